"""
Write a starter: the project without the functions that students write, their sheets and checks.

    python assignments/make.py starter
    python assignments/make.py starter --given 1 4       in which sheets 1 and 4 are solved

It is made from the project's files at this moment. grade.py grades what comes back.
"""

import ast
import shutil
import zipfile
from pathlib import Path

from checks import FILES

from common import ROOT, ArgumentParser, Refused, make_folder, one_sentence_errors

TO_WRITE = {
    1: ["rope_freqs", "rotation_tables", "apply_rotation"],
    2: ["alibi_slopes", "ALiBi.scores", "ALiBi.attend"],
    3: ["above_floor"],
    4: ["fourier_tables", "FoPE.identity", "FoPE.draw_noise"],
    5: ["task_accuracy"],
    6: ["MyEmbedding.rotate"],
}
HIDDEN = {2: ["ALiBi.with_bias"], 3: ["EXAMPLE"]}  # what else would show a solution
HANDED_OUT = ["*.py", "LICENSE", "requirements.txt", "runs/setup.sh", "runs/demo.sh"]
HANDED_OUT += ["results/mechanism/*e*.png"]
HANDED_OUT += ["assignments/[1-7].md", "assignments/[cg]*.py"]  # checks, child, grade


def find(text, name):
    """The ast node of a function, a class, Class.method, or a constant."""
    node = ast.parse(text)
    for part in name.split("."):
        names = {getattr(n, "name", None) or ast.unparse(n).split(" ")[0]: n for n in node.body}
        node = names[part]
    return node


def without_solutions(text, file, given):
    """A file's text without the sheets that are not given: signatures and docstrings stay."""
    for sheet in {sheet for sheet in TO_WRITE if FILES[sheet] == file} - {*given}:
        for name in HIDDEN.get(sheet, []) + TO_WRITE[sheet]:
            node, lines = find(text, name), text.split("\n")
            if name in TO_WRITE[sheet]:
                first = node.body[0]
                start = first.end_lineno if ast.get_docstring(node) else first.lineno - 1
                stub = f'raise NotImplementedError("exercise {sheet}: {name} is yours to write")'
                lines[start : node.end_lineno] = [" " * first.col_offset + stub]
            else:
                del lines[node.lineno - 1 : node.end_lineno]
            text = "\n".join(lines)
    return text


def main(argv=None):
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="a new or empty folder")
    add("--given", nargs="*", type=int, choices=TO_WRITE, default=[], help="sheets solved already")
    args = parser.parse_args(argv)
    if any(make_folder(args.folder).iterdir()):
        raise Refused(f"{args.folder} is not empty; choose another folder")
    for path in (path for pattern in HANDED_OUT for path in ROOT.glob(pattern)):
        file = args.folder / path.relative_to(ROOT)
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, file)
    shutil.copy(ROOT / "assignments" / "mine.py", args.folder)
    with zipfile.ZipFile(args.folder / "assignments" / "answers.zip", "w") as archive:
        for path in args.folder.glob("*.py"):
            archive.write(path, path.name)
    for file in {*FILES.values()}:
        text = without_solutions((args.folder / file).read_text("utf-8"), file, args.given)
        (args.folder / file).write_text(text, encoding="utf-8")
    readme = (ROOT / "assignments" / "starter.md").read_text(encoding="utf-8")
    for sheet in args.given:
        readme = readme.replace(f"| [{sheet}.", f"| solved already: [{sheet}.")
    (args.folder / "README.md").write_text(readme, encoding="utf-8")
    print(f"wrote {args.folder}; its README.md says how to start")


if __name__ == "__main__":
    one_sentence_errors(main)()
