"""
What is checked of each sheet, for how many points, and the sentence where it is wrong.

A check is (sheet, points, name, sentence, function of a Pair). The function gives questions (name,
*args), to each of which the student's answer must be the right one, or raises Wrong. Each function
is asked alone, on inputs of its own: a mistake in one costs nothing in another.

MISTAKES are the usual ones of functions that several checks ask, computed. A student whose answer
is one of them is told which. It costs once: later checks compare with the same mistake.
"""

import math

import torch

FILES = dict.fromkeys([1, 2, 3, 4], "fope.py") | {5: "evaluation.py", 6: "mine.py"}
TO_WRITE = {
    1: ["rope_freqs", "rotation_tables", "apply_rotation"],
    2: ["alibi_slopes", "ALiBi.scores", "ALiBi.attend"],
    3: ["above_floor"],
    4: ["fourier_tables", "FoPE.identity", "FoPE.draw_noise"],
    5: ["task_accuracy"],
    6: ["MyEmbedding"],
}


class Wrong(Exception):
    """Why a check gives no points."""


class Known(Wrong):
    """The same, where the sentence says all."""


class Pair:
    """A student's functions, the right ones, and random numbers."""

    def __init__(self, student, right, seed):
        self.student, self.right, self.followed = student, right, {}  # {function: its mistake}
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def integers(self, low, high, n=1):
        """n integers of low .. high."""
        return torch.randint(low, high + 1, (n,), generator=self.generator).tolist()

    def expected(self, name, *args):
        """The right answer, or that of the mistake which this function is known to have."""
        mistake = self.followed.get(name, lambda right, *args: right(name, *args))
        return mistake(self.right, *args)

    def ask(self, name, *args):
        """The student's answer. Wrong if it is not the right one."""
        got = self.student(name, *args)
        try:
            compare(got, self.expected(name, *args), name)
        except Wrong:
            for sentence, mistake in MISTAKES.get(name, []) if name not in self.followed else []:
                if is_close(got, mistake(self.right, *args)):
                    self.followed[name] = mistake
                    raise Known(sentence) from None
            raise
        return got

    def run(self, function):
        for question in function(self) or []:
            self.ask(*question)


def compare(got, right, name, atol=5e-4):
    """Wrong unless got is what is right, up to atol, in bf16 0.03, and nested like it."""
    if isinstance(right, dict) and isinstance(got, dict):
        got, right = [got.get(key) for key in right], [*right.values()]
    if isinstance(right, list) and isinstance(got, list) and len(got) == len(right):
        for x, y in zip(got, right, strict=True):
            compare(x, y, name, atol)
        return
    if not all(isinstance(x, int | float | torch.Tensor) for x in (got, right)):
        raise Wrong(f"{name} gives {type(got).__name__} {str(got)[:40]}")
    got, right = torch.as_tensor(got), torch.as_tensor(right)
    if got.shape != right.shape:
        raise Wrong(f"{name}: the shape is {tuple(got.shape)}, not {tuple(right.shape)}")
    off = (got.double() - right.double()).abs()
    if not (off <= max(atol, 0.03 * (right.dtype == torch.bfloat16))).all():  # nor where it is nan
        raise Wrong(f"{name}: values are off by up to {off.max():.3g}")


def is_close(got, mistake):
    try:
        compare(got, mistake, "", atol=0.01)
    except Wrong:
        return False
    return True


# --- usual mistakes: {function: [(sentence, what it gives for the same arguments)]}


def interleaved(right, x, cos, sin):
    """Dimension 2m with 2m + 1."""
    x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    y1, y2 = right("apply_rotation", x, cos, sin).chunk(2, dim=-1)
    return torch.stack((y1, y2), dim=-1).flatten(-2)


def attention(sign=1, scale=1.0, later=False):
    """ALiBi.attend by the formula: with another sign of the bias, scaled again, not causal."""

    def mistake(right, fields, q, k, v):
        t, y = torch.arange(q.size(-2)), []
        for i in t.split(256):
            bias = sign * fields["slopes"][:, None, None] * t
            logits = q[..., i, :].float() @ k.float().mT / math.sqrt(q.size(-1)) + bias
            hidden = torch.zeros(()) if later else (t > i[:, None])
            logits = (scale * logits).masked_fill(hidden.bool(), -torch.inf)
            y.append(logits.softmax(dim=-1) @ v.float())
        return torch.cat(y, dim=-2).to(v.dtype)

    return mistake


def of_full_length(right, freqs, train_len):
    return freqs * torch.isin(freqs, right("above_floor", freqs, train_len))


MISTAKES = {
    "rotation_tables": [
        ("Sine and cosine are swapped: cosine comes first.",
         lambda right, *args: right("rotation_tables", *args)[::-1]),
        ("Angles are turned into degrees: torch computes in radians.",
         lambda right, freqs, T: right("rotation_tables", freqs * 180 / math.pi, T)),
        ("Positions are one off: the first is 0, not 1.",
         lambda right, freqs, T: [x[1:] for x in right("rotation_tables", freqs, T + 1)]),
    ],
    "apply_rotation": [
        ("Neighbours (2m, 2m + 1) are the pairs, not (m, m + head_dim/2).", interleaved),
        ("It turns the other way: by cos - i sin.",
         lambda right, x, cos, sin: right("apply_rotation", x, cos, -sin)),
    ],
    "ALiBi.attend": [
        ("The bias has the other sign.", attention(sign=-1)),
        ("A query sees the keys that come after it.", attention(later=True)),
        # columns that are added change the kernel's own scale
        *[("q.k is scaled twice: the kernel's scale is 1/sqrt of the width if you give none.",
           attention(scale=width**-0.5)) for width in (8, 9, 10, 16)],
    ],
    "above_floor": [
        ("The others are set to zero: return the kept ones, a shorter tensor.",
         of_full_length),
        ("Half a turn is asked for, not a whole one.",
         lambda right, freqs, n: right("above_floor", freqs, 2 * n)),
        ("The floor is always that of 512 tokens, not of train_len.",
         lambda right, freqs, n: right("above_floor", freqs, 512)),
    ],
    "task_accuracy": [
        ("Logits are one position off: those at t are for the token at t + 1.",
         lambda right, *args: right("task_accuracy", *args, True)),
    ],
}  # fmt: skip

# --- the checks

FOPE = dict(head_dim=64, n_head=8, n_table=8, train_len=512, theta=10000.0, sigma=0.3, sin_pad=1.0)
PAPER, RELEASED = (FOPE | dict(variant=variant, n_kept=16) for variant in ("paper", "released"))


def freqs(the, n):
    """n frequencies of 0.003 .. 3, in no order."""
    return 3 * 10 ** (-3 * torch.rand(n, generator=the.generator))


def alibi(the):
    """The fields of an ALiBi of 4 heads. Powers of two: bf16 holds them exactly."""
    slopes = 0.5 ** torch.tensor(the.integers(1, 8, n=4)).float()
    return dict(head_dim=8, n_head=4, train_len=40, theta=10000.0, slopes=slopes)


def series(the, n_pairs, sin_pad, T):
    """fourier_tables for 3 heads, 6 frequencies, 5 pairs that turn."""
    tables = the.right("rotation_tables", freqs(the, 6), T)
    return "fourier_tables", *tables, the.randn(3, 6, 5), the.randn(3, 6, 5), n_pairs, sin_pad


def accuracy(the, *keys, wrong=0.1, trials=24, training=False):
    """task_accuracy of a model that takes a share of the tokens for others."""
    return "task_accuracy", keys, wrong, trials, the.integers(1, 10**6)[0], training


def dtype(the):
    question = "apply_rotation", the.randn(2, 90, 16).bfloat16(), *the.randn(2, 90, 8)
    got, right = the.ask(*question), the.expected(*question)
    if got.dtype != right.dtype or (got == right).double().mean() < 0.97:
        raise Wrong(f"{got.dtype} comes back, or not the fp32 result, rounded once")


def trains(the, which, name, *args):
    """What a training needs of a function, whatever its values."""
    for i in which:
        got = the.student("training", i, name, *args)
        if got["seconds"] > 0.5:
            raise Known(f"{name} is too slow to train with: use tensors in place of loops.")
        if not got["unchanged"]:
            raise Known(f"{name} changes its arguments in place: training needs them as they were.")
        compare(got["autograd"] / got["measured"], 1.0, f"gradient of {name}", atol=0.05)


def noise(the, fields):
    question = "FoPE.draw_noise", fields, 64, 64
    right, first, second = the.right(*question), *(the.student(*question) for _ in range(2))
    compare([first, second], [right, right], "draw_noise", atol=math.inf)
    draws = torch.stack((first[0], first[1], second[0])).double().flatten(1)
    std, sigma = draws.std(), fields["sigma"]
    flat = sigma * math.sqrt(2 / (64 + 64)), "The std is xavier's of two dimensions, not of three."
    for mistake, sentence in (flat, (sigma**2, "The std is sigma squared.")):
        if abs(std / mistake - 1) < 0.05:
            raise Known(sentence)
    compare(std / right.double().std(), 1.0, "std by what it should be", atol=0.05)
    compare(draws.mean() / std, 0.0, "mean", atol=0.05)
    compare((draws.abs() > 2 * std).double().mean(), 0.045, "share beyond 2 std", atol=0.015)
    compare(torch.corrcoef(draws), torch.eye(3), "correlation of heads and calls", atol=0.1)


# sheet 6: there is no right answer, but it must be an embedding
KNOWN = ["NoPE", "ALiBi", "RoPE", "FoPE", "KERPLE", "FIRE", "RoPEA", "TaperedRoPE"]
SHAPE = dict(head_dim=16, n_head=4, train_len=40)


def embed(the, qkv):
    """What MyEmbedding gives for q, k, v, if it is an embedding, and none that the project has."""
    mine = the.student("embed", "MyEmbedding", SHAPE, *qkv)
    for name in KNOWN:
        if is_close(mine["scores"], the.right("embed", name, SHAPE, *qkv)["scores"]):
            raise Known(f"MyEmbedding gives what {name} gives: it is not your own yet.")
    # With q = (1, 0) and k = (0, 1) of its second pair RoPE's score is sin(w_1), w_1 = theta^(-2/d)
    probe = torch.zeros(3, 1, 4, 60, 16)
    probe[0, ..., 1] = probe[1, ..., 9] = 1.0
    sine = the.student("embed", "MyEmbedding", SHAPE, *probe)["scores"][0, 0, 1, 0] * 4
    if 0 < sine < 1:
        shape = SHAPE | {"theta": float(sine.arcsin()) ** -8}
        if is_close(mine["scores"], the.right("embed", "RoPE", shape, *qkv)["scores"]):
            raise Known(f"MyEmbedding is RoPE with theta = {shape['theta']:.0f}: not your own yet.")
    return mine


def fused(the):
    qkv = the.randn(3, 2, 4, 60, 16)
    mine, later = embed(the, qkv), torch.ones(60, 60).triu(1).bool()
    weights = mine["scores"].masked_fill(later, -torch.inf).softmax(dim=-1)
    compare(mine["attention"], weights @ qkv[2], "attend")


def changed(the, change):
    """The largest change of each token's attention when tokens before or after it change."""
    qkv = the.randn(3, 2, 4, 30, 16)
    first = embed(the, qkv)["attention"]
    return (embed(the, change(qkv))["attention"] - first).abs().amax(dim=(0, 1, 3))


def causal(the):
    after = changed(the, lambda x: torch.cat((x[..., :20, :], 1 + x[..., 20:, :]), dim=-2))
    compare(after[:20], torch.zeros(20), "attend")


def position(the):
    before = changed(the, lambda x: torch.cat((x[..., :29, :].flip(-2), x[..., 29:, :]), dim=-2))
    if not before[29] > 1e-3:
        raise Wrong("their order changes nothing")


def saved(the):
    mine = embed(the, the.randn(3, 2, 4, 30, 16))
    compare(mine["loaded"], mine["attention"], "attend, once loaded")


def learns(the):
    if not 0 < embed(the, the.randn(3, 2, 4, 30, 16))["gradient"] < math.inf:
        raise Wrong("a parameter has none")


CHECKS = [
    (1, 2, "frequencies", "rope_freqs: theta^(-2m/head_dim), m = 0 .. head_dim/2 - 1: 1 is first.",
     lambda the: [("rope_freqs", 2 * d, 100.0 * d) for d in the.integers(3, 40, n=3)]),
    (1, 2, "tables", "rotation_tables: cosine and sine of t w_m, t = 0 .. T-1, (T, len(freqs)).",
     lambda the: [("rotation_tables", freqs(the, 6), T) for T in (1, 12, 2048)]),
    (1, 3, "rotation", "apply_rotation: multiply x1 + i x2 by cos + i sin, x1 the first half.",
     lambda the: [("apply_rotation", the.randn(2, 3, 9, 16), the.randn(*shape), the.randn(*shape))
                  for shape in ((9, 8), (3, 9, 8))]),
    (1, 1, "dtype", "Compute in fp32 and give back the dtype of x: bf16 rounds each step.", dtype),
    (1, 2, "in training", "No gradient comes through: numpy, detach, .data or no_grad cut it.",
     lambda the: trains(the, [0], "apply_rotation", the.randn(1, 4, 512, 64),
                        *the.randn(2, 512, 32))),
    (2, 1, "slopes", "The slopes are 2^(-8h/n_head), h = 1 .. n_head.",
     lambda the: [("alibi_slopes", 2**n) for n in range(5)]),
    (2, 1, "slopes in between", "Of the slopes of 2p take every other one, from the first on.",
     lambda the: [("alibi_slopes", n) for n in (3, 7, *the.integers(17, 31))]),
    (2, 1, "scores", "scores() is q.k / sqrt(head_dim) - m_h (i - j): less for keys far back.",
     lambda the: [("ALiBi.scores", alibi(the), *the.randn(2, 2, 4, 9, 8))]),
    (2, 3, "attention", "attend() is the softmax of these scores over keys j <= i, times v.",
     lambda the: [("ALiBi.attend", alibi(the), *the.randn(3, 2, 4, T, 8)) for T in (1, 39, 300)]),
    (2, 2, "memory", "With 8192 tokens a T x T matrix has 256 MB a head: do without.",
     lambda the: [("ALiBi.attend", alibi(the), *the.randn(3, 1, 4, 8192, 8))]),
    (2, 1, "bf16", "Rounded: bf16 holds j only up to 256, two columns hold more.",
     lambda the: [("ALiBi.attend", alibi(the), *the.randn(3, 1, 4, 2048, 8).bfloat16())]),
    (2, 1, "in training", "attend() has other gradients: a part detached, or no_grad?",
     lambda the: trains(the, [0, 1, 2], "ALiBi.attend", alibi(the), *the.randn(3, 1, 4, 512, 8))),
    (3, 5, "floor", "Keep what makes at least one turn in train_len tokens, and nothing else.",
     lambda the: [("above_floor", freqs(the, 40).sort(descending=True)[0], n)
                  for n in (16, *the.integers(50, 200), *the.integers(1000, 1500))]),
    (3, 2, "order", "The frequencies stay in the order in which they come.",
     lambda the: [("above_floor", freqs(the, 20), 300)]),
    (3, 3, "exactly", "What makes exactly one turn in train_len tokens stays.",
     lambda the: [("above_floor", torch.tensor([3.0, 2 * math.pi / 2**n, 1e-4]), 2**n)
                  for n in the.integers(5, 12)]),
    (4, 4, "sums",
     "cos_table[h, t, k] is the sum over d of cos(t w_d) cos_coef[h, d, k]; sin: sin_coef.",
     lambda the: [series(the, 5, 0.0, T) for T in (1, 40, 200)]),
    (4, 2, "constant pairs",
     "The pairs that stand still come last, at all positions with cosine 1, sine sin_pad.",
     lambda the: [series(the, n, pad, 30) for n, pad in ((8, 1.0), (6, 0.0), (9, 0.5))]),
    (4, 1, "identity", "Weight 1 is at d = k; random frequencies, d >= n_kept, have none.",
     lambda the: [("FoPE.identity", fields | {"n_kept": n}, D, n) for fields in (PAPER, RELEASED)
                  for n in the.integers(6, 16) for D in (n, n + 5)]),
    (4, 1, "identity with stride",
     "With more frequencies than series weight 1 is at every ceil(n_kept/K)-th frequency.",
     lambda the: [("FoPE.identity", RELEASED | {"n_kept": n}, n + 2, 16)
                  for n in (18, 33, *the.integers(34, 60))]),
    (4, 1, "noise, paper", "Normal, with sigma as the std; anew each time.",
     lambda the: noise(the, PAPER | {"sigma": the.integers(2, 8)[0] / 10})),
    (4, 1, "noise, released", "xavier_normal_ of the 3-D tensor with sigma as gain.",
     lambda the: noise(the, RELEASED | {"sigma": the.integers(2, 8)[0] / 10})),
    (5, 1, "trials",
     "One rng = np.random.default_rng((seed, length)); task.sample(length, rng) once a trial.",
     lambda the: [accuracy(the, "distance") for _ in range(2)]),
    (5, 3, "knows or not", "A model that always knows the key scores 1, one that never does 0.",
     lambda the: [accuracy(the, "accuracy", "token_accuracy", "trials", wrong=wrong)
                  for wrong in (0.0, 1.0)]),
    (5, 2, "right by trial",
     "A trial is right if all its answer tokens are right. Answers differ in length.",
     lambda the: [accuracy(the, "right", "token_accuracy", trials=40) for _ in range(2)]),
    (5, 1, "answer_nll",
     "answer_nll is the mean over trials of an answer's mean cross-entropy per token.",
     lambda the: [accuracy(the, "answer_nll")]),
    (5, 1, "by depth", "Depth 0.37 is in bin 3 of 10.",
     lambda the: [accuracy(the, "trials_by_depth")]),
    (5, 1, "eval mode",
     "The model must answer in eval mode, without dropout, whatever mode it was in.",
     lambda the: [accuracy(the, "accuracy", "token_accuracy", wrong=0.0, training=True)]),
    (5, 1, "leaves no trace",
     "The model is left in the mode in which it was, and torch's random state as it was.",
     lambda the: [accuracy(the, "mode", "random", training=b) for b in (True, False)]),
    (6, 4, "fused", "attend() must be the softmax of scores() times v: one formula, twice.", fused),
    (6, 2, "causal", "A token may not change what is attended before it.", causal),
    (6, 1, "position", "The order of the tokens before the last must matter to it.", position),
    (6, 2, "saved", "A loaded model must be the saved one: is something random no buffer?", saved),
    (6, 1, "learns", "Every parameter needs a gradient, or it does not learn.", learns),
]  # fmt: skip
