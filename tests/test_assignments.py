"""
The course kit: right solutions score full marks however they are written, the starter none, usual
mistakes lose what they deserve and are named, and a file that breaks costs nobody else anything.
"""

import csv
import json
import os
import re
import shutil
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
        assert not {name for name in named if not name.startswith("runs_out/")} - known, path


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
"""),
    "a bias that starts at 0, and is dropped in training": (6, """
import baselines
from torch import nn

class MyEmbedding(baselines.LearnedBias):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.slopes = nn.Parameter(torch.zeros(self.n_head))

    def bias(self, i, j):
        bias = self.slopes.view(-1, 1, 1) * (i[:, None] - j)
        return bias * (torch.rand(()) < 0.5) if self.training else bias
"""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", RIGHT)
def test_right_solutions_have_full_marks_however_they_are_written(graded, way):
    sheet, text = RIGHT[way]
    assert graded(sheet, original(checks.FILES[sheet]) + text, seed=2) == (10, [])


# --- mistakes: (sheet, points that are left, a word of the reason, what is replaced in a right
# solution, by what). Those of checks.MISTAKES lose what is at stake there, and are named

TURN = "    x1, x2 = x.float().chunk(2, dim=-1)\n"
ATTEND = "        y = causal_attention(q, k, v, self.window, scale=1.0)\n"
MASK = """        later = torch.full((q.size(-2), q.size(-2)), -1e30, device=q.device).triu(1).to(q)
        y = torch.cat([F.scaled_dot_product_attention(a, b, c, later, scale=1.0)
                       for a, b, c in zip(q.split(1, 1), k.split(1, 1), v.split(1, 1))], 1)
"""
NOISE = "noise = torch.empty(self.n_head, D, K)\n"
ROTATE = "    def rotate(self, q, k):\n"
GAIN = """    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gain = torch.nn.Parameter(torch.ones(1))

"""
MISTAKES = [
    (1, 8, "no gradient", TURN, TURN + "    x2 = x2.detach()\n"),
    (1, 8, "in place", TURN, TURN + "    x *= 1.0 + 1e-6\n"),
    (1, 9, "in bf16", TURN, "    x1, x2 = x.chunk(2, -1)\n    cos, sin = cos.to(x), sin.to(x)\n"),
    (1, 9, "the dtype is torch.float64", ".type_as(x)", ".double()"),
    (1, 8, "it gives array(", "1.0 / theta ** (", "1.0 / theta ** torch.Tensor.numpy("),
    (2, 9, "q.device", "v, torch.arange(q.size(-2), device=q.device", "v, torch.arange(q.size(-2)"),
    (2, 9, "the dtype is torch.float32", "y[..., : self.head", "y.float()[..., : self.head"),
    (2, 9, "bf16 holds", "(j // 256 % 256 * 256, j % 256,", "(j, 0 * j,"),
    (2, 8, "T x T", ATTEND, MASK),
    (2, 4, "asked only where attention is right", ATTEND, "        q = 1.5 * q\n" + ATTEND),
    (3, 3, "complete a turn", "2 * math.pi", "2.2 * math.pi"),
    (3, 7, "exactly one", "freqs[freqs >= 2", "freqs[freqs > 2"),
    (3, 8, "order", "train_len]", "train_len].sort(descending=True)[0]"),
    (4, 8, "stopped pairs", "(0, n_constant), value=sin_pad)", "(0, n_constant))"),
    (4, 9, "weight 1 is at every", "math.ceil(D / K)", "1"),
    (4, 9, "standard deviation is 0.77", "std=self.sigma", "std=self.sigma**0.5"),
    (4, 9, "two calls", NOISE, NOISE + "        torch.manual_seed(1)\n"),
    (5, 9, "default_rng", "rng((seed, length))", "rng((length, seed))"),
    (5, 8, "in length", "right[r, -n:].all(), right[r, -n:]", "right[r].all(), right[r]"),
    (5, 9, "eval mode", "    model.eval()\n", ""),
    (5, 9, "another mode", "    model.train(was_training)\n", ""),
    (5, 9, "share_right", ', "share_right": share.round(2).tolist()}', "}"),
    (5, 9, "not JSON", "exact.astype(int).tolist()", "[*torch.tensor(exact)]"),
    (6, 6, "one formula", ROTATE, ROTATE.replace("rotate", "scores")
     + "        return 1.1 * super().scores(q, k)\n\n" + ROTATE),
    (6, 8, "before it", ROTATE, ROTATE + "        k = k + k.mean(-2, True)\n"),
    (6, 9, "order", ROTATE, ROTATE + "        return q, k\n"),
    (6, 9, "buffer", ROTATE, ROTATE + "        self.a = getattr(self, 'a', torch.rand(()))\n"
     "        k = k * self.a.to(k.device)\n"),
    (6, 9, "q.device", ROTATE, ROTATE + "        k = k * torch.ones(64) if self.training else k\n"),
    (6, 9, "gain: no gradient", ROTATE, GAIN + ROTATE),
]  # fmt: skip
MISTAKES = [(*mistake[:3], dict([mistake[3:]])) for mistake in MISTAKES]
NO_GRAD = {"@torch.no_grad()\n": "", "with common.autocast(device):": "if True:"}
MISTAKES += [(5, 9, "without no_grad", NO_GRAD)]
MISTAKES += [
    (sheet, 10 - points, sentence, changes)
    for sheet, points, name, *_ in checks.CHECKS
    for sentence, changes in checks.MISTAKES.get(name, [])
]


@pytest.mark.slow
@pytest.mark.parametrize("sheet, left, word, changes", MISTAKES)
def test_mistakes_lose_what_they_deserve_and_are_named(graded, sheet, left, word, changes):
    text = original(checks.FILES[sheet])
    for right, wrong in changes.items():
        assert right in text
        text = text.replace(right, wrong, 1)
    points, reasons = graded(sheet, text)
    assert points == left and any(word in reason for reason in reasons), (points, reasons)


# --- files that break: no points but a reason, and those of others are kept

BROKEN = {
    "leaves": "import os; os._exit(0)",
    "writes lines": "def rope_freqs(*args):\n    raise ValueError('\\x1b[2K\\rx: 60 of 60\\n 10')",
    "never loads": "while True: pass",
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
def test_shares_that_are_not_rounded_and_a_thread_that_goes_on_lose_nothing(graded):
    text = original("eval_passkey.py").replace("share.round(2)", "share")
    thread = "\nimport threading, time\nthreading.Thread(target=time.sleep, args=(900,)).start()\n"
    assert graded(5, text + thread)[0] == 10


# --- what is handed in


@pytest.mark.parametrize(
    "name", ["fope.py", "Fope (1).PY", "ada_123_fope_v2.py", "fope.py.txt", "a/b/fope copy.py"]
)
def test_names_that_people_and_platforms_give(tmp_path, name):
    path = tmp_path / "ada" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    assert grade.read_submission(tmp_path / "ada") == {"fope.py": b"x"}
    assert grade.read_submission(path) == {"fope.py": b"x"}


def test_a_zip_is_read_but_for_the_answers_and_what_a_mac_adds(tmp_path):
    with zipfile.ZipFile(tmp_path / "ada.zip", "w") as archive:
        archive.writestr("__MACOSX/fope.py", "no")
        archive.writestr("starter/assignments/answers.zip", "no zip")
        archive.writestr("starter/fope (2).py", "x")
    assert grade.read_submission(tmp_path) == {"fope.py": b"x"}
    assert grade.read_submission(tmp_path / "ada.zip") == {"fope.py": b"x"}


def test_of_several_names_the_plainest_counts_and_of_several_words_the_first(tmp_path):
    for name in ("fope_old.py", "test_fope.py", "a/fope.py", "a/b/fope.py", "eval_passkey_fope.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    texts = grade.read_submission(tmp_path)
    assert texts == {"fope.py": b"a/fope.py", "eval_passkey.py": b"eval_passkey_fope.py"}


@pytest.mark.parametrize(
    "name, why", [("my_isofope.py", "none of"), (".venv/fope.py", "none of"), ("a.zip", "be read")]
)
def test_other_files_and_what_is_no_zip_are_refused(tmp_path, name, why):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    with pytest.raises(grade.Refused, match=why):
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
def test_the_file_of_gradescope(tmp_path):
    (tmp_path / "fope.py").write_text("def above_floor(freqs, train_len):\n    return freqs\n")
    words = ["--exercise", "3", "--out", tmp_path / "results.json"]
    command("assignments/grade.py", *words, tmp_path / "fope.py")
    tests = json.loads((tmp_path / "results.json").read_text())["tests"]
    assert [test["max_score"] for test in tests] == [4, 2, 3, 1]
    assert [test["score"] for test in tests] == [0, 0, 0, 1]
    assert [bool(test["output"]) for test in tests] == [True, True, True, False]


@pytest.mark.slow
def test_the_table_has_a_row_for_each_student(tmp_path):
    paths, out = [tmp_path / "a_fope.py", tmp_path / "b_fope.py"], tmp_path / "points.csv"
    shutil.copy(ROOT / "fope.py", paths[0])
    paths[1].write_text("")
    command("assignments/grade.py", *paths, "--exercise", "3", "--out", out)
    rows = [row[:3] for row in csv.reader(out.open())]
    assert rows == [["student", "points", "sheet 3"], ["a_fope", "10", "10"], ["b_fope", "0", "0"]]
