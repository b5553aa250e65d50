"""
The tables in README.md and in the texts of this folder, from the json files beside it.

    python results/tables.py                 makes them and summary.csv anew

A table stands between <!-- table NAME --> and <!-- end table -->. Which rows it has, and what they
are called there, is said here; the numbers are those of rows.py.
"""

import csv
import math
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from bench import bench_table  # noqa: E402
from named import PRIMARY, primary_table  # noqa: E402
from wrap import cause_table  # noqa: E402

from common import file_sha256, one_sentence_errors, read_json, write_atomically  # noqa: E402
from rows import NAMES, cell, grouped, markdown, n_models, read_rows, tables, values_at  # noqa: E402

TEXTS = [ROOT / "README.md", RESULTS / "README.md", RESULTS / "TABLES.md"]
# the studies at 512 tokens whose models are trained alike, and those that read them otherwise
AS_TRAINED = ["figure1", "figure1_all", "parts", "enough", "partial", "table2", "figure6c"]
ALL = [*AS_TRAINED, "untrained", "keys", "temperature"]
KEYS = "passkey_anywhere"
LENGTHS = [512, 1024, 2048, 4096, 8192]
# title in summary.csv, kind, number, factor, digits
NATS = ("nats per byte", "perplexity", "loss", 1, 2)
BITS = ("bits per byte", "perplexity", "bits_per_byte", 1, 2)
PERPLEXITY = ("perplexity", "perplexity", "perplexity", 1, 1)
WHOLE = ("% of whole passkeys", KEYS, "accuracy", 100, 0)
NLL = ("NLL of a digit", KEYS, "answer_nll", 1, 2)
DIGITS = ("% of digits", KEYS, "token_accuracy", 100, 0)

HEADLINE = [  # README's: what it is called there, the label for text, the label for passkeys
    ("RoPE", "RoPE", "RoPE, newer models"),
    (
        "the same, read with YaRN and its temperature",
        "RoPE, YaRN told the length, with temperature",
        "RoPE, YaRN told the length, with temperature",
    ),
    ("FoPE", "FoPE", "FoPE, newer models"),
    ("the same, read with the temperature", "FoPE, with temperature", "FoPE, with temperature"),
    ("ALiBi", "ALiBi", "ALiBi"),
]
UNTRAINED = {
    "RoPE": "RoPE, as it was trained",
    "RoPE, YaRN told the length": "YaRN told the length",
    "RoPE, YaRN told the length, with temperature": "YaRN told the length, with its temperature",
    "RoPE, YaRN x16": "YaRN x16",
    "RoPE, slow pairs told the length": "slow pairs told the length",
    "RoPE, NTK told the length": "NTK told the length",
    "RoPE, window of 512": "a window of 512",
    "FoPE": "trained with FoPE",
    "FoPE, window of 512": "trained with FoPE, a window of 512",
    "RoPE, theta 94": "trained with theta 94",
    "RoPE, theta 94, window of 512": "trained with theta 94, a window of 512",
}
MORE = {
    "RoPE to RoPE": "RoPE",
    "RoPE to RoPE + YaRN x16": "RoPE with YaRN",
    "RoPE to FoPE, authors' way": "RoPE changed to FoPE, moved",
    "RoPE to FoPE": "RoPE changed to FoPE, kept",
    "FoPE to FoPE": "FoPE from the start, by the authors' code",
    "FoPE to FoPE, own pairs": "FoPE from the start, a new pair for each new frequency",
    "FoPE to FoPE + YaRN x16": "FoPE from the start, with YaRN",
}
NO_MORE = {
    "RoPE, YaRN told the length": "RoPE, no more training, reads with YaRN",
    "RoPE, window of 512": "RoPE, no more training, reads with a window of 512",
}


def rows_of(names):
    return read_rows([RESULTS / f"{name}.json" for name in names])


def cells(rows, numbers, lengths, count=True):
    """{label: [each number at each length, how many models have each number]}, as text."""
    found = {}
    for label, models in grouped(rows, "label").items():
        found[label], counts = [], []
        for _, kind, number, *how in numbers:
            of_kind = [row for row in models if row["kind"] == kind]
            found[label] += [cell(values_at(of_kind, number, n), *how) for n in lengths]
            counts.append(str(n_models(of_kind, number) or ""))
        found[label] += counts * count
    return {label: row for label, row in found.items() if any(row[: len(lengths) * len(numbers)])}


def titles(numbers, lengths):
    return [f"{title}, {n}" for title, *_ in numbers for n in lengths]


def summary():
    """Text and passkeys of models trained on as many tokens, and read as they were trained."""
    numbers, lengths = [NATS, WHOLE], (512, 2048, 8192)
    found, columns = cells(rows_of(AS_TRAINED), numbers, lengths), titles(numbers, lengths)
    lines = [[label, *row[:6], *(n or "0" for n in row[6:])] for label, row in found.items()]
    return markdown(["embedding", *columns, "models for text", "for passkeys"], lines)


def keys():
    numbers, lengths = [WHOLE, NLL, DIGITS], (512, 2048, 8192)
    rows = [row for row in rows_of(ALL) if row["kind"] == KEYS]
    lines = [[label, *row[:-2]] for label, row in cells(rows, numbers, lengths).items()]
    return markdown(["embedding", *titles(numbers, lengths), "models"], lines)


def untrained():
    found = cells(rows_of(ALL), [NATS], LENGTHS)
    lines = [[name, *found[label]] for label, name in UNTRAINED.items()]
    columns = [f"{n} ({n // 512}x)" for n in LENGTHS]
    return markdown(["nats per byte", *columns, "models"], lines)


def more():
    tenth, quarter, none = (
        cells(rows_of(names), [NATS], (1024, 8192), count=False)
        for names in (["figure4"], ["figure4_quarter"], ["untrained"])
    )
    lines = [[name, *tenth[label], *quarter[label]] for label, name in MORE.items()]
    lines += [[name, *none[label], *none[label]] for label, name in NO_MORE.items()]
    columns = [f"a {share} more, at {n}" for share in ("tenth", "quarter") for n in (1024, 8192)]
    return markdown(["nats per byte", *columns], lines)


def read_results(names):
    """{(kind, label): its results}, whose labels are those of the rows."""
    results = [r for name in names for r in read_json(RESULTS / f"{name}.json", kind=list)]
    found = {}
    for result in results:
        label = result["label"] or NAMES[result["recipe"]["pos"]]
        found.setdefault((result["kind"], label), []).append(result)
    return found


NEAR = 511  # tokens between passkey and question: training had as many
HARMS = {  # a label, and what it is called there
    "RoPE, newer models": "RoPE",
    "RoPE, with temperature": "the same, with the temperature alone",
    "RoPE, YaRN told the length": "the same, with YaRN alone",
    "RoPE, YaRN told the length, with temperature": "the same, with YaRN and its temperature",
    "RoPE, window of 512": "the same, with a window of 512",
    "FoPE, newer models": "FoPE",
    "FoPE, with temperature": "the same, with the temperature",
    "FoPE": "FoPE, older models",
    "FoPE, floor alone": "the floor alone",
    "ALiBi": "ALiBi",
}


def near_and_far(results, length):
    """% of whole passkeys found near and far from the question, and by how many models 90 %."""
    rows = [r["lengths"][str(length)] for r in results if str(length) in r["lengths"]]
    if not rows:
        return ["", "", ""]
    right = np.concatenate([row["right"] for row in rows])
    near = np.concatenate([row["distance"] for row in rows]) <= NEAR
    shares = (f"{100 * right[group].sum() / group.sum():.0f}" for group in (near, ~near))
    return [*shares, n_that_find_90(rows)]


def n_that_find_90(rows):
    return f"{sum(row['accuracy'] >= 0.9 for row in rows)} of {len(rows)}"


def harms():
    results, lines = read_results(["enough", "keys", "temperature", "figure1_all"]), []
    for label, name in HARMS.items():
        of_label = results[KEYS, label]
        learned = n_that_find_90([r["lengths"]["512"] for r in of_label if "512" in r["lengths"]])
        cells = [*near_and_far(of_label, 2048), *near_and_far(of_label, 8192)]
        lines.append([name, learned, *cells])
    columns = ["models that find 90 % at 512"]
    for n in (2048, 8192):
        columns += [f"near at {n}, %", "far, %", "models that find 90 %"]
    return markdown(["whole passkeys", *columns], lines)


def headline():
    """Means alone: perplexities of text, and whole passkeys at 2048."""
    results, lines = read_results(["figure1", "enough", "keys", "untrained"]), []
    for name, text, keys in HEADLINE:
        of_text = [result["lengths"] for result in results["perplexity", text]]
        means = (np.mean([rows[n]["perplexity"] for rows in of_text]) for n in ("512", "8192"))
        found = near_and_far(results[KEYS, keys], 2048)
        lines.append([name, *(f"{mean:.1f}" for mean in means), *found, str(len(of_text))])
    counted = counted_letters(5)
    means = (np.mean([rows[n]["perplexity"] for rows in counted]) for n in ("512", "8192"))
    lines.append(
        ["counting five letters", *(f"{mean:.1f}" for mean in means), "", "", "", str(len(counted))]
    )
    columns = ["perplexity at 512", "at 8192", "passkeys at 2048, near, %", "far, %"]
    return markdown(["", *columns, "models that find 90 %", "models for text"], lines)


def counted_letters(context):
    """Of each seed what an n-gram with this many letters of context gives, by length."""
    counted = read_json(RESULTS / "mechanism" / "ngram.json")["results"]
    of_context = [r for r in counted if r["recipe"]["pos_args"]["context"] == context]
    return [result["lengths"] for result in of_context]


PLACES = [(8, 16), (32, 64), (384, 512)]  # in a window of 512
READERS = ["RoPE", "FoPE", "RoPE, theta 94", "RoPE + QK-norm", "ALiBi", "KERPLE"]


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
    numbers = [
        (title, f"perplexity on {corpus}", "bits_per_byte", math.log(2), 2)
        for title, corpus in (("nats per byte of books", "books"), ("of C4", "c4"))
    ]
    found = cells(rows_of(["gpu_60M"]), numbers, (512, 2048, 8192), count=False)
    lines = [[label, *row] for label, row in found.items()]
    return markdown(["60M", *titles(numbers, (512, 2048, 8192))], lines)


def cause():
    return cause_table(read_json(RESULTS / "mechanism" / "wrap_held.json")["runs"])


TABLES = (headline, summary, ngram, keys, harms, untrained, more, sizes, cause)
CITED = {function.__name__: function for function in TABLES}


def table_of_file(name):
    """All that a json file of this folder holds."""
    content = read_json(RESULTS / f"{name}.json", kind=dict | list)
    if name in PRIMARY:
        return primary_table(content)
    if name.startswith("bench"):
        return bench_table(content)
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


def summary_rows():
    """[[embedding, number, length, models, mean, half its 95 % interval], ...], as text."""
    lines = []
    for kind, numbers in (("perplexity", [NATS, BITS, PERPLEXITY]), (KEYS, [WHOLE, NLL, DIGITS])):
        rows = [row for row in rows_of(ALL) if row["kind"] == kind]
        for label, models in grouped(rows, "label").items():
            for title, _, number, *how in numbers:
                for n in sorted({row["length"] for row in models}):
                    mean, _, half = cell(values_at(models, number, n), *how).partition(" ± ")
                    lines.append([label, title, str(n), str(n_models(models, number)), mean, half])
    return lines


def main():
    for path in TEXTS:
        text = filled(path.read_text(encoding="utf-8"))
        write_atomically(path, lambda f, text=text: f.write(text.encode()))
    with open(RESULTS / "summary.csv", "w", newline="", encoding="utf-8") as f:
        names = ["embedding", "what", "tokens", "seeds", "mean", "half of 95 % interval"]
        csv.writer(f, lineterminator="\n").writerows([names, *summary_rows()])


if __name__ == "__main__":
    one_sentence_errors(main)()
