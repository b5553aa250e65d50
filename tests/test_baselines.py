"""KERPLE, FIRE, RoPE-A, YaRN and interpolation against their formulas, written a second time."""

import math

import pytest
import torch
from conftest import draw_qkv, make_embedding, softmax_attention

import baselines
from baselines import POSITION_EMBEDDINGS, ntk, rope_scaling, slow_down, yarn
from checkpoint import inherit
from fope import RoPE, rope_freqs

# --- KERPLE and FIRE


def test_kerple_bias():
    pos, (q, k, _) = make_embedding("kerple"), draw_qkv(50)
    bias = pos.scores(q, k) - make_embedding("nope").scores(q, k)
    for h, i, j in [(0, 49, 0), (1, 30, 29), (1, 7, 7)]:
        expected = -pos.r1[h].item() * math.log(1 + pos.r2[h].item() * (i - j))
        assert bias[1, h, i, j].item() == pytest.approx(expected, abs=1e-5)


def test_fire_bias():
    pos, (q, k, _) = make_embedding("fire"), draw_qkv(50)
    with torch.no_grad():
        pos.c.fill_(0.3)
        pos.L_multiple.fill_(1.5)  # L = 15: a quarter of 40, times 1.5
    bias = pos.scores(q, k) - make_embedding("nope").scores(q, k)
    w1, b1, w2 = (p.detach() for p in pos.mlp.parameters())
    for h, i, j in [(0, 49, 0), (1, 30, 29), (1, 7, 7), (0, 14, 2)]:
        x = math.log(0.3 * (i - j) + 1) / math.log(0.3 * max(15, i) + 1)
        hidden = [max(0.0, float(w1[n, 0]) * x + float(b1[n])) for n in range(32)]
        expected = sum(float(w2[h, n]) * hidden[n] for n in range(32))
        assert bias[1, h, i, j].item() == pytest.approx(expected, abs=1e-5)


def test_first_values_of_kerple_and_fire_are_the_papers():
    kerple, fire = make_embedding("kerple", n_head=2000), make_embedding("fire")
    for r, largest in ((kerple.r1, 2.0), (kerple.r2, 1.0)):
        assert r.min() >= 0 and r.max() <= largest
        assert r.mean().item() == pytest.approx(largest / 2, rel=0.05)
    assert fire.c.item() == pytest.approx(0.1) and fire.L_multiple.item() == 1.0
    assert fire.L_start.item() == 10.0  # a quarter of 40


@pytest.mark.parametrize("name", ["kerple", "fire"])
def test_learned_bias_is_made_in_blocks_of_queries_with_the_same_gradients(name, monkeypatch):
    """However long the text, one block's bias at a time, and the explicit gradients."""
    pos, qkv = make_embedding(name), draw_qkv(300)
    blocks, bias, parameters = [], pos.bias, list(pos.parameters())
    monkeypatch.setattr(pos, "bias", lambda i, j: blocks.append(len(i)) or bias(i, j))
    fused = torch.autograd.grad(pos.attend(*qkv).square().sum(), parameters)
    assert max(blocks) <= baselines.QUERIES_PER_BLOCK < 300
    explicit = torch.autograd.grad(softmax_attention(pos, *qkv).square().sum(), parameters)
    for a, b in zip(fused, explicit, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["kerple", "fire"])
def test_learned_biases_are_inherited(name):
    old, new = make_embedding(name), make_embedding(name, train_len=80)
    with torch.no_grad():
        for p in old.parameters():
            p.add_(0.5)
    inherit(new, old)
    t = torch.arange(20)
    assert torch.equal(new.bias(t, t), old.bias(t, t))


# --- RoPE-A


def test_aligned_frequencies_are_the_nearest_that_complete_whole_cycles():
    w = rope_freqs(64).double()
    pos = POSITION_EMBEDDINGS["rope_a"](head_dim=64, n_head=2, train_len=512)
    aligned = pos.freqs.double()
    cycles = aligned * 512 / (2 * math.pi)
    torch.testing.assert_close(cycles, cycles.round(), atol=1e-4, rtol=0)
    # half the distance of two such frequencies
    assert (aligned - w).abs().max() <= math.pi / 512 + 1e-6
    assert int((cycles.round() == 0).sum()) == int((w < math.pi / 512).sum()) > 0
    # rounded up, as in the authors' code, no pair stops
    up = baselines.RoPEA(head_dim=64, n_head=2, train_len=512, up=True).freqs.double()
    expected = (w * 512 / (2 * math.pi)).ceil() * 2 * math.pi / 512
    torch.testing.assert_close(up, expected, atol=1e-6, rtol=0)
    # the rotation has come back after the training length, 40
    cos, sin = make_embedding("rope_a").make_tables(81)
    torch.testing.assert_close(cos[40:], cos[:41], atol=1e-4, rtol=0)
    torch.testing.assert_close(sin[40:], sin[:41], atol=1e-4, rtol=0)


# --- YaRN and position interpolation


@pytest.mark.parametrize(
    "factor, theta, ends", [(2, 1e4, (3, 16)), (16, 1e4, (3, 16)), (4, 1e6, (2, 11))]
)
def test_yarn_frequencies(factor, theta, ends):
    """The published ramp, with the frequency's index as a loop variable."""
    dim, length = 64, 512

    def index_of(turns):
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(index_of(32)), math.ceil(index_of(1))
    assert (low, high) == ends
    expected = []
    for m in range(dim // 2):
        ramp = min(max((m - low) / (high - low), 0), 1)
        w = theta ** (-2 * m / dim)
        expected.append(w / factor * ramp + w * (1 - ramp))
    expected, exact = torch.tensor(expected), dict(atol=0, rtol=1e-5)
    freqs = rope_freqs(64, theta)
    torch.testing.assert_close(yarn(freqs, factor, 512, 64, theta), expected, **exact)
    scaling = rope_scaling(factor=factor, original_len=512, head_dim=64, theta=theta)
    pos = RoPE(head_dim=64, n_head=2, theta=theta, **scaling)
    torch.testing.assert_close(pos.scaled_freqs(), expected, **exact)
    torch.testing.assert_close(pos.make_tables(2)[1][1], expected.sin(), **exact)
    assert pos.train_len == 512 and pos.qk_factor == 1.0


def test_the_tapered_floor_falls_from_one_to_zero():
    """Of 32 frequencies 16 are under the floor: the first of them stays, the last stands still."""
    plain, tapered = (
        POSITION_EMBEDDINGS[name](head_dim=64, n_head=2, train_len=512).freqs
        for name in ("rope", "rope_taper")
    )
    ratio = tapered / plain
    assert torch.equal(ratio[:17], torch.ones(17)) and ratio[-1].abs() < 1e-6
    i = torch.arange(16)
    torch.testing.assert_close(ratio[16:], torch.cos(math.pi * i / 30) ** 2)


def test_position_interpolation_is_rope_at_a_fraction_of_the_position():
    scaling = {"kind": "interpolate", "factor": 4.0, "original_len": 40}
    cos, sin = make_embedding("rope", scaling=scaling).make_tables(101)
    expected = make_embedding("rope").make_tables(26)
    torch.testing.assert_close(cos[::4], expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[::4], expected[1], atol=1e-5, rtol=0)


def test_ntk_is_rope_with_a_larger_theta():
    """Of Llama's kind: the slowest pair is divided by the factor, the fastest stays."""
    freqs = ntk(rope_freqs(64, 500.0), 8.0, head_dim=64, theta=500.0)
    torch.testing.assert_close(freqs, rope_freqs(64, 500.0 * 8 ** (64 / 62)), atol=0, rtol=1e-5)
    torch.testing.assert_close(
        freqs[[0, -1]], rope_freqs(64, 500.0)[[0, -1]] / torch.tensor([1, 8])
    )


def test_slow_pairs_alone_are_slowed_down():
    freqs = rope_freqs(64)
    ratio = slow_down(freqs, 4.0, 512) / freqs
    assert torch.equal(ratio, torch.where(freqs * 512 < 2 * math.pi, 0.25, 1.0))
    assert (ratio == 1).sum() == 16


@pytest.mark.parametrize("name", ["rope", "fope"])
@pytest.mark.parametrize("kind", ["yarn", "none"])
def test_the_temperature_multiplies_the_logits(kind, name):
    q, k, _ = draw_qkv(30)
    scaling = {"kind": kind, "factor": 4.0, "original_len": 40}
    plain, warm = (
        make_embedding(name, scaling={**scaling, "temperature": on}).scores(q, k)
        for on in (False, True)
    )
    expected = plain * (0.1 * math.log(4) + 1) ** 2
    torch.testing.assert_close(warm, expected, atol=1e-5, rtol=1e-4)
    if kind == "none":
        assert torch.equal(plain, make_embedding(name).scores(q, k))
