"""
Points for what students hand in: folders, zips, or single files such as fope.py.

    python assignments/grade.py handed_in/*                              for a person to read
    python assignments/grade.py handed_in/* --out points.csv --jobs 4    a table, too
    python assignments/grade.py --exercise 2                             a student's own files, here

checks.py has the checks. A student's file runs in another process (child.py), with limits of time
and memory. What comes back is compared here with what the right file gives, in another such
process. In a starter, which has no solutions, the right files are in answers.zip.
"""

import csv
import io
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import child
import torch
from checks import CHECKS, FILES, TITLES, Known, Pair, Wrong

sys.path.insert(1, str(child.ROOT))

from common import ArgumentParser, Refused, one_sentence_errors, write_atomically

MOST = 2**20  # bytes of a file
DEATHS = 3  # so often the process of a file is started again

# --- a file in its process


class Process:
    """Calls functions of a file, in a process that is started again when it has ended."""

    def __init__(self, file, text):
        self.folder, self.lock = tempfile.TemporaryDirectory(), threading.Lock()
        self.file = Path(self.folder.name, file)
        self.file.write_bytes(text)
        self.process, self.broken, self.deaths = None, None, 0

    def __call__(self, *question):
        """The answer. Wrong: there is none, and why."""
        with self.lock:
            if self.process is None and not self.broken:
                self.start()
            if self.broken:
                raise Wrong(self.broken)
            torch.save(question, self.file.with_name("question.pt"))
            return self.answer(b"\n")

    def start(self):
        command = [sys.executable, child.__file__, self.file]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        # of its own session: Ctrl-C ends the grading, and no student's answer is wrong by it
        self.process = subprocess.Popen(command, **pipes, start_new_session=True)
        try:
            self.answer(b"")
        except Wrong as e:
            self.broken = f"{self.file.name} cannot be loaded: {e}"

    def answer(self, signal_to_begin):
        with suppress(BrokenPipeError):
            self.process.stdin.write(signal_to_begin)
            self.process.stdin.flush()
        if not self.process.stdout.readline():
            code, self.deaths = self.stop(), self.deaths + 1
            if self.deaths == DEATHS:
                self.broken = f"its process has ended {DEATHS} times, or took too long"
            slow = f"no end within {child.SECONDS} seconds"
            ended = "its process has ended: too much memory?"
            raise Wrong(slow if code == -signal.SIGALRM else ended)
        answer = torch.load(self.file.with_name("answer.pt"), weights_only=True)
        if "error" in answer:
            raise Wrong(answer["error"])
        return answer["value"]

    def stop(self):
        """The exit code of the process, which ends when there is nothing to read."""
        process, self.process = self.process, None
        if process is not None:
            process.communicate()
            return process.returncode


def right_processes():
    """{file: the process of the right one}. For sheet 6 that is all known embeddings."""
    folder = zipfile.Path(child.ANSWERS) if child.ANSWERS.exists() else child.ROOT
    texts = {file: (folder / file).read_bytes() for file in ("fope.py", "evaluation.py")}
    texts["mine.py"] = b"from baselines import *\nfrom fope import *\n"
    return {file: Process(file, text) for file, text in texts.items()}


# --- what was handed in


def file_of(name):
    """The file that a name stands for: also of "ada_123_fope.py", "fope (1).py", "Fope-2.py"."""
    for file in FILES.values():
        if re.fullmatch(rf"(.*[\W_\d])?{file[:-3]}([\W_\d]|copy)*\.py", name, re.I):
            return file
    return None


def read_submission(path):
    """{file: bytes} of what sheets ask for, from a folder, a zip or a file. Else Refused."""
    try:
        if path.suffix.lower() == ".zip":  # nothing is unpacked; Windows may write a\b
            archive = zipfile.ZipFile(path)
            found = {name.replace("\\", "/"): name for name in archive.namelist()}
            texts = read_best(found, archive.open)
        elif path.is_dir():
            some = [p for depth in ("*", "*/*", "*/*/*") for p in path.glob(depth) if p.is_file()]
            found = {p.relative_to(path).as_posix(): p for p in some}
            texts = read_best(found, lambda p: p.open("rb"))
        else:
            texts = read_best({path.name: path}, lambda p: p.open("rb"))
    except Exception as e:  # whatever a foreign file makes zipfile or the system raise
        raise Refused(f"it cannot be read: {e!r}") from None
    if not texts:
        raise Refused(f"it has none of {', '.join(sorted({*FILES.values()}))}")
    if any(len(text) > MOST for text in texts.values()):
        raise Refused(f"a file in it has more than {MOST:,} bytes")
    return texts


def read_best(found, open_file):
    """Of several the one that is least deep and whose name is plainest. What is hidden is not."""
    texts = {}
    for name in sorted(found, key=lambda name: (name.count("/"), len(name), name)):
        hidden = any(part[:1] == "." or part == "__MACOSX" for part in name.split("/"))
        file = file_of(name.split("/")[-1])
        if file and not hidden and file not in texts:
            with open_file(found[name]) as f:
                texts[file] = f.read(MOST + 1)
    return texts


# --- points


def grade(path, checks, rights, seed):
    """Of each check: sheet, name, points, of how many, and the reason where they are none."""
    rows, texts, unread = [], {}, None
    try:
        texts = read_submission(Path(path))
    except Refused as e:
        unread = str(e)
    students = {file: Process(file, text) for file, text in texts.items()}
    pairs = {file: Pair(student, rights[file], seed) for file, student in students.items()}
    for sheet, most, name, sentence, function in checks:
        file, points = FILES[sheet], 0
        try:
            if file not in pairs:
                raise Known(unread or f"{file} is missing")
            pairs[file].run(function)
            points, reason = most, ""
        except Wrong as e:
            all_said = isinstance(e, Known) or students[file].broken
            reason = str(e) if all_said else f"{sentence} ({e})"
            if str(e).startswith("NotImplementedError: exercise"):
                reason = "not written yet"
        except (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            traceback.print_exc()  # if it is our own mistake, it is shown whole
            reason = f"{sentence} (what comes back cannot be compared)"
        reason = "".join(c if c.isprintable() else " " for c in reason)  # it may be a student's
        rows.append((sheet, name, points, most, reason))
    for student in students.values():
        student.stop()
    return rows


def total(rows, sheet=None):
    return sum(row[2] for row in rows if sheet in (None, row[0]))


def as_text(student, rows):
    lines = [f"{student}: {total(rows)} of {sum(row[3] for row in rows)}"]
    for sheet in dict.fromkeys(row[0] for row in rows):
        lines.append(f"  {sheet}. {TITLES[sheet]}: {total(rows, sheet)}")
        for number, name, points, most, reason in rows:
            if number == sheet:
                lines.append(f"    {points} of {most}  {name}: {reason}".rstrip(": "))
    return "\n".join(lines)


def as_csv(scores, sheets):
    """A line for each student. No reason begins with what a spreadsheet takes for a formula."""
    out = io.StringIO()
    table = csv.writer(out)
    table.writerow(["student", "points", *(f"sheet {sheet}" for sheet in sheets), "reasons"])
    for student, rows in scores.items():
        reasons = dict.fromkeys(f"{row[0]}: {row[4]}" for row in rows if row[4])
        each = [total(rows, sheet) for sheet in sheets]
        table.writerow([student, total(rows), *each, " | ".join(reasons)])
    return out.getvalue()


def main(argv=None):
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("submissions", nargs="*", default=["."], help="folders, zips, or files")
    add("--exercise", type=int, nargs="+", choices=TITLES, default=[*TITLES], help="which sheets")
    add("--out", type=Path, help="a csv, written anew after each student")
    add("--jobs", type=int, default=1, help="students graded at the same time")
    add("--seed", type=int, help="of the random inputs, to grade with the same ones again")
    args = parser.parse_args(argv)
    for path in args.submissions:
        if not os.path.exists(path):
            raise Refused(f"there is no file or folder {path}")
    if args.out and args.out.suffix != ".csv":
        raise Refused(f"--out {args.out} must end with .csv")
    checks, scores = [check for check in CHECKS if check[0] in args.exercise], {}
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f"the random inputs are those of --seed {seed}", file=sys.stderr)
    rights, pool = right_processes(), ThreadPoolExecutor(max(args.jobs, 1))
    graded = pool.map(lambda path: grade(path, checks, rights, seed), args.submissions)
    try:
        for student, rows in zip(args.submissions, graded, strict=True):
            scores[student] = rows
            print(as_text(student, rows), flush=True)
            if args.out:
                text = as_csv(scores, args.exercise).encode()
                write_atomically(args.out, lambda f, text=text: f.write(text))
    finally:  # with Ctrl-C, too: those who are not begun are not graded
        pool.shutdown(wait=False, cancel_futures=True)
        for right in rights.values():
            right.stop()


if __name__ == "__main__":
    one_sentence_errors(main)()
