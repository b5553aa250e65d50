"""
The course kit: right solutions score full marks however they are written, the starter none, usual
mistakes lose what they should, and whatever a file does to the grader, it gains nothing.
"""

import ast
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import nullcontext

import pytest
import torch
from conftest import ROOT, refuses

sys.path.insert(0, str(ROOT / "assignments"))

import checks
import grade
import make

import fope

fope.POSITION_EMBEDDINGS.pop("mine")  # of no other test
EXERCISES = list(checks.TITLES)


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    """What is handed out, but for the recorded answers, which take a while."""
    out = tmp_path_factory.mktemp("kit") / "starter"
    make.write_files(out, make.HANDED_OUT)
    shutil.copy(ROOT / "assignments" / "starter.md", out / "README.md")
    return out


@pytest.fixture(scope="module")
def answers():
    return make.record_answers(1)


@pytest.fixture
def graded(starter, answers, tmp_path):
    """graded(exercise, text of its file) -> {check: (points, reason)}."""

    def graded(exercise, text):
        (tmp_path / "handed_in").mkdir(exist_ok=True)
        file = tmp_path / "handed_in" / checks.FILES[exercise]
        if text is not None:
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        some = [check for check in checks.CHECKS if check[0] == exercise]
        folders = dict.fromkeys(checks.FILES.values(), str(starter)) | {"mine.py": str(ROOT)}
        tests = grade.grade(file.parent, some, answers, folders)
        return {test["name"]: (test["score"], test["output"]) for test in tests}

    return graded


def points(result):
    return sum(score for score, _ in result.values())


def original(file):
    return (ROOT / "assignments" / file if file == "mine.py" else ROOT / file).read_text()


# --- the starter


def test_points_are_ten_for_each_exercise():
    for exercise in EXERCISES:
        assert sum(c[1] for c in checks.CHECKS if c[0] == exercise) == 10
    names = [(check[0], check[2]) for check in checks.CHECKS]
    assert len({*names}) == len(names) and [*make.TO_WRITE] == EXERCISES == [*checks.FILES]


def test_starter_has_everything_but_the_functions(starter):
    for exercise, names in make.TO_WRITE.items():
        text = (starter / checks.FILES[exercise]).read_text()
        for name in names:
            assert f"exercise {exercise}: {name} is yours to write" in text
    text = (starter / "fope.py").read_text()
    assert "theta^(-2m/head_dim)" in text  # docstrings stay
    run = [sys.executable, "train.py", "--help"]
    assert b"mine" in subprocess.run(run, cwd=starter, check=True, capture_output=True).stdout


def solution_lines():
    """The lines of code that students are to write, and of what is hidden beside them."""
    for file, names in [(checks.FILES[n], names) for n, names in make.TO_WRITE.items()] + [
        *make.HIDDEN.items()
    ]:
        text = original(file)
        for name in names:
            node = make.find(text, name)
            body = node.body if hasattr(node, "body") else [node]
            body = body[1:] if hasattr(node, "body") and ast.get_docstring(node) else body
            lines = text.split("\n")[body[0].lineno - 1 : body[-1].end_lineno]
            yield from (line.strip() for line in lines if len(line.strip()) > 22)


def test_nothing_of_a_solution_is_in_the_starter(starter):
    texts = {path: path.read_text() for path in starter.rglob("*.*") if path.suffix != ".png"}
    lines = {*solution_lines()}
    found = {line for line in lines for text in texts.values() if line in text}
    assert len(lines) > 60 and found <= {
        # how the loss of windows is measured beside it, and biases are made
        "device, was_training = next(model.parameters()).device, model.training",
        "n_rows, world = batch_rows(device, length), common.world_size()",
        "with common.autocast(device):",
        "model.train(was_training)",
        'for i in tqdm(starts, f"length {length}", disable=not show, leave=False):',
        "def rotate(self, q, k):",
        "def attend(self, q, k, v):",
        "def make_tables(self, T):",
        "t = torch.arange(q.size(-2), device=q.device)",
    }
    everything = "\n".join(texts.values())
    for word in ("// 256", "% 256", "with_bias", "x1 * cos", "five steps", "freqs[freqs", ">>>"):
        assert word not in everything, word


def test_links_names_and_lines_in_the_starter_are_right(starter):
    known = {path.relative_to(starter).as_posix() for path in starter.rglob("*")}
    known |= {"assignments/answers.pt"}
    for path in starter.rglob("*.md"):
        text = path.read_text()
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert target.startswith("http") or (path.parent / target).exists(), target
        named = re.findall(r"(?<![\w/.~])[\w/]+\.(?:py|md|png|sh|pt)\b", text)
        named += re.findall(r"\b(?:results|experiments|tests|runs|docs|hf)/[\w./]+\w", text)
        assert not {*named} - known, path
        assert not re.search(r"\.py:\d|#L\d", text)  # no line numbers, which a student's edits move
    for path in [starter / file for file in ("fope.py", "evaluation.py", "mine.py")]:
        assert not {*re.findall(r"[\w/]+\.(?:py|md|html|ipynb)\b", path.read_text())} - known
    names = {name for names in make.TO_WRITE.values() for name in names}
    for exercise, names in make.TO_WRITE.items():
        page = (starter / "assignments" / f"{exercise}.md").read_text()
        assert all(f"`{name}`" in page for name in names)
        assert f"python assignments/grade.py --exercise {exercise}" in page


@pytest.mark.slow
def test_solved_starter_passes_its_own_checks_and_the_empty_one_none(tmp_path):
    out = tmp_path / "starter"
    make.main([str(out)])
    refuses(make.main, [out], "is not empty")
    for command in (["eval_passkey.py", "-h"], ["-m", "paper.plot", "-h"]):
        subprocess.run([sys.executable, *command], cwd=out, check=True, capture_output=True)
    run = [sys.executable, "assignments/grade.py", "--format", "json"]
    for solved in (False, True):
        for file in ("fope.py", "evaluation.py", "mine.py") if solved else ():
            (out / file).write_text(original(file))
        shown = subprocess.run(run, cwd=out, check=True, capture_output=True, text=True)
        (result,) = json.loads(shown.stdout).values()
        assert result["points"] == (60 if solved else 0)
        assert {t["output"] for t in result["tests"]} == ({""} if solved else {"not written yet"})


@pytest.mark.slow
def test_check_of_a_sheet_needs_no_other_exercise(tmp_path):
    """But exercise 6, where a class builds on exercise 1."""
    out = tmp_path / "starter"
    make.main([str(out)])
    for exercise in EXERCISES[:5]:
        file = checks.FILES[exercise]
        text = original(file)
        for other, names in make.TO_WRITE.items():
            for name in names if other != exercise and checks.FILES[other] == file else []:
                text = make.remove_body(text, name, other)
        kept = (out / file).read_text()
        (out / file).write_text(text)
        run = [sys.executable, "assignments/grade.py", "--exercise", str(exercise)]
        shown = subprocess.run(run, cwd=out, check=True, capture_output=True, text=True).stdout
        assert shown.startswith(".: 10 of 10\n"), shown
        (out / file).write_text(kept)


# --- right solutions, each written in two further ways

RIGHT = {
    "complex numbers": (1, """
def rope_freqs(head_dim, theta=10000.0):
    return torch.tensor([theta ** (-2 * m / head_dim) for m in range(head_dim // 2)])

def rotation_tables(freqs, T):
    angles = torch.arange(T, dtype=torch.float64)[:, None] * freqs.double()
    return angles.cos().float(), angles.sin().float()

HALF = 2

def apply_rotation(x, cos, sin):
    half = x.size(-1) // HALF
    z = torch.complex(x[..., :half].float(), x[..., half:].float()) * torch.complex(cos, sin)
    return torch.cat((z.real, z.imag), -1).to(x.dtype)
"""),
    "rotate half": (1, """
def rope_freqs(head_dim, theta=10000.0):
    return torch.exp(-math.log(theta) * torch.arange(head_dim // 2) * 2 / head_dim)

def rotation_tables(freqs, T):
    z = torch.polar(torch.ones(T, len(freqs)), torch.arange(T)[:, None] * freqs[None, :])
    return [z.real, z.imag]

def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

def apply_rotation(x, cos, sin):
    y = x.float()
    y = y * torch.cat((cos, cos), -1) + rotate_half(y) * torch.cat((sin, sin), -1)
    return y.to(x.dtype)
"""),
    "one column in fp32": (2, """
def alibi_slopes(n_head):
    def power_of_two(n):
        return [2 ** (-8 * (h + 1) / n) for h in range(n)]
    p = 1
    while 2 * p <= n_head:
        p *= 2
    return torch.tensor(power_of_two(p) + power_of_two(2 * p)[0::2][: n_head - p])

def scores(self, q, k):
    T = q.shape[-2]
    distance = torch.arange(T).view(T, 1) - torch.arange(T).view(1, T)
    bias = -self.slopes[:, None, None] * distance.clamp(min=0)
    return torch.einsum("bhid,bhjd->bhij", q, k) / self.head_dim ** 0.5 + bias

def attend(self, q, k, v):
    T, dtype = q.size(-2), v.dtype
    q, k, v = q.float(), k.float(), v.float()
    one = torch.ones(*q.shape[:-1], 1)
    q = torch.cat((q / self.head_dim ** 0.5, one * self.slopes.view(1, -1, 1, 1)), dim=-1)
    k = torch.cat((k, one * torch.arange(T).view(1, 1, T, 1)), dim=-1)
    with torch.autocast("cpu", enabled=False):
        y = F.scaled_dot_product_attention(q, k, F.pad(v, (0, 1)), is_causal=True, scale=1.0)
    return y[..., :-1].to(dtype)

ALiBi.scores, ALiBi.attend = scores, attend
"""),
    "blocks of queries": (2, """
def alibi_slopes(n_head):
    p = 1 << (n_head.bit_length() - 1)
    h = torch.arange(1, p + 1)
    odd = torch.arange(1, 2 * p, 2)
    return torch.cat((2.0 ** (-8 * h / p), 2.0 ** (-4 * odd / p)))[:n_head]

class ALiBi(PositionEmbedding):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("slopes", alibi_slopes(self.n_head), persistent=False)

    def scores(self, q, k):
        t = torch.arange(q.size(-2))
        s = super().scores(q, k) - self.slopes[:, None, None] * (t[:, None] - t)
        return s.masked_fill(t > t[:, None], -torch.inf)

    def attend(self, q, k, v):
        T, rows = q.size(-2), []
        j = torch.arange(T)
        for start in range(0, T, 256):
            i = j[start : start + 256]
            bias = -self.slopes[:, None, None] * (i[:, None] - j)
            bias = bias.masked_fill(j > i[:, None], -torch.inf)
            s = q[..., i, :].float() @ k.float().mT / math.sqrt(q.size(-1)) + bias
            rows.append(s.softmax(-1).to(v.dtype) @ v)
        return torch.cat(rows, dim=-2)
"""),
    "in cycles": (3, """
def above_floor(freqs, train_len):
    cycles = freqs * train_len / (2 * math.pi)
    return torch.masked_select(freqs, cycles >= 1)
"""),
    "in wave lengths": (3, """
def above_floor(freqs, train_len):
    return torch.stack([w for w in freqs if 2 * math.pi / w <= train_len])
"""),
    "einsum": (4, """
def fourier_tables(cos, sin, cos_coef, sin_coef, n_pairs, sin_pad):
    cos = torch.einsum("td,hdk->htk", cos, cos_coef)
    sin = torch.einsum("td,hdk->htk", sin, sin_coef)
    one = torch.ones(cos.size(0), cos.size(1), n_pairs - cos.size(2))
    return torch.cat((cos, one), -1), torch.cat((sin, sin_pad * one), -1)

def identity(self, D, K):
    eye = torch.zeros(D, K)
    for k, d in enumerate(range(0, self.n_kept, -(-self.n_kept // K))):
        if k < K:
            eye[d, k] = 1
    return eye

def draw_noise(self, D, K):
    std = self.sigma
    if self.variant == "released":
        std = self.sigma * math.sqrt(2 / (K * (D + self.n_table)))
    return torch.randn(self.n_table, D, K) * std

FoPE.identity, FoPE.draw_noise = identity, draw_noise
"""),
    "without the tables": (4, """
def fourier_tables(cos, sin, cos_coef, sin_coef, n_pairs, sin_pad):
    T, (n_head, D, K) = len(cos), cos_coef.shape
    c, s = torch.ones(n_head, T, n_pairs), torch.full((n_head, T, n_pairs), float(sin_pad))
    for h in range(n_head):
        c[h, :, :K] = cos @ cos_coef[h]
        s[h, :, :K] = sin @ sin_coef[h]
    return c, s

class FoPE(FoPE):
    def stride(self, K):
        return math.ceil(self.n_kept / K)

    def identity(self, D, K):
        rows, columns = torch.arange(D)[:, None], torch.arange(K)[None]
        return ((rows == columns * self.stride(K)) & (rows < self.n_kept)).float()

    def draw_noise(self, D, K):
        if self.variant == "paper":
            return torch.normal(0.0, self.sigma, (self.n_table, D, K))
        return nn.init.xavier_normal_(torch.empty(self.n_table, D, K), self.sigma)
"""),
    "one trial at a time": (5, """
@torch.no_grad()
def task_accuracy(model, task, length, trials, seed=0, generate=False, show=False):
    rng, was_training = np.random.default_rng((seed, length)), model.training
    model.eval()
    rows = []
    for _ in range(trials):
        tokens, n, depth, distance = task.sample(length, rng)
        tokens = torch.tensor(tokens)
        logits = model(tokens[None])[0, -n - 1 : -1].float()
        right = logits.argmax(-1) == tokens[-n:]
        loss = F.cross_entropy(logits, tokens[-n:]).item()
        b = min(int(depth * DEPTH_BINS), DEPTH_BINS - 1)
        rows.append((right.all().item(), right.float().mean().item(), loss, b, distance))
    model.train(was_training)
    exact, share, nll, bins, distance = map(np.array, zip(*rows))
    each = {"distance": distance, "right": exact.astype(int), "share_right": share}
    each = {name: values.tolist() for name, values in each.items()}
    return summary(exact.astype(float), share, nll, bins) | each
"""),
    "all at once": (5, """
def task_accuracy(model, task, length, trials, seed=0, generate=False, show=False):
    rng, mode = np.random.default_rng((seed, length)), model.training
    tokens, n, depth, distance = zip(*[task.sample(length, rng) for _ in range(trials)])
    tokens, n = torch.tensor(np.array(tokens)), torch.tensor(n)
    with torch.inference_mode():
        log_probs = model.eval()(tokens[:, :-1]).log_softmax(-1)
    model.train(mode)
    answer = torch.arange(1, length) >= length - n[:, None]
    hit = (log_probs.argmax(-1) == tokens[:, 1:]) & answer
    nll = -log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
    share = (hit.sum(1) / n).numpy()
    nll = ((nll * answer).sum(1) / n).numpy()
    exact = (hit.sum(1) == n).numpy() * 1.0
    bins = np.floor(np.array(depth) * DEPTH_BINS).astype(int)
    each = {"distance": list(distance), "right": [int(x) for x in exact]}
    return {**summary(exact, share, nll, bins), **each, "share_right": list(share)}
"""),
    "a learned bias": (6, """
from torch import nn
from baselines import LearnedBias

class MyEmbedding(LearnedBias):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.slope = nn.Parameter(torch.linspace(0.1, 1, self.n_head))

    def bias(self, i, j):
        return -self.slope[:, None, None] * (i[:, None] - j).clamp(min=0).float().sqrt()
"""),
    "random frequencies": (6, """
class MyEmbedding(RoPE):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("freqs", torch.rand(self.head_dim // 2))
"""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_projects_solution_has_full_marks(graded, exercise):
    result = graded(exercise, original(checks.FILES[exercise]))
    assert points(result) == 10, result


@pytest.mark.slow
@pytest.mark.parametrize("way", RIGHT)
def test_right_solutions_have_full_marks_however_they_are_written(graded, starter, way):
    exercise, text = RIGHT[way]
    result = graded(exercise, (starter / checks.FILES[exercise]).read_text() + text)
    assert points(result) == 10, result


# --- usual mistakes: what is replaced in a right solution, and the points that are left

MISTAKES = {
    "frequencies from 1": (1, "arange(0, head_dim, 2)", "arange(2, head_dim + 2, 2)", 8),
    "interleaved pairs": (1, """\
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)""", """\
    x1, x2 = x.float()[..., ::2], x.float()[..., 1::2]
    x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return torch.stack((x1, x2), -1).flatten(-2).type_as(x)""", 5),
    "degrees": (1, "angles.cos(), angles.sin()", "(57.3 * angles).cos(), (57.3 * angles).sin()", 7),
    "backwards": (1, "x1 * cos - x2 * sin, x2 * cos + x1 * sin",
                  "x1 * cos + x2 * sin, x2 * cos - x1 * sin", 5),
    "rotated in bf16": (1, "    x1, x2 = x.float().chunk(2, dim=-1)\n",
                        "    x1, x2 = x.chunk(2, dim=-1)\n"
                        "    cos, sin = cos.type_as(x), sin.type_as(x)\n", 9),
    "returned in fp32": (1, "dim=-1).type_as(x)", "dim=-1)", 9),
    "slopes from 0": (2, "for h in range(1, p + 1)", "for h in range(p)", 8),
    "every other from the second": (2, "range(1, 2 * p, 2)", "range(2, 2 * p, 2)", 9),
    "distance the other way": (2, "(t[:, None] - t[None, :])", "(t[None, :] - t[:, None])", 9),
    "scaled twice": (2, "is_causal=True, scale=1.0)", "is_causal=True)", 3),
    "sees later keys": (2, "is_causal=True, scale=1.0)", "scale=1.0)", 3),
    "one column": (2, "(j // 256 * 256, j % 256)", "(j, 0 * j)", 9),
    "one column in fp32": (2, "(j // 256 * 256, j % 256)", """\
(j // 256 * 256, j % 256) if k.dtype == torch.bfloat16 else (j, 0 * j)""", 9),
    "a mask": (2, """\
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)""", """\
        T = q.size(-2)
        mask = torch.zeros(1, 4, T, T).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype), scale=1.0)""", 7),
    "no gradient": (2, "        y = F.scaled", "        k = k.detach()\n        y = F.scaled", 9),
    "floor of half a cycle": (3, "freqs >= 2 * math.pi", "freqs >= math.pi", 6),
    "strict": (3, "freqs[freqs >= 2", "freqs[freqs > 2", 8),
    "always 512": (3, "2 * math.pi / train_len", "2 * math.pi / 512", 4),
    "sorted": (3, "2 * math.pi / train_len]",
               "2 * math.pi / train_len].sort(descending=True)[0]", 8),
    "sine of the cosines": (4, "(sin.double() @ sin_coef", "(sin.double() @ cos_coef", 6),
    "constant sine 0": (4, "F.pad(sin, (0, n_constant), value=sin_pad)",
                        "F.pad(sin, (0, n_constant))", 8),
    "constant pairs first": (4, "F.pad(cos, (0, n_constant)", "F.pad(cos, (n_constant, 0)", 8),
    "identity without stride": (4, "math.ceil(self.n_kept / K)", "1", 9),
    "variance": (4, "normal_(noise, std=self.sigma)", "normal_(noise, std=self.sigma**0.5)", 8),
    "uniform": (4, "nn.init.xavier_normal_", "nn.init.xavier_uniform_", 8),
    "one table for all": (4, "normal_(noise, std=self.sigma)",
                          "normal_(noise, std=self.sigma)[:1].expand(self.n_table, D, K)", 8),
    "logits off by one": (5, "model(tokens[:, :-1], ", "model(tokens, ", 3),
    "another generator": (5, "default_rng((seed, length))", "default_rng(seed)", None),
    "a seed for torch": (5, "    model.eval()\n    samples",
                         "    model.eval()\n    torch.manual_seed(seed)\n    samples", 9),
    "arrays": (5, "exact.astype(int).tolist()", "exact.astype(int)", 8),
    "the longest answer for all": (5, "right[r, -n:].all(), right[r, -n:]",
                                   "right[r].all(), right[r]", 8),
    "stays in eval mode": (5, "    model.train(was_training)\n    common.all", "    common.all", 9),
    "in training mode": (5, "    model.eval()\n    samples", "    samples", 9),
    "nan": (5, "nll[i + r] = losses[r, -n:].mean()", "nll[i + r] = math.nan", 9),
    "another scores": (6, "POSITION", """\
def scores(self, q, k):
    return 1.1 * RoPE.scores(self, q, k)

MyEmbedding.scores = scores
POSITION""", 6),
    "RoPE itself": (6, "half = self.n_head // 2", "half = self.n_head", 0),
    "an unsaved draw": (6, "half = self.n_head // 2",
                        "half = self.n_head // 2\n        self.draw = getattr(self, 'draw', None)\n"
                        "        if self.draw is None:\n            self.draw = torch.rand(16)\n"
                        "        k = k * self.draw", 8),
    "a look ahead": (6, "turned = zip", "k = k + k.mean(-2, True)\n        turned = zip", 8),
}  # fmt: skip


def test_mistakes_are_in_the_code_as_it_is():
    for exercise, right, _, _ in MISTAKES.values():
        assert original(checks.FILES[exercise]).count(right) >= 1, right


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_usual_mistakes_lose_what_they_should(graded, mistake):
    exercise, right, wrong, left = MISTAKES[mistake]
    text = original(checks.FILES[exercise])
    at = text.rindex(right) if exercise == 6 else text.index(right)
    result = graded(exercise, text[:at] + wrong + text[at + len(right) :])
    assert points(result) == left or (left is None and points(result) < 8), result
    sentences = {check[2]: check[3] for check in checks.CHECKS if check[0] == exercise}
    for name, (score, reason) in result.items():
        assert score or sentences[name] in reason


# --- attacks: no points and a reason, whatever a file does

BODY = """
import math
import torch
import torch.nn.functional as F
from torch import nn
{top}
def rope_freqs(head_dim, theta=10000.0):
    {body}
def rotation_tables(freqs, T):
    {body}
def apply_rotation(x, cos, sin):
    {body}
"""
OS = "os = torch.serialization.os"
FORGED = '{"value": {"dtype": "torch.float32", "shape": [4], "bytes": "AACAPwAAgD8AAIA/AACAPw=="}}'
FORGE = f"""
import socket
s = torch.distributed.socket if 0 else None
text = {FORGED!r}.encode()
for _ in range(99):
    for fd in range(3, 9):
        try:
            os.write(fd, len(text).to_bytes(8, 'little') + text)
        except OSError:
            pass
"""
ATTACKS = {
    "skips": ("import pytest", 'pytest.skip("todo")', "imports pytest"),
    "expected to fail": ("import unittest", "raise unittest.SkipTest", "imports unittest"),
    "raises a skip": ("class Skipped(BaseException): pass", "raise Skipped", "Skipped"),
    "patches the runner": (
        "main = torch.serialization.os.sys.modules['__main__']\n"
        "main.call = lambda *a: 1.0\nmain.send = lambda sock, value: None", "return 1", ""),
    "patches torch": (
        "torch.allclose = torch.equal = lambda *a, **k: True\n"
        "torch.Tensor.__sub__ = lambda a, b: torch.zeros(())", "return torch.zeros(4)", ""),
    "leaves": (f"{OS}\nos._exit(0)", "pass", "has ended"),
    "leaves later": (OS, "os._exit(0)", "has ended"),
    "exits": ("raise SystemExit(0)", "pass", "SystemExit"),
    "exits later": ("", "raise SystemExit(0)", "SystemExit"),
    "writes a report": ("open('report.xml', 'w').write('passed')", "pass", "may not open"),
    "reads the parent's folder": (
        f"{OS}\ntext = open(f'/proc/{{os.getppid()}}/cwd/fope.py').read()\nexec(text)", "pass", ""),
    "reads the solution": (
        f"exec(open({str(ROOT / 'fope.py')!r}).read())", "pass", "may not open"),
    "imports the solution": (
        f"sys = torch.serialization.os.sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "del sys.modules['fope']\nright = __import__('fope')", "return right.rope_freqs(8)", ""),
    "kills the grader": (f"{OS}\nos.kill(os.getppid(), 9)", "pass", "may not use os.kill"),
    "starts processes": (f"{OS}\nos.fork()", "pass", "may not use os.fork"),
    "runs a command": (f"{OS}\nos.system('true')", "pass", "may not use os.system"),
    "forges an answer": (f"{OS}\n{FORGE.replace('import socket', '')}", "return 1", ""),
    "forges answers later": (OS, FORGE.replace("import socket", "").replace("\n", "\n    "), ""),
    "sends a pickle": (
        "class P:\n    def __reduce__(self): return (print, ('executed',))", "return P()", ""),
    "returns all there is": ("", "return torch.zeros(2**27)", ""),
    "takes memory": ("", "return [torch.ones(2**28) for _ in range(99)]", "memory"),
    "writes more than a line": (
        "", "raise ValueError('\\x1b[2K\\rx: 60 of 60\\n  1. RoPE: 10')", "ValueError"),
    "does not end": ("", "while True: pass", "no end within"),
    "never loads": ("while True: pass", "pass", "no end within"),
    "recurses": ("", "return rope_freqs(1, 1)", "Recursion"),
    "gives nan": ("", "return torch.full((4,), math.nan)", ""),
    "gives what equals all": (
        "class All(float):\n    def __eq__(self, other): return True\n"
        "    def __sub__(self, other): return 0.0", "return All()", ""),
    "gives nothing": ("", "pass", "NoneType"),
    "gives zeros": ("", "return torch.zeros(4)", ""),
    "fills the pipe": ("while True: print('x' * 10**6)", "pass", "no end within"),
    "is slow at everything": ("import torch as t\n", "sum(range(10**12))", "seconds"),
}  # fmt: skip
FILES_OF_NO_USE = {
    "minus signs": "x = " + "-" * 200_000 + "1",
    "brackets": "x = " + "(" * 200_000,
    "zeros": b"\0" * 1000,
    "no text": bytes(range(256)) * 100,
    "too long": b"#" * (2**20 + 1),
    "empty": "",
    "a syntax error": "def rope_freqs(:\n",
    "a surrogate": "x = '\\ud800'\nraise ValueError(x)",
}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(grade, "SECONDS", 5)
    monkeypatch.setattr(grade, "SECONDS_IN_ALL", 8)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_give_no_points_but_a_reason(graded, short, attack):
    top, body, word = ATTACKS[attack]
    result = graded(1, BODY.format(top=top, body=body))
    assert points(result) == 0 and all(reason for _, reason in result.values()), result
    assert all(reason.isprintable() for _, reason in result.values())
    assert any(word in reason for _, reason in result.values()), result


@pytest.mark.slow
@pytest.mark.parametrize("what", FILES_OF_NO_USE)
def test_files_of_no_use_give_no_points_but_a_reason(graded, short, what):
    result = graded(1, FILES_OF_NO_USE[what])
    assert points(result) == 0 and all(reason for _, reason in result.values()), result


@pytest.mark.slow
def test_a_function_that_does_not_end_costs_its_own_points_alone(graded, monkeypatch):
    monkeypatch.setattr(grade, "SECONDS", 4)
    text = original("fope.py") + "\ndef rotation_tables(freqs, T):\n    while True: pass\n"
    assert points(graded(1, text)) == 7


@pytest.mark.slow
def test_unusual_but_honest_files_lose_nothing(graded):
    text = "\ufeff# \u2028\n\x0c\n" + original("fope.py").replace("\n", "\r\n")
    assert points(graded(3, text)) == 10
    text = original("fope.py").replace("import math", "import math\nimport numpy as np")
    assert points(graded(3, text + "\nprint('my file')\n")) == 10


# --- what is handed in, without a process


def test_folders_zips_and_files_are_read(tmp_path):
    text = b"x = 1\n"
    (tmp_path / "a" / "fope-main").mkdir(parents=True)
    (tmp_path / "a" / "fope-main" / "fope.py").write_bytes(text)
    assert grade.read_submission(tmp_path / "a") == {"fope.py": text}
    (tmp_path / "a" / "fope.py").write_bytes(b"y")
    assert grade.read_submission(tmp_path / "a") == {"fope.py": b"y"}
    (tmp_path / "ada_123_evaluation.py").write_bytes(text)
    assert grade.read_submission(tmp_path / "ada_123_evaluation.py") == {"evaluation.py": text}
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__MACOSX/fope.py", b"no")
        archive.writestr("work/tests/mine.py", b"no")
        archive.writestr("work/mine.py", text)
        archive.writestr("work/../../fope.py", text)
    assert grade.read_submission(tmp_path / "b.zip") == {"fope.py": text, "mine.py": text}


@pytest.mark.parametrize("what", ["link", "pipe", "zip", "bomb", "none", "nothing", "folder"])
def test_bad_submissions_are_refused_in_a_sentence(tmp_path, what):
    path = tmp_path / "ada"
    path.mkdir()
    file = path / "fope.py"
    if what == "link":
        file.symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    elif what in ("zip", "bomb"):
        path = tmp_path / "ada.zip"
        path.write_bytes(b"PK\3\4 no zip")
        if what == "bomb":
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("fope.py", b"\0" * 2**24)
    elif what == "nothing":
        path = tmp_path / "nobody"
    with pytest.raises(grade.Refused) as info:
        grade.read_submission(path)
    assert "\n" not in str(info.value)


TESTS = [
    {"number": "1", "name": "tables", "score": 3, "max_score": 3, "output": ""},
    {"number": "3", "name": "floor", "score": 0, "max_score": 4, "output": "=Keep, all (x)"},
    {"number": "3", "name": "order", "score": 2, "max_score": 2, "output": ""},
]


def test_formats():
    scores = {"ada": TESTS, "=bob": TESTS[:2]}
    text = grade.as_text(scores)
    assert "ada: 5 of 9\n  1. RoPE" in text and "    0 of 4  floor: =Keep, all (x)\n" in text
    assert json.loads(grade.as_json(scores))["ada"] == {"points": 5, "tests": TESTS}
    rows = [*csv.reader(grade.as_csv(scores).splitlines())]
    assert rows[0] == ["student", "points", "exercise 1", "exercise 3", "reasons"]
    assert rows[1] == ["ada", "5", "3", "2", "3: =Keep, all (x)"]
    assert json.loads(grade.as_gradescope({"ada": TESTS})) == {"tests": TESTS}


def test_compare():
    x = torch.arange(3.0)
    right = {"a": [x, 1.0], "b": None}
    checks.compare({"a": (x + 1e-6, 1), "b": None, "c": 0}, right, "f")
    for wrong, words in [
        ({"a": [x, 1.0]}, None),
        ({"a": [x, 1.0], "b": 0}, "f, b, gives int 0"),
        ({"a": [x + 1, 1.0], "b": None}, "off by up to 1"),
        ({"a": [x * torch.nan, 1.0], "b": None}, "off by up to nan"),
        ({"a": [x[:2], 1.0], "b": None}, r"shape is \(2,\), not \(3,\)"),
        ({"a": [x[:1], 1.0], "b": None}, "shape"),  # nothing is broadcast
        ({"a": [1.0, 1.0], "b": None}, "f, a, gives float"),
        ({"a": [x], "b": None}, "gives 1 values, not 2"),
        ({"a": [x, float("nan")], "b": None}, "is nan, not 1"),
        ({"a": [x, "1"], "b": None}, "gives str"),
        ([x], "f gives list"),
        (None, "f gives NoneType"),
    ]:
        fails = pytest.raises(checks.Wrong, match=words) if words else nullcontext()
        with fails:
            checks.compare(wrong, right, "f")


# --- all together


@pytest.mark.slow
def test_a_batch_of_good_and_broken_submissions_is_graded_whole(tmp_path, capsys):
    solution = original("fope.py")
    paths = [tmp_path / name for name in ("a", "b", "c", "d.zip", "e_fope.py", "x", "y.zip", "z")]
    for path in (*paths[:3], paths[5]):
        path.mkdir()
        (path / "fope.py").write_text(solution)
    with zipfile.ZipFile(paths[3], "w") as archive:
        archive.writestr("fope.py", solution)
    paths[4].write_text(solution)
    (paths[5] / "fope.py").write_text("x = " + "-" * 200_000 + "1")
    paths[6].write_bytes(b"no zip")
    order = [0, 5, 1, 6, 2, 7, 3, 4]  # z is not there
    out = tmp_path / "scores.csv"
    flags = ["--exercise", "3", "--jobs", "2", "--format", "csv", "--out", str(out)]
    grade.main([*(str(paths[i]) for i in order), *flags])
    rows = [*csv.reader(out.open())][1:]
    assert [row[0] for row in rows] == [str(paths[i]) for i in order]
    assert [int(row[1]) for row in rows] == [10, 0, 10, 0, 10, 0, 10, 10]
    assert "cannot be loaded" in rows[1][-1] and "cannot be read" in rows[3][-1]
    assert capsys.readouterr().out.count(" of 10\n") == 8
    for taken in (paths[4], paths[0] / "scores.csv", paths[2]):  # a student's, or beside it
        refuses(grade.main, [paths[0], "--out", taken], "choose another")
    assert paths[4].read_text() == solution


@pytest.mark.slow
def test_gradescope(tmp_path):
    """The zip that the page says how to make, unpacked where Gradescope would, but for its root."""
    command = re.search(r"git archive (?:[^\n]|(?<=\\)\n)*", original("assignments/README.md"))[0]
    subprocess.run(command.replace("-o ", f"-o {tmp_path}/"), shell=True, check=True, cwd=ROOT)
    with zipfile.ZipFile(tmp_path / "autograder.zip") as archive:
        archive.extractall(tmp_path / "source")
    assert "source/requirements.txt" in (tmp_path / "source" / "setup.sh").read_text()
    script = (tmp_path / "source" / "run_autograder").read_text()
    script = script.replace("/autograder/venv/bin/python", sys.executable)
    script = script.replace("/autograder", str(tmp_path))
    (tmp_path / "submission").mkdir()
    (tmp_path / "submission" / "fope.py").write_text(original("fope.py"))
    subprocess.run(["bash", "-c", script], check=True)
    tests = json.loads((tmp_path / "results" / "results.json").read_text())["tests"]
    assert sum(t["score"] for t in tests) == 40 and sum(t["max_score"] for t in tests) == 60
    assert {t["output"] for t in tests if t["number"] == "5"} == {"evaluation.py is missing"}
    refuses(grade.main, ["a", "b", "--format", "gradescope"], "for one student")
