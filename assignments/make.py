"""
Write a starter: the project without the functions that students write, their sheets and checks.

    python assignments/make.py starter
    python assignments/make.py starter --given 1 4       in which sheets 1 and 4 are solved

It is made from the project's files at this moment. grade.py grades what comes back.
"""

import ast
import shutil
import sys
import zipfile
from pathlib import Path

from checks import FILES, TO_WRITE

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import ROOT, ArgumentParser, Refused, make_folder, one_sentence_errors

HERE = Path(__file__).resolve().parent
# what else would show a solution
HIDDEN = {2: ["ALiBi.with_bias"], 4: ["EXAMPLE"]}

HANDED_OUT = ["*.py", "LICENSE", "requirements.txt", "runs/setup.sh", "runs/demo.sh"]
HANDED_OUT += ["paper/*.py", "paper/requirements.txt", "assignments/[1-7].md"]
HANDED_OUT += [f"assignments/{name}.py" for name in ("grade", "checks", "child")]
HANDED_OUT += ["results/mechanism/*e*.png"]


def find(text, name):
    """The ast node of a function, a class, Class.method, or a constant."""
    node = ast.parse(text)
    for part in name.split("."):
        names = {getattr(n, "name", None) or ast.unparse(n).split(" ")[0]: n for n in node.body}
        node = names[part]
    return node


def remove_body(text, name, exercise):
    """`text` with the body of `name` removed: signature and docstring stay, and raise an error."""
    node, lines = find(text, name), text.split("\n")
    indent = " " * node.body[0].col_offset
    stub = [f'{indent}raise NotImplementedError("exercise {exercise}: {name} is yours to write")']
    if isinstance(node, ast.ClassDef):
        stub = ["", f"{indent}def rotate(self, q, k):", f"    {stub[0]}"]
    start = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
    lines[start : node.end_lineno] = stub
    return "\n".join(lines)


def without_solutions(text, file, given):
    """A file's text with nothing of the sheets that are not given."""
    for sheet in {*TO_WRITE} - {*given}:
        for name in HIDDEN.get(sheet, []) if file == "fope.py" else []:
            node, lines = find(text, name), text.split("\n")
            text = "\n".join(lines[: node.lineno - 1]).rstrip() + "\n"
            text += "\n".join(lines[node.end_lineno :])
        for name in TO_WRITE[sheet] if FILES[sheet] == file else []:
            text = remove_body(text, name, sheet)
    return text.replace(" FoPERelative in paper/readings.py is the\n    equations' own.", "")


def main(argv=None):
    parser = ArgumentParser(__doc__)
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    words = dict(nargs="*", type=int, choices=TO_WRITE, default=[])
    parser.add_argument("--given", **words, help="sheets that are solved already")
    args = parser.parse_args(argv)
    if any(make_folder(args.folder).iterdir()):
        raise Refused(f"{args.folder} is not empty; choose another folder")
    for path in (path for pattern in HANDED_OUT for path in ROOT.glob(pattern)):
        if path.name != "readings.py":  # its rotations show how FoPE's are made
            file = args.folder / path.relative_to(ROOT)
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, file)
    shutil.copy(HERE / "mine.py", args.folder)
    with zipfile.ZipFile(args.folder / "assignments" / "answers.zip", "w") as archive:
        for file in sorted({*FILES.values()}):
            text = (args.folder / file).read_text(encoding="utf-8")
            archive.writestr(file, text)
            text = without_solutions(text, file, args.given)
            (args.folder / file).write_text(text, encoding="utf-8")
    lines = (HERE / "starter.md").read_text(encoding="utf-8").split("\n")
    for i, line in enumerate(lines):  # of its table
        if line.startswith(tuple(f"| [{sheet}." for sheet in args.given)):
            lines[i] = line.rsplit("|", 2)[0] + "| solved already |"
    (args.folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
    print(f"wrote {args.folder}; its README.md says how to start")


if __name__ == "__main__":
    one_sentence_errors(main)()
