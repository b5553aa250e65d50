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
from rows import NAMES as EMBEDDINGS  # noqa: E402
from rows import cell, grouped, markdown, n_models, read_rows, tables, values_at  # noqa: E402

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


def table(rows, title, columns, counts=(), names=None):
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
    lengths = [512, 1024, 2048, 4096, 8192]
    columns = at(NATS, [f"{n} ({n // 512}x)" for n in lengths], lengths)
    return table(rows_of(ALL), "nats per byte", columns, [("models", NATS)], NAMES["untrained"])


def removed():
    """The share of RoPE's loss at 8192, above that with a window of 512, that a remedy removes."""
    rows = [row for row in rows_of(["figure1", "untrained"]) if row["length"] == 8192]
    losses = {}
    for row in of_kind(rows, "perplexity"):
        losses.setdefault(row["label"], {})[row["seed"]] = row["loss"]
    as_it_is, window = losses["RoPE"], losses["RoPE, window of 512"]
    lines = []
    for name in ("slow pairs", "YaRN", "NTK"):
        read = losses[f"RoPE, {name} told the length"]
        shares = [(as_it_is[s] - read[s]) / (as_it_is[s] - window[s]) for s in sorted(read)]
        lines.append([f"{name} told the length", cell(shares, 100, 0), str(len(shares))])
    return markdown(["% of the loss above a window that goes away", "at 8192", "models"], lines)


def more():
    """The loss at 8192 after a tenth and after a quarter of the training, and without it."""
    columns, rows, none = [], [], rows_of(["untrained"])
    for share, study in (("a tenth more", "figure4"), ("a quarter more", "figure4_quarter")):
        rows += [row | {"kind": share} for row in rows_of([study]) + none]
        columns.append((share, (share, *NATS[1:]), 8192))
    return table(rows, "nats per byte at 8192", columns, names=NAMES["more"])


def read_results(names):
    """{(kind, label): its results}, whose labels are those of the rows."""
    results = [r for name in names for r in read_json(RESULTS / f"{name}.json", kind=list)]
    found = {}
    for result in results:
        label = result["label"] or EMBEDDINGS[result["recipe"]["pos"]]
        found.setdefault((result["kind"], label), []).append(result)
    return found


NEAR = 511  # tokens from passkey to answer: within the training length


def near_and_far(rows):
    """% of whole passkeys found near and far from the question: means over the models."""
    if not rows:
        return ["", ""]
    shares = []  # of each model: some were asked more passkeys than others
    for row in rows:
        right, near = np.array(row["right"]), np.array(row["distance"]) <= NEAR
        shares.append([right[near].mean(), right[~near].mean()])
    return [f"{100 * share:.0f}" for share in np.mean(shares, axis=0)]


def at_length(results, length):
    return [r["lengths"][str(length)] for r in results if str(length) in r["lengths"]]


def that_find_90(rows):
    return [row for row in rows if row["accuracy"] >= 0.9]


def harms():
    results, lines = read_results(["enough", "keys", "temperature", "figure1_all"]), []
    for label, name in NAMES["harms"].items():
        of_label = results[KEYS, label]
        at_512 = [r for r in of_label if "512" in r["lengths"]]
        learned = [r for r in at_512 if that_find_90(at_length([r], 512))]
        seeds = [r["recipe"]["seed"] for r in learned]
        cells = [f"{len(learned)} of {len(at_512)}"]
        for length in (2048, 8192):
            cells += near_and_far(at_length(of_label, length))
            rows = at_length([r for r in of_label if r["recipe"]["seed"] in seeds], length)
            found = [row["accuracy"] for row in rows]
            cells.append(f"{100 * np.mean(found):.0f}" if found else "")
        lines.append([name, *cells])
    columns = ["learned"]
    for n in (2048, 8192):
        columns += [f"near at {n}, %", "far, %", "by the learned, %"]
    return markdown(["whole passkeys", *columns], lines)


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
    """Means over the models: perplexities of text, and whole passkeys at 2048."""
    results, lines = read_results(["figure1", "enough", "keys", "untrained"]), []
    for name, (text, keys) in NAMES["headline"].items():
        of_text = [result["lengths"] for result in results.get(("perplexity", text), [])]
        of_keys = at_length(results[KEYS, keys], 2048)
        found = [*near_and_far(of_keys), f"{len(that_find_90(of_keys))} of {len(of_keys)}"]
        lines.append([name, *perplexities(of_text), *found])
    lines.append(["counting, by the last five letters", *perplexities(counted_letters(5))])
    lines[-1] += ["", "", ""]
    columns = ["perplexity at 512", "at 8192", "passkeys at 2048, near, %", "far, %"]
    return markdown(["", *columns, "models that find 90 %"], lines)


def perplexities(models):
    """The mean at 512 and at 8192 over models, of which each has its rows by length."""
    lengths = ("512", "8192") if models else ()
    means = [np.mean([rows[n]["perplexity"] for rows in models]) for n in lengths]
    return [f"{mean:.1f}" for mean in means] or ["", ""]


def counted_letters(context):
    """Of each seed what an n-gram with this many letters of context gives, by length."""
    counted = read_json(RESULTS / "mechanism" / "ngram.json")["results"]
    of_context = [r for r in counted if r["recipe"]["pos_args"]["context"] == context]
    return [result["lengths"] for result in of_context]


PLACES = [(8, 16), (16, 32), (32, 64), (384, 512)]  # in a window of 512
READERS = ["RoPE", "FoPE", "ALiBi", "KERPLE"]


def ngram():
    """The loss of models of text, also by place in 512 bytes, and what counting letters gives."""
    results = read_results(["figure1", "figure1_all", "parts", "enough"])
    models = {}
    for label in READERS:
        of_seed = {r["recipe"]["seed"]: r["lengths"] for r in results["perplexity", label]}
        models[label] = list(of_seed.values())
    models |= {f"counting letters, {n} bytes of context": counted_letters(n) for n in (3, 4, 5)}
    lines = []
    for label, of_label in models.items():
        losses = [np.mean([rows[n]["loss"] for rows in of_label]) for n in ("512", "8192")]
        places = np.mean([rows["512"]["by_position"] for rows in of_label], axis=0)
        losses += [places[a // 4 : b // 4].mean() for a, b in PLACES]  # 128 parts of 4 bytes
        lines.append([label, *(f"{loss:.2f}" for loss in losses), str(len(of_label))])
    columns = ["at 512", "at 8192", *(f"bytes {a} to {b}" for a, b in PLACES)]
    return markdown(["nats per byte", *columns, "models"], lines)


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
    return primary_table(
        [one for name in SEEDS for one in read_json(RESULTS / f"{name}.json", kind=list)]
    )


def places():
    """The loss of SmolLM2 by place in a long text."""
    names = NAMES["places"]["files"]
    return places_table(*read_places([RESULTS / "smollm2" / f"{name}.json" for name in names]))


CITED = (headline, summary, ngram, harms, masked, untrained, removed, more, sizes, cause, named)
CITED = {function.__name__: function for function in (*CITED, places)}


def table_of_file(name):
    """All that a json file of this folder holds."""
    content = read_json(RESULTS / f"{name}.json", kind=dict | list)
    if name in SEEDS:
        return primary_table(content)
    return tables(rows_of([name]), to=("FoPE", "RoPE"))


def all_tables():
    """Of every json file its tables, where it is from, and its checksum."""
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        content = read_json(path, kind=dict | list)
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
