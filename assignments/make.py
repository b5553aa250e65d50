"""
Write a starter copy of the project: the functions of the six exercises without their bodies,
everything else as it is.

    python assignments/make.py ~/starter
    python assignments/make.py ~/solution --solution        with the bodies: full marks

The copy is made from the project's files at this moment. Hand it out; grade.py grades what comes
back.
"""

import shutil
from pathlib import Path

from exercises import EXERCISES, ROOT, reference, remove_body

from common import ArgumentParser, Refused, one_sentence_errors

# Of the results the figures, of this folder the students' pages, no tests of what is left out.
HANDED_OUT = ["*.py", "*.md", "*.toml", "*.txt", "LICENSE", "runs/*.sh", "tests/*.py"]
HANDED_OUT += ["experiments/*.py", "experiments/*.ipynb", "assignments/[1-6].md"]
HANDED_OUT += ["paper/*.py", "paper/*.txt"]
HANDED_OUT += ["results/*.png", "results/mechanism/*.png"]
LEFT_OUT = [f"tests/test_{name}.py" for name in ("assignments", "paper", "readme")]


def exercise_files(solution):
    """{path: text} of the files that exercises change, with or without the functions to write."""
    texts = {}
    for number, (_, functions, _) in EXERCISES.items():
        for file, names in functions.items():
            texts.setdefault(file, reference(file))
            for name in [] if solution else names:
                texts[file] = remove_body(texts[file], name, number)
    return texts


def main(argv=None):
    parser = ArgumentParser(__doc__)
    parser.add_argument("folder", help="a new or empty folder")
    parser.add_argument("--solution", action="store_true", help="keep the functions")
    args = parser.parse_args(argv)
    out = Path(args.folder)
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} is not empty; choose another folder")
    texts = exercise_files(args.solution)
    for path in sorted(path for pattern in HANDED_OUT for path in ROOT.glob(pattern)):
        file = str(path.relative_to(ROOT))
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        if file in texts:
            (out / file).write_text(texts[file], encoding="utf-8")
        elif file not in LEFT_OUT:
            shutil.copy(path, out / file)
    print(f"wrote {out}; start with {out}/assignments/1.md")


if __name__ == "__main__":
    one_sentence_errors(main)()
