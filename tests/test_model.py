"""The GPT and its checkpoints."""

import json
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

import model as model_file
from fope import POSITION_EMBEDDINGS, RoPE
from model import GPT, GPTConfig, linear_cross_entropy, load_checkpoint, loss_and_gradient, save_checkpoint, with_pos


def small(pos="fope", **kwargs):
    fields = dict(pos=pos, train_len=16, vocab_size=50, n_layer=2, n_head=2, n_embd=32)
    return GPT(GPTConfig(**{**fields, **kwargs}))


def tokens(B=2, T=24, vocab_size=50):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(0))


def test_causal(pos_name):
    """A token must not change what is predicted before it."""
    model, x = small(pos_name), tokens()
    y = x.clone()
    y[:, 15] = (y[:, 15] + 1) % 50
    a, b = model(x), model(y)
    torch.testing.assert_close(a[:, :15], b[:, :15])
    assert (a[:, 15:] - b[:, 15:]).abs().amax(dim=-1).min() > 0


def test_reads_16_times_the_training_length(pos_name):
    assert torch.isfinite(small(pos_name)(tokens(T=256))).all()


def test_gradients_reach_every_trainable_parameter_and_nothing_frozen(pos_name):
    model, x = small(pos_name), tokens()
    frozen = {name: b.clone() for name, b in model.named_buffers()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x[:, :-1], x[:, 1:]).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name
    optimizer.step()
    for name, b in model.named_buffers():
        assert torch.equal(b, frozen[name]), name


def test_loss_is_cross_entropy_of_the_logits(pos_name):
    """The loss is over the padded vocabulary, whose extra rows the logits leave out; undo that to compare."""
    model, x = small(pos_name, vocab_size=128), tokens(vocab_size=128)
    expected = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(model(x[:, :-1], x[:, 1:], reduction="none").flatten(), expected)
    torch.testing.assert_close(model(x[:, :-1], x[:, 1:]), expected.mean())


@pytest.mark.parametrize("autocast", [False, True])
def test_sliced_loss_has_the_same_value_and_gradients(monkeypatch, autocast):
    """In fp32 to 1e-5; under autocast within bf16's rounding of plain autograd's."""
    x, w, targets = torch.randn(100, 8), torch.randn(64, 8), tokens(1, 100)[0]

    def run(loss):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = loss(*leaves)
        (3 * value).backward()  # the loss need not be the end of the graph
        return value.detach(), *(leaf.grad for leaf in leaves)

    whole = run(lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets))
    monkeypatch.setattr(model_file, "LOGITS_PER_SLICE", 7 * 64)  # 100 rows: 14 slices of 7, one of 2
    for sliced, plain in zip(run(lambda x, w: linear_cross_entropy(x, w, targets)), whole, strict=True):
        assert sliced.dtype == torch.float32
        torch.testing.assert_close(sliced, plain, **(dict(atol=3e-3, rtol=2e-2) if autocast else dict(atol=1e-6, rtol=1e-5)))
    with torch.no_grad():
        each = F.cross_entropy(F.linear(x, w), targets, reduction="none")
        torch.testing.assert_close(linear_cross_entropy(x, w, targets, "none"), each)
        torch.testing.assert_close(linear_cross_entropy(x, w, targets), each.mean())


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99, 0.999, 0.9999])
def test_gradient_in_bf16_of_a_token_that_the_model_is_sure_of(p):
    """bf16 knows no number between 0.996 and 1, so the gradient p - 1 has to be made before it is rounded."""
    logits = torch.zeros(1, 64)
    logits[0, 5] = math.log(63 * p / (1 - p))
    logits = logits.bfloat16()
    _, gradient = loss_and_gradient(logits, torch.tensor([5]))
    exact = logits.double().softmax(dim=1) - F.one_hot(torch.tensor([5]), 64)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), exact, rtol=2**-8, atol=0)


def test_json_is_read_back_as_it_was(tmp_path):
    content = {"names": ["two  blanks", " [x] ", "a\nb"], "rows": [[1, 2], []], "nothing": None}
    model_file.write_json(tmp_path / "x.json", content)
    assert model_file.read_json(tmp_path / "x.json") == content


def test_logits_of_some_positions():
    model, x = small(), tokens()
    torch.testing.assert_close(model(x, positions=[3, -1]), model(x)[:, [3, -1]])
    torch.testing.assert_close(model(x, positions=slice(-4, None)), model(x)[:, -4:])


def test_greedy_generation_takes_the_most_likely_token():
    model, x = small(), tokens()
    y = model.generate(x, 3, temperature=0)
    assert torch.equal(y[:, : x.size(1)], x)
    for i in range(3):
        assert torch.equal(model(y[:, : x.size(1) + i])[:, -1].argmax(dim=-1), y[:, x.size(1) + i])


def test_sampling_follows_its_own_generator_and_top_k():
    model, x = small(), tokens(B=1)
    draws = [model.generate(x, 8, generator=torch.Generator().manual_seed(s), top_k=5) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert draws[0].max() < 50  # never a token from the padding of the vocabulary
    assert torch.equal(model.generate(x, 8, top_k=1), model.generate(x, 8, temperature=0))


@pytest.mark.parametrize("name, millions", [("20M", 21.3), ("60M", 59.3), ("180M", 186), ("1.2B", 1177)])
def test_presets_have_the_papers_sizes(name, millions):
    with torch.device("meta"):
        model = GPT(GPTConfig.preset(name, pos="rope"))
    assert model.num_params() / 1e6 == pytest.approx(millions, abs=0.5 if millions > 100 else 0.05)
    assert GPTConfig.preset("180M").pos_args == {"sigma": 0.4} and GPTConfig.preset("60M").pos_args == {}


@pytest.mark.parametrize("name, std", [("tiny", 0.05), ("20M", 0.02)])
def test_weights_start_normal_and_cut_off(name, std):
    model = GPT(GPTConfig.preset(name, pos="rope", vocab_size=2048))
    for weight in (model.embed.weight, model.head.weight, model.blocks[-1].attn.qkv.weight, model.blocks[0].mlp.down.weight):
        assert weight.abs().max() <= 3 * std
        assert weight.std().item() == pytest.approx(0.987 * std, rel=0.01)  # a normal cut off at 3 loses 1.3 % of its std


def test_weights_depend_on_the_seed_alone():
    """Methods are compared at equal initial weights, however much randomness an embedding uses itself."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    models = [small("rope"), small("fope"), small("fope", seed=1)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(models[0].blocks[1].mlp.up.weight, models[1].blocks[1].mlp.up.weight)
    assert not torch.equal(models[1].blocks[1].mlp.up.weight, models[2].blocks[1].mlp.up.weight)
    layers = [b.attn.pos for b in models[1].blocks]
    assert not torch.equal(layers[0].sin_coef, layers[1].sin_coef)


def test_qk_norm_makes_logits_independent_of_the_size_of_queries_and_keys():
    model, x = small("rope", qk_norm=True), tokens()
    before = model(x)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[:64] *= 10  # queries and keys
    torch.testing.assert_close(model(x), before, atol=1e-4, rtol=1e-3)


def test_another_embedding_for_trained_weights():
    old, x = small("rope", seed=4), tokens()
    new, what = with_pos(old, pos="fope", train_len=32)
    assert new.config.pos == "fope" and new.config.train_len == 32 and old.config.pos == "rope"
    assert torch.equal(new.blocks[1].attn.qkv.weight, old.blocks[1].attn.qkv.weight)
    assert torch.equal(new.head.weight, old.head.weight) and not torch.equal(new(x), old(x))
    assert "RoPE(train_len=16" in what and "FoPE(train_len=32" in what and "none to take over" in what
    again, what = with_pos(new, train_len=64)
    assert torch.equal(again.blocks[1].attn.pos.cos_coef[:, :2, :2], new.blocks[1].attn.pos.cos_coef)
    same, _ = with_pos(new, seed=9)  # other draws, but none is needed
    assert torch.equal(same(x), new(x))


class ScaledRoPE(RoPE):  # the README's example
    def __init__(self, *, scale=4.0, **kwargs):
        super().__init__(**kwargs)
        self.freqs /= scale


def test_an_embedding_is_one_class_and_one_registry_line(monkeypatch, tmp_path):
    monkeypatch.setitem(POSITION_EMBEDDINGS, "scaled_rope", ScaledRoPE)
    model, x = small("scaled_rope", pos_args={"scale": 2.0}), tokens()
    q = torch.randn(1, 2, 9, 16)
    pos, rope = model.blocks[0].attn.pos, small("rope").blocks[0].attn.pos
    torch.testing.assert_close(pos.rotate(q, q)[0][..., 8, :], rope.rotate(q[..., 4:, :], q[..., 4:, :])[0][..., 4, :])
    save_checkpoint(tmp_path, model)
    assert torch.equal(load_checkpoint(tmp_path)[0](x), model(x))


def test_checkpoint_round_trip(pos_name, tmp_path):
    model, x = small(pos_name, seed=3), tokens()
    save_checkpoint(tmp_path, model, {"data": "here"}, step=7)
    loaded, about, state = load_checkpoint(tmp_path)
    assert loaded.config == model.config and about == {"data": "here"} and state["step"] == 7
    for (name, a), (_, b) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(model(x), loaded(x))
    assert not list(tmp_path.glob("*.tmp"))


def test_changed_coefficients_come_back_exactly(tmp_path):
    model = small(pos_args={"n_freq": 9})
    model.blocks[0].attn.pos.cos_coef.normal_()
    save_checkpoint(tmp_path, model)
    assert torch.equal(load_checkpoint(tmp_path)[0].blocks[0].attn.pos.cos_coef, model.blocks[0].attn.pos.cos_coef)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def damage(folder, how):
    path, config = folder / "checkpoint.pt", folder / "config.json"
    content = json.loads(config.read_text())
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    elif how == "bit flip":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "missing":
        path.unlink()
    elif how == "pickle bomb":
        path.write_bytes(pickle.dumps(Bomb()))
    elif how == "zipped pickle bomb":
        torch.save({"model": Bomb()}, path)
    elif how == "another model":
        torch.save({"model": {"weight": torch.zeros(3)}}, path)
    elif how == "config is no json":
        config.write_text("{")
    elif how == "config of another project":
        config.write_text('{"hidden_size": 3}')
    elif how == "config with a wrong type":
        content["model"]["n_layer"] = "two"
        config.write_text(json.dumps(content))
    elif how == "config with an unknown embedding":
        content["model"]["pos"] = "xpos"
        config.write_text(json.dumps(content))
    elif how == "config with another size":
        content["model"]["n_embd"] = 64
        config.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "bit flip",
        "empty",
        "missing",
        "pickle bomb",
        "zipped pickle bomb",
        "another model",
        "config is no json",
        "config of another project",
        "config with a wrong type",
        "config with an unknown embedding",
        "config with another size",
    ],
)
def test_damaged_checkpoint_is_refused_with_a_sentence(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path, small())
    damage(tmp_path, how)
    with pytest.raises((ValueError, OSError)) as info:
        load_checkpoint(tmp_path)
    message = str(info.value)
    assert str(tmp_path) in message and "\n" not in message
    assert not (tmp_path / "exploded").exists()


MEASURE = """
import resource, torch
from model import GPT, GPTConfig
from eval_perplexity import window_loss
model = GPT(GPTConfig.preset("60M", pos="{pos}", n_layer=2))
window_loss(model, torch.randint(50257, (8193,)).numpy(), 8192)
left_out = 6 * sum(p.numel() * 4 for p in model.blocks[0].parameters())  # bytes
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 + left_out / 2**30)
"""


def test_evaluating_60M_at_8192_stays_under_2_5_GB(pos_name):
    """
    Neither a (T, T) bias nor all logits at once: each alone would break the limit. Layers run one after the other, so 2 of
    the 8 need the same memory but for the weights of the others, which are added.
    """
    run = subprocess.run([sys.executable, "-c", MEASURE.format(pos=pos_name)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 2.5
