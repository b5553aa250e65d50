"""
The course kit: right solutions score full marks however they are written, the starter none, usual
mistakes lose what they deserve and are named, and a file that breaks costs nobody else anything.
"""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT, refuses

sys.path.insert(0, str(ROOT / "assignments"))

import checks
import child
import grade
import make

SHEETS = [*checks.FILES]


def original(file):
    return (ROOT / "assignments" / file if file == "mine.py" else ROOT / file).read_text()


def command(*words, **kwargs):
    """What a script of the course prints, and its exit code."""
    kwargs = dict(cwd=ROOT, capture_output=True, text=True) | kwargs
    done = subprocess.run([sys.executable, *map(os.fspath, words)], **kwargs)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    out = tmp_path_factory.mktemp("kit") / "starter"
    make.main([str(out)])
    return out


@pytest.fixture
def graded(tmp_path):
    """graded(sheet, text of its file) -> (points, the reasons of what is lost)."""

    def graded(sheet, text, seed=1):
        file = tmp_path / checks.FILES[sheet]
        file.write_text(text)
        rows = grade.grade(file, [c for c in checks.CHECKS if c[0] == sheet], seed)
        assert all(bool(reason) == (points == 0) for *_, points, _, reason in rows), rows
        assert all(row[4].isprintable() for row in rows)  # so it is one line
        return sum(row[2] for row in rows), [row[4] for row in rows if row[4]]

    return graded


# --- the starter


def test_points_are_ten_for_each_sheet():
    for sheet in SHEETS:
        assert sum(c[1] for c in checks.CHECKS if c[0] == sheet) == 10


def test_the_starter_has_all_but_the_functions_and_nothing_of_a_solution(starter):
    texts = [p.read_text() for p in starter.rglob("*.*") if p.suffix not in (".png", ".zip")]
    for file in {*checks.FILES.values()}:
        removed = {*original(file).split("\n")} - {*(starter / file).read_text().split("\n")}
        for line in (line.strip() for line in removed):
            # shorter ones are also written elsewhere
            assert len(line) < 46 or not any(line in text for text in texts), line
    for sheet, names in make.TO_WRITE.items():
        for name in names:
            stub = f'raise NotImplementedError("exercise {sheet}: {name} is'
            assert stub in (starter / checks.FILES[sheet]).read_text()
    assert "theta^(-2m/head_dim)" in (starter / "fope.py").read_text()  # docstrings stay
    refuses(make.main, [starter], str(starter))


def test_links_and_files_named_in_the_starter_are_there(starter):
    known = {path.relative_to(starter).as_posix() for path in starter.rglob("*")}
    for path in starter.rglob("*.md"):
        text = path.read_text()
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert target.startswith("http") or (path.parent / target).exists(), target
        named = re.findall(r"(?<![\w/.~])[\w/]+\.(?:py|md|png|sh|pt|zip)\b", text)
        assert not {*named} - known, path


@pytest.mark.slow
def test_the_starter_has_no_points_and_with_the_solution_all(starter, tmp_path):
    """Seeds are drawn anew. A file beside the student's is not there, as later at the teacher's."""
    out = tmp_path / "starter"
    shutil.copytree(starter, out)
    code, shown, _ = command("assignments/grade.py", cwd=out)
    assert code == 0 and shown.startswith(".: 0 of 60\n")
    assert shown.count(": not written yet\n") == len(checks.CHECKS)
    for file in {*checks.FILES.values()}:
        (out / file).write_text(original(file))
    assert command("assignments/grade.py", cwd=out)[1].startswith(".: 60 of 60\n")
    (out / "helper.py").write_text("")
    (out / "fope.py").write_text("import helper\n" + original("fope.py"))
    assert "No module named 'helper'" in command("assignments/grade.py", cwd=out)[1]
    make.main([str(tmp_path / "given"), "--given", "1", "4"])
    shown = command("assignments/grade.py", "--exercise", "1", "3", "4", cwd=tmp_path / "given")[1]
    assert shown.startswith(".: 20 of 30\n")
    assert (tmp_path / "given" / "README.md").read_text().count("solved already") == 2


@pytest.mark.slow
@pytest.mark.parametrize("sheet", SHEETS[:5])
def test_a_check_needs_no_other_sheet(graded, starter, sheet):
    text = make.without_solutions(original(checks.FILES[sheet]), checks.FILES[sheet], [sheet])
    assert graded(sheet, text) == (10, [])


# --- right solutions, each written in another way

EMBEDDING = """
import baselines, fope
from torch import nn

class MyEmbedding({base}):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
"""
RIGHT = {
    "numpy in float64, a NamedTuple": (1, """
import numpy as np
from typing import NamedTuple

class Tables(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor

def rope_freqs(head_dim, theta=10000.0):
    return torch.from_numpy(theta ** (-np.arange(0, head_dim, 2) / head_dim))

def rotation_tables(freqs, T):
    angles = torch.arange(T).double()[:, None] * freqs
    return Tables(angles.cos(), angles.sin())

def apply_rotation(x, cos, sin):
    half = x.shape[-1] // 2
    other = torch.cat((-x[..., half:], x[..., :half]), dim=-1).float()
    return (x.float() * torch.cat((cos, cos), -1) + other * torch.cat((sin, sin), -1)).to(x.dtype)
"""),
    "a map": (1, """
def rotation_tables(freqs, T):
    return map(lambda f: f(torch.arange(T).float()[:, None] * freqs), (torch.cos, torch.sin))
"""),
    "one query at a time": (2, """
def attend(self, q, k, v):
    y = []
    for i in range(q.size(-2)):
        scores = q[:, :, i : i + 1] @ k[:, :, : i + 1].transpose(-2, -1) / self.head_dim ** 0.5
        scores = scores - self.slopes.view(-1, 1, 1) * torch.arange(i, -1, -1, device=q.device)
        y.append(scores.softmax(dim=-1).to(v.dtype) @ v[:, :, : i + 1])
    return torch.cat(y, dim=-2)

ALiBi.attend = attend
"""),
    "float64, its own path, a thread that never ends": (3, """
import threading, time
threading.Thread(target=time.sleep, args=(900,)).start()
assert open(__file__) and open("fope.py")

def above_floor(freqs, train_len):
    return freqs.double()[freqs.double() * train_len / (2 * math.pi) >= 1]
"""),
    "an identity of bools, noise in float64": (4, """
def identity(self, D, K):
    return torch.arange(D)[:, None] == math.ceil(D / K) * torch.arange(K)

def draw_noise(self, D, K):
    paper = self.variant == "paper"
    std = self.sigma * (1 if paper else math.sqrt(2 / (K * (D + self.n_head))))
    return std * torch.randn(self.n_head, D, K, dtype=torch.float64)

FoPE.identity, FoPE.draw_noise = identity, draw_noise
"""),
    "one trial at a time": (5, """
@torch.no_grad()
def task_accuracy(model, task, length, trials, seed=0, generate=False, show=False):
    rng, was_training = np.random.default_rng((seed, length)), model.training
    model.eval()
    rows = []
    for _ in range(trials):
        tokens, n, distance = task.sample(length, rng)
        tokens = torch.tensor(tokens)
        logits = model(tokens[None])[0, -n - 1 : -1].float()
        right = logits.argmax(-1) == tokens[-n:]
        loss = F.cross_entropy(logits, tokens[-n:]).item()
        rows.append((right.all().item(), right.float().mean().item(), loss, distance))
    model.train(was_training)
    exact, share, nll, distance = map(np.array, zip(*rows))
    each = {"distance": distance, "right": exact.astype(int), "share_right": share}
    each = {name: values.tolist() for name, values in each.items()}
    return summary(exact.astype(float), share, nll) | each
"""),
    "a bias that starts at 0, and is dropped in training": (6, EMBEDDING.format(
        base="baselines.LearnedBias") + """
        self.slopes = nn.Parameter(torch.zeros(self.n_head))

    def bias(self, i, j):
        bias = self.slopes.view(-1, 1, 1) * (i[:, None] - j)
        return bias * (torch.rand(()) < 0.5) if self.training else bias
"""),
    "random frequencies, random positions in training, a table kept by T": (6, EMBEDDING.format(
        base="RoPE") + """
        self.kept = {}
        self.register_buffer("w", torch.rand(self.head_dim // 2))

    def rotate(self, q, k):
        T = q.size(-2)
        if self.training or T not in self.kept:
            t = torch.arange(T, device=q.device) + self.training * torch.rand(T, device=q.device)
            self.kept[T] = (t[:, None] * self.w).cos(), (t[:, None] * self.w).sin()
        return tuple(fope.apply_rotation(x, *self.kept[T]) for x in (q, k))
"""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", RIGHT)
def test_right_solutions_have_full_marks_however_they_are_written(graded, way):
    sheet, text = RIGHT[way]
    assert graded(sheet, original(checks.FILES[sheet]) + text, seed=2) == (10, [])


# --- mistakes: what is replaced in a right solution, the points that are left, and where the course
# promises to name it, a word of the sentence. Those of checks.MISTAKES lose what is at stake there

TURN = "    x1, x2 = x.float().chunk(2, dim=-1)\n"
ATTEND = "        y = causal_attention(q, k, v, self.window, scale=1.0)"
ROTATE = "        half = self.n_head // 2"

MISTAKES = {
    # sheet 1
    "half detached": (1, {TURN: TURN + "    x2 = x2.detach()\n"}, 8, "no gradient"),
    "in place": (1, {TURN: TURN + "    x *= 1.0 + 1e-6\n"}, 8, "in place"),
    "in bf16": (1, {TURN: "    x1, x2 = x.chunk(2, dim=-1)\n"
                "    cos, sin = cos.type_as(x), sin.type_as(x)\n"}, 9, "computes in bf16"),
    "float64": (1, {".type_as(x)": ".double()"}, 9, "dtype"),
    "an array": (1, {"1.0 / theta ** (": "1.0 / theta ** torch.Tensor.numpy("}, 8, "array("),
    # sheet 2
    "numpy": (2, {ATTEND: "        k = torch.tensor(k.detach().float().numpy()).to(k)\n" + ATTEND},
              9, "no gradient"),
    "on the CPU": (2, {"k, v, torch.arange(q.size(-2), device=q.device)":
                       "k, v, torch.arange(q.size(-2))"}, 9, "q.device"),
    "fp32 for bf16": (2, {"y[..., : self.head": "y.float()[..., : self.head"}, 9, "dtype"),
    "slopes from 0": (2, {"for h in range(1, p + 1)": "for h in range(p)"}, 8),
    "one column": (2, {"(j // 256 % 256 * 256, j % 256,": "(j, 0 * j,"}, 9, "bf16"),
    "a mask, a head at a time": (2, {ATTEND: "        T = q.size(-2)\n"
               "        later = torch.ones(T, T, device=q.device).triu(1).mul(-1e30).to(q.dtype)\n"
               "        y = torch.cat([F.scaled_dot_product_attention(a, b, c, later, scale=1.0)"
               " for a, b, c in zip(q.split(1, 1), k.split(1, 1), v.split(1, 1))], 1)"},
               8, "T x T"),
    "a wrong value": (2, {ATTEND: "        q = 1.5 * q\n" + ATTEND}, 4, "where attention is right"),
    # sheet 3
    "its input is zeroed": (3, {"    return freqs[freqs >=": "    freqs *= freqs >= 2 * math.pi "
                                "/ train_len\n    return freqs[freqs >="}, 9, "in place"),
    "too strict": (3, {"2 * math.pi": "2.2 * math.pi"}, 3, "complete a turn"),
    "strict": (3, {"freqs[freqs >= 2": "freqs[freqs > 2"}, 7, "exactly one"),
    "nearly": (3, {"2 * math.pi": "1.98 * math.pi"}, 7, "exactly one"),
    "sorted": (3, {"train_len]": "train_len].sort(descending=True)[0]"}, 8, "order"),
    # sheet 4
    "swapped, but not in the stopped pairs": (4, {
        "cos, sin, cos_coef, sin_coef, n_pairs, sin_pad):":
        "sin, cos, sin_coef, cos_coef, n_pairs, sin_pad):"}, 7, "swapped"),
    "more pairs": (4, {"n_pairs - cos.size(-1)": "n_pairs"}, 8, "stopped pairs"),
    "constant sine 0": (4, {"F.pad(sin, (0, n_constant), value=sin_pad)":
                        "F.pad(sin, (0, n_constant))"}, 8),
    "no stride": (4, {"math.ceil(D / K)": "1"}, 9),
    "the root of sigma": (4, {"std=self.sigma": "std=self.sigma**0.5"}, 9, "is 0.77"),
    "uniform": (4, {"nn.init.normal_(noise, std=self.sigma)":
                "noise.uniform_(-1, 1) * self.sigma * 3**0.5"}, 9, "mean size"),
    "a seed of its own": (4, {"noise = torch.empty(self.n_head, D, K)": "noise = torch.empty("
                          "self.n_head, D, K)\n        torch.manual_seed(1)"}, 9, "two calls"),
    # sheet 5
    "another seed": (5, {"rng((seed, length))": "rng((length, seed))"}, 9, "default_rng"),
    "one length for all": (5, {"right[r, -n:].all(), right[r, -n:]": "right[r].all(), right[r]"},
                           8, "differ in length"),
    "training mode": (5, {"    model.eval()\n    samples": "    samples"}, 9, "eval mode"),
    "the mode stays": (5, {"    model.train(was_training)\n": ""}, 9, "another mode"),
    "logits with gradients": (5, {"@torch.no_grad()\ndef task_acc": "def task_acc",
                                  "with common.autocast(device):": "if True:"}, 9, "gradients"),
    "no share_right": (5, {', "share_right": share.round(2).tolist()}': "}"}, 9, "share_right"),
    "0-d tensors": (5, {"exact.astype(int).tolist()": "[*torch.tensor(exact)]",
                        "share.round(2).tolist()": "[*torch.tensor(share)]"}, 9, "not JSON"),
    # sheet 6
    "attend is not scores": (6, {"    def rotate": "    def scores(self, q, k):\n"
                             "        return 1.1 * super().scores(q, k)\n\n    def rotate"}, 6),
    "a look ahead": (6, {ROTATE: "        k = k + k.mean(-2, True)\n" + ROTATE}, 8),
    "no order": (6, {ROTATE: "        return q, k\n" + ROTATE}, 9, "order"),
    "not saved": (6, {ROTATE: "        self.draw = getattr(self, 'draw', torch.rand(()))\n"
                  "        k = k * self.draw.to(k.device)\n" + ROTATE}, 9, "buffer"),
    "random at each call": (6, {ROTATE: "        k = k * torch.rand(()).to(k)\n" + ROTATE}, 9,
                            "buffer"),
    "on the CPU, in training": (6, {ROTATE: "        if self.training:\n"
                                "            k = k * torch.ones(64)\n" + ROTATE}, 9, "q.device"),
    "no use": (6, {"    def rotate": "    def __init__(self, **kwargs):\n"
                   "        super().__init__(**kwargs)\n"
                   "        self.gain = torch.nn.Parameter(torch.ones(1))\n\n    def rotate"}, 9,
               "gain: no gradient"),
}  # fmt: skip
for sheet, points, name, *_ in checks.CHECKS:
    for said, changes in checks.MISTAKES.get(name, []):
        MISTAKES[f"{said} {changes}"] = sheet, changes, 10 - points, said


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_lose_what_they_deserve_and_are_named(graded, mistake):
    sheet, changes, left, *words = MISTAKES[mistake]
    text = original(checks.FILES[sheet])
    for right, wrong in changes.items():
        assert right in text
        text = text.replace(right, wrong, 1)
    points, reasons = graded(sheet, text)
    named = not words or any(words[0] in reason for reason in reasons)
    if "where attention is right" in words:
        assert not any("T x T" in reason or "bf16" in reason for reason in reasons), reasons
    assert points == left and named, (points, reasons)


# --- files that break: no points but a reason, and those of others are kept

BROKEN = {
    "leaves": "import os; os._exit(0)",
    "exits later": "def rope_freqs(head_dim, theta):\n    raise SystemExit(0)",
    "takes memory": "import torch\ndef rope_freqs(*args):\n    return [torch.ones(2**28)] * 2",
    "writes lines": "def rope_freqs(*args):\n    raise ValueError('\\x1b[2K\\rx: 60 of 60\\n 10')",
    "never loads": "while True: pass",
    "gives sparse": "import torch\ndef rope_freqs(*args):\n    return torch.eye(4).to_sparse()",
    "gives nan": "import torch\ndef rope_freqs(d, _):\n    return torch.nan * torch.ones(d // 2)",
    "a syntax error": "def rope_freqs(:\n",
}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(child, "SECONDS", 3)


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_has_no_points_but_a_reason(graded, short, what):
    assert graded(1, BROKEN[what])[0] == 0


@pytest.mark.slow
def test_a_function_that_does_not_end_costs_its_own_points_alone(graded, short):
    text = original("fope.py") + "\ndef rotation_tables(freqs, T):\n    while True: pass\n"
    assert graded(1, text)[0] == 8


@pytest.mark.slow
def test_unusual_but_honest_files_lose_nothing(graded):
    text = "\ufeff# \u2028\n\x0c\n" + original("fope.py").replace("\n", "\r\n")
    assert graded(3, text + "\r\nprint('my file')\r\n")[0] == 10


# --- what is handed in


@pytest.mark.parametrize(
    "name",
    ["fope.py", "fope (1).py", "Fope.PY", "ada_123_fope.py", "fope copy.py", "fope_v2.py",
     "fope - Kopie (2).py", "fope.py.txt", "a/b/fope.py", "x.zip:fope.py", "X.ZIP:a\\b\\fope.py",
     "a/x.zip:a/b/fope (2).py", "x.zip:y.zip:fope.py"],
)  # fmt: skip
def test_names_that_people_and_platforms_give(tmp_path, name):
    *archives, inside = name.split(":")
    content = b"x"
    for archive in archives[::-1]:
        with zipfile.ZipFile(tmp_path / "zip", "w") as file:
            file.writestr("__MACOSX/fope.py", "no")
            file.writestr(inside, content)
        inside, content = archive, (tmp_path / "zip").read_bytes()
    path = tmp_path / "ada" / inside
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (tmp_path / "ada" / "none.zip").write_text("no zip")
    assert grade.read_submission(tmp_path / "ada") == {"fope.py": b"x"}
    assert grade.read_submission(path) == {"fope.py": b"x"}


def test_of_several_names_the_plainest_counts_and_of_several_words_the_first(tmp_path):
    for name in ("fope_old.py", "test_fope.py", "a/fope.py", "a/b/fope.py", "eval_passkey_fope.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    texts = grade.read_submission(tmp_path)
    assert texts == {"fope.py": b"a/fope.py", "eval_passkey.py": b"eval_passkey_fope.py"}


@pytest.mark.parametrize("name", ["my_isofope.py", ".venv/fope.py", "a.zip"])
def test_other_files_and_what_is_no_zip_are_refused(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    with pytest.raises(
        grade.Refused, match="none of" if path.suffix == ".py" else "cannot be read"
    ):
        grade.read_submission(tmp_path)


# --- all together


def test_what_is_not_there_and_a_file_that_is_there_are_refused(tmp_path):
    fope, out = tmp_path / "fope.py", tmp_path / "points.csv"
    for path in (fope, out):
        path.write_text("")
    refuses(grade.main, [fope, tmp_path / "not there"], "not there")
    refuses(grade.main, [fope, "--out", out], "points.csv", "new file")
    refuses(grade.main, [fope, fope, "--out", tmp_path / "results.json"], "one student")


@pytest.mark.slow
def test_names_that_are_no_utf_8_and_the_file_of_gradescope(tmp_path):
    names = [tmp_path / os.fsdecode(name) for name in (b"M\xfcller.b", b"zoe")]
    for name in names:
        name.mkdir()
        shutil.copy(ROOT / "fope.py", name)
    words = ["assignments/grade.py", "--exercise", "3", "--out"]
    env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    code, shown, _ = command(*words, tmp_path / "points.csv", *names, env=env)
    rows = [*csv.reader((tmp_path / "points.csv").open())]
    assert code == 0 and shown.count(": 10 of 10\n") == 2
    assert [row[:3] for row in rows[1:]] == [["M\\udcfcller.b", "10", "10"], ["zoe", "10", "10"]]
    (names[1] / "fope.py").write_text("def above_floor(freqs, train_len):\n    return freqs\n")
    command(*words, tmp_path / "results.json", names[1])
    tests = json.loads((tmp_path / "results.json").read_text())["tests"]
    assert [test["max_score"] for test in tests] == [4, 2, 3, 1]
    assert [test["score"] for test in tests] == [0, 0, 0, 1]
    assert [bool(test["output"]) for test in tests] == [True, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_batch_of_eight_that_is_ended_in_the_middle(tmp_path, how):
    paths, texts = [tmp_path / f"{name}_fope.py" for name in "abcdefgh"], [original("fope.py")] * 8
    texts[1], texts[5] = BROKEN["leaves"], "def"
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    out, points = tmp_path / "points.csv", ["10", "0", "10", "10", "10", "0", "10", "10"]
    words = ["assignments/grade.py", *paths, "--exercise", "3", "--out", out]
    batch = subprocess.Popen(
        [sys.executable, *map(str, words)], stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
    )
    while b"c_fope.py" not in batch.stdout.readline():
        pass  # what it says before the third is in the file
    batch.stdout.readline()
    os.killpg(batch.pid, how)
    batch.communicate()
    rows = [row[:2] for row in csv.reader(out.open())][1:]
    assert 2 <= len(rows) < 8
    assert rows == [[p.stem, n] for p, n in zip(paths, points, strict=True)][: len(rows)]
    assert command(*words)[0] == 1 and len(rows) == len([*csv.reader(out.open())]) - 1
