"""
The course kit: right solutions score full marks however they are written, the starter none, usual
mistakes lose what they deserve and are named, and a file that breaks costs nobody else anything.
"""

import csv
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
    done = subprocess.run([sys.executable, *map(str, words)], **kwargs)
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
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
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
    """Seeds are drawn anew; a starter in which sheets are given says so."""
    out = tmp_path / "starter"
    shutil.copytree(starter, out)
    code, shown, _ = command("assignments/grade.py", cwd=out)
    assert code == 0 and shown.startswith(".: 0 of 60\n")
    assert shown.count(": not written yet\n") == len(checks.CHECKS)
    for file in {*checks.FILES.values()}:
        (out / file).write_text(original(file))
    assert command("assignments/grade.py", cwd=out)[1].startswith(".: 60 of 60\n")
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
    "a thread that never ends": (3, """
import threading, time
threading.Thread(target=time.sleep, args=(900,)).start()
"""),
    "rotate half": (1, """
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
def attend(self, q, k, v):
    T, dtype = q.size(-2), v.dtype
    q, k, v = q.float(), k.float(), v.float()
    one = q.new_ones(*q.shape[:-1], 1)
    q = torch.cat((q / self.head_dim ** 0.5, one * self.slopes.view(1, -1, 1, 1)), dim=-1)
    k = torch.cat((k, one * torch.arange(T, device=q.device).view(1, 1, T, 1)), dim=-1)
    y = F.scaled_dot_product_attention(q, k, F.pad(v, (0, 1)), is_causal=True, scale=1.0)
    return y[..., :-1].to(dtype)

ALiBi.attend = attend
"""),
    "one tensor for both tables": (1, """
def rotation_tables(freqs, T):
    angles = torch.arange(T).float()[:, None] * freqs
    return torch.stack((angles.cos(), angles.sin()))
"""),
    "in loops": (1, """
def apply_rotation(x, cos, sin):
    y, half = torch.zeros_like(x), x.size(-1) // 2
    for t in range(x.size(-2)):
        for m in range(half):
            a, b = x[..., t, m].float(), x[..., t, m + half].float()
            y[..., t, m] = a * cos[..., t, m] - b * sin[..., t, m]
            y[..., t, m + half] = b * cos[..., t, m] + a * sin[..., t, m]
    return y
"""),
    "compiled, and its own path": (3, """
@torch.jit.script
def turns(freqs, train_len: int):
    return freqs * train_len / 6.283185307179586

assert open(__file__)

def above_floor(freqs, train_len):
    return freqs[turns(freqs, train_len) >= 0.9999999]
"""),
    "by blocks of queries": (2, """
def attend(self, q, k, v):
    t, y = torch.arange(q.size(-2), device=q.device), []
    for i in t.split(256):
        distance = i[:, None] - t
        bias = (-self.slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
        scores = q[:, :, i].float() @ k.float().transpose(-2, -1) / self.head_dim ** 0.5 + bias
        y.append(scores.softmax(dim=-1) @ v.float())
    return torch.cat(y, dim=-2).to(v.dtype)

ALiBi.attend = attend
"""),
    "learned frequencies": (6, """
class MyEmbedding(RoPE):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.w = torch.nn.Parameter(self.freqs.clone())

    def rotate(self, q, k):
        angles = torch.arange(q.size(-2), device=q.device)[:, None] * self.w
        return tuple(fope.apply_rotation(x, angles.cos(), angles.sin()) for x in (q, k))

import fope
"""),
    "a gain that starts at 1": (6, """
class MyEmbedding(RoPE):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gain = torch.nn.Parameter(torch.ones(1))

    def rotate(self, q, k):
        return super().rotate(self.gain * q, k)
"""),
    "a bias that starts at 0": (6, """
import baselines

class MyEmbedding(baselines.LearnedBias):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.near, self.far = (torch.nn.Parameter(torch.zeros(self.n_head)) for _ in range(2))

    def bias(self, i, j):
        distance = (i[:, None] - j).abs()
        near, far = self.near.view(-1, 1, 1), self.far.view(-1, 1, 1)
        return near * (distance < 3) + far * distance.sqrt()
"""),
    "random frequencies": (6, """
class MyEmbedding(RoPE):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("freqs", torch.rand(self.head_dim // 2))
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
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", RIGHT)
def test_right_solutions_have_full_marks_however_they_are_written(graded, way):
    sheet, text = RIGHT[way]
    for seed in (2, 3):
        assert graded(sheet, original(checks.FILES[sheet]) + text, seed) == (10, [])


# --- mistakes: what is replaced in a right solution, the points that are left, and where the course
# promises to name it, a word of the sentence. Those of checks.MISTAKES lose what is at stake there

TURN = "    x1, x2 = x.float().chunk(2, dim=-1)\n"
ATTEND = "        y = causal_attention(q, k, v, self.window, scale=1.0)"


def built_on(base, body):
    """A class MyEmbedding that takes the place of mine.py's."""
    return f"\nimport baselines, fope\nclass MyEmbedding({base}):\n{body}"


def with_keywords(base, keywords, more=""):
    init = "    def __init__(self, theta=0, **kwargs):\n        super().__init__"
    return built_on(base, f"{init}({keywords} **kwargs)\n{more}")


MISTAKES = {
    # holes where right values hide broken code
    "numpy": (1, {TURN: TURN.replace("x.float()", "torch.tensor(x.detach().float().numpy())")}, 8),
    "half detached": (1, {TURN: TURN + "    x2 = x2.detach()\n"}, 8, "no gradient"),
    "in place": (1, {TURN: TURN + "    x *= 1.0 + 1e-6\n"}, 8, "in place"),
    "detached": (2, {ATTEND: "        k = k.detach()\n" + ATTEND}, 9, "no gradient"),
    "on the CPU": (2, {"k, v, torch.arange(q.size(-2), device=q.device)":
                       "k, v, torch.arange(q.size(-2))"}, 9, "q.device"),
    "float64 slopes": (2, {"torch.tensor(slopes[": "torch.DoubleTensor(slopes["}, 8, "float64"),
    "float64 noise": (4, {"torch.empty(self.n_head, D, K)":
                          "torch.empty(self.n_head, D, K).double()"}, 8, "float64"),
    "float64 everywhere": (1, "torch.set_default_dtype(torch.float64)\n", 8, "default"),
    "its input is zeroed": (3, {"    return freqs[freqs >=": "    freqs *= freqs >= 2 * math.pi "
                                "/ train_len\n    return freqs[freqs >="}, 9, "in place"),
    "a generator of its own": (4, {"torch.empty(self.n_head, D, K)":
                                   "torch.empty(self.n_head, D, K)\n        return noise.normal_("
                                   "std=self.sigma if self.variant == 'paper' else self.sigma * "
                                   "math.sqrt(2 / (K * (D + self.n_head))), "
                                   "generator=OWN)",
                                   "EXAMPLE =": "OWN = torch.Generator()\nEXAMPLE ="},
                               9, "--seed"),
    "no share_right": (5, {', "share_right": share.round(2).tolist()}': "}"}, 9, "share_right"),
    "logits with gradients": (5, {"@torch.no_grad()\ndef task_acc": "def task_acc",
                                  "with common.autocast(device):": "if True:"}, 9, "gradients"),
    # sheets 1 to 5
    "degrees, otherwise": (1, {"    return angles.cos": "    angles = angles.rad2deg()\n"
                           "    return angles.cos"}, 8, "degrees"),
    "in bf16": (1, {TURN: "    x1, x2 = x.chunk(2, dim=-1)\n"
                "    cos, sin = cos.type_as(x), sin.type_as(x)\n"}, 9),
    "slopes from 0": (2, {"for h in range(1, p + 1)": "for h in range(p)"}, 8),
    "one column": (2, {"(j // 256 % 256 * 256, j % 256,": "(j, 0 * j,"}, 9, "bf16"),
    "a mask": (2, {ATTEND: "        T = q.size(-2)\n"
               "        later = torch.ones(1, 4, T, T, device=q.device).triu(1) * -1e30\n"
               "        y = F.scaled_dot_product_attention(q, k, v, later.to(q.dtype), scale=1.0)"},
               8, "T x T"),
    "a mask, a head at a time": (2, {ATTEND: "        T = q.size(-2)\n"
               "        later = torch.ones(T, T, device=q.device).triu(1).mul(-1e30).to(q.dtype)\n"
               "        y = torch.cat([F.scaled_dot_product_attention(a, b, c, later, scale=1.0)"
               " for a, b, c in zip(q.split(1, 1), k.split(1, 1), v.split(1, 1))], 1)"},
               8, "T x T"),
    "a wrong value": (2, {ATTEND: "        q = 1.5 * q\n" + ATTEND}, 4, "where attention is right"),
    "strict": (3, {"freqs[freqs >= 2": "freqs[freqs > 2"}, 7, "exactly one"),
    "sorted": (3, {"train_len]": "train_len].sort(descending=True)[0]"}, 8, "order"),
    "constant sine 0": (4, {"F.pad(sin, (0, n_constant), value=sin_pad)":
                        "F.pad(sin, (0, n_constant))"}, 8),
    "no stride": (4, {"math.ceil(D / K)": "1"}, 9),
    "uniform": (4, {"nn.init.normal_(noise, std=self.sigma)":
                "noise.uniform_(-1, 1) * self.sigma * 3**0.5"}, 9),
    "one length for all": (5, {"right[r, -n:].all(), right[r, -n:]": "right[r].all(), right[r]"},
                           8, "differ in length"),
    "training mode": (5, {"    model.eval()\n    samples": "    samples"}, 9, "eval mode"),
    "arrays": (5, {"exact.astype(int).tolist()": "exact.astype(int)"}, 9),
    # sheet 6: not one's own
    "FoPE renamed": (6, built_on("fope.FoPE", "    pass\n"), 0, "attends as FoPE:"),
    "FIRE renamed": (6, built_on("baselines.FIRE", "    pass\n"), 0, "attends as FIRE:"),
    "theta 9000": (6, with_keywords("RoPE", "theta=9000.0,"), 0, "theta = 9000"),
    "other keywords": (6, with_keywords("fope.FoPE", "sigma=0.1, floor=False,"), 0,
                       "sigma = 0.1, floor = False"),
    "the other sign": (6, with_keywords("RoPE", "", "        self.freqs *= -1\n"), 0,
                       "the other way"),
    "doubled slopes": (6, with_keywords("fope.ALiBi", "", "        self.slopes *= 2\n"), 0,
                       "bias of alibi, times 2"),
    "2 q": (6, built_on("RoPE", "    def rotate(self, q, k):\n"
                        "        return super().rotate(2 * q, k)\n"), 0, "times 2"),
    "neighbours as pairs": (6, built_on("RoPE", "    def rotate(self, q, k):\n"
                            "        pairs = torch.stack((q, k)).unflatten(-1, (-1, 2))\n"
                            "        return super().rotate(*pairs.mT.flatten(-2))\n"), 0,
                            "neighbours"),
    "a parameter without use": (6, with_keywords("RoPE", "", "        self.gain = "
                                "torch.nn.Parameter(torch.ones(1))\n"), 0, "attends as RoPE:"),
    # sheet 6: one's own, but for one mistake
    "tables without gradients": (6, with_keywords("RoPE", "", "        freqs = self.freqs\n"
                                 "        del self.freqs\n"
                                 "        self.freqs = torch.nn.Parameter(freqs)\n"), 9,
                                 "freqs: no gradient"),
    "a bias in attend alone": (6, built_on("fope.ALiBi", "    def attend(self, q, k, v):\n"
                               "        slopes, self.slopes = self.slopes, self.slopes.flip(0)\n"
                               "        y = super().attend(q, k, v)\n"
                               "        self.slopes = slopes\n        return y\n"), 6, "twice"),
    "a table on the CPU": (6, built_on("RoPE", "    def rotate(self, q, k):\n"
                           "        return super().rotate(q, k * torch.linspace(1, 2, 64))\n"),
                           9, "q.device"),
    "attend is not scores": (6, {"    def rotate": "    def scores(self, q, k):\n"
                             "        return 1.1 * super().scores(q, k)\n\n    def rotate"}, 6),
    "not saved": (6, {"half = self.n_head // 2": "half = self.n_head // 2\n"
                  "        if not hasattr(self, 'draw'):\n"
                  "            self.draw = torch.rand(64)\n"
                  "        k = k * self.draw.to(q.device)"}, 9, "buffer"),
    "a look ahead": (6, {"turned = zip": "k = k + k.mean(-2, True)\n        turned = zip"}, 8),
}  # fmt: skip
for sheet, points, name, *_ in checks.CHECKS:
    for said, changes in checks.MISTAKES.get(name, []):
        MISTAKES[f"{said} {changes}"] = sheet, changes, 10 - points, said


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_lose_what_they_deserve_and_are_named(graded, mistake):
    sheet, changes, left, *words = MISTAKES[mistake]
    text = original(checks.FILES[sheet])
    if isinstance(changes, str):
        text, changes = text + changes, {}
    for right, wrong in changes.items():
        assert right in text
        text = text.replace(right, wrong, 1)
    points, reasons = graded(sheet, text)
    named = not words or any(words[0] in reason for reason in reasons)
    if "where attention is right" in words:
        assert not any("T x T" in reason or "bf16" in reason for reason in reasons), reasons
    assert points == left and named, (points, reasons)


# --- files that break: no points but a reason, and those of others are kept

BODY = """
import torch
{top}
def rope_freqs(head_dim, theta=10000.0):
    {body}
rotation_tables = apply_rotation = rope_freqs
"""
BROKEN = {
    "leaves": BODY.format(top="import os; os._exit(0)", body="pass"),
    "exits later": BODY.format(top="", body="raise SystemExit(0)"),
    "takes memory": BODY.format(top="", body="return [torch.ones(2**28) for _ in range(99)]"),
    "writes lines": BODY.format(top="", body="raise ValueError('\\x1b[2K\\rx: 60 of 60\\n 10')"),
    "never loads": BODY.format(top="while True: pass", body="pass"),
    "gives sparse": BODY.format(top="", body="return torch.eye(4).to_sparse()"),
    "gives nan": BODY.format(top="", body="return torch.full((4,), torch.nan)"),
    "empty": "",
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
    assert graded(3, text)[0] == 10
    text = original("fope.py").replace("import math", "import math\nimport numpy as np")
    assert graded(3, text + "\nprint('my file')\n")[0] == 10


# --- what is handed in


@pytest.mark.parametrize(
    "name",
    ["fope.py", "fope (1).py", "fope-2.py", "Fope.PY", "ada_123_fope.py", "fope copy.py",
     "fope_final.py", "fope_v2.py", "fope_ada.py", "fope - Copy.py", "fope - Kopie (2).py",
     "fope - copia.py", "fope.py.txt", "a/fope.py", "a/b/fope.py", "x.zip:fope.py",
     "X.ZIP:a\\b\\fope.py", "x.zip:a/b/fope (2).py"],
)  # fmt: skip
def test_names_that_people_and_platforms_give(tmp_path, name):
    archive, _, inside = name.rpartition(":")
    path = tmp_path / "ada" / (archive or name)
    path.parent.mkdir(parents=True)
    if archive:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("__MACOSX/fope.py", "no")
            file.writestr(inside, "x")
    else:
        path.write_text("x")
    assert grade.read_submission(path if archive else tmp_path / "ada") == {"fope.py": b"x"}


def test_of_several_names_the_plainest_counts_and_of_several_words_the_first(tmp_path):
    for name in ("fope_old.py", "test_fope.py", "a/fope.py", "a/b/fope.py", "eval_passkey_fope.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    texts = grade.read_submission(tmp_path)
    assert texts == {"fope.py": b"a/fope.py", "eval_passkey.py": b"eval_passkey_fope.py"}


@pytest.mark.parametrize("name", ["my_isofope.py", "test.py", ".venv/fope.py", "a.zip"])
def test_other_files_and_what_is_no_zip_are_refused(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    with pytest.raises(grade.Refused):
        grade.read_submission(path if path.suffix == ".zip" else tmp_path)


# --- all together


def test_a_path_that_is_not_there_is_no_student(tmp_path):
    (tmp_path / "fope.py").write_text("")
    refuses(grade.main, [tmp_path / "fope.py", tmp_path / "not there"], "not there")
    refuses(grade.main, [tmp_path / "fope.py", "--out", tmp_path / "fope.py"], "--out")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_batch_of_eight_that_is_ended_in_the_middle_and_started_again(tmp_path, how):
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
    assert command(*words)[0] == 0
    assert [row[1] for row in csv.reader(out.open())][1:] == points
