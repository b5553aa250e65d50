"""
The tables in README.md and in the texts of this folder, from the json files beside it.

    python results/tables.py                 makes them anew

A table stands between <!-- table NAME --> and <!-- end table -->. names.toml says which rows it
has, if not all, and what they are called there. The numbers are those of rows.py.
"""

import math
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from named import SEEDS, primary_table  # noqa: E402
from wrap import cause_table  # noqa: E402

from common import file_sha256, one_sentence_errors, read_json, write_atomically  # noqa: E402
from hf.places import places_table, read_places  # noqa: E402
from rows import cell, grouped, markdown, n_models, read_rows, tables, values_at  # noqa: E402
from rows import rows_of as rows_of_result  # noqa: E402
from rows import table as table_of_rows  # noqa: E402

TEXTS = [ROOT / "README.md", ROOT / "hf" / "README.md"]
TEXTS += [RESULTS / f"{name}.md" for name in ("README", "APPENDIX", "TABLES")]
# the studies at 512 tokens whose models are trained alike, and those that read them otherwise
AS_TRAINED = ["figure1", "figure1_all", "parts", "enough", "partial", "table2", "figure6c"]
ALL = [*AS_TRAINED, "untrained", "keys", "temperature"]
KEYS = "passkey_anywhere"
LONGER = [512, 2048, 8192]
# kind, number, factor, digits
NATS = ("perplexity", "loss", 1, 2)
WHOLE = (KEYS, "accuracy", 100, 0)

NAMES = tomllib.loads((RESULTS / "names.toml").read_text(encoding="utf-8"))  # of rows


def rows_of(names):
    return read_rows([RESULTS / f"{name}.json" for name in names])


def mean(values, factor=1, digits=2):
    """As rows.cell, without the interval."""
    return f"{factor * np.mean(values):.{digits}f}" if len(values) else ""


def table(rows, title, columns, counts=(), names=None, cell=cell):
    """
    A row for each label, or for each of names, {label: its name}. columns: [(title, what, length),
    ...]; counts: [(title, what), ...], how many models have this number. what: such as NATS.
    """
    found, lines = grouped(rows, "label"), []
    for label, name in (names or {label: label for label in found}).items():
        numbers, models = [], []
        for _, (kind, number, *how), n in columns:
            numbers.append(cell(values_at(of_kind(found[label], kind), number, n), *how))
        for _, (kind, number, *_) in counts:
            models.append(str(n_models(of_kind(found[label], kind), number)))
        if any(numbers):
            lines.append([name, *numbers, *models])
    return markdown([title, *(column[0] for column in (*columns, *counts))], lines)


def of_kind(rows, kind):
    return [row for row in rows if row["kind"] == kind]


def at(what, titles, lengths):
    """Columns of one number at several lengths."""
    return [(title, what, n) for title, n in zip(titles, lengths, strict=True)]


def summary():
    """Text and passkeys of models trained on as many tokens, and read as they were trained."""
    columns = at(NATS, [f"nats per byte, {n}" for n in LONGER], LONGER)
    columns += at(WHOLE, [f"% of whole passkeys, {n}" for n in LONGER], LONGER)
    counts = [("models for text", NATS), ("for passkeys", WHOLE)]
    return table(rows_of(AS_TRAINED), "embedding", columns, counts)


def untrained():
    """
    Models that are read otherwise than they were trained; and what share of RoPE's loss at 8192,
    above that with a window of 512, this takes away.
    """
    rows = of_kind(rows_of(ALL), "perplexity")
    at_8192 = {(row["label"], row["seed"]): row["loss"] for row in rows if row["length"] == 8192}
    for row in rows:
        row["removed"] = None
        if row["label"].endswith("told the length") and row["length"] == 8192:
            worst, best = (at_8192[la, row["seed"]] for la in ("RoPE", "RoPE, window of 512"))
            row["removed"] = (worst - row["loss"]) / (worst - best)
    lengths = [512, 1024, 2048, 4096, 8192]
    columns = at(NATS, [f"{n} ({n // 512}x)" for n in lengths], lengths)
    columns.append(("damage removed at 8192, %", ("perplexity", "removed", 100, 0), 8192))
    return table(rows, "nats per byte", columns, [("models", NATS)], NAMES["untrained"])


def more():
    """The loss at 8192 after a tenth and after a quarter of the training, and without it."""
    columns, rows, none = [], [], rows_of(["untrained"])
    for share, study in (("a tenth more", "figure4"), ("a quarter more", "figure4_quarter")):
        rows += [row | {"kind": share} for row in rows_of([study]) + none]
        columns.append((share, (share, *NATS[1:]), 8192))
    return table(rows, "nats per byte at 8192", columns, names=NAMES["more"])


def passkeys():
    """Rows of passkeys: all, and those of models that have learned the task, with 90 % at 512."""
    rows = of_kind(rows_of(ALL), KEYS)
    at_512 = [row for row in rows if row["length"] == 512]
    learned = {(row["label"], row["seed"]) for row in at_512 if row["accuracy"] >= 0.9}
    return rows, [row for row in rows if (row["label"], row["seed"]) in learned]


def harms():
    """Whole passkeys near and far, of models that have learned the task."""
    rows, learned = passkeys()
    rows += [row | {"kind": "learned"} for row in learned]
    columns = []
    for n in (2048, 8192):
        columns.append((f"near at {n}, %", ("learned", "near", 100, 0), n))
        columns.append(("far, %", ("learned", "far", 100, 0), n))
    counts = [("have learned the task", ("learned", "near")), ("of", WHOLE)]
    return table(rows, "whole passkeys", columns, counts, NAMES["harms"], mean)


MASKS = {
    "from none": "as it is",
    "from the question": "hidden from the question",
    "from the passkey": "from the passkey",
    "from both": "from both",
}


def masked():
    """Whole passkeys at 2048, with the far filler hidden by a mask: means over the models."""
    every = read_json(RESULTS / "mechanism" / "filler.json")["models"]
    every = [model for model in every if model["task"] == KEYS]
    kinds = {"RoPE": ("rope", False), "RoPE with YaRN": ("rope", True), "FoPE": ("fope", False)}
    lines = []
    for name, kind in kinds.items():
        models = [m for m in every if (m["recipe"]["pos"], m["yarn"]) == kind]
        for where in ("near", "far"):
            found = [[m[where][hidden] for m in models] for hidden in MASKS]
            shares = [f"{100 * np.mean(of_models):.0f}" for of_models in found]
            lines.append([f"{name}, {where}", *shares, str(len(models))])
    return markdown(["whole passkeys at 2048, %", *MASKS.values(), "models"], lines)


def headline():
    """Perplexities of text, and whole passkeys at 2048 by models that have learned the task."""
    texts = of_kind(rows_of(ALL), "perplexity") + counted_letters()
    (_, learned), lines = passkeys(), []
    for name, labels in NAMES["headline"].items():
        text, keys = (
            [row for row in rows if row["label"] == label]
            for rows, label in zip((texts, learned), labels, strict=True)
        )
        cells = [mean(values_at(text, "perplexity", n), 1, 1) for n in (512, 8192)]
        cells += [mean(values_at(keys, number, 2048), 100, 0) for number in ("near", "far")]
        found = values_at(keys, "accuracy", 2048)
        cells.append(f"{sum(share >= 0.9 for share in found)} of {len(found)}" if found else "")
        lines.append([name, *cells])
    columns = ["perplexity at 512", "at 8192", "near passkeys at 2048, %", "far ones, %"]
    return markdown(["", *columns, "models that find 90 % at 2048"], lines)


def first():
    """What README's first commands print."""
    texts = of_kind(rows_of(["models"]), "perplexity")
    return table_of_rows(texts, "perplexity per byte", "perplexity", 1, 2)


def counted_letters():
    """What counting with 3, 4 and 5 letters of context gives, as rows."""
    return [
        row
        | {"kind": "perplexity", "label": f"counting {r['recipe']['pos_args']['context']}"}
        | {"seed": r["recipe"]["seed"]}
        for r in read_json(RESULTS / "mechanism" / "ngram.json")["results"]
        for row in rows_of_result(r)
    ]


def ngram():
    """The loss of models of text, also by place in 512 bytes, and what counting letters gives."""
    rows = of_kind(rows_of(AS_TRAINED), "perplexity") + counted_letters()
    columns = at(NATS, ["at 512", "at 8192"], [512, 8192])
    for a, b in ((8, 16), (16, 32), (32, 64), (384, 512)):
        name = f"bytes {a} to {b}"
        for row in rows:
            row[name] = np.mean(row["by_position"][a // 4 : b // 4])  # at 512: 128 parts of 4 bytes
        columns.append((name, ("perplexity", name, 1, 2), 512))
    return table(rows, "nats per byte", columns, [("models", NATS)], NAMES["ngram"], mean)


def sizes():
    columns = []
    for title, corpus in (("nats per byte of books", "books"), ("of C4", "c4")):
        what = (f"perplexity on {corpus}", "bits_per_byte", math.log(2), 2)
        columns += at(what, [f"{title}, {n}" for n in LONGER], LONGER)
    return table(rows_of(["gpu_60M"]), "60M", columns)


def cause():
    return cause_table(read_json(RESULTS / "mechanism" / "wrap_held.json")["runs"])


def named():
    """All comparisons that were named beforehand."""
    return primary_table([one for name in SEEDS for one in read_json(RESULTS / f"{name}.json")])


def places():
    """The loss of SmolLM2 by place in a long text."""
    names = NAMES["places"]
    losses, length = read_places([RESULTS / "smollm2" / f"{file}.json" for file in names])
    return places_table({names[file]: of_file for file, of_file in losses.items()}, length)


CITED = (first, headline, summary, ngram, harms, masked, untrained, more, sizes, cause, named)
CITED = {function.__name__: function for function in (*CITED, places)}


def table_of_file(name):
    """All that a json file of this folder holds."""
    content = read_json(RESULTS / f"{name}.json")
    if name in SEEDS:
        return primary_table(content)
    return tables(rows_of([name]), to=("FoPE", "RoPE"))


def all_tables():
    """Of every json file its tables, where it is from, and its checksum."""
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        content = read_json(path)
        every = content if isinstance(content, list) else [content]
        sources = Counter(f"commit {r['commit']}, {r['hardware']}" for r in every if "commit" in r)
        told = "; ".join(f"{n} of {source}" for source, n in sorted(sources.items()))
        first = f"; the first by `{every[0]['command']}`" if "command" in every[0] else ""
        about = f"Results: {told or len(every)}{first}. sha256 {file_sha256(path)[:16]}."
        parts += [f"## {path.stem}", about, table_of_file(path.stem)]
    return "\n\n".join(parts)


def filled(text):
    """`text` with the table between each <!-- table ... --> and <!-- end table --> made anew."""

    def made(mark):
        name = mark[2]
        table = all_tables() if name == "all" else CITED.get(name, lambda: table_of_file(name))()
        return f"{mark[1]}{table}\n{mark[3]}"

    old = "(?:(?!<!-- table ).)*?"  # up to the next mark at most: one may lack its end
    pattern = rf"(<!-- table (\w+) -->\n){old}(<!-- end table -->)"
    return re.sub(pattern, made, text, flags=re.S)


def main():
    for path in TEXTS:
        text = filled(path.read_text(encoding="utf-8"))
        write_atomically(path, lambda f, text=text: f.write(text.encode()))


if __name__ == "__main__":
    one_sentence_errors(main)()
