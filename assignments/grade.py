"""
Points for what students hand in: folders, zips, or single files such as fope.py.

    python assignments/grade.py handed_in/*                     for a person to read
    python assignments/grade.py handed_in/* --out points.csv    a table, too
    python assignments/grade.py --exercise 2                    a student's own files, here

checks.py has the checks. A student's file runs in processes of its own (child.py). What they leave
is compared here with what the right file gives. In a starter that is one in answers.zip.
"""

import csv
import io
import os
import random
import re
import sys
import traceback
import zipfile
from pathlib import Path
from types import SimpleNamespace

import child
import torch
from checks import CHECKS, FILES, Known, Pair, Wrong

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
# a starter has the solutions there: a student's file is tried beside right ones
sys.path.insert(1, str(Path(__file__).resolve().parent / "answers.zip"))

import baselines
import evaluation
import fope
from common import ArgumentParser, Refused, one_sentence_errors, write_atomically

MOST = 2**20  # bytes of a file


class Student:
    """Calls functions of a file, unless it cannot be loaded, or three calls have not ended."""

    def __init__(self, file, text):
        self.file, self.text, self.slow, self.broken = file, text, 0, None
        if reason := child.ask(file, text).get("error"):
            self.broken = f"{file} cannot be loaded: {reason}"

    def __call__(self, *question):
        """The answer. Wrong: there is none, and why."""
        if self.broken:
            raise Wrong(self.broken)
        answer = child.ask(self.file, self.text, *question)
        if "error" in answer:
            self.slow += answer["error"].startswith("no end")
            if self.slow == 3:
                self.broken = "three calls have not ended"
            raise Wrong(answer["error"])
        return answer["value"]


def right(name, *args):
    """What the right file gives: the same function of fope.py, evaluation.py or baselines.py."""
    known = SimpleNamespace(**vars(fope) | vars(baselines))
    module = {"task_accuracy": evaluation, "embed": known}.get(name, fope)
    args = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    return child.plain(child.call(module, name, *args))


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


def grade(path, checks, seed):
    """Of each check: sheet, name, points, of how many, and the reason where they are none."""
    rows, pairs, unread = [], {}, None
    try:
        texts = read_submission(Path(path))
        pairs = {file: Pair(Student(file, text), right, seed) for file, text in texts.items()}
    except Refused as e:
        unread = str(e)
    for sheet, most, name, sentence, function in checks:
        file, points = FILES[sheet], 0
        try:
            if file not in pairs:
                raise Known(unread or f"{file} is missing")
            pairs[file].run(function)
            points, reason = most, ""
        except Wrong as e:
            all_said = isinstance(e, Known) or pairs[file].student.broken
            reason = str(e) if all_said else f"{sentence} ({e})"
            if str(e).startswith("NotImplementedError: exercise"):
                reason = "not written yet"
        except (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            traceback.print_exc()  # if it is our own mistake, it is shown whole
            reason = f"{sentence} (what comes back cannot be compared)"
        reason = "".join(c if c.isprintable() else " " for c in reason)  # it may be a student's
        rows.append((sheet, name, points, most, reason))
    return rows


def total(rows, sheet=None):
    return sum(row[2] for row in rows if sheet in (None, row[0]))


def as_text(student, rows):
    lines = [f"{student}: {total(rows)} of {sum(row[3] for row in rows)}"]
    for sheet, name, points, most, reason in rows:
        lines.append(f"  {sheet}. {points} of {most}  {name}: {reason}".rstrip(": "))
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
    add("--exercise", type=int, nargs="+", choices=FILES, default=[*FILES], help="which sheets")
    add("--out", type=Path, help="a csv, written anew after each student")
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
    torch.set_num_threads(1)  # of processes that are forked
    for student in args.submissions:
        scores[student] = grade(student, checks, seed)
        print(as_text(student, scores[student]), flush=True)
        if args.out:
            text = as_csv(scores, args.exercise).encode()
            write_atomically(args.out, lambda f, text=text: f.write(text))


if __name__ == "__main__":
    one_sentence_errors(main)()
