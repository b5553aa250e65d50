"""
Points for what students hand in: folders, zips, or single files such as fope.py.

    python assignments/grade.py handed_in/*                     for a person to read
    python assignments/grade.py handed_in/* --out points.csv    a table, too
    python assignments/grade.py ada --out results.json          one student, for Gradescope
    python assignments/grade.py --exercise 2                    a student's own files, here

checks.py has the checks. A student's file runs in processes of its own (child.py).
"""

import csv
import os
import random
import re
import sys
import zipfile
from pathlib import Path

import torch
from checks import CHECKS, FILES, HandIn

from common import ArgumentParser, Refused, one_sentence_errors, write_json

# also "ada_123_fope.py", "fope - Kopie (2).py", "Fope_final.py.txt": the first such word counts
STEMS = "|".join(file.removesuffix(".py") for file in FILES.values())
NAME = re.compile(rf"(?:.*?[\W_\d])??({STEMS})(?:[\W_\d].*)?\.py(?:\.txt)?", re.I)


def find(name, file):
    """(name, bytes) of an open file, if a sheet asks for it, or of such files in a zip."""
    given = "assignments/answers.zip" in name.as_posix()  # in every starter
    if given or any(part.startswith((".", "__MACOSX")) for part in name.parts):
        return
    if NAME.fullmatch(name.name):
        yield name, file.read()
    elif name.suffix.lower() == ".zip":  # nothing is unpacked
        archive = zipfile.ZipFile(file)
        for member in archive.namelist():
            with archive.open(member) as inner:
                yield from find(name / member.replace("\\", "/"), inner)  # Windows has a\b


def read_submission(path):
    """{file: bytes} of what sheets ask for, from a folder, a zip or a file. Else Refused."""
    found, unread = {}, ""
    for p in [path, *(p for depth in ("*", "*/*", "*/*/*") for p in path.glob(depth))]:
        if os.path.isfile(p):
            try:
                with open(p, "rb") as file:
                    found |= find(p.relative_to(path) if p != path else Path(p.name), file)
            except Exception as e:  # whatever a foreign file makes zipfile or the system raise
                unread = f"; {p.name} cannot be read: {e!r}"
    if not found:
        raise Refused(f"it has none of {', '.join(sorted({*FILES.values()}))}{unread}")
    # of several files the last stays: the one with the sheet's own name, then the least deep
    own_name = {p: p.name in FILES.values() for p in found}
    order = sorted(found, key=lambda p: (own_name[p], -len(p.parts), -len(p.name), p))
    return {NAME.fullmatch(p.name)[1].lower() + ".py": found[p] for p in order}


def grade(path, checks, seed):
    """Of each check: sheet, name, points, of how many, and the reason where they are none."""
    rows, texts, unread = [], {}, ""
    try:
        texts = read_submission(Path(path))
    except Refused as e:
        unread = str(e)
    hand_ins = {file: HandIn(file, text, seed) for file, text in texts.items()}
    for sheet, points, *check in checks:
        file = FILES[sheet]
        reason = hand_ins[file].reason(*check) if file in texts else unread or f"{file} is missing"
        reason = "".join(c if c.isprintable() else " " for c in reason)  # it may be a student's
        rows.append((sheet, check[0], 0 if reason else points, points, reason))
    return rows


def as_text(path, rows):
    lines = [f"{path}: {sum(row[2] for row in rows)} of {sum(row[3] for row in rows)}"]
    for sheet, name, points, most, reason in rows:
        lines.append(f"  {sheet}. {points} of {most}  {name}: {reason}".rstrip(": "))
    return "\n".join(lines)


def main(argv=None):
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("submissions", nargs="*", default=["."], help="folders, zips, or files")
    add("--exercise", type=int, nargs="+", choices=FILES, default=[*FILES], help="which sheets")
    add("--out", type=Path, help="a new points.csv, or for one student a new results.json")
    add("--seed", type=int, help="of the random inputs, to grade with the same ones again")
    args = parser.parse_args(argv)
    for path in args.submissions:
        if not os.path.exists(path):
            raise Refused(f"there is no file or folder {path}")
    kind = args.out.suffix if args.out else ""
    if args.out and (kind not in (".csv", ".json") or args.out.exists()):
        raise Refused(f"--out {args.out} must be a new file that ends with .csv or .json")
    if kind == ".json" and len(args.submissions) > 1:
        raise Refused(f"{args.out} can hold one student, not {len(args.submissions)}")
    checks = [check for check in CHECKS if check[0] in args.exercise]
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f"the random inputs are those of --seed {seed}", file=sys.stderr)
    torch.set_num_threads(1)  # of processes that are forked
    sys.stdout.reconfigure(errors="backslashreplace")  # a student's name may be no UTF-8
    letters = dict(newline="", encoding="utf-8", errors="backslashreplace")
    with open(args.out if kind == ".csv" else os.devnull, "a", buffering=1, **letters) as file:
        table = csv.writer(file)
        sheets = (f"sheet {sheet}" for sheet in args.exercise)
        table.writerow(["student", "points", *sheets, "feedback", "handed in"])
        for path in map(Path, args.submissions):
            rows = grade(path, checks, seed)
            points = [sum(r[2] for r in rows if r[0] == sheet) for sheet in args.exercise]
            # no reason begins with what a spreadsheet takes for a formula
            reasons = " | ".join(dict.fromkeys(f"{row[0]}: {row[4]}" for row in rows if row[4]))
            student = path.name if path.is_dir() else path.stem
            table.writerow([student, sum(points), *points, reasons, path])
            if kind == ".json":  # what Gradescope reads
                keys = "number", "name", "score", "max_score", "output"
                tests = [dict(zip(keys, (str(row[0]), *row[1:]), strict=True)) for row in rows]
                write_json(args.out, {"output": f"--seed {seed} repeats this", "tests": tests})
            print(as_text(path, rows), flush=True)


if __name__ == "__main__":
    one_sentence_errors(main)()
