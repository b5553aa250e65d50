"""The embeddings against their formulas, written a second time in the most literal way."""

import cmath
import doctest
import math

import pytest
import torch
from conftest import SHAPE, draw_qkv, make_embedding, softmax_attention
from hypothesis import given, settings
from hypothesis import strategies as st

import fope
from baselines import POSITION_EMBEDDINGS
from checkpoint import inherit
from common import Refused
from fope import (
    ALiBi,
    FoPE,
    NoPE,
    above_floor,
    alibi_slopes,
    apply_rotation,
    rope_freqs,
    rotation_tables,
)
from hf.grouped import GroupedFoPE

YARN = {"kind": "yarn", "factor": 4.0, "original_len": 40, "temperature": True}
VARIANTS = [
    ("fope", {"variant": "paper"}),
    ("fope", {"fourier_dim": 48}),
    ("fope", {"window": 23}),
    ("alibi", {"window": 40}),
    ("kerple", {"window": 150}),
    ("fope", {"floor": False}),
    ("fope", {"floor": 80}),
    ("fope", {"scaling": YARN}),
    ("rope", {"scaling": YARN}),
]
CASES = [pytest.param(name, {}, id=name) for name in POSITION_EMBEDDINGS]
CASES += [pytest.param(name, kw, id=f"{name}-{'-'.join(map(str, kw))}") for name, kw in VARIANTS]

# --- all embeddings


@pytest.mark.parametrize("name, kwargs", CASES)
@pytest.mark.parametrize("T", [1, 39, 640])  # 640 = 16 times the training length
def test_fused_attention_is_softmax_of_the_scores(name, kwargs, T):
    """attend() is what the model runs, scores() what a reader understands: the same function."""
    pos, (q, k, v) = make_embedding(name, **kwargs), draw_qkv(T)
    fused = pos.attend(*pos.rotate(q, k), v)
    torch.testing.assert_close(fused, softmax_attention(pos, q, k, v), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name, kwargs", CASES)
def test_fused_attention_has_the_gradients_of_the_scores(name, kwargs):
    pos, qkv = make_embedding(name, **kwargs), draw_qkv(50).requires_grad_()
    attended = pos.attend(*pos.rotate(qkv[0], qkv[1]), qkv[2])
    (fused,) = torch.autograd.grad(attended.square().sum(), qkv)
    (explicit,) = torch.autograd.grad(softmax_attention(pos, *qkv).square().sum(), qkv)
    torch.testing.assert_close(fused, explicit, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["nope", "alibi", "rope", "rope_a", "kerple"])
def test_scores_depend_on_distance_only(name):
    """The same content at every position: then score(i, j) may only depend on i - j."""
    q, k, _ = draw_qkv(1)
    s = make_embedding(name).scores(q.expand(-1, -1, 60, -1), k.expand(-1, -1, 60, -1))
    torch.testing.assert_close(s[..., 1:, 1:], s[..., :-1, :-1], atol=1e-5, rtol=1e-5)


def test_fope_scores_depend_on_distance_only_without_noise():
    """
    With noise cos_coef and sin_coef differ, and e^{i w t} is no longer what multiplies; without,
    FoPE is relative.
    """
    q, k, _ = draw_qkv(1)
    q, k = q.expand(-1, -1, 60, -1), k.expand(-1, -1, 60, -1)
    for variant in ("paper", "released"):
        s = make_embedding(sigma=0.0, variant=variant).scores(q, k)
        torch.testing.assert_close(s[..., 1:, 1:], s[..., :-1, :-1], atol=1e-5, rtol=1e-5)
        s = make_embedding(sigma=0.3, variant=variant).scores(q, k)
        assert (s[..., 1:, 1:] - s[..., :-1, :-1]).abs().max() > 0.01


# --- rotation and RoPE


def test_rope_frequencies():
    assert rope_freqs(8, 10000.0).tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert rope_freqs(4, 100.0).tolist() == pytest.approx([1.0, 0.1])


@given(t=st.integers(0, 5000), m=st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_rotation_is_complex_multiplication(t, m):
    x = draw_qkv(1)[0, 0, 0]
    cos, sin = rotation_tables(rope_freqs(16), t + 1)
    y = apply_rotation(x, cos[t:], sin[t:])[0]
    expected = complex(x[0, m], x[0, m + 8]) * cmath.exp(1j * t * 10000 ** (-2 * m / 16))
    assert abs(complex(y[m], y[m + 8]) - expected) < 1e-3


def test_rotation_is_computed_in_fp32_and_returned_in_the_dtype():
    pos, (q, k, _) = make_embedding("rope"), draw_qkv(640)
    half = pos.rotate(q.bfloat16(), k.bfloat16())[0]
    assert half.dtype == torch.bfloat16
    exact = pos.rotate(q.bfloat16().float(), k.float())[0]
    assert torch.equal(half, exact.bfloat16())
    whole = pos.rotate(q, k)[0]
    assert torch.equal(pos.bfloat16().rotate(q, k)[0], whole)  # its frequencies are not rounded


# --- ALiBi


def test_alibi_slopes():
    first = [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(8).tolist() == first
    # 12 heads: those of 8, then every other of 16, as published
    more = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert alibi_slopes(12).tolist() == pytest.approx(first + more)
    assert len(alibi_slopes(1)) == 1 and len(alibi_slopes(7)) == 7


def test_alibi_bias_is_the_published_one():
    shape = dict(head_dim=16, n_head=12, train_len=40)
    pos, (q, k, _) = ALiBi(**shape), draw_qkv(9, n_head=12)
    plain, slopes = NoPE(**shape).scores(q, k), alibi_slopes(12)
    for h, i, j in [(0, 5, 2), (11, 8, 0), (7, 3, 3)]:
        expected = plain[:, h, i, j] - slopes[h] * (i - j)
        torch.testing.assert_close(pos.scores(q, k)[:, h, i, j], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_is_exact_in_16_bits_wherever_a_text_stands(dtype):
    pos = make_embedding("alibi", head_dim=16, n_head=2)
    q, k, v = draw_qkv(64).to(dtype)
    near, far = (pos.with_bias(q, k, v, torch.arange(64) + start) for start in (0, 65_500))
    logits = [(q.double() @ k.double().mT) for q, k, _ in (near, far)]
    assert (logits[1] - logits[0] - 65_500 * pos.slopes.view(1, -1, 1, 1)).abs().max() < 1e-6


# --- FoPE


def fope_by_hand(pos, x, t, h, sin_pad):
    """One vector x, turned at position t by table h: Eq. 11-13 with sums over frequencies."""
    M, (D, K) = pos.head_dim // 2, pos.cos_coef.shape[1:]
    y = [0.0] * (2 * M)
    for m in range(M):
        if m < K:
            angles = [t * float(w) for w in pos.freqs]
            c = sum(math.cos(angles[d]) * float(pos.cos_coef[h, d, m]) for d in range(D))
            s = sum(math.sin(angles[d]) * float(pos.sin_coef[h, d, m]) for d in range(D))
        else:
            c, s = 1.0, sin_pad
        y[m] = float(x[m]) * c - float(x[m + M]) * s
        y[m + M] = float(x[m + M]) * c + float(x[m]) * s
    return torch.tensor(y)


PAPER_MORE = {"variant": "paper", "fourier_dim": 32, "sigma": 0.5}
PADDED = [{"sin_pad": 0.0}, {"variant": "paper", "sin_pad": 1.0}, {"sin_pad": 0.25}]


@pytest.mark.parametrize(
    "kwargs", [{}, {"variant": "paper"}, {"fourier_dim": 64}, PAPER_MORE, *PADDED]
)
def test_fope_is_a_fourier_series_per_dimension(kwargs):
    pos, (q, k, _) = make_embedding(**kwargs), draw_qkv(100)
    sin_pad = kwargs.get("sin_pad", 0.0 if kwargs.get("variant") == "paper" else 1.0)
    rotated = pos.rotate(q, k)[1]
    for t, h in [(0, 0), (1, 1), (39, 0), (99, 1)]:
        expected = fope_by_hand(pos, k[1, h, t], t, h, sin_pad)
        torch.testing.assert_close(rotated[1, h, t], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("n_table", [1, 2, 6])
def test_neighbouring_heads_of_a_grouped_model_share_a_table(n_table):
    """The queries of a key head share one, and its keys are turned once for all of them."""
    torch.manual_seed(0)
    pos = GroupedFoPE(**SHAPE | {"n_head": 6}, n_table=n_table)
    q, k, _ = draw_qkv(100, n_head=6)
    assert len(pos.cos_coef) == len(pos.make_tables(9)[0]) == n_table
    rotated = pos.rotate(q, k)[1]
    for t, h in [(0, 0), (1, 1), (39, 2), (99, 5)]:
        expected = fope_by_hand(pos, k[1, h, t], t, h * n_table // 6, 1.0)
        torch.testing.assert_close(rotated[1, h, t], expected, atol=1e-4, rtol=1e-4)
    first = slice(None, None, 6 // n_table)  # keys that are of the key heads alone
    assert torch.equal(pos.rotate(q, k[:, first])[1], rotated[:, first])


def test_the_default_draws_what_it_always_drew():
    """Runs in progress and stored results depend on it."""
    pos = make_embedding()
    torch.manual_seed(0)
    noise = [torch.nn.init.xavier_normal_(torch.empty(2, 2, 2), gain=0.3) for _ in range(2)]
    assert torch.equal(pos.sin_coef, torch.eye(2) + noise[0])
    assert torch.equal(pos.cos_coef, torch.eye(2) + noise[1])


@pytest.mark.parametrize("train_len", [16, 40, 128, 512, 4096])
def test_floor_keeps_exactly_the_frequencies_that_complete_a_cycle(train_len):
    freqs = rope_freqs(64)
    expected = [w for w in freqs.tolist() if w * train_len >= 2 * math.pi]
    assert above_floor(freqs, train_len).tolist() == expected
    assert above_floor(freqs.flip(0), train_len).tolist() == expected[::-1]
    pos = FoPE(head_dim=64, n_head=2, train_len=train_len, variant="paper")
    assert pos.freqs.tolist() == expected
    assert pos.cos_coef.shape == (2, len(expected), len(expected))


def test_frequencies_of_a_larger_head_are_a_denser_grid():
    """The authors' fourier_dim=128 for heads of 64 at 512: 31 frequencies, 16 series, s = 2."""
    pos = FoPE(head_dim=64, n_head=8, train_len=512, fourier_dim=128, sigma=0.0)
    assert torch.equal(pos.freqs, above_floor(rope_freqs(128), 512)) and len(pos.freqs) == 31
    assert pos.cos_coef.shape == (8, 31, 16)
    pos = FoPE(head_dim=64, n_head=8, train_len=512, fourier_dim=128, theta=500.0)
    assert torch.equal(pos.freqs, above_floor(rope_freqs(128, 500.0), 512))


def test_tables_are_made_in_full_precision_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = make_embedding().make_tables(640)
    exact = make_embedding().make_tables(640)
    assert all(torch.equal(a, b) for a, b in zip(rounded, exact, strict=True))


def test_released_variant_caps_the_outputs_and_strides_the_identity():
    """
    head_dim 64 at 1024: 18 frequencies, 16 outputs, weight 1 at every second frequency. The last
    columns are noise alone.
    """
    pos = FoPE(head_dim=64, n_head=8, train_len=1024, sigma=0.0)
    assert pos.cos_coef.shape == (8, 18, 16)
    expected = torch.zeros(18, 16)
    for k in range(9):
        expected[2 * k, k] = 1.0
    assert torch.equal(pos.cos_coef[3], expected) and torch.equal(pos.sin_coef[0], expected)


@pytest.mark.parametrize("kwargs", [{"variant": "paper"}, {"floor": False}, {"cap": False}])
def test_without_the_cap_every_series_has_the_frequency_of_its_number(kwargs):
    pos = FoPE(**{"head_dim": 64, "n_head": 2, "train_len": 1024, "sigma": 0.0, **kwargs})
    D, K = pos.cos_coef.shape[1:]
    assert D == K == (32 if "floor" in kwargs else 18)
    for coef in (*pos.cos_coef, *pos.sin_coef):
        assert torch.equal(coef, torch.eye(K))


def test_noise_has_the_documented_size():
    torch.manual_seed(0)
    shape = dict(head_dim=64, n_head=8, train_len=512, sigma=0.3)
    for variant, std in [("released", 0.0217), ("paper", 0.3)]:
        pos = FoPE(variant=variant, **shape)
        noise = pos.sin_coef - torch.eye(16)
        assert noise.std().item() == pytest.approx(std, rel=0.1), variant
        assert not torch.equal(pos.sin_coef, pos.cos_coef)
        assert not torch.equal(noise[0], noise[1])


def test_identity_coefficients_and_no_floor_are_rope():
    fope = make_embedding(sigma=0.0, floor=False)
    rope = make_embedding("rope")
    q, k, _ = draw_qkv(200)
    for ours, ropes in zip(fope.rotate(q, k), rope.rotate(q, k), strict=True):
        torch.testing.assert_close(ours, ropes, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant, gain", [("paper", 1.0), ("released", 2.0)])
def test_zero_frequency_dimensions_ignore_position(variant, gain):
    """They carry content alone; with sin = 1 (released) their share of q.k is exactly doubled."""
    pos, (q, k, _) = make_embedding(variant=variant), draw_qkv(100)
    K, M = pos.cos_coef.size(-1), pos.head_dim // 2
    zero = [*range(K, M), *range(M + K, 2 * M)]
    assert len(zero) >= 4
    keep = torch.zeros(2 * M)
    keep[zero] = 1.0
    plain = NoPE(**SHAPE).scores(q * keep, k)
    torch.testing.assert_close(pos.scores(q * keep, k), gain * plain, atol=1e-5, rtol=1e-4)


def test_floor_of_another_length():
    """floor=80 keeps what completes a cycle in 80 tokens, whatever the training length."""
    pos = make_embedding(floor=80)
    assert torch.equal(pos.freqs, make_embedding(train_len=80).freqs)
    assert pos.train_len == 40 and len(pos.freqs) > len(make_embedding().freqs)


def test_coefficients_are_frozen_and_saved():
    """The tables are no buffers: DDP would copy them from another process, with its length."""
    pos, rope = (
        make_embedding(fourier_dim=48),
        make_embedding("rope"),
    )  # RoPE's follow from the config
    for used in (pos, rope):
        used.rotate(*draw_qkv(9)[:2])
    assert not list(pos.parameters()) and not any(b.requires_grad for b in pos.buffers())
    assert set(pos.state_dict()) == {n for n, _ in pos.named_buffers()}
    assert set(pos.state_dict()) == {"freqs", "sin_coef", "cos_coef"}
    assert not rope.state_dict() and [n for n, _ in rope.named_buffers()] == ["freqs"]


def test_frequencies_of_ones_own_are_cut_by_the_floor():
    freqs = [1.0, 0.9, 0.8, 0.7, 0.2, 0.1, 0.05, 0.01]
    torch.testing.assert_close(make_embedding("rope", freqs=freqs).freqs, torch.tensor(freqs))
    assert make_embedding(freqs=freqs, cap=False).freqs.tolist() == pytest.approx(freqs[:5])


# --- tables that are kept


def test_tables_are_made_once_for_the_longest_text(monkeypatch):
    """And how long it is, past the training length of 40, or was before, changes no position."""
    pos, made, (q, k, _) = make_embedding(), [], draw_qkv(60)
    make_tables = pos.make_tables
    monkeypatch.setattr(pos, "make_tables", lambda T: made.append(T) or make_tables(T))
    for T in (30, 10, 30, 60, 59, 10):
        rotated = pos.rotate(q[..., :T, :], k[..., :T, :])[0]
        fresh = make_embedding().rotate(q[..., :T, :], k[..., :T, :])[0]
        assert torch.equal(rotated, fresh)
    assert made == [32, 64]  # powers of two: a text that grows needs few


def test_cached_tables_follow_their_coefficients():
    """The tables are kept, so what is loaded, inherited or announced as changed must drop them."""
    pos, other, (q, k, _) = make_embedding(), FoPE(**SHAPE, sigma=1.0), draw_qkv(30)

    def rotated(pos):
        return pos.rotate(q, k)[0]

    before = rotated(pos)
    pos.load_state_dict(other.state_dict())
    assert torch.equal(rotated(pos), rotated(other)) and not torch.equal(rotated(pos), before)
    torch.manual_seed(5)
    drawn_anew = FoPE(**SHAPE)
    inherit(pos, drawn_anew)
    assert torch.equal(rotated(pos), rotated(drawn_anew)) and not torch.equal(rotated(pos), before)
    pos.cos_coef.mul_(2.0)
    pos.forget_tables()
    torch.testing.assert_close(pos.tables(30)[0][..., :2], 2 * drawn_anew.tables(30)[0][..., :2])
    assert pos.to("meta").cos is None  # those of the old device would not do


# --- another embedding for trained weights


@pytest.mark.parametrize("kwargs", [{}, {"variant": "paper"}, {"cap": False}])
def test_fope_at_twice_the_length_keeps_the_coefficients_of_its_frequencies(kwargs):
    kwargs = {"sigma": 0.05, **kwargs}
    old = make_embedding(head_dim=64, train_len=512, **kwargs)
    torch.manual_seed(5)
    new = FoPE(head_dim=64, n_head=2, train_len=1024, **kwargs)
    assert (len(old.freqs), len(new.freqs)) == (16, 18)
    inherit(new, old)
    assert torch.equal(new.freqs[:16], old.freqs[:16])
    assert torch.equal(new.freqs[:18], rope_freqs(64)[:18])
    K = min(new.cos_coef.size(2), old.cos_coef.size(2))
    for a, b in ((new.sin_coef, old.sin_coef), (new.cos_coef, old.cos_coef)):
        assert torch.equal(a[:, :16, :K], b[:, :16, :K])
        # what is added is as new.identity says, which for K < D moves series 8 to frequency 16, too
        ones = torch.eye(*a.shape[1:])
        if a.size(2) < len(new.freqs):
            ones[16, 8] = 1.0
        noise = a - ones
        assert 0 < noise[:, 16:].std() < 3 * noise[:, :16, :16].std()
        assert noise.abs().max() < 5 * new.sigma


def test_what_an_embedding_built_on_fope_has_learned_stays():
    old, new = make_embedding(), make_embedding(train_len=80)
    for pos, gain in ((old, 3.0), (new, 1.0)):
        pos.gain = torch.nn.Parameter(torch.tensor(gain))
    inherit(new, old)
    assert new.gain == 3.0 and len(new.freqs) > len(old.freqs)
    assert torch.equal(new.cos_coef[:, :2, :2], old.cos_coef)


CHANGES = [{"sigma": 0.4}, {"variant": "paper"}, {"n_head": 1}, {"sin_pad": 0.5}]


@pytest.mark.parametrize("change", CHANGES)
def test_how_coefficients_that_are_all_kept_were_drawn_cannot_change(change):
    (value,) = change.values()
    with pytest.raises(Refused, match=f"with .*{value}"):
        inherit(make_embedding(**change), make_embedding())


@pytest.mark.parametrize("change", [{"fourier_dim": 128}, {"theta": 5000.0}])
def test_coefficients_are_kept_for_their_own_frequencies_alone(change):
    with pytest.raises(Refused, match="other frequencies"):
        inherit(make_embedding(**change), make_embedding())


# --- the example for the wall


def test_the_worked_example_is_what_comes_out():
    example = doctest.DocTestParser().get_doctest(fope.EXAMPLE, vars(fope), "example", None, 0)
    assert doctest.DocTestRunner().run(example).failed == 0 and len(example.examples) > 4
