"""
The course kit: the solution scores full marks, the starter none, and typical mistakes cost points
where they belong.
"""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, refuses

sys.path.insert(0, str(ROOT / "assignments"))

import exercises
import grade
import make


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    out = tmp_path_factory.mktemp("kit")
    make.main([str(out / "starter")])
    make.main([str(out / "solution"), "--solution"])
    return out


def test_starter_has_everything_but_the_functions(folders):
    starter, solution = folders / "starter", folders / "solution"
    text = (starter / "fope.py").read_text()
    named = r"\b(?:results|experiments|tests|runs)/[\w./]+\w"
    for number, (_, functions, tests) in exercises.EXERCISES.items():
        page = (starter / "assignments" / f"{number}.md").read_text()
        assert all((starter / path).exists() for path in re.findall(named, page))
        assert sum(points for points, _ in tests.values()) == 10
        for test in tests:
            file, name = test.split("[")[0].split("::")
            assert f"def {name}(" in (starter / "tests" / file).read_text()
        for file, names in functions.items():
            for name in names:
                assert f"exercise {number}: {name} is yours" in (starter / file).read_text()
    assert "theta^(-2m/head_dim)" in text and "1.0 / theta **" not in text  # docstrings stay
    assert (solution / "fope.py").read_text().startswith((ROOT / "fope.py").read_text())
    assert not (starter / "assignments" / "exercises.py").exists()
    subprocess.run(
        [sys.executable, "train.py", "--help"], cwd=starter, check=True, capture_output=True
    )
    refuses(make.main, [starter], "is not empty")


@pytest.mark.slow
@pytest.mark.parametrize("exercise", exercises.EXERCISES)
def test_solution_scores_full_marks(folders, exercise):
    assert grade.grade(folders / "solution", exercise) == (10, 10, [])


@pytest.mark.slow
@pytest.mark.parametrize("number", exercises.EXERCISES)
def test_check_of_a_page_passes_once_it_and_those_before_it_are_written(folders, tmp_path, number):
    student = tmp_path / "student"
    shutil.copytree(folders / "starter", student)
    for _, functions, _ in list(exercises.EXERCISES.values())[:number]:
        for file, names in functions.items():
            text = (student / file).read_text()
            for name in names:
                text = exercises.replace(text, name, exercises.reference(file))
            (student / file).write_text(text)
    page = (student / "assignments" / f"{number}.md").read_text()
    command = shlex.split(re.search(r"\*\*Check\.\*\* `python (.+?)`", page)[1])
    command = [sys.executable, *command, "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=student, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.slow
def test_starter_scores_nothing(folders, capsys, tmp_path):
    flags = ["--exercise", "1", "5", "6", "--json", str(tmp_path / "scores.json")]
    grade.main([str(folders / "starter"), *flags])
    printed = capsys.readouterr().out
    assert printed.count("not written yet") == 3
    assert "6. An embedding of your own: 0 of 10" in printed and "together: 0 of 30" in printed
    assert '"points": 0' in (tmp_path / "scores.json").read_text()


# what: (exercise, file, the right code, the mistake, a word of what the student is told)
MISTAKES = {
    "interleaved pairs": (
        1,
        "fope.py",
        "    x1, x2 = x.float().chunk(2, dim=-1)\n"
        "    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)",
        "    x1, x2 = x.float()[..., ::2], x.float()[..., 1::2]\n"
        "    x = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)\n"
        "    return x.flatten(-2)",
        "not with its neighbour",
    ),
    "degrees": (1, "fope.py", "angles.cos()", "torch.rad2deg(angles).cos()", "not degrees"),
    "mask off by one": (
        2,
        "fope.py",
        "F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)",
        "F.scaled_dot_product_attention("
        "q, k, v, attn_mask=torch.ones(T, T).tril(1).bool(), scale=1.0)",
        "does no query see later keys",
    ),
    "one column for the position": (
        2,
        "fope.py",
        "torch.stack((j // 256 * 256, j % 256), dim=-1)",
        "torch.stack((j, 0 * j), dim=-1)",
        "Split j",
    ),
    "floor of half the length": (
        3,
        "fope.py",
        "freqs >= 2 * math.pi / train_len",
        "freqs >= math.pi / train_len",
        "2 pi / train_len",
    ),
    "floor of the evaluated length": (
        4,
        "fope.py",
        "    n_constant = n_pairs - cos.size(-1)\n",
        "    cos[..., freqs[: cos.size(-1)] < 2 * math.pi / T] = 1.0\n"
        "    n_constant = n_pairs - cos.size(-1)\n",
        "nothing in them may depend on T",
    ),
    "trained coefficients": (
        4,
        "fope.py",
        "return nn.init.xavier_normal_(noise, gain=self.sigma)",
        "return nn.Parameter(nn.init.xavier_normal_(noise, gain=self.sigma))",
        "not trained",
    ),
    "logits off by one": (
        5,
        "evaluation.py",
        "model(tokens[:, :-1], ",
        "model(tokens, ",
        "off by one",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_costs_points_in_its_exercise_and_is_explained(folders, tmp_path, mistake):
    exercise, file, right, wrong, words = MISTAKES[mistake]
    text = (folders / "solution" / file).read_text()
    (tmp_path / file).write_text(text.replace(right, wrong))
    points, _, lost = grade.grade(tmp_path, exercise)
    assert 0 <= points < 10 and words in " ".join(lost)
    if mistake == "floor of half the length":
        assert grade.grade(tmp_path, 1)[0] == 10  # and nowhere else


def test_mistakes_are_in_the_code_as_it_is(folders):
    for _, file, right, _, _ in MISTAKES.values():
        assert (folders / "solution" / file).read_text().count(right) == 1, right


def test_files_that_are_no_python_cost_points_and_are_explained(tmp_path):
    file = tmp_path / "fope.py"
    file.write_text("def rope_freqs(:\n")
    words = ["fope.py is no Python: invalid syntax, line 1"]
    assert grade.grade(tmp_path, 1) == (0, 10, words)
    file.write_text("x = 1\n")
    assert grade.grade(tmp_path, 3)[2] == ["fope.py: there is no above_floor"]
    refuses(grade.main, [tmp_path / "nobody"], "no copy of the project")


@pytest.mark.slow
def test_endless_code_costs_points_and_unusual_code_none(folders, tmp_path):
    file, text = tmp_path / "fope.py", (folders / "solution" / "fope.py").read_text()
    file.write_text("while True:\n    pass\n" + text)
    words = ["the tests did not end within 3 seconds"]
    assert grade.grade(tmp_path, 3, time_limit=3)[2] == words
    file.write_text(text + "\nraise SystemExit(0)\n")
    assert "could not be run" in grade.grade(tmp_path, 3)[2][0]
    file.write_text("\ufeff# \u2028\n\x0c\n" + text, encoding="utf-8")  # and Python all the same
    assert grade.grade(tmp_path, 3)[0] == 10
