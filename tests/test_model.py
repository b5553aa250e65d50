"""The GPT and its checkpoints."""

import copy
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

import model as model_file
from baselines import POSITION_EMBEDDINGS
from checkpoint import load_checkpoint, save_checkpoint, with_pos
from common import Refused
from fope import RoPE
from model import GPT, GPTConfig, linear_cross_entropy, loss_and_gradient
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
    after = dict(model.named_buffers())
    for name, b in frozen.items():
        assert torch.equal(after[name], b), name


def test_qk_norm_makes_logits_independent_of_the_size_of_queries_and_keys():
    model, x = small("rope", qk_norm=True), tokens()
    before = model(x)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[:64] *= 10  # queries and keys
    torch.testing.assert_close(model(x), before, atol=1e-4, rtol=1e-3)


def test_logits_of_some_positions():
    model, x = small(), tokens()
    torch.testing.assert_close(model(x, positions=[3, -1]), model(x)[:, [3, -1]])
    torch.testing.assert_close(model(x, positions=slice(-4, None)), model(x)[:, -4:])


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


# --- generation


def generated(model, x, n, **kwargs):
    return torch.cat([x, *model.generate(x, n, **kwargs)], dim=1)


def test_greedy_generation_takes_the_most_likely_token():
    model, x = small(), tokens()
    y = generated(model, x, 3, temperature=0)
    T = x.size(1)
    assert y.size(1) == T + 3
    for i in range(3):
        assert torch.equal(model(y[:, : T + i])[:, -1].argmax(dim=-1), y[:, T + i])


def test_generation_yields_each_token_as_it_comes():
    """Each is computed when it is asked for, without gradients, which the caller keeps."""
    (model, x), reads = (small(), tokens()), []
    model.register_forward_hook(lambda *_: reads.append(torch.is_grad_enabled()))
    first_two = []
    for token in itertools.islice(model.generate(x, 10**9, temperature=0), 2):
        assert token.shape == (2, 1) and torch.is_grad_enabled()
        first_two.append(token)
        assert reads == [False] * len(first_two)
    assert torch.equal(torch.cat([x, *first_two], dim=1), generated(model, x, 2, temperature=0))


def test_sampling_follows_its_own_generator_and_top_k():
    model, x = small(), tokens(B=1)
    draws = [
        generated(model, x, 8, generator=torch.Generator().manual_seed(s), top_k=5)
        for s in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert draws[0].max() < 50  # never a token from the padding of the vocabulary
    greedy = generated(model, x, 8, temperature=0)
    assert torch.equal(generated(model, x, 8, top_k=1), greedy)


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


def test_making_a_model_seeds_no_generator_but_the_cpus(monkeypatch):
    """torch.manual_seed would also reseed every GPU's, which nothing puts back."""
    seeders = [(torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "seed")]
    devices = [torch.cuda, torch.mps, torch.xpu]
    seeders += [(d, n) for d in devices for n in ("manual_seed", "manual_seed_all", "seed")]
    called = []
    for module, name in seeders:
        note = lambda *args, n=name: called.append(n)  # noqa: E731
        monkeypatch.setattr(module, name, note, raising=False)
    small("fope")
    assert called == []


def test_theta_is_that_of_the_frequencies_and_of_yarn():
    scaling = {"kind": "yarn", "factor": 2.0, "original_len": 512}
    shape = dict(head_dim=64, theta=100.0)
    pos = small("rope", rope_scaling=scaling, train_len=1024, **shape).blocks[1].attn.pos
    m = torch.arange(32)
    torch.testing.assert_close(pos.freqs, 100.0 ** (-2 * m / 64), atol=0, rtol=1e-5)
    # 100^(-2m/64) turns 32 times in 512 tokens at m = 6.5: from m = 6 on slower ones are lowered
    lowered = pos.scale(pos.freqs) / pos.freqs
    assert (lowered[:7] == 1).all() and (lowered[7:] < 1).all()
    assert pos.train_len == 512


def test_a_model_needs_no_more_than_a_gptconfig():
    """A Recipe is one; what else it holds changes nothing of the model."""
    names = asdict(GPTConfig())
    recipe = replace(small().config, lr=1.0, tokens=1)
    config = GPTConfig(**{name: getattr(recipe, name) for name in names})
    assert torch.equal(GPT(config)(tokens()), GPT(recipe)(tokens()))


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


@pytest.mark.parametrize("name", ["nope", "alibi", "kerple", "fire"])
def test_frequencies_are_not_scaled_where_there_are_none(name):
    model = small(name)
    with pytest.raises(Refused, match=f"{name} has no frequencies that --rope_scaling could lower"):
        with_pos(model, replace(model.config, rope_scaling=INTERPOLATION))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pos": "xpos"}, "known: nope, alibi, rope, fope, kerple, fire, rope_a"),
        ({"pos_args": {"sigma": 0.4}}, "coefficients were drawn with 2 tables, sigma 0.3"),
        ({"pos_args": {"alpha": 1}}, "fope has no keyword alpha"),
        ({"pos_args": {"n_freq": 0}}, "fope: n_freq is 0, but 1 frequencies are kept"),
    ],
)
def test_what_trained_weights_cannot_take_is_refused_with_a_sentence(changes, words):
    model = small()
    with pytest.raises(Refused) as info:
        with_pos(model, replace(model.config, **changes))
    assert words in str(info.value) and "\n" not in str(info.value)


def test_weights_loaded_into_a_model_that_has_read_are_those_it_reads_with():
    model, other, x = small(), small(seed=1), tokens()
    assert not torch.equal(model(x), other(x))
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(x), other(x))
    assert torch.equal(copy.deepcopy(model)(x), other(x))


class ScaledRoPE(RoPE):  # the README's example
    def __init__(self, *, factor=4.0, **kwargs):
        super().__init__(**kwargs)
        self.freqs /= factor


def test_an_embedding_is_one_class_and_one_registry_line(monkeypatch, tmp_path):
    monkeypatch.setitem(POSITION_EMBEDDINGS, "scaled_rope", ScaledRoPE)
    model, x = small("scaled_rope", pos_args={"factor": 2.0}), tokens()
    q = torch.randn(1, 2, 9, 16)
    pos, rope = model.blocks[0].attn.pos, small("rope").blocks[0].attn.pos
    expected = rope.rotate(q[..., 4:, :], q[..., 4:, :])[0][..., 4, :]
    torch.testing.assert_close(pos.rotate(q, q)[0][..., 8, :], expected)
    save_checkpoint(tmp_path, model)
    assert torch.equal(load_checkpoint(tmp_path)[0](x), model(x))


# --- checkpoints


def test_checkpoint_round_trip(pos_name, tmp_path):
    model, x = small(pos_name, seed=3), tokens()
    save_checkpoint(tmp_path, model, {"data": "here"}, step=7)
    loaded, about, state = load_checkpoint(tmp_path)
    assert loaded.config == model.config and about == {"data": "here"} and state["step"] == 7
    weights = model.state_dict().items(), loaded.state_dict().items()
    for (name, a), (_, b) in zip(*weights, strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(model(x), loaded(x))
    assert not list(tmp_path.glob("*.tmp"))


def test_changed_coefficients_come_back_exactly(tmp_path):
    model = small(pos_args={"n_freq": 9})
    coef = model.blocks[0].attn.pos.cos_coef.normal_()
    save_checkpoint(tmp_path, model)
    assert torch.equal(load_checkpoint(tmp_path)[0].blocks[0].attn.pos.cos_coef, coef)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def damage(path, how):
    state = torch.load(path, weights_only=True)
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
    elif how == "another model with our config":
        torch.save(state | {"model": {"weight": torch.zeros(3)}}, path)
    elif how == "no config":
        torch.save({"model": state["model"]}, path)
    elif how == "config of another project":
        torch.save(state | {"config": {"hidden_size": 3}}, path)
    else:
        field, value = {
            "config with a wrong type": ("n_layer", "two"),
            "config with an unknown embedding": ("pos", "xpos"),
            "config with an unknown field": ("hidden_size", 3),
            "config with another size": ("n_embd", 64),
        }[how]
        state["config"]["recipe"][field] = value
        torch.save(state, path)


DAMAGED, MISFIT = "is damaged", "does not fit this code, which may have changed since"


@pytest.mark.parametrize(
    "how, words",
    [
        ("truncated", DAMAGED),
        ("bit flip", DAMAGED),
        ("empty", DAMAGED),
        ("missing", "there is no checkpoint"),
        ("pickle bomb", DAMAGED),
        ("zipped pickle bomb", DAMAGED),
        ("another model", DAMAGED),
        ("another model with our config", MISFIT),
        ("no config", DAMAGED),
        ("config of another project", DAMAGED),
        ("config with a wrong type", MISFIT),
        ("config with an unknown embedding", "known: nope, alibi, rope, fope"),
        ("config with an unknown field", "hidden_size"),
        ("config with another size", MISFIT),
    ],
)
def test_damaged_checkpoint_is_refused_with_a_sentence(how, words, tmp_path, monkeypatch):
    """One that is whole, but does not fit, is not called damaged: it says what does not fit."""
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path, small())
    damage(tmp_path / "checkpoint.pt", how)
    with pytest.raises(Refused) as info:
        load_checkpoint(tmp_path)
    message = str(info.value)
    assert str(tmp_path) in message and "\n" not in message
    assert words in message and (DAMAGED not in message or MISFIT not in words)
    assert not (tmp_path / "exploded").exists()


def test_config_json_is_a_copy_for_people(tmp_path):
    """What is loaded is in checkpoint.pt alone, so that a kill between the two does no harm."""
    model = small("rope", seed=3)
    save_checkpoint(tmp_path, model, {"data": "here"}, step=7)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content == {"recipe": asdict(model.config), "data": "here"}
    for damaged in ("{", '{"recipe": {"n_layer": 3}}', None):
        (tmp_path / "config.json").unlink()
        if damaged:
            (tmp_path / "config.json").write_text(damaged)
        loaded, about, _ = load_checkpoint(tmp_path)
        assert loaded.config == model.config and about == {"data": "here"}


# --- memory

MEASURE = """
import resource, torch
from model import GPT
from evaluation import window_loss
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
