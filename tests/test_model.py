"""The GPT and its checkpoints."""

import itertools
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, refuses

import model as model_file
from checkpoint import load_checkpoint, save_checkpoint, with_pos
from model import GPT, linear_cross_entropy, loss_and_gradient
from recipe import RECIPES, Recipe


def small(pos="fope", **kwargs):
    fields = dict(pos=pos, train_len=16, vocab_size=50, n_layer=2, n_head=2, n_embd=32)
    fields |= dict(head_dim=16)
    return GPT(Recipe(**{**fields, **kwargs}))


def tokens(B=2, T=24, vocab_size=50):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(0))


# --- the network


def test_causal(pos_name):
    """A token must not change what is predicted before it."""
    model, x = small(pos_name), tokens()
    y = x.clone()
    y[:, 15] = (y[:, 15] + 1) % 50
    a, b = model(x), model(y)
    assert a.shape == (2, 24, 50)  # the vocabulary without its padding
    torch.testing.assert_close(a[:, :15], b[:, :15])
    assert (a[:, 15:] - b[:, 15:]).abs().amax(dim=-1).min() > 0


def test_gradients_reach_every_trainable_parameter_and_nothing_frozen(pos_name):
    model, x = small(pos_name), tokens()
    frozen = {name: b.clone() for name, b in model.named_buffers()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x[:, :-1], x[:, 1:]).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name
    optimizer.step()
    after = dict(model.named_buffers())
    for name, b in frozen.items():
        assert torch.equal(after[name], b), name


def test_qk_norm_makes_logits_independent_of_the_size_of_queries_and_keys():
    model, x = small("rope", qk_norm=True), tokens()
    before = model(x)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[:64] *= 10  # queries and keys
    torch.testing.assert_close(model(x), before, atol=1e-4, rtol=1e-3)


# --- the loss


def test_loss_is_cross_entropy_of_the_logits(pos_name):
    """The loss is over the padded vocabulary, the logits without: equal where there is none."""
    model, x = small(pos_name, vocab_size=128), tokens(vocab_size=128)
    inputs, targets = x[:, :-1], x[:, 1:]
    logits = model(inputs).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="none")
    each = model(inputs, targets, reduction="none")
    torch.testing.assert_close(each.flatten(), expected)
    torch.testing.assert_close(model(inputs, targets), expected.mean())


@pytest.mark.parametrize("autocast", [False, True])
def test_sliced_loss_has_the_same_value_and_gradients(monkeypatch, autocast):
    """Without the padding; in fp32 to 1e-5, under autocast within bf16's rounding."""
    x, w, targets = torch.randn(100, 8), torch.randn(64, 8), tokens(1, 100)[0]
    V = 60  # of 64 rows, the last four are padding

    def run(loss):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = loss(*leaves)
        (3 * value).backward()  # the loss need not be the end of the graph
        return value.detach(), *(leaf.grad for leaf in leaves)

    whole = run(lambda x, w: F.cross_entropy(F.linear(x, w[:V]).float(), targets))
    # 100 rows: 14 slices of 7, one of 2
    monkeypatch.setattr(model_file, "LOGITS_PER_SLICE", 7 * 64)
    close = dict(atol=3e-3, rtol=2e-2) if autocast else dict(atol=1e-6, rtol=1e-5)
    sliced = run(lambda x, w: linear_cross_entropy(x, w, targets, V))
    for ours, plain in zip(sliced, whole, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, plain, **close)
    with torch.no_grad():
        each = F.cross_entropy(F.linear(x, w[:V]), targets, reduction="none")
        torch.testing.assert_close(linear_cross_entropy(x, w, targets, V, "none"), each)
        torch.testing.assert_close(linear_cross_entropy(x, w, targets, V), each.mean())


@pytest.mark.parametrize(("N", "V"), [(1024, 2048), (2048, 50304), (100, 2**20), (3, 2**25)])
def test_slices_of_the_loss_fit_and_are_equal(N, V):
    """All of one size, but for the last where N cannot be halved evenly."""
    x, weight = torch.empty(N, 1, device="meta"), torch.empty(V, 1, device="meta")
    sizes = [len(logits) for _, logits in model_file.sliced_logits(x, weight, V)]
    assert sum(sizes) == N and max(sizes) * V <= model_file.LOGITS_PER_SLICE
    assert set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0]
    if N & (N - 1) == 0:
        assert set(sizes) == {sizes[0]}


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99, 0.999, 0.9999])
def test_gradient_in_bf16_of_a_token_that_the_model_is_sure_of(p):
    """bf16 knows no number between 0.996 and 1: p - 1 has to be made before it is rounded."""
    logits = torch.zeros(1, 64)
    logits[0, 5] = math.log(63 * p / (1 - p))
    logits = logits.bfloat16()
    _, gradient = loss_and_gradient(logits, torch.tensor([5]))
    exact = logits.double().softmax(dim=1) - F.one_hot(torch.tensor([5]), 64)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), exact, rtol=2**-8, atol=0)


def test_generation_yields_the_most_likely_token_when_it_is_asked_for():
    """Without gradients, which the caller keeps."""
    (model, text), reads = (small(), tokens()), []
    model.register_forward_hook(lambda *_: reads.append(torch.is_grad_enabled()))
    for token in itertools.islice(model.generate(text, 10**9, temperature=0), 2):
        assert torch.is_grad_enabled() and reads == [False]
        assert torch.equal(token, model(text)[:, -1].argmax(dim=-1, keepdim=True))
        text = torch.cat([text, token], dim=1)
        reads.clear()


def test_a_drawn_token_follows_the_temperature_and_the_likeliest():
    model, text = small(), tokens(B=200, T=3)
    with torch.no_grad():
        model.head.weight *= 30
        logits = model(text)[:, -1]
    for temperature, top_k in ((0.5, None), (2.0, None), (1.0, 3)):
        options = dict(temperature=temperature, top_k=top_k)
        (drawn,) = model.generate(text, 1, **options, generator=torch.Generator().manual_seed(0))
        least = logits.topk(top_k or 50).values[:, -1:]
        probs = (logits / temperature).exp() * (logits >= least)
        generator = torch.Generator().manual_seed(0)
        expected = torch.multinomial(probs, 1, generator=generator)
        assert (drawn == expected).float().mean() > 0.98, options


# --- sizes and the start


@pytest.mark.parametrize(
    "name, millions", [("20M", 21.3), ("60M", 59.3), ("180M", 186), ("1.2B", 1177)]
)
def test_presets_have_the_papers_sizes(name, millions):
    with torch.device("meta"):
        model = GPT(RECIPES[name].changed(pos="rope"))
    close = 0.5 if millions > 100 else 0.05
    assert model.num_params() / 1e6 == pytest.approx(millions, abs=close)
    sigma = {"180M": {"sigma": 0.4}, "1.2B": {"sigma": 0.6}}.get(name, {})
    assert RECIPES[name].pos == "fope" and RECIPES[name].pos_args == sigma
    assert RECIPES[name].changed(pos="rope").pos_args == {}


@pytest.mark.parametrize("name, std", [("tiny", 0.05), ("20M", 0.02)])
def test_weights_start_normal_and_cut_off(name, std):
    model = GPT(RECIPES[name].changed(pos="rope", vocab_size=2048))
    first, last = model.blocks[0], model.blocks[-1]
    for layer in (model.embed, model.head, last.attn.qkv, first.mlp.down):
        assert layer.weight.abs().max() <= 3 * std
        # a normal cut off at 3 loses 1.3 % of its std
        assert layer.weight.std().item() == pytest.approx(0.987 * std, rel=0.01)


def test_weights_depend_on_the_seed_alone():
    """Methods start with equal weights, however much randomness an embedding uses itself."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    models = [small("rope"), small("fope"), small("fope", seed=1)]
    assert torch.equal(torch.get_rng_state(), state)
    rope, fope, other = (model.blocks[1].mlp.up.weight for model in models)
    assert torch.equal(rope, fope) and not torch.equal(fope, other)
    layers = [b.attn.pos for b in models[1].blocks]
    assert not torch.equal(layers[0].sin_coef, layers[1].sin_coef)


def test_theta_is_that_of_the_frequencies_and_of_yarn():
    scaling = {"kind": "yarn", "factor": 2.0, "original_len": 512}
    shape = dict(head_dim=64, theta=100.0)
    pos = small("rope", rope_scaling=scaling, train_len=1024, **shape).blocks[1].attn.pos
    m = torch.arange(32)
    torch.testing.assert_close(pos.freqs, 100.0 ** (-2 * m / 64), atol=0, rtol=1e-5)
    # 100^(-2m/64) turns 32 times in 512 tokens at m = 6.5: from m = 6 on slower ones are lowered
    lowered = pos.scaled_freqs() / pos.freqs
    assert (lowered[:7] == 1).all() and (lowered[7:] < 1).all()
    assert pos.train_len == 512


# --- another embedding for trained weights


def test_another_embedding_for_trained_weights():
    old, x = small("rope", seed=4), tokens()
    new = with_pos(old, replace(old.config, pos="fope", train_len=32))
    assert new.config.pos == "fope" and new.config.train_len == 32 and old.config.pos == "rope"
    assert torch.equal(new.blocks[1].attn.qkv.weight, old.blocks[1].attn.qkv.weight)
    assert torch.equal(new.head.weight, old.head.weight) and not torch.equal(new(x), old(x))
    again = with_pos(new, replace(new.config, train_len=64))
    new_coef, again_coef = (m.blocks[1].attn.pos.cos_coef for m in (new, again))
    assert torch.equal(again_coef[:, :2, :2], new_coef)
    same = with_pos(new, replace(new.config, seed=9))  # other draws, but none is needed
    assert torch.equal(same(x), new(x))


INTERPOLATION = {"kind": "interpolate", "factor": 2.0, "original_len": 16}


@pytest.mark.parametrize("name", ["rope", "rope_a", "fope"])
def test_scaled_frequencies_for_trained_weights(name):
    """The embedding keeps all that it has and turns more slowly."""
    old, x = small(name, seed=4), tokens()
    new = with_pos(old, replace(old.config, rope_scaling=INTERPOLATION, train_len=32))
    pos, slow = (m.blocks[1].attn.pos for m in (old, new))
    assert slow.train_len == 16 and torch.equal(slow.freqs, pos.freqs)
    cos, slow_cos = pos.tables(12)[0], slow.tables(23)[0]
    torch.testing.assert_close(slow_cos[..., ::2, :], cos, atol=1e-5, rtol=0)
    assert not torch.equal(new(x), old(x))


# --- checkpoints


def test_checkpoint_round_trip(pos_name, tmp_path):
    model, x = small(pos_name, seed=3), tokens()
    for weight in model.state_dict().values():
        weight += 0.1  # not what the seed draws
    save_checkpoint(tmp_path, model, {"data": "here"}, step=7)
    loaded, about, state = load_checkpoint(tmp_path)
    assert loaded.config == model.config and about == {"data": "here"} and state["step"] == 7
    weights = model.state_dict().items(), loaded.state_dict().items()
    for (name, a), (_, b) in zip(*weights, strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(model(x), loaded(x))
    assert not list(tmp_path.glob("*.tmp"))


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_checkpoint_runs_no_code_and_one_whose_bytes_have_changed_is_refused(tmp_path):
    load, path, model = lambda _: load_checkpoint(tmp_path), tmp_path / "checkpoint.pt", small()
    refuses(load, [], "there is no checkpoint")
    save_checkpoint(tmp_path, model)
    content = path.read_bytes()
    start = content.index(model.head.weight.detach().numpy().tobytes())
    path.write_bytes(content[:1000])  # the half of a copy
    refuses(load, [], str(path), "is damaged")
    path.write_bytes(content[:start] + b"\0" + content[start + 1 :])
    refuses(load, [], str(path), "is damaged")
    state = torch.load(path, weights_only=True)
    gone = state["config"]["recipe"] | {"pos": "x"}
    torch.save(state | {"config": {"recipe": gone}}, path)
    refuses(load, [], "'x'", "known: nope, alibi, rope, fope")
    torch.save({"model": Bomb(tmp_path / "exploded")}, path)
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "exploded").exists()


# --- memory

MEASURE = """
import resource, torch
from model import GPT
from data import window_loss
from recipe import RECIPES
model = GPT(RECIPES["60M"].changed(pos="{pos}", n_layer=2))
window_loss(model, torch.randint(50257, (8193,)).numpy(), 8192)
left_out = 6 * sum(p.numel() * 4 for p in model.blocks[0].parameters())  # bytes
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 + left_out / 2**30)
"""


@pytest.mark.slow
def test_evaluating_60M_at_8192_stays_under_2_5_GB(pos_name):
    """
    Neither a (T, T) bias nor all logits at once: each alone would break the limit. Layers run one
    after the other, so 2 of the 8 need the same memory but for the weights of the others, which
    are added.
    """
    command = [sys.executable, "-c", MEASURE.format(pos=pos_name)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 2.5
