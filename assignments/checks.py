"""
What is checked of each sheet, for how many points, and the sentence where it is wrong.

CHECKS is the table: (sheet, points, name, sentence, function). The function gives the
check's questions (name, *args). The student's answers must be those of the right file. Each
function is asked alone, on inputs of its own: a mistake costs nothing in another.

MISTAKES are the usual ones. A student who answers as the right file does with one of them is told
which it is. It costs once: in later questions to that function the same mistake is no other.
"""

import inspect
import traceback
from functools import cache

import child  # first: it says where the right files are
import mine
import torch
from torch import randn

import eval_passkey
import fope

FILES = dict.fromkeys([1, 2, 3, 4], "fope.py") | {5: "eval_passkey.py", 6: "mine.py"}
RIGHT = {m.__name__ + ".py": inspect.getsource(m) for m in (fope, eval_passkey, mine)}


@cache
def questions(function, seed):
    """What a check asks: each student of a batch the same."""
    torch.manual_seed(seed)
    return function()


@cache
def right(file, function, seed, changes=()):
    """The right file's answers; with changes, (old text, new text), those that it gives then."""
    text = RIGHT[file]
    for old, new in changes:
        text = text.replace(old, new, 1)
    return child.ask(file, text.encode(), questions(function, seed))["value"]


class Wrong(Exception):
    """Why a check gives no points. Wrong(reason, True): there is no more to say."""


class HandIn:
    """A student's file, its answers, and the mistakes that have cost points already."""

    def __init__(self, file, text, seed):
        self.file, self.text, self.seed = file, text, seed
        self.endless = 0  # checks that have not ended
        self.mistakes = {}  # {name of a function: changes that give the right file this mistake}
        self.unnamed = set()  # checks that are wrong, and no mistake of MISTAKES is why

    def answers(self, function):
        """The student's answers to a check. Wrong: there are none, and why."""
        if self.endless == 3:
            raise Wrong("three calls have not ended", True)
        answer = child.ask(self.file, self.text, questions(function, self.seed))
        error = answer.get("error", "")
        self.endless += "no end" in error
        if "loaded" not in answer:
            raise Wrong(f"{self.file} cannot be loaded alone: {error}", True)
        if "value" in answer:
            return answer["value"]
        new = error.startswith("NotImplementedError: exercise")
        raise Wrong("not written yet", True) if new else Wrong(error)

    def compare(self, name, function):
        """Wrong, if the student's answers to a check are not the right ones."""
        got, question = self.answers(function), questions(function, self.seed)[0]
        asked_of = [x for x in question if isinstance(x, str)][-1]  # in a question of train, too
        count = COUNTS.get(asked_of, "it gives {} numbers, not {}")

        def wrong_with(changes):
            return difference(got, right(self.file, function, self.seed, changes), count)

        wrong = wrong_with(())
        if not wrong or not wrong_with(self.mistakes.get(asked_of, ())):
            return
        for sentence, changes in MISTAKES.get(name, []):
            changes = tuple(changes.items())
            if not wrong_with(changes):
                self.mistakes[asked_of] = changes
                raise Wrong(sentence, True)
        raise Wrong(f"{asked_of}: {wrong}")

    def reason(self, name, sentence, function):
        """Why a check gives no points; "" if it does."""
        try:
            if AFTER.get(name) in self.unnamed:
                raise Wrong(f"asked only where {AFTER[name]} is right", True)
            self.compare(name, function)
            return ""
        except Wrong as e:
            if e.args[1:]:
                return e.args[0]
            self.unnamed.add(name)
            return f"{sentence} ({e})"
        except Exception:
            traceback.print_exc()  # if it is our own mistake, it is shown whole
            return f"{sentence} (what comes back cannot be compared)"


def difference(got, expected, count):
    """
    Why got is not what is expected, up to rounding and whatever its dtype, and nested like it; ""
    if it is. count: the sentence for two numbers of numbers.
    """
    if isinstance(expected, str):  # got says why it is wrong
        return got if got != expected else ""
    if isinstance(expected, dict):  # of measured numbers
        sure = 0.03 * max(expected.values())
        wrong = [name for name, x in expected.items() if not abs(got[name] - x) < sure]
        return "; ".join(f"the {x} is {got[x]:.3g}, not {expected[x]:.3g}" for x in wrong)
    if isinstance(expected, list):
        got = [*got]  # two tables may be one tensor
        if len(got) != len(expected):
            return f"it gives {len(got)} values, not {len(expected)}"
        pairs = zip(got, expected, strict=True)
        return next((wrong for x, y in pairs if (wrong := difference(x, y, count))), "")
    if isinstance(got, list):
        return f"it gives {len(got)} values, not a tensor"
    if got.shape != expected.shape:
        if got.dim() == expected.dim() == 1:
            return count.format(len(got), len(expected))
        return f"the shape is {tuple(got.shape)}, not {tuple(expected.shape)}"
    bf16 = expected.dtype == torch.bfloat16
    if bf16 and got.dtype != expected.dtype:
        return f"the dtype is {got.dtype}, not that of v"
    got, expected = got.double(), expected.double()
    off = (got - expected).abs()
    if (off <= (0.03 if bf16 else 1e-3)).all():  # nan is not
        return ""
    at = torch.unravel_index(off.nan_to_num(torch.inf).argmax(), off.shape)
    at_index = f"at {[*map(int, at)]} " * bool(at)
    return f"{at_index}it gives {got[at]:.5g}, not {expected[at]:.5g}"


# --- what is asked

FOPE = dict(head_dim=64, n_head=8, train_len=512, theta=10000.0, sigma=0.3, sin_pad=1.0)
PAPER, RELEASED = (FOPE | dict(variant=variant) for variant in ("paper", "released"))


def integers(low, high, n=1):
    """n integers of low .. high."""
    return torch.randint(low, high + 1, (n,)).tolist()


def freqs(n):
    """n frequencies of 0.003 .. 3, in no order."""
    return 3 * 10 ** (-3 * torch.rand(n))


def alibi(n_head=4):
    """The fields of an ALiBi. Slopes are powers of two: bf16 holds them exactly."""
    slopes = 0.5 ** torch.tensor(integers(1, 8, n=n_head)).float()
    return dict(head_dim=8, n_head=n_head, train_len=40, theta=1e4, window=None, slopes=slopes)


def series(columns, n_pairs, sin_pad, T):
    """These columns of fourier_tables for 3 heads, 6 frequencies, 5 pairs that turn."""
    angles = torch.arange(T)[:, None] * freqs(6)
    args = angles.cos(), angles.sin(), *randn(2, 3, 6, 5), n_pairs, sin_pad
    return "columns", *columns, "fourier_tables", *args


def accuracy(*keys, wrong=0.1, trials=24, training=False, learns=False):
    """task_accuracy of a model that takes a share of the tokens for others."""
    return "task_accuracy", keys, wrong, trials, integers(1, 10**6)[0], training, learns


def embedding(part):
    """What is asked of MyEmbedding."""
    shape = dict(head_dim=64, n_head=4, train_len=40)
    return lambda: [("embedding", part, "MyEmbedding", shape, randn(3, 2, 4, 64, 64))]


CHECKS = [
    (1, 2, "frequencies", "rope_freqs: theta^(-2m/head_dim), m = 0 .. head_dim/2 - 1: 1 is first.",
     lambda: [("rope_freqs", 2 * d, 100.0 * d) for d in integers(3, 40, n=3)]),
    (1, 2, "tables", "rotation_tables: cosine and sine of t w_m, t = 0 .. T-1, (T, len(freqs)).",
     lambda: [("rotation_tables", freqs(6), T) for T in (1, 12, 2048)]),
    (1, 3, "rotation", "apply_rotation: multiply x1 + i x2 by cos + i sin, x1 the first half.",
     lambda: [("apply_rotation", randn(2, 3, 9, 16), randn(*shape), randn(*shape))
              for shape in ((9, 8), (3, 9, 8))]),
    (1, 1, "dtype", "Compute in fp32 and give back the dtype of x: bf16 rounds each step.",
     lambda: [("rounding", "apply_rotation", randn(1, 2, 90, 16), *randn(2, 90, 8))]),
    (1, 2, "in training", "A training cannot use it.",
     lambda: [("train", 1, "apply_rotation", randn(1, 4, 60, 16), *randn(2, 60, 8))]),
    (2, 1, "slopes", "The slopes are 2^(-8h/n_head), h = 1 .. n_head.",
     lambda: [("alibi_slopes", 2**n) for n in range(5)]),
    (2, 1, "slopes in between", "Of the slopes of 2p take every other one, from the first on.",
     lambda: [("alibi_slopes", n) for n in (3, 7, *integers(17, 31))]),
    (2, 1, "scores", "scores() is q.k / sqrt(head_dim) - m_h (i - j): less for keys far back.",
     lambda: [("ALiBi.scores", alibi(), *randn(2, 2, 4, 9, 8))]),
    (2, 3, "attention", "attend() is the softmax of these scores over keys j <= i, times v.",
     lambda: [("ALiBi.attend", alibi(), *randn(3, 2, 4, T, 8)) for T in (1, 39, 300)]),
    (2, 2, "memory", "With 8192 tokens a T x T matrix has 256 MB a head: do without.",
     lambda: [("ALiBi.attend", alibi(2), *randn(3, 1, 2, 4096, 8))]),
    (2, 1, "bf16", "Rounded: bf16 holds j only up to 256, two columns hold more.",
     lambda: [("ALiBi.attend", alibi(), *randn(3, 1, 4, 1024, 8).bfloat16())]),
    (2, 1, "in training", "A training cannot use it.",
     lambda: [("train", 3, "ALiBi.attend", alibi(), *randn(3, 1, 4, 60, 8))]),
    (3, 4, "floor", "Keep what makes at least one turn in train_len tokens, and nothing else.",
     lambda: [("above_floor", freqs(40).sort(descending=True)[0], n)
              for n in (16, *integers(50, 200), *integers(1000, 1500))]),
    (3, 2, "order", "The frequencies stay in the order in which they come.",
     lambda: [("above_floor", freqs(20), 300)]),
    (3, 3, "exactly", "What makes exactly one turn in train_len tokens stays.",
     lambda: [("above_floor", torch.tensor([3.0, turn, 0.99 * turn]), 2**n)
              for n in integers(5, 12) for turn in [2 * torch.pi / 2**n]]),
    (3, 1, "argument", "The frequencies that are given must stay as they are.",
     lambda: [("train", 0, "above_floor", freqs(20), 300)]),
    (4, 3, "sums", "cos_table[h, t, k] is the sum over d of cos(t w_d) cos_coef[h, d, k].",
     lambda: [series((0, 5), 5, 0.0, T) for T in (1, 40, 200)]),
    (4, 2, "stopped pairs", "The stopped pairs come last: cosine 1, sine sin_pad.",
     lambda: [series((5, None), n, pad, 30) for n, pad in ((8, 1.0), (6, 0.0), (9, 0.5))]),
    (4, 1, "identity", "Where there are as many series as frequencies, weight 1 is at d = k.",
     lambda: [("FoPE.identity", fields, n, n) for fields in (PAPER, RELEASED)
                  for n in integers(6, 16, n=2)]),
    (4, 1, "stride", "With fewer series, K, weight 1 is at every ceil(D/K)-th frequency.",
     lambda: [("FoPE.identity", RELEASED, D, 16) for D in (18, 33, *integers(34, 60))]),
    (4, 1, "noise, paper", "Normal, with sigma as the std.",
     lambda: [("statistics", "FoPE.draw_noise", PAPER | {"sigma": 0.6}, 64, 64)]),
    (4, 1, "noise, released", "xavier_normal_ of the 3-D tensor with sigma as gain.",
     lambda: [("statistics", "FoPE.draw_noise", RELEASED | {"sigma": 0.5}, 64, 64)]),
    (4, 1, "seed", "Drawn anew at each call, from torch's own generator: --seed decides.",
     lambda: [("seeded", "FoPE.draw_noise", PAPER, 16, 16)]),
    (5, 1, "trials", "One default_rng((seed, length)); task.sample(length, rng) once a trial.",
     lambda: [accuracy("distance") for _ in range(2)]),
    (5, 2, "answer_nll", "The mean over trials of an answer's mean cross-entropy per token.",
     lambda: [accuracy("answer_nll")]),
    (5, 1, "knows or not", "A model that always knows the key scores 1, one that never does 0.",
     lambda: [accuracy("accuracy", "token_accuracy", "trials", wrong=x) for x in (0.0, 1.0)]),
    (5, 1, "right", "A trial is right if its whole answer is. Answers differ in length.",
     lambda: [accuracy("right", "token_accuracy", trials=40) for _ in range(2)]),
    (5, 1, "share_right", "Of each trial the share of its answer tokens that is right.",
     lambda: [accuracy("share_right")]),
    (5, 1, "json", "Lists and numbers must be Python's own: json holds no arrays or tensors.",
     lambda: [accuracy("json")]),
    (5, 1, "eval mode", "The model must answer in eval mode, whatever mode it was in.",
     lambda: [accuracy("accuracy", "token_accuracy", wrong=0.0, training=True)]),
    (5, 1, "no trace", "The model's mode and torch's random state must be left as they were.",
     lambda: [accuracy("mode", "random", training=b) for b in (True, False)]),
    (5, 1, "gradients", "A model's logits need gradients: numpy() refuses them without no_grad.",
     lambda: [accuracy("trials", learns=True)]),
    (6, 4, "fused", "attend() must be the softmax of scores() times v: one formula, twice.",
     embedding("fused")),
    (6, 2, "causal", "A token may not change what is attended before it.", embedding("causal")),
    (6, 1, "position", "The order of the tokens before the last must matter to it.",
     embedding("position")),
    (6, 1, "saved", "A loaded model must be the saved one: is something random no buffer?",
     embedding("saved")),
    (6, 1, "device", "It must run where q is.", embedding("device")),
    (6, 1, "learns", "Every parameter needs a gradient to learn.", embedding("learns")),
]  # fmt: skip

# asked only where another check is right, or wrong by a mistake that has a name
AFTER = {"memory": "attention", "bf16": "attention"}

COUNTS = {"above_floor": "you keep {} frequencies, {} complete a turn"}

# usual mistakes at a check: what a student is told, and what makes it of the right file
MISTAKES = {
    "tables": [
        ("Sine and cosine are swapped: cosine comes first.",
         {"angles.cos(), angles.sin()": "angles.sin(), angles.cos()"}),
        ("Angles are turned into degrees: torch computes in radians.",
         {"torch.outer(torch": "180 / math.pi * torch.outer(torch"}),
        ("Positions are one off: the first is 0, not 1.", {"arange(T)": "arange(1, T + 1)"}),
    ],
    "rotation": [
        ("Neighbours (2m, 2m + 1) are the pairs, not (m, m + head_dim/2).",
         {"chunk(2, dim=-1)": "unflatten(-1, (-1, 2)).unbind(-1)",
          "cat((x1 *": "stack((x1 *", "dim=-1).type_as(x)": "dim=-1).flatten(-2).type_as(x)"}),
        ("It turns the other way: by cos - i sin.",
         {"cos - x2 * sin, x2 * cos + x1": "cos + x2 * sin, x2 * cos - x1"}),
    ],
    "scores": [
        ("The bias has the other sign.", {"(q, k) - self.slopes": "(q, k) + self.slopes"}),
        ("The bias is divided by sqrt(head_dim), too: only q.k is.",
         {"1) * (t": "1) / math.sqrt(self.head_dim) * (t"}),
    ],
    "attention": [
        ("q.k is not divided by sqrt(head_dim).", {"(q / math.sqrt(self.head_dim)": "(q"}),
        ("The bias has the other sign.", {"= self.slopes.to(": "= -self.slopes.to("}),
        ("A query sees the keys that come after it.", {"v, is_causal=True, scale": "v, scale"}),
        # columns that are added change the kernel's own scale
        *[("q.k is scaled twice: the kernel's scale is 1/sqrt of the width if you give none.",
           {"scale=1.0": f"scale={width**-0.5}"}) for width in (16, 11, 10, 9)],
        *[("The bias is divided, too: give q / sqrt(head_dim) to the kernel, and scale=1.0.",
           {"(q / math.sqrt(self.head_dim)": "(q", "scale=1.0": f"scale={width**-0.5}"})
          for width in (8, 16, 11, 10, 9)],
    ],
    "floor": [
        ("2 pi is forgotten: a whole turn has 2 pi radians.", {"2 * math.pi / t": "1 / t"}),
        ("It is a mask, True and False: return the frequencies that are kept.",
         {"freqs[freqs >= 2 * math.pi / train_len]": "freqs >= 2 * math.pi / train_len"}),
        ("The others are set to zero: return the kept ones, a shorter tensor.",
         {"freqs[freqs >= 2 * math.pi / train_len]": "freqs * (freqs >= 2 * math.pi / train_len)"}),
        ("Half a turn is asked for, not a whole one.", {"freqs >= 2 * math": "freqs >= math"}),
        ("The floor is that of 512 tokens, not of train_len.", {"pi / train_len": "pi / 512"}),
    ],
    "sums": [
        ("Sine and cosine are swapped: cosine is first.", {"return cos, sin": "return sin, cos"}),
        ("The sines have the coefficients of the cosines.", {"@ sin_coef": "@ cos_coef"}),
        ("The cosines have the coefficients of the sines.", {"@ cos_coef": "@ sin_coef"}),
    ],
    "noise, paper": [
        ("The std is sigma squared.", {"std=self.sigma": "std=self.sigma**2"}),
        ("All heads share their noise: each has its own.",
         {"torch.empty(self.n_head, D, K)": "torch.empty(D, K)"}),
    ],
    "noise, released": [("The std is xavier's of two dimensions, not of three.",
                         {"xavier_normal_(noise, gain=self.sigma)":
                          "normal_(noise, std=self.sigma * math.sqrt(2 / (D + K)))"})],
    "answer_nll": [
        ("Logits are one position late: those at t are for the token at t + 1.",
         {"model(tokens[:, :-1], ": "model(tokens, "}),
        ("Logits are one position early: those at t are for the token at t + 1.",
         {"slice(-n_max, None)": "slice(-n_max - 1, -1)"}),
    ],
}  # fmt: skip
