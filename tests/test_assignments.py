"""
The course kit: right solutions score full marks however they are written, the starter none, usual
mistakes lose what they should, and whatever a file does to the grader, it gains nothing.
"""

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile

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


def test_the_starter_has_all_but_the_functions_and_nothing_of_a_solution(starter):
    texts = [path.read_text() for path in starter.rglob("*.*") if path.suffix != ".png"]
    for file in {*checks.FILES.values(), *make.HIDDEN}:
        removed = {*original(file).split("\n")} - {*(starter / file).read_text().split("\n")}
        for line in (line.strip() for line in removed):
            # shorter ones are also written elsewhere
            assert len(line) < 46 or not any(line in text for text in texts), line
    for exercise, names in make.TO_WRITE.items():
        text = (starter / checks.FILES[exercise]).read_text()
        for name in names:
            assert f'raise NotImplementedError("exercise {exercise}: {name} is' in text
    assert "theta^(-2m/head_dim)" in (starter / "fope.py").read_text()  # docstrings stay
    run = [sys.executable, "train.py", "--help"]
    assert b"mine" in subprocess.run(run, cwd=starter, check=True, capture_output=True).stdout


def test_links_and_files_named_in_the_starter_are_there(starter):
    known = {path.relative_to(starter).as_posix() for path in starter.rglob("*")}
    known |= {"assignments/answers.pt"}
    for path in starter.rglob("*.md"):
        text = path.read_text()
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert target.startswith("http") or (path.parent / target).exists(), target
        named = re.findall(r"(?<![\w/.~])[\w/]+\.(?:py|md|png|sh|pt)\b", text)
        assert not {*named} - known, path
    for file in ("fope.py", "evaluation.py", "mine.py"):
        named = re.findall(r"[\w/]+\.(?:py|md|html|ipynb)\b", (starter / file).read_text())
        assert not {*named} - known, file
    for exercise, names in make.TO_WRITE.items():
        sheet = (starter / "assignments" / f"{exercise}.md").read_text()
        for words in (*names, f"python assignments/grade.py --exercise {exercise}"):
            assert words in sheet


@pytest.mark.slow
def test_solved_starter_passes_its_own_checks_and_the_empty_one_none(tmp_path):
    out = tmp_path / "starter"
    make.main([str(out)])
    refuses(make.main, [out], str(out))
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


# --- right solutions, each written in another way

RIGHT = {
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
    "in cycles": (3, """
def above_floor(freqs, train_len):
    cycles = freqs * train_len / (2 * math.pi)
    return torch.masked_select(freqs, cycles >= 1)
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
    "slopes from 0": (2, "for h in range(1, p + 1)", "for h in range(p)", 8),
    "every other from the second": (2, "range(1, 2 * p, 2)", "range(2, 2 * p, 2)", 9),
    "distance the other way": (2, "(t[:, None] - t[None, :])", "(t[None, :] - t[:, None])", 9),
    "scaled twice": (2, "is_causal=True, scale=1.0)", "is_causal=True)", 3),
    "sees later keys": (2, "is_causal=True, scale=1.0)", "scale=1.0)", 3),
    "one column": (2, "(j // 256 % 256 * 256, j % 256, j // 65536)", "(j, 0 * j, 0 * j)", 9),
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
    "nan": (5, "nll[i] = losses[r, -n:].mean()", "nll[i] = math.nan", 9),
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


# --- attacks: no points but a reason, whatever a file does

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
text = {FORGED!r}.encode()
for fd in 99 * [3, 4, 5, 6, 7, 8]:
    try:
        os.write(fd, len(text).to_bytes(8, 'little') + text)
    except OSError:
        pass
"""
SOLUTION = f"exec(open({str(ROOT / 'fope.py')!r}).read())"
IMPORTED = f"""
torch.serialization.os.sys.path.insert(0, {str(ROOT)!r})
del torch.serialization.os.sys.modules['fope']
right = __import__('fope')
"""
RUNNER = """
main = torch.serialization.os.sys.modules['__main__']
main.call = lambda *a: 1.0
main.send = lambda sock, value: None
"""
ATTACKS = {  # top of the file, body of its functions
    "skips": ("import pytest", "pytest.skip('todo')"),
    "patches the runner": (RUNNER, "return 1"),
    "leaves": (f"{OS}\nos._exit(0)", "pass"),
    "exits later": ("", "raise SystemExit(0)"),
    "reads the solution": (SOLUTION, "pass"),
    "imports the solution": (IMPORTED, "return right.rope_freqs(8)"),
    "kills the grader": (f"{OS}\nos.kill(os.getppid(), 9)", "pass"),
    "runs a command": (f"{OS}\nos.system('true')", "pass"),
    "forges an answer": (f"{OS}\n{FORGE}", "return 1"),
    "returns all there is": ("", "return torch.zeros(2**27)"),
    "takes memory": ("", "return [torch.ones(2**28) for _ in range(99)]"),
    "writes more than a line": ("", "raise ValueError('\\x1b[2K\\rx: 60 of 60\\n  1. RoPE: 10')"),
    "does not end": ("", "while True: pass"),
    "never loads": ("while True: pass", "pass"),
    "prints without end": ("while True: print('x' * 10**6)", "pass"),
    "is slow at everything": ("", "sum(range(10**12))"),
    "gives nan": ("", "return torch.full((4,), math.nan)"),
}
ATTACKS = {what: BODY.format(top=top, body=body) for what, (top, body) in ATTACKS.items()} | {
    "minus signs": "x = " + "-" * 200_000 + "1",
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
    result = graded(1, ATTACKS[attack])
    assert points(result) == 0
    for _, reason in result.values():
        assert reason and reason.isprintable()  # so it is one line


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


@pytest.mark.parametrize(
    "what", ["link", "pipe", "folder", "nothing", "not there", "no zip", "bomb"]
)
def test_bad_submissions_are_refused_in_a_sentence(tmp_path, what):
    path = tmp_path / ("ada.zip" if what in ("no zip", "bomb") else "ada")
    file = path / "fope.py"
    if what == "no zip":
        path.write_bytes(b"PK\3\4 no zip")
    elif what == "bomb":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("fope.py", b"\0" * 2**24)
    elif what != "not there":
        path.mkdir()
        make_file = {"link": lambda: file.symlink_to("/dev/zero"), "pipe": lambda: os.mkfifo(file)}
        make_file |= {"folder": file.mkdir, "nothing": lambda: None}
        make_file[what]()
    with pytest.raises(grade.Refused) as info:
        grade.read_submission(path)
    assert "\n" not in str(info.value)


def test_formats():
    tests = [
        {"number": "1", "name": "tables", "score": 3, "max_score": 3, "output": ""},
        {"number": "3", "name": "floor", "score": 0, "max_score": 4, "output": "=Keep, all (x)"},
        {"number": "3", "name": "order", "score": 2, "max_score": 2, "output": ""},
    ]
    scores = {"ada": tests, "=bob": tests[:2]}
    assert "ada: 5 of 9\n" in grade.as_text(scores)
    assert json.loads(grade.as_json(scores))["ada"] == {"points": 5, "tests": tests}
    rows = [*csv.reader(grade.as_csv(scores).splitlines())]
    assert rows[0] == ["student", "points", "exercise 1", "exercise 3", "reasons"]
    assert rows[1] == ["ada", "5", "3", "2", "3: =Keep, all (x)"]  # no formula of a spreadsheet


def test_compare():
    x = torch.arange(3.0)
    right = {"a": [x, 1.0], "b": None}
    checks.compare({"a": (x + 1e-6, 1), "b": None, "c": 0}, right, "f")
    pairs = [[x + 1, 1.0], [x * torch.nan, 1.0], [x[:2], 1.0], [x[:1], 1.0], [1.0, 1.0], [x]]
    pairs += [[x, math.nan], [x, "1"]]
    wrong = [{"a": pair, "b": None} for pair in pairs]
    for got in (*wrong, {"a": [x, 1.0], "b": 0}, [x], None):
        with pytest.raises(checks.Wrong):
            checks.compare(got, right, "f")


# --- all together


@pytest.mark.slow
def test_a_batch_of_good_and_broken_submissions_is_graded_whole(tmp_path, capsys):
    good, bad, alone, no_zip = (tmp_path / name for name in ("a", "b", "c_fope.py", "d.zip"))
    good.mkdir()
    bad.mkdir()
    (good / "fope.py").write_text(original("fope.py"))
    (bad / "fope.py").write_text("import torch\ntorch.serialization.os._exit(0)")
    alone.write_text(original("fope.py"))
    no_zip.write_bytes(b"no zip")
    paths = [str(path) for path in (bad, good, no_zip, tmp_path / "not there", alone)]
    out = tmp_path / "scores.csv"
    flags = ["--exercise", "3", "--jobs", "2", "--format", "csv", "--out", str(out)]
    grade.main([*paths, *flags])
    rows = [row[:2] for row in csv.reader(out.open())][1:]
    assert rows == [[p, n] for p, n in zip(paths, ["0", "10", "0", "0", "10"], strict=True)]
    assert capsys.readouterr().out.count(" of 10\n") == 5
    for taken in (alone, good / "scores.csv", good):  # a student's, or beside it
        refuses(grade.main, [good, "--out", taken], "--out")
    assert alone.read_text() == original("fope.py")


@pytest.mark.slow
def test_a_batch_that_is_killed_has_points_so_far_and_can_be_started_again(tmp_path):
    paths = [str(tmp_path / f"{name}_fope.py") for name in "abc"]
    for path in paths:
        shutil.copy(ROOT / "fope.py", path)
    out = tmp_path / "scores.csv"
    command = [sys.executable, "assignments/grade.py", *paths, "--exercise", "3"]
    command += ["--format", "csv", "--out", str(out)]
    batch = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    batch.stdout.readline()  # what it says once the first is in the file
    batch.kill()
    batch.wait()
    rows = [row[1] for row in csv.reader(out.open())][1:]
    assert len(rows) < 3 and {*rows} == {"10"}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert [row[:2] for row in csv.reader(out.open())][1:] == [[path, "10"] for path in paths]
