"""
Points for what students hand in: folders, zips, or single files such as fope.py.

    python assignments/grade.py handed_in/*                     for a person to read
    python assignments/grade.py handed_in/* --out points.csv    a table, too
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

from common import ArgumentParser, Refused, one_sentence_errors

# also "ada_123_fope.py", "fope - Kopie (2).py", "Fope_final.py.txt": the first such word counts
STEMS = "|".join(file.removesuffix(".py") for file in FILES.values())
NAME = re.compile(rf"(?:.*?[\W_\d])??({STEMS})(?:[\W_\d].*)?\.py(?:\.txt)?", re.I)


def read_submission(path):
    """{file: bytes} of what sheets ask for, from a folder, a zip or a file. Else Refused."""
    try:
        if path.suffix.lower() == ".zip":  # nothing is unpacked; Windows has a\b
            archive = zipfile.ZipFile(path)
            found = {Path(name.replace("\\", "/")): name for name in archive.namelist()}
            read = archive.read
        else:
            some = [path, *(p for depth in ("*", "*/*", "*/*/*") for p in path.glob(depth))]
            found = {p.relative_to(path.parent): p for p in some if p.is_file()}
            read = Path.read_bytes
        texts = {}
        # of several files the last stays: the one with the sheet's own name, then the least deep
        own_name = {p: p.name in FILES.values() for p in found}
        for p in sorted(found, key=lambda p: (own_name[p], -len(p.parts), -len(p.name), p)):
            hidden = any(part.startswith((".", "__MACOSX")) for part in p.parts)
            if (match := NAME.fullmatch(p.name)) and not hidden:
                texts[match[1].lower() + ".py"] = read(found[p])
    except Exception as e:  # whatever a foreign file makes zipfile or the system raise
        raise Refused(f"it cannot be read: {e!r}") from None
    if not texts:
        raise Refused(f"it has none of {', '.join(sorted({*FILES.values()}))}")
    return texts


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
    add("--out", type=Path, help="a csv, to which a line is added after each student")
    add("--seed", type=int, help="of the random inputs, to grade with the same ones again")
    args = parser.parse_args(argv)
    for path in args.submissions:
        if not os.path.exists(path):
            raise Refused(f"there is no file or folder {path}")
    if args.out and args.out.suffix != ".csv":
        raise Refused(f"--out {args.out} must end with .csv")
    checks = [check for check in CHECKS if check[0] in args.exercise]
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f"the random inputs are those of --seed {seed}", file=sys.stderr)
    torch.set_num_threads(1)  # of processes that are forked
    with open(args.out or os.devnull, "w", newline="", encoding="utf-8", buffering=1) as file:
        table = csv.writer(file)
        sheets = [f"sheet {sheet}" for sheet in args.exercise]
        table.writerow(["student", "points", *sheets, "feedback", "handed in"])
        for path in args.submissions:
            rows = grade(path, checks, seed)
            points = [sum(r[2] for r in rows if r[0] == sheet) for sheet in args.exercise]
            # no reason begins with what a spreadsheet takes for a formula
            reasons = " | ".join(dict.fromkeys(f"{row[0]}: {row[4]}" for row in rows if row[4]))
            table.writerow([Path(path).stem, sum(points), *points, reasons, path])
            print(as_text(path, rows), flush=True)


if __name__ == "__main__":
    one_sentence_errors(main)()
