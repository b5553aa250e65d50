"""
The core written a second time by hand: a block, a step of training, the numbers of the recipes. A
changed constant or sign anywhere on the way of training fails here.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import log, run_training

import common
import train
from checkpoint import load_checkpoint
from common import Refused
from data import Batches, TokenData, cut
from eval_passkey import task_accuracy
from fope import above_floor
from model import GPT, Block, GPTConfig, RMSNorm
from recipe import RECIPES
from tasks import Passkey, PasskeyAnywhere

# --- the network


def test_a_block_is_the_one_written_by_hand():
    """RMSNorm, attention without position, SwiGLU, two residuals; and no bias anywhere."""
    torch.manual_seed(0)
    block = Block(GPTConfig(pos="nope", n_head=2, head_dim=4, n_embd=6, qk_norm=True))
    norms = {"norm1.weight", "norm2.weight", "attn.q_norm.weight", "attn.k_norm.weight"}
    matrices = {"attn.qkv.weight", "attn.proj.weight"}
    matrices |= {f"mlp.{name}.weight" for name in ("gate", "up", "down")}
    parameters = dict(block.named_parameters())
    assert parameters.keys() == norms | matrices
    for name in norms:
        torch.nn.init.normal_(parameters[name])
    W = {name: p.detach().double() for name, p in parameters.items()}

    def rms_norm(x, weight):
        return x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + 1e-6) * weight

    def layer_norm(x, weight):
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(dim=-1, keepdim=True) + 1e-6) * weight

    def by_hand(x):  # (T, 6), through heads of 2 x 4
        T, y = len(x), []
        q, k, v = (rms_norm(x, W["norm1.weight"]) @ W["attn.qkv.weight"].T).split(8, dim=1)
        for h in range(2):
            head = slice(4 * h, 4 * h + 4)
            q_h = layer_norm(q[:, head], W["attn.q_norm.weight"])
            k_h = layer_norm(k[:, head], W["attn.k_norm.weight"])
            hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
            logits = (q_h @ k_h.T / math.sqrt(4)).masked_fill(hidden, -math.inf)
            y.append(logits.softmax(dim=1) @ v[:, head])
        x = x + torch.cat(y, dim=1) @ W["attn.proj.weight"].T
        normed = rms_norm(x, W["norm2.weight"])
        gate = normed @ W["mlp.gate.weight"].T
        gated = gate * torch.sigmoid(gate) * (normed @ W["mlp.up.weight"].T)
        return x + gated @ W["mlp.down.weight"].T

    # of the size of the norm's epsilon, too
    for size in (1.0, 1e-3):
        x = size * torch.randn(1, 5, 6)
        expected = by_hand(x[0].double()).float()
        torch.testing.assert_close(block(x)[0], expected, atol=2e-6 * size, rtol=1e-4)


def test_a_model_is_table_blocks_norm_and_head():
    config = GPTConfig(pos="nope", n_layer=3, n_head=2, head_dim=4, n_embd=8, vocab_size=130)
    model, idx = GPT(config), torch.arange(20)[None]
    assert model.embed.weight.shape == model.head.weight.shape == (256, 8)
    x = model.embed.weight[idx]
    for block in model.blocks:
        x = block(x)
    expected = (model.norm(x) @ model.head.weight.T)[..., :130]
    torch.testing.assert_close(model(idx), expected)
    last_two = model(idx, positions=slice(-2, None))
    torch.testing.assert_close(last_two, expected[:, -2:])
    assert len(model.blocks) == 3 and isinstance(model.norm, RMSNorm)


def test_flops_are_six_a_parameter_and_twelve_a_score():
    config = GPTConfig(pos="nope", n_layer=3, n_head=2, head_dim=4, n_embd=6, vocab_size=128)
    model = GPT(config)
    in_a_block = 4 * 8 * 6 + 3 * 4 * 6 * 6 + 2 * 6
    assert model.num_params() == 3 * in_a_block + 6 + 128 * 6
    assert model.flops_per_token() == 6 * model.num_params() + 12 * 3 * 2 * 4 * 512


def test_the_floor_itself_is_kept():
    on_it = torch.tensor(2 * math.pi / 64)
    freqs = torch.stack([on_it, torch.nextafter(on_it, torch.tensor(0.0))])
    assert above_floor(freqs, 64).tolist() == [on_it.item()]


# --- a step of training


def test_three_steps_are_clipped_adamw_by_hand(data_folder, tmp_path):
    """Of a run: its batches, loss, schedule, clipping, decay and update, in fp64 by hand."""
    flags = ["--pos=rope", "--init_std=0.3", "--weight_decay=0.2", "--log_every=1", "--lr=0.01"]
    flags += ["--stop_at=3", "--warmup_steps=2", "--grad_accum=2"]
    run = run_training(data_folder, tmp_path, *flags)
    trained, _, state = load_checkpoint(run)
    recipe = trained.config
    model = GPT(recipe).double()
    parameters = dict(model.named_parameters())
    mean = {name: torch.zeros_like(p) for name, p in parameters.items()}
    square = {name: torch.zeros_like(p) for name, p in parameters.items()}
    batches, norms = Batches(TokenData(recipe.data, "train"), recipe), []
    for step in range(3):
        batch = batches.batch(step, torch.device("cpu"))
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        assert state["log"][step]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        gradients = torch.autograd.grad(loss, parameters.values())
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients)))
        assert state["log"][step]["grad_norm"] == pytest.approx(norms[-1], rel=1e-5)
        clip = min(1.0, 1.0 / norms[-1])
        progress = (step - 2) / (recipe.n_steps - 3)  # 20 steps, after two of warm-up
        lr = 0.01 * ((step + 1) / 2 if step < 2 else 0.55 + 0.45 * math.cos(math.pi * progress))
        assert state["log"][step]["lr"] == pytest.approx(lr, rel=1e-12)
        with torch.no_grad():
            for (name, p), gradient in zip(parameters.items(), gradients, strict=True):
                mean[name] = 0.9 * mean[name] + 0.1 * clip * gradient
                square[name] = 0.95 * square[name] + 0.05 * (clip * gradient) ** 2
                first = mean[name] / (1 - 0.9 ** (step + 1))
                second = square[name] / (1 - 0.95 ** (step + 1))
                p *= 1 - lr * 0.2
                p -= lr * first / (second.sqrt() + 1e-8)
    assert min(norms) > 1.5 and max(norms) / min(norms) > 1.02  # it was clipped, unequally
    for name, p in trained.named_parameters():
        difference = (p - parameters[name]).abs()
        # where a gradient is next to nothing rounding may turn its sign
        assert difference.mean() < 1e-6 and difference.quantile(0.99) < 1e-5, name


def test_the_validation_loss_is_that_of_the_first_tokens_in_windows(data_folder, tmp_path):
    run = run_training(data_folder, tmp_path, "--stop_at=2", "--eval_every=2", "--eval_tokens=160")
    model, _, _ = load_checkpoint(run)
    inputs, targets = cut(TokenData(data_folder, "val").read(0, 161), 32)
    assert inputs.shape == (5, 32)
    logits = model(torch.from_numpy(inputs))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
    assert log(run)[-1]["val_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_tokens_and_steps_are_counted(data_folder, tmp_path):
    """20 steps of 4 sequences of 32 tokens are all of --tokens 2560; of 2561 there is one more."""
    line = log(run_training(data_folder, tmp_path / "a"))[-1]
    assert (line["step"], line["tokens"]) == (20, 2560)
    line = log(run_training(data_folder, tmp_path / "b", "--tokens=2561"))[-1]
    assert (line["step"], line["tokens"]) == (21, 2688)
    steps = [line["step"] for line in log(tmp_path / "b") if "val_loss" in line]
    assert steps == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21]


def test_a_process_computes_its_part_of_the_micro_batches(monkeypatch):
    recipe = RECIPES["tiny"].changed(batch_size=12, grad_accum=6)
    assert train.count_micro_batches(recipe) == 6
    for n_processes, n_micro in ((2, 3), (4, None), (12, 1)):
        monkeypatch.setattr(common, "world_size", lambda n=n_processes: n)
        if n_micro is None:  # 4 processes of 2 micro-batches: 12 cannot be divided into 8
            with pytest.raises(Refused):
                train.count_micro_batches(recipe)
        else:
            assert train.count_micro_batches(recipe) == n_micro


def test_mfu_is_of_one_of_the_processes(monkeypatch):
    model = GPT(GPTConfig(n_layer=1, n_embd=64, vocab_size=128))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3e9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    rate = 0.4 * 989e12 / model.flops_per_token()
    for n_processes in (1, 4):
        monkeypatch.setattr(common, "world_size", lambda n=n_processes: n)
        mfu = train.throughput(rate, model, torch.device("cuda"))["mfu"]
        assert mfu == pytest.approx(0.4 / n_processes, abs=1e-4)


# --- what a seed decides


def test_trials_differ_by_seed_and_length_and_are_the_same_for_every_model(data_folder):
    encode = TokenData(data_folder, "train").tokenizer().encode_ordinary
    asked = []

    class Noted(Passkey):
        def needle(self, rng):
            asked[-1].append(super().needle(rng))
            return asked[-1][-1]

    trials = [("nope", 256, 0), ("rope", 256, 0), ("nope", 256, 1), ("nope", 300, 0)]
    for pos, length, seed in trials:
        asked.append([])
        config = GPTConfig(pos=pos, n_layer=1, n_head=2, head_dim=4, n_embd=8, vocab_size=512)
        task_accuracy(GPT(config), Noted(encode), length, 5, seed=seed)
    assert asked[0] == asked[1] and asked[0] != asked[2] and asked[0] != asked[3]


def test_a_question_anywhere_is_asked_from_a_quarter_of_the_length_on(data_folder):
    encode = TokenData(data_folder, "train").tokenizer().encode_ordinary
    task = PasskeyAnywhere(encode)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        tokens, rng = task.document(1000, rng, eot=0), np.random.default_rng(seed)
        # a whole trial, and a line of filler
        end = int(rng.integers(250, 1001))
        filler = (encode("\n") + task.filler(1000))[: 1001 - end]
        assert tokens.dtype == np.int64 and tokens.tolist() == [*task.sample(end, rng)[0], *filler]


# --- recipes

SHAPES = {  # n_layer, n_head, head_dim, n_embd, init_std
    "tiny": (4, 4, 64, 128, 0.05),
    "20M": (8, 4, 64, 256, 0.02),
    "60M": (8, 8, 64, 512, 0.02),
    "180M": (8, 8, 128, 1024, 0.02),
    "1.2B": (16, 16, 128, 2048, 0.02),
}
TRAINING = {  # tokens, batch_size, grad_accum, lr, read_tokens, trials
    "tiny": (1_024_000, 2, 1, 2e-3, 163_841, 50),
    "20M": (10**10, 1024, 8, 6e-4, 4_194_305, 1000),
    "60M": (10**10, 1024, 16, 6e-4, 4_194_305, 1000),
    "180M": (10**10, 1024, 16, 6e-4, 4_194_305, 1000),
    "1.2B": (10**10, 1024, 16, 6e-4, 4_194_305, 1000),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_presets_are_these(name):
    r = RECIPES[name]
    assert (r.n_layer, r.n_head, r.head_dim, r.n_embd, r.init_std) == SHAPES[name]
    training = r.tokens, r.batch_size, r.grad_accum, r.lr, r.read_tokens, r.trials
    assert training == TRAINING[name]
    assert (r.train_len, r.theta, r.weight_decay, r.qk_norm, r.seed) == (
        512,
        10000.0,
        0.1,
        False,
        0,
    )
    assert r.lengths == "1x,2x,4x,8x,16x" and r.task_share == 0


def test_the_warm_up_is_the_papers_where_the_run_is_as_long():
    paper = RECIPES["60M"]
    for tokens, train_len, warmup_steps in (
        (10**10, 512, 10_000),  # 19,074 steps
        (10**10 - 1, 512, 953),
        (19_000 * 1024 * 530, 530, 10_000),
        (18_999 * 1024 * 530, 530, 949),
        (1024 * 512, 512, 1),
    ):
        recipe = paper.changed(tokens=tokens, train_len=train_len).resolved()
        assert recipe.warmup_steps == warmup_steps, recipe.n_steps
    assert paper.changed(tokens=100 * 1024 * 512).resolved().eval_every == 10
    assert paper.changed(warmup_steps=7, eval_every=3).resolved().warmup_steps == 7
