"""
Grade a student's copy of the project: the project's own tests, run on the student's functions.

    python assignments/grade.py ~/handed_in/ada            about a minute
    python assignments/grade.py ~/handed_in/* --exercise 1 2

Each exercise is graded on its own: the functions of all other exercises are taken from the project,
so that a mistake in one costs points there alone. The tests are the project's, whatever the
student's copy of them says. They run in a subprocess with a time limit, on a copy: nothing in the
student's folder is changed, but their code does run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from exercises import EXERCISES, ROOT, find, has, reference, replace

sys.path.insert(0, str(ROOT))

from common import ArgumentParser, number, one_sentence_errors, write_json


def graded_file(student, file, own):
    """
    The student's file with the functions of all exercises but `own` replaced by the project's.
    ValueError: no points.
    """
    try:
        text = student.read_text(encoding="utf-8-sig")  # with or without a byte order mark
        for number, (_, functions, _) in EXERCISES.items():
            for name in functions.get(file, []):
                if number == own:
                    find(text, name)
                elif has(text, name):
                    text = replace(text, name, reference(file))
    except SyntaxError as e:
        raise ValueError(f"{file} is no Python: {e.msg}, line {e.lineno}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{file} has an expression that is too long for Python") from None
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
    return text


def run_tests(folder, tests, time_limit):
    """
    {test: None, or the first line of why it failed} for every test of the list. TimeoutError where
    they do not end.
    """
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--all", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *(f"tests/{test}" for test in tests)]
    settings = dict(capture_output=True, text=True, timeout=time_limit)
    settings["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(command, cwd=folder, **settings)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the tests did not end within {time_limit} seconds") from None
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):  # the student's file has ended the process
        last = (run.stdout + run.stderr).strip().splitlines()[-1:]
        why = last[0] if last else "the code ends the process"
        raise ValueError(f"the tests could not be run: {why}") from None
    outcome = {}
    for case in cases:
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        why = None if problem is None else (problem.get("message") or "failed").splitlines()[0]
        outcome[f"{case.get('classname').split('.')[-1]}.py::{case.get('name')}"] = why
    # a file that cannot be imported leaves one error and no tests
    elsewhere = next((why for why in outcome.values() if why), "did not run")
    results = {}
    for test in tests:  # all parameters of a test together
        names = [name for name in outcome if name == test or name.startswith(test + "[")]
        failed = [outcome[name] for name in names if outcome[name] is not None]
        results[test] = failed[0] if failed else None if names else elsewhere
    return results


def grade(folder, exercise, time_limit=120):
    """(points, points to be had, [why points were lost, ...]) of one exercise."""
    _, functions, tests = EXERCISES[exercise]
    total = sum(points for points, _ in tests.values())
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
            shutil.copy(path, copy)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=ignore)
        (copy / "fope.py").write_text(reference("fope.py"), encoding="utf-8")
        try:
            for file in functions:
                text = graded_file(Path(folder) / file, file, exercise)
                (copy / file).write_text(text, encoding="utf-8")
            results = run_tests(copy, tests, time_limit)
        except (ValueError, TimeoutError, OSError) as e:
            return 0, total, [str(e)]
    lost = []
    for test, (points, meaning) in tests.items():
        if (why := results[test]) is not None:
            words = f"{meaning} [{test.split('::')[1]}: {why[:120]}]"
            words = "not written yet" if "NotImplementedError" in why else words
            lost.append(f"-{points}: {words}")
    if len(lost) == len(tests) and len({why.split(": ", 1)[1] for why in lost}) == 1:
        lost = [lost[0].split(": ", 1)[1]]  # the same everywhere: say it once
    won = sum(points for test, (points, _) in tests.items() if results[test] is None)
    return won, total, lost


def main(argv=None):
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("folders", nargs="+", help="what students handed in, each a copy of the project")
    numbers = dict(choices=EXERCISES, default=list(EXERCISES))
    add("--exercise", type=int, nargs="+", help="only these", **numbers)
    seconds = number(int, 1, 86400)
    add("--time_limit", type=seconds, default=120, help="seconds for the tests of one exercise")
    add("--json", help="also write all scores to this file")
    args = parser.parse_args(argv)
    if args.json and (Path(args.json).is_dir() or not Path(args.json).absolute().parent.is_dir()):
        raise ValueError(f"--json {args.json} must be a file in a folder that exists")
    for folder in args.folders:
        if not (Path(folder) / "fope.py").exists():
            raise FileNotFoundError(f"{folder} is no copy of the project: it has no fope.py")
    scores = {}
    for folder in args.folders:
        print(f"{folder}")
        scores[folder] = {}
        for exercise in args.exercise:
            points, total, lost = grade(folder, exercise, args.time_limit)
            scores[folder][exercise] = {"points": points, "of": total, "lost": lost}
            print(f"  {exercise}. {EXERCISES[exercise][0]}: {points} of {total}")
            for reason in lost:
                print(f"       {reason}")
        parts = scores[folder].values()
        points, total = (sum(part[key] for part in parts) for key in ("points", "of"))
        print(f"  together: {points} of {total}")
    if args.json:
        write_json(args.json, scores)


if __name__ == "__main__":
    one_sentence_errors(main)()
