"""
Grade a student's copy of the project: the project's own tests, run on the student's functions.

    python assignments/grade.py ~/handed_in/ada            about a minute
    python assignments/grade.py ~/handed_in/* --exercise 1 2

Each exercise is graded on its own: the functions of all other exercises are taken from the project,
so that a mistake in one costs points there alone. The tests are the project's, whatever the
student's copy of them says. They run in a subprocess with a time limit, on a copy: nothing in the
student's folder is changed, but their code does run.
"""

import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from exercises import EXERCISES, ROOT, find, reference, replace

from common import ArgumentParser, Refused, one_sentence_errors, write_json


def graded_file(student, file, own):
    """The student's file, with the project's functions for all exercises but `own`."""
    text = student.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    try:
        for exercise, (_, functions, _) in EXERCISES.items():
            for name in functions.get(file, []):
                if find(text, name) is None:
                    if exercise == own:
                        raise Refused(f"{file}: there is no {name}")
                elif exercise != own:
                    text = replace(text, name, reference(file))
    except SyntaxError as e:
        raise Refused(f"{file} is no Python: {e.msg}, line {e.lineno}") from None
    return text


def run_tests(folder, tests, time_limit):
    """{test: None, or the first line of why it failed}. Refused where they do not run or end."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--all", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *(f"tests/{test}" for test in tests)]
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, timeout=time_limit)
    except subprocess.TimeoutExpired:
        raise Refused(f"the tests did not end within {time_limit} seconds") from None
    if not report.exists():  # the student's file has ended the process
        last = (run.stdout + run.stderr).decode(errors="replace").strip().split("\n")[-1]
        raise Refused(f"the tests could not be run: {last}")
    outcome, elsewhere = {}, "did not run"
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname').split('.')[-1]}.py::{case.get('name')}"
        problem = [child for child in case if child.tag in ("failure", "error")]
        outcome[name] = None
        if problem:  # a file that cannot be imported leaves one error and no tests
            elsewhere = outcome[name] = problem[0].get("message", "failed").split("\n")[0]
    results = {}
    for test in tests:  # all parameters of a test together
        of_test = [why for name, why in outcome.items() if f"{name}[".startswith(f"{test}[")]
        failed = [why for why in of_test or [elsewhere] if why is not None]
        results[test] = failed[0] if failed else None
    return results


def grade(folder, exercise, time_limit=120):
    """(points, points to be had, [why points were lost, ...]) of one exercise."""
    _, functions, tests = EXERCISES[exercise]
    total = sum(points for points, _ in tests.values())
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
            shutil.copy(path, copy)
        shutil.copytree(ROOT / "tests", copy / "tests")
        (copy / "fope.py").write_text(reference("fope.py"), encoding="utf-8")
        try:
            for file in functions:
                text = graded_file(Path(folder) / file, file, exercise)
                (copy / file).write_text(text, encoding="utf-8")
            results = run_tests(copy, tests, time_limit)
        except (Refused, OSError, UnicodeDecodeError) as e:
            return 0, total, [str(e)]
    failed = {test: why for test, why in results.items() if why is not None}
    lost = []
    for test, why in failed.items():
        points, meaning = tests[test]
        lost.append(f"-{points}: {meaning} [{test.split('::')[1]}: {why[:120]}]")
    if len(failed) == len(tests) and all("NotImplementedError" in why for why in failed.values()):
        lost = ["not written yet"]
    return total - sum(tests[test][0] for test in failed), total, lost


def main(argv=None):
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("folders", nargs="+", help="what students handed in, each a copy of the project")
    add("--exercise", type=int, nargs="+", choices=EXERCISES, default=[*EXERCISES], help="which")
    add("--json", help="also write all scores to this file")
    args = parser.parse_args(argv)
    for folder in args.folders:
        if not (Path(folder) / "fope.py").exists():
            raise Refused(f"{folder} is no copy of the project: it has no fope.py")
    scores = {}
    for folder in args.folders:
        print(folder)
        scores[folder] = {}
        for exercise in args.exercise:
            points, total, lost = grade(folder, exercise)
            scores[folder][exercise] = {"points": points, "of": total, "lost": lost}
            print(f"  {exercise}. {EXERCISES[exercise][0]}: {points} of {total}")
            for reason in lost:
                print(f"       {reason}")
        points, total = (sum(s[key] for s in scores[folder].values()) for key in ("points", "of"))
        print(f"  together: {points} of {total}")
    if args.json:
        write_json(args.json, scores)


if __name__ == "__main__":
    one_sentence_errors(main)()
