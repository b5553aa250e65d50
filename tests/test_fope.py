"""The embeddings against their formulas, written a second time in the slowest and most literal way."""

import cmath
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

import fope
from fope import (
    KERPLE,
    POSITION_EMBEDDINGS,
    ALiBi,
    FoPE,
    NoPE,
    RoPE,
    above_floor,
    alibi_slopes,
    apply_rotation,
    rope_freqs,
    rotation_tables,
    yarn_freqs,
)

SHAPE = dict(head_dim=16, n_head=2, train_len=40)
VARIANTS = [
    ("fope", {"variant": "paper"}),
    ("fope", {"n_freq": 12}),
    ("fope", {"floor": False}),
    ("fope", {"yarn_scale": 4.0, "yarn_temperature": True}),
    ("rope", {"yarn_scale": 4.0, "yarn_temperature": True}),
    ("kerple", {"flex": True}),
]
CASES = [pytest.param(name, {}, id=name) for name in POSITION_EMBEDDINGS]
CASES += [pytest.param(name, kwargs, id=f"{name}-{'-'.join(map(str, kwargs))}") for name, kwargs in VARIANTS]


def make(name="fope", **kwargs):
    torch.manual_seed(0)
    return POSITION_EMBEDDINGS[name](**{**SHAPE, **kwargs})


def draw(T, head_dim=16, n_head=2, seed=1):
    return torch.randn(3, 2, n_head, T, head_dim, generator=torch.Generator().manual_seed(seed))


def softmax_attention(pos, q, k, v):
    mask = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).tril()
    return pos.scores(q, k).masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v


# --- all embeddings


@pytest.mark.parametrize("name, kwargs", CASES)
@pytest.mark.parametrize("T", [1, 39, 640])  # 640 = 16 times the training length
def test_fused_attention_is_softmax_of_the_scores(name, kwargs, T):
    """attend() is what the model runs, scores() is what a reader understands: they must be the same function."""
    pos, (q, k, v) = make(name, **kwargs), draw(T)
    fused = pos.attend(*pos.rotate(q, k), v)
    torch.testing.assert_close(fused, softmax_attention(pos, q, k, v), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name, kwargs", CASES)
def test_fused_attention_has_the_gradients_of_the_scores(name, kwargs):
    pos, qkv = make(name, **kwargs), draw(50).requires_grad_()
    (fused,) = torch.autograd.grad(pos.attend(*pos.rotate(qkv[0], qkv[1]), qkv[2]).square().sum(), qkv)
    (explicit,) = torch.autograd.grad(softmax_attention(pos, *qkv).square().sum(), qkv)
    torch.testing.assert_close(fused, explicit, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["nope", "alibi", "rope", "rope_a", "kerple"])
def test_scores_depend_on_distance_only(name):
    """The same content at every position: then score(i, j) may only depend on i - j."""
    q, k, _ = draw(1)
    s = make(name).scores(q.expand(-1, -1, 60, -1), k.expand(-1, -1, 60, -1))
    torch.testing.assert_close(s[..., 1:, 1:], s[..., :-1, :-1], atol=1e-5, rtol=1e-5)


def test_fope_scores_depend_on_distance_only_without_noise():
    """With noise cos_coef and sin_coef differ, and e^{i w t} is no longer what multiplies; without, FoPE is relative."""
    q, k, _ = draw(1)
    q, k = q.expand(-1, -1, 60, -1), k.expand(-1, -1, 60, -1)
    for variant in ("paper", "released"):
        s = make(sigma=0.0, variant=variant).scores(q, k)
        torch.testing.assert_close(s[..., 1:, 1:], s[..., :-1, :-1], atol=1e-5, rtol=1e-5)
        s = make(sigma=0.3, variant=variant).scores(q, k)
        assert (s[..., 1:, 1:] - s[..., :-1, :-1]).abs().max() > 0.01


# --- rotation and RoPE


def test_rope_frequencies():
    assert rope_freqs(8, 10000.0).tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert rope_freqs(4, 100.0).tolist() == pytest.approx([1.0, 0.1])


@given(t=st.integers(0, 5000), m=st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_rotation_is_complex_multiplication(t, m):
    x = draw(1)[0, 0, 0]
    cos, sin = rotation_tables(rope_freqs(16), t + 1)
    y = apply_rotation(x, cos[t:], sin[t:])[0]
    expected = complex(x[0, m], x[0, m + 8]) * cmath.exp(1j * t * 10000 ** (-2 * m / 16))
    assert abs(complex(y[m], y[m + 8]) - expected) < 1e-3


def test_rotation_is_computed_in_fp32_and_returned_in_the_dtype():
    pos, (q, k, _) = make("rope"), draw(640)
    half = pos.rotate(q.bfloat16(), k.bfloat16())[0]
    assert half.dtype == torch.bfloat16
    exact = pos.rotate(q.bfloat16().float(), k.float())[0]
    assert torch.equal(half, exact.bfloat16())


# --- ALiBi


def test_alibi_slopes():
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    # 12 heads: those of 8, then every other of 16, as published
    assert alibi_slopes(12).tolist() == pytest.approx([2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    assert len(alibi_slopes(1)) == 1 and len(alibi_slopes(7)) == 7


def test_alibi_bias_is_the_published_one():
    pos, (q, k, _) = ALiBi(head_dim=16, n_head=12, train_len=40), draw(9, n_head=12)
    plain = NoPE(head_dim=16, n_head=12, train_len=40).scores(q, k)
    slopes = alibi_slopes(12)
    for h, i, j in [(0, 5, 2), (11, 8, 0), (7, 3, 3)]:
        expected = plain[:, h, i, j] - slopes[h] * (i - j)
        torch.testing.assert_close(pos.scores(q, k)[:, h, i, j], expected)


def test_alibi_stays_linear_in_bf16_at_8192():
    """bf16 has 8 bits of mantissa: a position as one number would be rounded to multiples of 32 at 8192."""
    T = 8192
    pos = ALiBi(head_dim=16, n_head=8, train_len=40)
    q = torch.zeros(1, 8, T, 16, dtype=torch.bfloat16)
    v = torch.zeros_like(q)
    v[..., -1, 0] = 1.0  # how much the last query sees of the last key ...
    v[..., -9, 1] = 1.0  # ... and of the one 8 before
    y = pos.attend(q, q, v)[0, :, -1].float()
    torch.testing.assert_close(torch.log(y[:, 0] / y[:, 1]), 8 * pos.slopes, atol=0.02, rtol=0.02)


# --- FoPE


def fope_by_hand(pos, x, t, h):
    """One vector x of head h at position t, rotated by Eq. 11-13 with explicit sums over the frequencies."""
    M, (D, K) = pos.head_dim // 2, pos.cos_coef.shape[1:]
    y = [0.0] * (2 * M)
    for m in range(M):
        if m < K:
            c = sum(math.cos(t * float(pos.freqs[d])) * float(pos.cos_coef[h, d, m]) for d in range(D))
            s = sum(math.sin(t * float(pos.freqs[d])) * float(pos.sin_coef[h, d, m]) for d in range(D))
        else:
            c, s = 1.0, (1.0 if pos.variant == "released" else 0.0)
        y[m] = float(x[m]) * c - float(x[m + M]) * s
        y[m + M] = float(x[m + M]) * c + float(x[m]) * s
    return torch.tensor(y)


@pytest.mark.parametrize("kwargs", [{}, {"variant": "paper"}, {"n_freq": 9}, {"variant": "paper", "n_freq": 20, "sigma": 0.5}])
def test_fope_is_a_fourier_series_per_dimension(kwargs):
    pos, (q, k, _) = make(**kwargs), draw(100)
    rotated = pos.rotate(q, k)[1]
    for t, h in [(0, 0), (1, 1), (39, 0), (99, 1)]:
        torch.testing.assert_close(rotated[1, h, t], fope_by_hand(pos, k[1, h, t], t, h), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("train_len", [16, 40, 128, 512, 4096])
def test_floor_keeps_exactly_the_frequencies_that_complete_a_cycle(train_len):
    freqs = rope_freqs(64)
    expected = [w for w in freqs.tolist() if w * train_len >= 2 * math.pi]
    assert above_floor(freqs, train_len).tolist() == expected
    assert above_floor(freqs.flip(0), train_len).tolist() == expected[::-1]


@pytest.mark.parametrize("train_len", [16, 40, 128, 512, 4096])
def test_every_dimension_above_the_floor_has_coefficients(train_len):
    pos = FoPE(head_dim=64, n_head=2, train_len=train_len, variant="paper")
    expected = [w for w in rope_freqs(64).tolist() if w * train_len >= 2 * math.pi]
    assert pos.freqs.tolist() == expected
    assert pos.cos_coef.shape == (2, len(expected), len(expected))


def test_tables_are_made_in_full_precision_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = make().make_tables(640)
    assert all(torch.equal(a, b) for a, b in zip(rounded, make().make_tables(640), strict=True))


def test_released_variant_caps_the_outputs_and_strides_the_identity():
    """head_dim 64 at 1024: 18 frequencies, 16 outputs, weight 1 at every second frequency, the last columns noise alone."""
    pos = FoPE(head_dim=64, n_head=8, train_len=1024, sigma=0.0)
    assert pos.cos_coef.shape == (8, 18, 16)
    expected = torch.zeros(18, 16)
    for k in range(9):
        expected[2 * k, k] = 1.0
    assert torch.equal(pos.cos_coef[3], expected) and torch.equal(pos.sin_coef[0], expected)


def test_noise_has_the_documented_size():
    torch.manual_seed(0)
    shape = dict(head_dim=64, n_head=8, train_len=512, sigma=0.3)
    for variant, std in [("released", 0.0217), ("paper", 0.3)]:
        pos = FoPE(variant=variant, **shape)
        noise = pos.sin_coef - torch.eye(16)
        assert noise.std().item() == pytest.approx(std, rel=0.1), variant
        assert not torch.equal(pos.sin_coef, pos.cos_coef) and not torch.equal(noise[0], noise[1])


def test_identity_coefficients_and_no_floor_are_rope():
    fope = make(variant="paper", sigma=0.0, train_len=10**9)
    q, k, _ = draw(200)
    for ours, ropes in zip(fope.rotate(q, k), make("rope").rotate(q, k), strict=True):
        torch.testing.assert_close(ours, ropes, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant, gain", [("paper", 1.0), ("released", 2.0)])
def test_zero_frequency_dimensions_ignore_position(variant, gain):
    """They carry content alone; with sin = 1 (released) their share of q.k is exactly doubled."""
    pos, (q, k, _) = make(variant=variant), draw(100)
    K, M = pos.cos_coef.size(-1), pos.head_dim // 2
    zero = [*range(K, M), *range(M + K, 2 * M)]
    assert len(zero) >= 4
    keep = torch.zeros(2 * M)
    keep[zero] = 1.0
    torch.testing.assert_close(pos.scores(q * keep, k), gain * NoPE(**SHAPE).scores(q * keep, k), atol=1e-5, rtol=1e-4)


def test_floor_belongs_to_the_training_length():
    """How long the text is, or one that was read before, must not change what happens to its beginning."""
    pos, (q, k, _) = make(), draw(640)
    short = make().rotate(q[..., :40, :], k[..., :40, :])[0]
    torch.testing.assert_close(make().rotate(q[..., :10, :], k[..., :10, :])[0], short[..., :10, :], atol=1e-6, rtol=0)
    torch.testing.assert_close(pos.rotate(q, k)[0][..., :40, :], short, atol=1e-6, rtol=0)
    torch.testing.assert_close(pos.rotate(q[..., :40, :], k[..., :40, :])[0], short, atol=1e-6, rtol=0)


def test_cached_tables_follow_their_coefficients():
    """The tables are built once per length, so a loaded, copied or replaced coefficient must drop them."""
    pos, other, (q, k, _) = make(), FoPE(**SHAPE, sigma=1.0), draw(30)
    before = pos.rotate(q, k)[0]
    pos.load_state_dict(other.state_dict())
    assert torch.equal(pos.rotate(q, k)[0], other.rotate(q, k)[0])
    pos.load_state_dict(make().state_dict())
    assert torch.equal(pos.rotate(q, k)[0], before)
    pos.cos_coef.mul_(2.0)
    assert not torch.equal(pos.rotate(q, k)[0], before)
    pos.cos_coef = make().cos_coef
    assert torch.equal(pos.rotate(q, k)[0], before)


def test_coefficients_are_frozen_and_saved():
    pos = make(n_freq=12)
    assert not list(pos.parameters()) and not any(b.requires_grad for b in pos.buffers())
    assert set(pos.state_dict()) == {"freqs", "sin_coef", "cos_coef"}
    assert set(make("rope").state_dict()) == set()  # RoPE's follow from the config


def test_fourier_series_without_the_floor_turns_every_dimension():
    pos = make(floor=False)
    assert pos.cos_coef.shape == (2, 8, 8) and pos.make_tables(9)[0].shape == (2, 9, 8)
    q, k, _ = draw(200)
    rope = make("rope").rotate(q, k)[0]
    torch.testing.assert_close(make(floor=False, sigma=0.0).rotate(q, k)[0], rope, atol=1e-5, rtol=1e-5)


# --- RoPE-A, YaRN, position interpolation


def test_aligned_frequencies_are_the_nearest_that_complete_whole_cycles():
    w, aligned = rope_freqs(64).double(), POSITION_EMBEDDINGS["rope_a"](head_dim=64, n_head=2, train_len=512).freqs.double()
    cycles = aligned * 512 / (2 * math.pi)
    torch.testing.assert_close(cycles, cycles.round(), atol=1e-4, rtol=0)
    assert (aligned - w).abs().max() <= math.pi / 512 + 1e-6  # half the distance of two such frequencies
    assert int((cycles.round() == 0).sum()) == int((w < math.pi / 512).sum()) > 0
    cos, sin = make("rope_a").make_tables(81)  # the rotation has come back after the training length, 40
    torch.testing.assert_close(cos[40:], cos[:41], atol=1e-4, rtol=0)
    torch.testing.assert_close(sin[40:], sin[:41], atol=1e-4, rtol=0)


@pytest.mark.parametrize("scale", [2, 16])
def test_yarn_frequencies(scale):
    """The published ramp, with the frequency's index as a loop variable."""
    dim, length, base = 64, 512, 10000.0

    def index_of(turns):
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(index_of(32)), math.ceil(index_of(1))
    assert (low, high) == (3, 16)
    expected = []
    for m in range(dim // 2):
        ramp = min(max((m - low) / (high - low), 0), 1)
        w = base ** (-2 * m / dim)
        expected.append(w / scale * ramp + w * (1 - ramp))
    torch.testing.assert_close(yarn_freqs(rope_freqs(64), scale, 512, 64), torch.tensor(expected), atol=0, rtol=1e-5)
    pos = RoPE(head_dim=64, n_head=2, train_len=1024, yarn_scale=scale, original_len=512)
    torch.testing.assert_close(pos.scaled_freqs(), torch.tensor(expected), atol=0, rtol=1e-5)


def test_yarn_scale_1_changes_nothing():
    assert torch.equal(yarn_freqs(rope_freqs(64), 1.0, 512, 64), rope_freqs(64))


def test_position_interpolation_is_rope_at_a_fraction_of_the_position():
    cos, sin = make("rope", pi_scale=4.0).make_tables(101)
    expected = make("rope").make_tables(26)
    torch.testing.assert_close(cos[::4], expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[::4], expected[1], atol=1e-5, rtol=0)


def test_yarn_temperature_multiplies_the_logits():
    q, k, _ = draw(30)
    plain, warm = (make("rope", yarn_scale=4.0, yarn_temperature=on).scores(q, k) for on in (False, True))
    torch.testing.assert_close(warm, plain * (0.1 * math.log(4) + 1) ** 2, atol=1e-5, rtol=1e-4)


def test_yarn_on_fope_lowers_the_frequencies_and_keeps_the_series():
    """The trained model's floor and coefficients stay; what its series are made of turns more slowly."""
    pos, scaled = make(train_len=512, head_dim=64), make(train_len=1024, head_dim=64, yarn_scale=2.0, original_len=512)
    assert torch.equal(pos.freqs, scaled.freqs) and torch.equal(pos.cos_coef, scaled.cos_coef)
    assert torch.equal(scaled.scaled_freqs(), yarn_freqs(pos.freqs, 2.0, 512, 64))
    assert not torch.equal(scaled.make_tables(9)[0], pos.make_tables(9)[0])


# --- KERPLE and FIRE


def test_kerple_bias():
    pos, (q, k, _) = make("kerple"), draw(50)
    bias = pos.scores(q, k) - make("nope").scores(q, k)
    for h, i, j in [(0, 49, 0), (1, 30, 29), (1, 7, 7)]:
        expected = -pos.r1[h].item() * math.log(1 + pos.r2[h].item() * (i - j))
        assert bias[1, h, i, j].item() == pytest.approx(expected, abs=1e-5)


def test_fire_bias():
    pos, (q, k, _) = make("fire"), draw(50)
    with torch.no_grad():
        pos.c.fill_(0.3)
        pos.L_multiple.fill_(1.5)  # L = 15: a quarter of 40, times 1.5
    bias = pos.scores(q, k) - make("nope").scores(q, k)
    w1, b1, w2, b2 = (p.detach() for p in pos.mlp.parameters())
    for h, i, j in [(0, 49, 0), (1, 30, 29), (1, 7, 7), (0, 14, 2)]:
        x = math.log(0.3 * (i - j) + 1) / math.log(0.3 * max(15, i) + 1)
        expected = sum(float(w2[h, n]) * max(0.0, float(w1[n, 0]) * x + float(b1[n])) for n in range(32)) + float(b2[h])
        assert bias[1, h, i, j].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["kerple", "fire"])
def test_learned_bias_is_made_in_blocks_of_queries_with_the_same_gradients(name, monkeypatch):
    """However long the text, no more than one block's bias exists at a time; every parameter gets the explicit gradient."""
    pos, qkv = make(name), draw(300)
    blocks = []
    bias = pos.bias
    monkeypatch.setattr(pos, "bias", lambda i, j: blocks.append(len(i)) or bias(i, j))
    fused = torch.autograd.grad(pos.attend(*qkv).square().sum(), list(pos.parameters()))
    assert max(blocks) <= fope.QUERIES_PER_BLOCK < 300
    explicit = torch.autograd.grad(softmax_attention(pos, *qkv).square().sum(), list(pos.parameters()))
    for a, b in zip(fused, explicit, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kerple_by_flexattention_is_the_same(monkeypatch):
    """On CUDA with the compiled kernel; on a CPU, whose kernel has no backward pass, with FlexAttention's own definition."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pos, qkv = make("kerple", flex=True).to(device), draw(256).to(device).requires_grad_()
    if device == "cpu":
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *qkv: None)
        pos.flex_attention = flex_attention.flex_attention
    inputs = [qkv, *pos.parameters()]
    for attend in (KERPLE.attend, pos.flex):
        y, explicit = attend(pos, *qkv), softmax_attention(pos, *qkv)
        torch.testing.assert_close(y, explicit, atol=2e-5, rtol=1e-4)
        gradients = torch.autograd.grad(y.square().sum(), inputs), torch.autograd.grad(explicit.square().sum(), inputs)
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_kerple_by_the_compiled_flexattention_is_the_same():
    """The kernel that torch's compiler makes of the bias: for a CPU, too, it has the forward pass."""
    if not (shutil.which("g++") or shutil.which("clang++")) or "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("compiling FlexAttention for a CPU needs a C++ compiler and AVX2")
    pos, qkv = make("kerple", flex=True), draw(256)
    torch.testing.assert_close(pos.flex(pos, *qkv), softmax_attention(pos, *qkv), atol=2e-5, rtol=1e-4)


# --- another embedding for trained weights


def test_fope_at_twice_the_length_keeps_the_coefficients_of_its_frequencies():
    for kwargs in ({}, {"variant": "paper"}, {"n_freq": 30}):
        old = make(head_dim=64, train_len=512, **kwargs)
        torch.manual_seed(5)
        new = FoPE(head_dim=64, n_head=2, train_len=1024, **kwargs)
        assert (old.n_kept, new.n_kept) == (16, 18)
        new.inherit(old)
        assert torch.equal(new.freqs[:16], old.freqs[:16])
        assert torch.equal(new.freqs[:18], rope_freqs(64)[:18])
        if kwargs.get("n_freq"):
            assert torch.equal(new.freqs[18:], old.freqs[16:28])
        K = min(new.cos_coef.size(2), old.cos_coef.size(2))
        for a, b in ((new.sin_coef, old.sin_coef), (new.cos_coef, old.cos_coef)):
            assert torch.equal(a[:, :16, :K], b[:, :16, :K])
            # every series has one weight near 1, on the frequency of its number; all else is noise
            noise = a - torch.eye(*a.shape[1:])
            assert 0 < noise[:, 16:].std() < 3 * noise[:, :16, :16].std() and noise.abs().max() < 5 * new.sigma
    pos = make()
    before = pos.state_dict()["cos_coef"].clone()
    pos.inherit(make("rope"))
    assert torch.equal(pos.cos_coef, before)


@pytest.mark.parametrize("name", ["kerple", "fire"])
def test_learned_biases_are_inherited(name):
    old, new = make(name), make(name, train_len=80)
    with torch.no_grad():
        for p in old.parameters():
            p.add_(0.5)
    new.inherit(old)
    t = torch.arange(20)
    assert torch.equal(new.bias(t, t), old.bias(t, t))


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"yarn_scale": 0.5}, "at least 1"),
        ({"pi_scale": "2"}, "at least 1"),
        ({"variant": "original"}, "released, paper"),
        ({"n_freq": 1}, "n_freq is 1"),
        ({"n_freq": 3.5}, "whole number, at most a million, not 3.5"),
        ({"sigma": -0.1}, "not negative"),
        ({"sigma": "0.3"}, "not negative"),
        ({"sigma": math.inf}, "not negative"),
        ({"train_len": 6}, "train_len 6"),
        ({"head_dim": 15}, "must be even"),
        ({"head_dim": 2}, "head_dim 2"),
        ({"floor": "False"}, "true or false"),
        ({"yarn_temperature": "no"}, "true or false"),
        ({"name": "kerple", "flex": 1}, "true or false"),
        ({"name": "rope_a", "train_len": 3}, "nothing to turn with train_len 3"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(kwargs, words):
    with pytest.raises(ValueError, match=words):
        make(**kwargs)


def test_registry_has_the_papers_embeddings():
    assert {"nope": NoPE, "alibi": ALiBi, "rope": RoPE, "fope": FoPE}.items() <= POSITION_EMBEDDINGS.items()
