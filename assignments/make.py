"""
Write a starter: the project without the functions that students write, their sheets and checks.

    python assignments/make.py starter

It is made from the project's files at this moment. grade.py grades what comes back.
"""

import ast
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import child
import torch
from checks import CHECKS, FILES, ROOT, Pair
from mine import MyEmbedding

import evaluation
import fope
from common import ArgumentParser, Refused, make_folder, one_sentence_errors

HERE = Path(__file__).resolve().parent
# {exercise: what is to be written in its file}
TO_WRITE = {
    1: ["rope_freqs", "rotation_tables", "apply_rotation"],
    2: ["alibi_slopes", "ALiBi.scores", "ALiBi.attend"],
    3: ["above_floor"],
    4: ["fourier_tables", "FoPE.identity", "FoPE.draw_noise"],
    5: ["task_accuracy"],
    6: ["MyEmbedding"],
}
# what else would show a solution
HIDDEN = {"fope.py": ["ALiBi.with_bias", "EXAMPLE"]}

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


def starter_text(path):
    """One of the project's files without solutions."""
    text = path.read_text(encoding="utf-8")
    for name in HIDDEN.get(path.name, []):
        node, lines = find(text, name), text.split("\n")
        text = "\n".join(lines[: node.lineno - 1]).rstrip() + "\n"
        text += "\n".join(lines[node.end_lineno :])
    for exercise, names in TO_WRITE.items():
        for name in names if FILES[exercise] == path.name else []:
            text = remove_body(text, name, exercise)
    if path.name == "fope.py":
        text = text.replace(" FoPERelative in paper/readings.py is the\n    equations' own.", "")
    if path.name == "baselines.py":
        text += "\nimport mine  # noqa: E402, F401\n"
    return text


def write_files(folder, patterns):
    """The project's files, those at its root without solutions, and mine.py beside them."""
    for path in [HERE / "mine.py", *(p for pattern in patterns for p in ROOT.glob(pattern))]:
        if path.name == "readings.py":  # its rotations show how FoPE's are made
            continue
        file = folder / (path.relative_to(ROOT) if path != HERE / "mine.py" else path.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.parent == folder and file.suffix == ".py":
            file.write_text(starter_text(path), encoding="utf-8")
        else:
            shutil.copy(path, file)


def record_answers(seed):
    """What the project's functions give, for each check in the order in which it asks."""
    answers = {"seed": seed}
    for exercise, _, name, _, function in CHECKS:
        replies = answers[f"{exercise} {name}"] = []
        project = evaluation if FILES[exercise] == "evaluation.py" else fope

        def right(*question, project=project, replies=replies):
            text = json.dumps(child.call(project, *question), default=child.encode)
            replies.append(json.loads(text, object_hook=child.decode))
            return replies[-1]

        mine = SimpleNamespace(MyEmbedding=MyEmbedding)
        Pair(partial(child.call, mine if exercise == 6 else project), right, seed).run(function)
    return answers


def main(argv=None):
    parser = ArgumentParser(__doc__)
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    args = parser.parse_args(argv)
    if any(make_folder(args.folder).iterdir()):
        raise Refused(f"{args.folder} is not empty; choose another folder")
    write_files(args.folder, HANDED_OUT)
    shutil.copy(HERE / "starter.md", args.folder / "README.md")
    torch.save(record_answers(seed=0), args.folder / "assignments" / "answers.pt")
    print(f"wrote {args.folder}; its README.md says how to start")


if __name__ == "__main__":
    one_sentence_errors(main)()
