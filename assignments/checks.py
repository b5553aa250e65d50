"""
What is checked of each exercise, for how many points, and the likely mistake where it is wrong.

A check is (exercise, points, name, likely mistake, function of a Pair). Pair.student(name, *args)
calls a function of the student's in another process, Pair.right is what the project's function
gives for the same. The function of a check gives questions (name, *args), to each of which the
student's answer must be the right one, or raises Wrong. Only a check that ends without an exception
gives its points. Each function is asked alone, on inputs of the check's own: a mistake in one
function costs nothing in another.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TITLES = {
    1: "RoPE: frequencies and rotation",
    2: "ALiBi without a mask",
    3: "The floor",
    4: "The Fourier series",
    5: "Passkeys in one forward pass",
    6: "An embedding of your own",
}
FILES = dict.fromkeys(TITLES, "fope.py") | {5: "evaluation.py", 6: "mine.py"}


class Wrong(Exception):
    """Why a check gives no points: one sentence for the student."""


@dataclass
class Pair:
    """A student's functions, the right answers, and random inputs."""

    student: callable
    right: callable
    seed: int

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def run(self, function):
        for question in function(self) or []:
            compare(self.student(*question), self.right(*question), question[0])


def compare(got, right, name, atol=5e-4):
    """Wrong unless got is what is right, up to atol, in bf16 0.03, and nested like it."""
    kinds = int | float, torch.Tensor, list | tuple, dict
    if not any(isinstance(got, kind) and isinstance(right, kind) for kind in kinds):
        if got is not right:  # None
            raise Wrong(f"{name} gives {type(got).__name__} {str(got)[:40]}")
    elif isinstance(right, dict):
        for key in right:
            compare(got.get(key), right[key], f"{name}, {key},", atol)
    elif isinstance(right, torch.Tensor):
        if got.shape != right.shape:
            raise Wrong(f"{name}: the shape is {tuple(got.shape)}, not {tuple(right.shape)}")
        off = (got.double() - right.double()).abs()
        most = max(atol, 0.03) if right.dtype == torch.bfloat16 else atol
        if not (off <= most).all():  # nor where it is nan
            raise Wrong(f"{name}: values are off by up to {off.max():.3g}")
    elif isinstance(right, list | tuple):
        if len(got) != len(right):
            raise Wrong(f"{name} gives {len(got)} values, not {len(right)}")
        for x, y in zip(got, right, strict=True):
            compare(x, y, name, atol)
    elif not abs(got - right) <= atol:
        raise Wrong(f"{name} is {got:.4g}, not {right:.4g}")


ALIBI = dict(head_dim=8, n_head=4, train_len=40, theta=10000.0)
ALIBI |= {"slopes": torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])}
FOPE = dict(head_dim=64, n_head=8, n_table=8, train_len=512, theta=10000.0, sigma=0.3, sin_pad=1.0)
PAPER, RELEASED = (FOPE | dict(variant=variant, n_kept=16) for variant in ("paper", "released"))
FREQS = torch.tensor([1.0, 0.6, 0.2, 0.05, 2.9, 0.003])


def series(the, coef, n_pairs, sin_pad, T):
    """fourier_tables for 3 heads, 6 frequencies, 5 pairs that turn."""
    cos, sin = the.right("rotation_tables", FREQS, T)
    return "fourier_tables", cos, sin, coef(3, 6, 5), coef(3, 6, 5), n_pairs, sin_pad


def accuracy(wrong, *keys, trials=24, seed=3, training=False):
    """task_accuracy of a model that takes a share of the tokens for others."""
    return "task_accuracy", wrong, trials, seed, training, keys


CHECKS = [
    # 1. RoPE
    (1, 2, "frequencies",
     "Frequencies are theta^(-2m/head_dim), m = 0 .. head_dim/2 - 1: 1 comes first.",
     lambda the: [("rope_freqs", 8, 10000.0), ("rope_freqs", 64, 500.0)]),
    (1, 3, "tables",
     "Position t turns by t w_m in radians, from t = 0 on: two tables (T, len(freqs)).",
     lambda the: [("rotation_tables", FREQS, T) for T in (1, 40, 2048)]),
    (1, 4, "rotation",
     "Dimension m turns together with m + head_dim/2, in the direction of e^{+i w t}.",
     lambda the: [("apply_rotation", the.randn(2, 3, 9, 16), the.randn(*shape), the.randn(*shape))
                  for shape in ((9, 8), (3, 9, 8))]),
    # 2. ALiBi
    (2, 1, "slopes", "The slopes are 2^(-8h/n_head), h = 1 .. n_head.",
     lambda the: [("alibi_slopes", n_head) for n_head in (1, 2, 8, 16)]),
    (2, 1, "slopes in between",
     "Where n_head is no power of two, see the docstring: 12 heads have those of 8 first.",
     lambda the: [("alibi_slopes", n_head) for n_head in (3, 7, 12)]),
    (2, 1, "scores",
     "scores() is q.k / sqrt(head_dim) minus m_h (i - j), for each head its own m_h.",
     lambda the: [("ALiBi.scores", ALIBI, *the.randn(2, 2, 4, 9, 8))]),
    (2, 2, "attention",
     "attend() is the softmax of these scores over keys j <= i, times v. Is q scaled once?",
     lambda the: [("ALiBi.attend", ALIBI, *the.randn(3, 2, 4, T, 8)) for T in (1, 39, 300)]),
    (2, 1, "gradients",
     "Wrong as in 'attention', or attend() has other gradients: a part detached, or no_grad?",
     lambda the: [("gradients", "ALiBi.attend", ALIBI, *the.randn(3, 1, 4, 30, 8))]),
    (2, 3, "memory",
     "Wrong as in 'attention', or a T x T matrix: with 8192 tokens it has 256 MB a head.",
     lambda the: [("ALiBi.attend", ALIBI, *the.randn(3, 1, 4, 8192, 8))]),
    (2, 1, "bf16",
     "Wrong as in 'attention', or rounded: bf16 holds j only up to 256, two columns hold more.",
     lambda the: [("ALiBi.attend", ALIBI, *the.randn(3, 1, 4, 2048, 8).bfloat16()),
                  ("autocast", "ALiBi.attend", ALIBI, *the.randn(3, 1, 4, 2048, 8))]),
    # 3. the floor
    (3, 4, "floor",
     "Keep w >= 2 pi / train_len: whole cycles in the TRAINING length, and nothing else.",
     lambda the: [("above_floor", the.right("rope_freqs", 64), n) for n in (16, 40, 512, 4096)]),
    (3, 2, "order", "The frequencies stay in the order in which they come.",
     lambda the: [("above_floor", torch.tensor([0.5, 1e-5, 3.0, 1e-6, 1.0]), 512)]),
    (3, 2, "exactly", "A frequency of exactly 2 pi / train_len completes its cycle: it stays.",
     lambda the: [("above_floor", torch.tensor([3.0, math.pi / 32, math.pi / 3200]), 64)]),
    (3, 2, "of its length",
     "The floor is that of the length it is given, whatever the frequencies are.",
     lambda the: [("above_floor", torch.tensor([3.0, 0.01]), n) for n in (8, 50000)]),
    # 4. the Fourier series
    (4, 4, "sums",
     "cos_table[h, t, k] is the sum over d of cos(t w_d) cos_coef[h, d, k]; sin likewise.",
     lambda the: [series(the, the.randn, 5, 0.0, T) for T in (1, 40, 200)]),
    (4, 2, "constant pairs",
     "The pairs that stand still come last, at all positions with cosine 1, sine sin_pad.",
     lambda the: [series(the, torch.zeros, n, pad, 30)
                  for n, pad in ((8, 1.0), (6, 0.0), (9, 0.5))]),
    (4, 1, "identity",
     "Without a cut weight 1 is at d = k; random frequencies, d >= n_kept, have none.",
     lambda the: [("FoPE.identity", fields, D, 16)
                  for fields, D in ((PAPER, 16), (PAPER, 24), (RELEASED, 16))]),
    (4, 1, "identity with stride",
     "With more frequencies than series weight 1 is at every ceil(n_kept/K)-th frequency.",
     lambda the: [("FoPE.identity", RELEASED | {"n_kept": n}, n + 2, 16) for n in (18, 33, 40)]),
    # 5. passkeys
    (5, 1, "trials",
     "One rng = np.random.default_rng((seed, length)); task.sample(length, rng) once a trial.",
     lambda the: [accuracy(0.1, "distance", seed=n) for n in (3, 4)]),
    (5, 3, "knows or not",
     "A model that always knows the key scores 1, one that never does 0: is it off by one?",
     lambda the: [accuracy(wrong, "accuracy", "token_accuracy", "trials") for wrong in (0.0, 1.0)]),
    (5, 2, "right by trial",
     "A trial is right if all its answer tokens are right. Answers differ in length.",
     lambda the: [accuracy(0.1, "right", "token_accuracy", trials=40, seed=n) for n in (3, 4)]),
    (5, 1, "answer_nll",
     "answer_nll is the mean over trials of an answer's mean cross-entropy per token.",
     lambda the: [accuracy(0.1, "answer_nll")]),
    (5, 1, "by depth", "Depth 0.37 is in bin 3 of 10.",
     lambda the: [accuracy(0.1, "trials_by_depth")]),
    (5, 1, "eval mode",
     "The model must answer in eval mode, without dropout, whatever mode it was in.",
     lambda the: [accuracy(0.1, "accuracy", training=True)]),
    (5, 1, "leaves no trace",
     "The model is left in the mode in which it was, and torch's random state as it was.",
     lambda the: [accuracy(0.1, "mode", "random", training=b) for b in (True, False)]),
]  # fmt: skip


def check(exercise, points, name, mistake):
    def add(function):
        CHECKS.append((exercise, points, name, mistake, function))
        return function

    return add


@check(1, 1, "dtype", "Compute in fp32 and give back the dtype of x: bf16 rounds each step.")
def dtype(the):
    question = "apply_rotation", the.randn(2, 90, 16).bfloat16(), the.randn(90, 8), the.randn(90, 8)
    right, got = the.right(*question), the.student(*question)
    compare(got, right, "apply_rotation")
    if got.dtype != torch.bfloat16 or (got == right).double().mean() < 0.97:
        raise Wrong("apply_rotation of bf16 is not the fp32 result, rounded to bf16")


@check(4, 2, "noise", "Normal, of std sigma (paper) or xavier's in 3-D (released); anew each time.")
def noise(the):
    for fields in (PAPER, RELEASED):
        question = "FoPE.draw_noise", fields, 64, 64
        right, first, second = the.right(*question), *(the.student(*question) for _ in range(2))
        compare([first, second], [right, right], "draw_noise", atol=math.inf)
        draws = torch.stack((first[0], first[1], second[0])).double().flatten(1)
        std, right_std = draws.std(), right.double().std()
        if not abs(std / right_std - 1) < 0.05:
            raise Wrong(f"{fields['variant']}: the std is {std:.4f}, not {right_std:.4f}")
        beyond, off = (draws.abs() > 2 * std).double().mean(), abs(draws.mean() / right_std)
        if not (0.03 < beyond < 0.06 and off < 0.05):
            raise Wrong(f"{fields['variant']}: the noise is not normal, or its mean not 0")
        if not (torch.corrcoef(draws) - torch.eye(3)).abs().max() < 0.1:
            raise Wrong(f"{fields['variant']}: two calls or two heads have the same noise")


# --- 6. an embedding of one's own: there is no right answer, but it must be one


def embed(the, qkv):
    """What MyEmbedding gives for q, k, v, if it is an embedding, and none that the project has."""
    T, shape = qkv.size(-2), dict(head_dim=16, n_head=4, train_len=40)
    mine = the.student("embed", "MyEmbedding", shape, *qkv)
    like = {"attention": qkv[0], "loaded": qkv[0], "scores": torch.zeros(2, 4, T, T)}
    compare(mine, like | {"gradient": 0.0}, "MyEmbedding", atol=math.inf)
    for name in ("NoPE", "ALiBi", "RoPE", "FoPE"):
        scores = the.right("embed", name, shape, *qkv)["scores"]
        if (mine["scores"] - scores).tril().abs().max() < 1e-3:
            raise Wrong(f"MyEmbedding gives what {name} gives: it is not your own yet")
    return mine


@check(6, 4, "fused", "attend() must be the softmax of scores() times v: one formula, twice.")
def fused(the):
    qkv = the.randn(3, 2, 4, 60, 16)
    mine, later = embed(the, qkv), torch.ones(60, 60).triu(1).bool()
    weights = mine["scores"].masked_fill(later, -torch.inf).softmax(dim=-1)
    compare(mine["attention"], weights @ qkv[2], "attend")


@check(6, 2, "causal", "A token may not change what is attended before it.")
def causal(the):
    qkv = the.randn(3, 2, 4, 30, 16)
    first = embed(the, qkv)["attention"]
    qkv[..., 20:, :] = 1.0
    compare(embed(the, qkv)["attention"][..., :20, :], first[..., :20, :], "attend")


@check(6, 1, "position", "The order of the tokens before the last must make a difference to it.")
def position(the):
    qkv = the.randn(3, 2, 4, 30, 16)
    first = embed(the, qkv)["attention"]
    qkv[..., :29, :] = qkv[..., :29, :].flip(-2)
    if not (embed(the, qkv)["attention"] - first)[..., 29, :].abs().max() > 1e-3:
        raise Wrong("the order of the tokens changes nothing")


@check(6, 2, "saved", "A loaded model must be the saved one: is something random no buffer?")
def saved(the):
    mine = embed(the, the.randn(3, 2, 4, 30, 16))
    compare(mine["loaded"], mine["attention"], "attend, once loaded")


@check(6, 1, "learns", "Every parameter needs a gradient, or it does not learn.")
def learns(the):
    if not 0 < embed(the, the.randn(3, 2, 4, 30, 16))["gradient"] < math.inf:
        raise Wrong("a parameter has no gradient")


CHECKS.sort(key=lambda check: check[0])
