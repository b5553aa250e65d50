"""
docs/implementations.md: each implementation of FoPE from its formula, written down in numpy,
against ours with the keywords that the page gives for it.
"""

import json
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from conftest import ROOT

from fope import FoPE
from hf.grouped import GroupedFoPE
from model import GPT, GPTConfig

PAGE = (ROOT / "docs" / "implementations.md").read_text(encoding="utf-8")
N_HEAD, N_KEY_HEAD, T = 4, 2, 48
SMALL = dict(head_dim=64, train_len=1024, theta=10000.0, sigma=0.3)  # 18 pairs above the floor
INTERN = dict(head_dim=128, train_len=262_144, theta=5e6, sigma=0.5)  # Intern-S1-Pro's: 45 of 64

# what the sources say, in the page's words and order
QUERY_HEADS = dict(shape=SMALL, tables=N_HEAD, cap=True, noise="xavier", pad=1, strict=False)
KEY_HEADS = dict(shape=INTERN, tables=N_KEY_HEAD, cap=False, noise="xavier", pad=1, strict=True)
FORMULAS = {
    "The authors' repository": QUERY_HEADS,
    "The listing in the paper's appendix": QUERY_HEADS
    | dict(column_sums=True, sign=-1, shape=SMALL | {"train_len": 512}),  # no column of noise alone
    "The equations (11-13)": QUERY_HEADS | dict(cap=False, noise="normal", pad=0),
    "XTuner": KEY_HEADS,
    "vLLM before 55243": KEY_HEADS,
    "vLLM with 55243": KEY_HEADS | dict(pad=0),
    "SGLang": KEY_HEADS,
    "LMDeploy": KEY_HEADS,
}


def keywords_of_the_page():
    """{implementation: the class and its keywords, in its row of the page's table}."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    classes = {cls.__name__: partial(partial, cls) for cls in (FoPE, GroupedFoPE)}
    return {row[0]: eval(row[-1].strip("`"), classes) for row in rows if "FoPE(" in row[-1]}


def kept_frequencies(shape, strict):
    w = shape["theta"] ** (-np.arange(0, shape["head_dim"], 2) / shape["head_dim"])
    floor = 2 * np.pi / shape["train_len"]
    return w[w > floor] if strict else w[w >= floor]


def draw_coefficients(how, D, K):
    """The sine's first, then the cosine's: (tables, D, K) each."""
    n = how["tables"]
    std = how["shape"]["sigma"] * (
        math.sqrt(2 / (D * K + n * K)) if how["noise"] == "xavier" else 1
    )
    step, identity = math.ceil(D / K), np.zeros((D, K))
    for k in range(K):
        if k * step < D:
            identity[k * step, k] = 1
    coefs = []
    for _ in range(2):
        coef = identity + torch.empty(n, D, K).normal_(std=std).double().numpy()
        coefs.append(coef / coef.sum(axis=-2, keepdims=True) if how.get("column_sums") else coef)
    return coefs


def rotate_half(x):
    x1, x2 = np.split(x, 2, axis=-1)
    return np.concatenate((-x2, x1), axis=-1)


def logits_by_formula(how, q, k):
    """q (n_head, T, head_dim), k (key heads, T, head_dim) -> (n_head, T, T), before the mask."""
    w, half = kept_frequencies(how["shape"], how["strict"]), q.shape[-1] // 2
    D = len(w)
    sin_coef, cos_coef = draw_coefficients(how, D, min(D, half // 2) if how["cap"] else D)
    angles = np.outer(np.arange(q.shape[1]), w)
    tables = []
    for wave, coef, constant in ((np.cos, cos_coef, 1), (np.sin, sin_coef, how["pad"])):
        series = wave(angles) @ coef  # (tables, T, K)
        constants = np.full((*series.shape[:-1], half - series.shape[-1]), float(constant))
        tables.append(np.concatenate((series, constants) * 2, axis=-1))
    turned = []
    for x in (q, k):
        cos, sin = (table.repeat(len(x) // len(table), axis=0) for table in tables)
        turned.append(x * cos + how.get("sign", 1) * rotate_half(x) * sin)
    q, k = turned[0], turned[1].repeat(len(q) // len(k), axis=0)
    return q @ k.swapaxes(-2, -1) / math.sqrt(q.shape[-1])


def our_logits(pos, q, k):
    q, k = pos.rotate(torch.from_numpy(q).float()[None], torch.from_numpy(k).float()[None])
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)))[0].double().numpy()


def draw_q_and_k(how):
    rng, head_dim = np.random.default_rng(1), how["shape"]["head_dim"]
    n_key = N_KEY_HEAD if how["tables"] == N_KEY_HEAD else N_HEAD
    return rng.normal(size=(N_HEAD, T, head_dim)), rng.normal(size=(n_key, T, head_dim))


@pytest.mark.parametrize("name", FORMULAS)
def test_the_pages_keywords_give_what_the_formula_gives(name):
    how, make_fope = FORMULAS[name], keywords_of_the_page()[name]
    q, k = draw_q_and_k(how)
    torch.manual_seed(0)
    expected = logits_by_formula(how, q, k)
    torch.manual_seed(0)
    pos = make_fope(**how["shape"], n_head=N_HEAD)
    if how.get("column_sums"):  # no keyword: to be set, with the other sense of rotation
        pos.cos_coef /= pos.cos_coef.sum(dim=-2, keepdim=True)
        pos.sin_coef /= -pos.sin_coef.sum(dim=-2, keepdim=True)
    np.testing.assert_allclose(our_logits(pos, q, k), expected, atol=1e-5)
    if how["shape"] is INTERN:
        assert pos.cos_coef.shape == (N_KEY_HEAD, 45, 45)


def test_the_page_and_this_test_have_the_same_implementations():
    assert set(keywords_of_the_page()) == set(FORMULAS)


def test_a_floor_keeps_as_many_as_num_inv_freq():
    """Theirs keeps the first frequencies; ours those above the floor of a number of tokens."""
    w = kept_frequencies(INTERN, True)
    pos = FoPE(**INTERN, n_head=N_HEAD, cap=False, floor=math.ceil(2 * math.pi / w[29]))
    np.testing.assert_allclose(pos.freqs, w[:30], rtol=1e-5)


# --- vLLM issue 55204: 1 or 0?


def intern(sin_pad):
    torch.manual_seed(0)
    return GroupedFoPE(**INTERN, n_head=N_HEAD, n_table=N_KEY_HEAD, cap=False, sin_pad=sin_pad)


def test_reading_with_0_halves_the_term_of_the_constant_pairs():
    """Whatever the noise: their cosine and sine are constants."""
    q, k = draw_q_and_k(KEY_HEADS)
    series = [*range(45), *range(64, 109)]
    alone = q.copy()
    alone[..., series] = 0
    ones, zeros = (our_logits(intern(pad), alone, k) for pad in (1.0, 0.0))
    np.testing.assert_allclose(zeros, ones / 2, atol=1e-5)
    rest = q - alone
    np.testing.assert_allclose(
        our_logits(intern(1.0), rest, k), our_logits(intern(0.0), rest, k), atol=1e-5
    )


def test_the_pull_requests_test_holds_for_its_pad_whatever_a_model_was_trained_with():
    """Identity coefficients, and channels past the floor must stay: true of 0, untrue of 1."""
    x = draw_q_and_k(KEY_HEADS)[0]
    constant = [*range(45, 64), *range(109, 128)]
    for sin_pad, stay in ((0.0, True), (1.0, False)):
        pos = FoPE(**INTERN | {"sigma": 0.0}, n_head=N_HEAD, cap=False, sin_pad=sin_pad)
        turned = pos.rotate(torch.from_numpy(x).float()[None], torch.from_numpy(x).float()[None])[0]
        assert np.allclose(turned[0, ..., constant], x[..., constant], atol=1e-6) == stay


@torch.no_grad()
def test_it_is_repaired_by_the_root_of_two_in_the_weights_of_the_norms():
    config = dict(vocab_size=90, n_layer=2, n_head=2, head_dim=32, n_embd=32, qk_norm=True)
    ones, zeros = (
        GPT(GPTConfig(**config, init_std=0.3, pos_args={"sin_pad": s})) for s in (1.0, 0.0)
    )
    ids = torch.randint(90, (2, 60))
    assert (zeros(ids) - ones(ids)).abs().max() > 0.01
    for attn in (block.attn for block in zeros.blocks):
        scale = torch.ones(2, 16)
        scale[:, attn.pos.cos_coef.size(-1) :] = math.sqrt(2)  # both dimensions of each pair
        attn.q_norm.weight *= scale.flatten()
        attn.k_norm.weight *= scale.flatten()
    torch.testing.assert_close(zeros(ids), ones(ids), atol=1e-4, rtol=1e-4)


def test_the_page_says_what_was_measured():
    stored = json.loads((ROOT / "results" / "mechanism" / "pad.json").read_text())
    for name, value in stored["random"].items():
        assert (f"{value:.2f}" if "std_" in name else f"{100 * value:.0f} %") in PAGE
    for n in ("1x", "8x"):
        more = np.array([row[n][1] - row[n][0] for row in stored["runs"].values()])
        assert len(more) == 10
        assert f"{more.mean():.3f}" in PAGE and f"{more.std(ddof=1):.3f}" in PAGE


def test_the_links_of_the_page_are_there():
    for link in re.findall(r"\]\((\.\./[^)#]+)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
