"""
Points for what students hand in: folders, zips, or single files such as fope.py.

    python assignments/grade.py handed_in/*                         for a person to read
    python assignments/grade.py handed_in/* --format csv --out scores.csv --jobs 4
    python assignments/grade.py --exercise 2                        a student's own files, here

checks.py has the checks. A student's file runs in another process (child.py), with limits of time
and memory, and only tensors and plain values come back: they are compared here with what the
project's functions give. In a starter, which has no solutions, these are in answers.pt.
"""

import csv
import io
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import child
import torch
from checks import CHECKS, FILES, ROOT, TITLES, Pair, Wrong

from common import (
    ArgumentParser,
    Refused,
    make_folder,
    one_sentence_errors,
    positive_int,
    write_atomically,
)

HERE = Path(__file__).resolve().parent
MOST = 2**20  # bytes of a file
MOST_BACK = 2**23  # bytes of an answer
SECONDS = 20  # for one call
SECONDS_IN_ALL = 100  # for all calls of a file
IMPORTS = "__future__ argparse collections dataclasses functools itertools math numpy pathlib sys"
IMPORTS += " torch tqdm typing warnings baselines checkpoint common data fope recipe"

# --- a student's file in its process


class Student:
    """Calls functions of a file, in a process that is started again when it has ended."""

    def __init__(self, file, text, folder):
        """folder: the project's other files."""
        self.about = {"file": file, "text": text.decode("latin-1"), "imports": IMPORTS.split()}
        self.folder, self.process, self.seconds, self.broken = folder, None, SECONDS_IN_ALL, None

    def __call__(self, *question):
        """The answer. Wrong: there is none, and why."""
        if self.process is None and not self.broken:
            self.start()
            try:
                self.ask(self.about)
            except Wrong as e:
                self.broken = f"{self.about['file']} cannot be loaded: {e}"
        if self.broken:
            raise Wrong(self.broken)
        return self.ask(question)

    def start(self):
        self.socket, there = socket.socketpair()
        command = [sys.executable, "-P", HERE / "child.py", str(there.fileno()), self.folder]
        command.append(str(SECONDS_IN_ALL + 10))
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        how = dict(env=env | {"OMP_NUM_THREADS": "1"}, cwd=self.folder, start_new_session=True)
        how |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.process = subprocess.Popen(command, pass_fds=[there.fileno()], **how)
        there.close()
        try:
            child.receive(self.socket, time.monotonic() + 120)
        except OSError:  # before any student's code
            raise Refused("the process for students' code, child.py, does not start here") from None

    def ask(self, question):
        started, limit = time.monotonic(), min(SECONDS, self.seconds)
        try:
            self.socket.settimeout(limit)
            child.send(self.socket, question)
            answer = child.receive(self.socket, started + limit, MOST_BACK)
            reason = None if "value" in answer else str(answer["error"])[:400]
        except Exception as e:  # whatever foreign bytes make sockets, json or torch raise
            slow = isinstance(e, TimeoutError)
            reason = f"no end within {limit:.0f} seconds" if slow else "its process has ended"
            self.stop()
        self.seconds -= time.monotonic() - started
        if self.seconds <= 0:
            self.broken = f"its calls took more than {SECONDS_IN_ALL} seconds"
        if reason is not None:
            raise Wrong(reason)
        return answer["value"]

    def stop(self):
        """End the process and all that it has started."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.socket.close()
            self.process = None


# --- what was handed in


def read_file(path):
    """The bytes of an ordinary file, and of nothing that only looks like one."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as f:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path.name} is no ordinary file")
        return f.read(MOST + 1)


def read_submission(path):
    """{file: bytes} of what exercises ask for, from a folder, a zip or a file. Else Refused."""
    path, files = Path(path), sorted({*FILES.values()})
    if not path.exists():
        raise Refused("there is no such file or folder")
    try:
        if path.suffix == ".zip":  # nothing is unpacked
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if Path(n).name in files and n[:2] != "__"]
                names = sorted(names, key=lambda name: name.count("/"))[: 2 * len(files)]
                found = [(Path(name).name, archive.open(name).read(MOST + 1)) for name in names]
        elif path.is_dir():
            paths = [p for depth in ("", "*/") for file in files for p in path.glob(depth + file)]
            found = [(p.name, read_file(p)) for p in paths]
        else:  # a learning platform may have put words before the name
            found = [(file, read_file(path)) for file in files if path.name.endswith(file)]
    except Exception as e:  # whatever a foreign file makes zipfile or the system raise
        raise Refused(f"it cannot be read: {e!r}") from None
    if not found:
        raise Refused(f"it has none of {', '.join(files)}")
    if any(len(text) > MOST for _, text in found):
        raise Refused(f"a file in it has more than {MOST:,} bytes")
    return dict(reversed(found))  # of several the one that is least deep


# --- points


def grade(path, checks, answers, folders):
    """Each check: number, name, score, max_score, and output, the reason."""
    tests, texts, unread = [], {}, None
    try:
        texts = read_submission(path)
    except Refused as e:
        unread = str(e)
    students = {file: Student(file, text, folders[file]) for file, text in texts.items()}
    for exercise, points, name, mistake, function in checks:
        student, replies = students.get(FILES[exercise]), iter(answers[f"{exercise} {name}"])
        score = 0
        try:
            if student is None:
                reason = unread or f"{FILES[exercise]} is missing"
            else:
                pair = Pair(student, lambda *_, replies=replies: next(replies), answers["seed"])
                pair.run(function)
                score, reason = points, ""
        except Wrong as e:
            reason = str(e) if student.broken else f"{mistake} ({e})"
            if str(e).startswith("NotImplementedError: exercise"):
                reason = "not written yet"
        except (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            traceback.print_exc()  # our own mistake is shown whole, and the others are graded
            reason = "the grader itself has failed here"
        reason = "".join(c if c.isprintable() else " " for c in reason)  # it may be a student's
        test = {"number": str(exercise), "name": name, "score": score, "max_score": points}
        tests.append(test | {"output": reason})
    for student in students.values():
        student.stop()
    return tests


def points(tests):
    return sum(test["score"] for test in tests)


def by_exercise(tests):
    return [(n, [*some]) for n, some in groupby(tests, key=lambda test: test["number"])]


def as_text(scores):
    lines = []
    for student, tests in scores.items():
        lines.append(f"{student}: {points(tests)} of {sum(t['max_score'] for t in tests)}")
        for number, some in by_exercise(tests):
            lines.append(f"  {number}. {TITLES[int(number)]}: {points(some)}")
            for t in some:
                line = f"    {t['score']} of {t['max_score']}  {t['name']}: {t['output']}"
                lines.append(line.rstrip(": "))
    return "\n".join(lines)


def as_csv(scores):
    """A line for each student. No reason begins with what a spreadsheet takes for a formula."""
    out = io.StringIO()
    table = csv.writer(out)
    for student, tests in scores.items():
        parts = by_exercise(tests)
        if not out.tell():
            table.writerow(["student", "points", *(f"exercise {n}" for n, _ in parts), "reasons"])
        reasons = dict.fromkeys(f"{t['number']}: {t['output']}" for t in tests if t["output"])
        each = [points(some) for _, some in parts]
        table.writerow([student, points(tests), *each, " | ".join(reasons)])
    return out.getvalue().rstrip()


def as_json(scores):
    results = {student: {"points": points(t), "tests": t} for student, t in scores.items()}
    return json.dumps(results, indent=1)


FORMATS = {"text": as_text, "json": as_json, "csv": as_csv}


def main(argv=None):
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("submissions", nargs="*", default=["."], help="folders, zips, or files")
    add("--exercise", type=int, nargs="+", choices=TITLES, default=[*TITLES], help="which")
    add("--format", choices=FORMATS, default="text", help="how points are written")
    add("--out", help="to this file, anew after each student")
    add("--jobs", type=positive_int, default=1, help="students graded at the same time")
    args = parser.parse_args(argv)
    if args.out and (out := Path(args.out).resolve()):
        inside = any(out.is_relative_to(Path(s).resolve()) for s in args.submissions)
        if inside or out.suffix in (".py", ".zip") or out.is_dir():
            raise Refused(f"--out {args.out} may be what a student has handed in; choose another")
        make_folder(out.parent)
    checks, scores = [check for check in CHECKS if check[0] in args.exercise], {}
    with tempfile.TemporaryDirectory() as stripped, ThreadPoolExecutor(args.jobs) as pool:
        folders = dict.fromkeys(FILES.values(), ROOT)
        if (HERE / "answers.pt").exists():
            answers = torch.load(HERE / "answers.pt", weights_only=True)
        else:  # not in a starter: no solutions in reach of a student's file
            from make import record_answers, write_files

            write_files(Path(stripped), ["*.py"])
            answers, folders = record_answers(seed=1), dict.fromkeys(folders, stripped)
            folders["mine.py"] = ROOT  # which builds on them
        graded = pool.map(lambda path: grade(path, checks, answers, folders), args.submissions)
        for student, tests in zip(args.submissions, graded, strict=True):
            scores[student] = tests
            if args.out:
                text = FORMATS[args.format](scores).encode() + b"\n"
                write_atomically(args.out, lambda f, text=text: f.write(text))
            if args.out or args.format == "text":
                print(as_text({student: tests}), flush=True)
    if not args.out and args.format != "text":
        print(FORMATS[args.format](scores))


if __name__ == "__main__":
    one_sentence_errors(main)()
