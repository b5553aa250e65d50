"""
The tables in README.md and in the texts of this folder, from the json files beside it.

    python results/tables.py                 makes them anew

A table stands between <!-- table NAME --> and <!-- end table -->. names.toml says which rows it
has, if not all, and what they are called there. The numbers are those of rows.py. The comparisons
that were named beforehand are tested anew, too.
"""

import math
import re
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
from scipy import stats

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from filler import filler_table  # noqa: E402
from wrap import damage_left  # noqa: E402

import rows  # noqa: E402
from common import file_sha256, one_sentence_errors, read_json, write_atomically  # noqa: E402
from hf.places import places_table, read_places  # noqa: E402
from rows import cell, grouped, half_interval, is_text, markdown, n_models, values_at  # noqa: E402

TEXTS = [ROOT / "README.md", ROOT / "hf" / "README.md"]
TEXTS += [RESULTS / f"{name}.md" for name in ("README", "APPENDIX", "TABLES")]
# the studies at 512 tokens whose models are trained alike, and those that read them otherwise
AS_TRAINED = ("figure1", "figure1_all", "parts", "enough", "equations", "partial")
AS_TRAINED = (*AS_TRAINED, "table2", "figure6c")
ALL = (*AS_TRAINED, "untrained", "keys", "temperature")
TEXT, KEYS = "perplexity", "passkey_anywhere"
LONGER = [512, 2048, 8192]
PLACES = [(8, 16), (16, 32), (32, 64), (384, 512)]  # in 512 bytes
MORE = {"a tenth more": "figure4", "a quarter more": "figure4_quarter"}  # training
NAMES = tomllib.loads((RESULTS / "names.toml").read_text(encoding="utf-8"))

# --- the rows that the texts cite


@cache
def rows_of(*studies):
    return rows.read_rows([RESULTS / f"{name}.json" for name in studies])


def of_kind(found, kind):
    return [row for row in found if row["kind"] == kind]


def learned():
    """Passkeys of models that have learned the task: they find 90 % at 512 tokens."""
    keys = of_kind(rows_of(*ALL), KEYS)
    at_512 = [row for row in keys if row["length"] == 512 and row["accuracy"] >= 0.9]
    models = {(row["label"], row["seed"]) for row in at_512}
    found = [row for row in keys if (row["label"], row["seed"]) in models]
    return [row | {"kind": "learned", "finds": row["accuracy"] >= 0.9} for row in found]


def texts():
    """
    Text, also by place in 512 bytes, and by counting with some letters of context. Of RoPE that
    reads otherwise: what share of its loss at 8192, above that with a window, this takes away.
    """
    found = of_kind(rows_of(*ALL), TEXT)
    for result in read_json(RESULTS / "mechanism" / "ngram.json")["results"]:
        label = f"counting {result['recipe']['pos_args']['context']}"
        about = {"kind": TEXT, "label": label, "seed": result["recipe"]["seed"]}
        found += [row | about for row in rows.rows_of(result)]
    at_8192 = {(row["label"], row["seed"]): row["loss"] for row in found if row["length"] == 8192}
    for row in found:
        row = row | {"removed": None}
        for a, b in PLACES:  # at 512 it has 128 parts of 4 bytes
            row[f"bytes {a} to {b}"] = np.mean(row["by_position"][a // 4 : b // 4])
        if row["label"].endswith("told the length") and row["length"] == 8192:
            most, least = (at_8192[la, row["seed"]] for la in ("RoPE", "RoPE, window of 512"))
            row["removed"] = (most - row["loss"]) / (most - least)
        yield row


def trained_further():
    for kind, study in MORE.items():
        yield from (row | {"kind": kind} for row in rows_of(study))


@cache
def every_row():
    """{label: all rows that a table below may need}"""
    found = [*texts(), *of_kind(rows_of(*ALL), KEYS), *learned(), *trained_further()]
    of_60M = [row for row in rows_of("gpu_60M") if is_text(row)]
    found += [row | {"kind": row["kind"].replace(TEXT, "60M")} for row in of_60M]
    return grouped(found, "label")


# --- the tables that the texts cite


def table(title, columns, counts=(), names=None, intervals=True):
    """
    A row for each label, or for each of names, {what it is called: its label, or several}.
    columns: (title, length, kind, number[, factor, digits]). counts: (title, kind, number), how
    many models have it. intervals: whether a mean has its interval.
    """
    lines, found = [], every_row()
    for called, labels in (names or {label: label for label in found}).items():
        kinds = {}  # of several labels the last one that has a kind counts
        for label in [labels] if isinstance(labels, str) else labels:
            kinds |= grouped(found[label], "kind")
        cells = []
        for _, length, kind, number, *scale in columns:
            values = values_at(kinds.get(kind, []), number, length)
            text = cell(values, *scale)
            if number == "finds":
                text = f"{sum(values)} of {len(values)}" if values else ""
            cells.append(text if intervals else text.partition(" ± ")[0])
        models = [str(n_models(kinds.get(kind, []), number)) for _, kind, number in counts]
        if any(cells):
            lines.append([called, *cells, *models])
    return markdown([title, *(column[0] for column in (*columns, *counts))], lines)


def at(lengths, title, *rest):
    """Columns of one number at several lengths."""
    return [(title.format(n, n // 512), n, *rest) for n in lengths]


def first():
    """What README's first commands print."""
    return rows.table(of_kind(rows_of("models"), TEXT), "perplexity per byte", "perplexity", 1, 2)


def headline():
    """Perplexities, and passkeys of models that have learned the task."""
    columns = at([512], "perplexity at {}", TEXT, "perplexity", 1, 1)
    columns += at([8192], "at {}", TEXT, "perplexity", 1, 1)
    columns += at([2048], "near passkeys at {}, %", "learned", "near", 100, 0)
    columns += at([2048], "far ones, %", "learned", "far", 100, 0)
    columns += at([2048], "models that find 90 % at {}", "learned", "finds")
    return table("", columns, names=NAMES["headline"], intervals=False)


def summary():
    """All models that were trained alike and read as they were trained."""
    columns = at(LONGER, "nats per byte, {}", TEXT, "loss")
    columns += at(LONGER, "% of whole passkeys, {}", KEYS, "accuracy", 100, 0)
    counts = [("models for text", TEXT, "loss"), ("for passkeys", KEYS, "accuracy")]
    return table(
        "embedding", columns, counts, {row["label"]: row["label"] for row in rows_of(*AS_TRAINED)}
    )


def ngram():
    columns = at([512, 8192], "at {}", TEXT, "loss")
    for a, b in PLACES:
        columns += at([512], f"bytes {a} to {b}", TEXT, f"bytes {a} to {b}")
    return table(
        "nats per byte", columns, [("models", TEXT, "loss")], names=NAMES["ngram"], intervals=False
    )


def equations():
    """On text, FoPE by the equations less the same floor without a series."""
    labels = ("FoPE, by the equations", "p-RoPE, p = 0.5")
    found = of_kind(rows_of("enough", "equations"), TEXT)
    less = rows.minus([row for row in found if row["label"] in labels], labels[1], "loss")
    return rows.table(less, "nats per byte, minus p-RoPE", "loss", 1, 2, "+")


def untrained():
    columns = at([512, 1024, 2048, 4096, 8192], "{} ({}x)", TEXT, "loss")
    columns += at([8192], "damage removed at {}, %", TEXT, "removed", 100, 0)
    return table("nats per byte", columns, [("models", TEXT, "loss")], names=NAMES["untrained"])


def more():
    return table(
        "nats per byte at 8192", [(kind, 8192, kind, "loss") for kind in MORE], names=NAMES["more"]
    )


def harms():
    """Of models that have learned the task."""
    columns = at([2048], "near at {}, %", "learned", "near", 100, 0)
    columns += at([2048], "far at {}, %", "learned", "far", 100, 0)
    columns += at([2048, 8192], "all at {}, %", "learned", "accuracy", 100, 0)
    counts = [("have learned the task", "learned", "near"), ("of", KEYS, "accuracy")]
    return table("whole passkeys", columns, counts, names=NAMES["harms"], intervals=False)


def of_filler(columns):
    return filler_table(read_json(RESULTS / "mechanism" / "filler.json")["models"], columns)


def masked():
    columns = {"from none": "all far filler seen", "known distances": "all, at known distances"}
    columns |= {"every 8th": "every 8th token", "every 8th block": "every 8th block of 64"}
    return of_filler(columns | {"from both": "none"})


def steps():
    columns = {f"from {step}": f"hidden from {step}" for step in ("the question", "the passkey")}
    return of_filler({"from none": "as it is"} | columns | {"from both": "hidden from both"})


def sizes():
    columns = []
    for title, corpus in (("nats per byte of books, {}", "books"), ("of C4, {}", "c4")):
        columns += at(LONGER, title, f"60M on {corpus}", "bits_per_byte", math.log(2), 2)
    return table("60M", columns)


def stays(runs, pairs, ways):
    """What stays of the damage if far tokens get other angles in these pairs, over all ways."""
    conditions = [f"{pairs}, {way}" for way in ways]
    ran = [run for run in runs if conditions[0] in run["removed"]]
    return cell([np.mean([damage_left(run, c) for c in conditions]) for run in ran], digits=0)


def cause():
    """What stays of RoPE's damage at 2048 if some pairs of far tokens get other angles."""
    study, of_60M = (read_json(RESULTS / "mechanism" / f"{n}.json") for n in ("wrap", "wrap_60M"))
    known = [f"held at {distance}" for distance in study["held"] if 113 < distance < 512]
    new = [f"held at {distance}" for distance in study["held"] if distance >= 512]
    lines, every = [], ("slow", "fast", "both")
    for title, found, ways in (
        ("far tokens get the angles of many known distances, 256 to 511", study, ["wrapped"]),
        ("the same at 60M parameters", of_60M, ["wrapped"]),
        ("all get those of one distance: six known ones, 170 to 455 (mean)", study, known),
        ("all get those of one distance: 19 new ones, 512 to 1536 (mean)", study, new),
    ):
        runs = [run for run in found["runs"] if run["name"] == "rope"]
        cells = (stays(runs, pairs, ways) for pairs in every)
        lines.append([title, *cells, str(len(runs))])
    columns = ["slow pairs alone changed", "fast pairs alone", "both", "models"]
    return markdown(["% of the damage that stays", *columns], lines)


def peaks():
    """The same of the fast pairs, at peaks and dips of their curve."""
    study, lines = read_json(RESULTS / "mechanism" / "wrap_curve.json"), []
    for title, distances in (("a peak", study["held"][:5]), ("a dip", study["held"][5:])):
        ways = [f"held at {distance}" for distance in distances]
        title = f"{title} of the fast pairs' curve (mean of five)"
        lines.append([title, stays(study["runs"], "fast", ways)])
    return markdown(["all far tokens get the angles of", "% of the damage that stays"], lines)


def score():
    """The same, if the scores of far tokens are lowered or raised, too."""
    runs = read_json(RESULTS / "mechanism" / "wrap_score.json")["runs"]
    left = ("none, lowered", "slow, wrapped, raised", "slow, wrapped")
    lowered, raised, known = (cell([damage_left(run, c) for run in runs], digits=0) for c in left)
    lines = [["new angles in the slow pairs", "100", lowered]]
    lines.append(["known angles in the slow pairs", raised, known])
    return markdown(["% of the damage that stays", "high scores", "low scores"], lines)


def places():
    """The loss of SmolLM2 by place in a long text."""
    names = NAMES["places"]
    losses, length = read_places([RESULTS / "smollm2" / f"{file}.json" for file in names])
    return places_table({names[file]: of_file for file, of_file in losses.items()}, length)


# --- what was named before the models were read past the training length

# The files of comparisons that were named together, and their seeds. STUDIES.md says more.
SEEDS = {"primary": range(1, 11), "primary_enough": range(3, 11), "primary_untrained": range(3, 11)}
# some models of a comparison are in other files
BESIDE = {"enough": ("figure1", "parts"), "untrained": ("figure1",), "keys": ("enough",)}


def compare(name):
    """Test the comparisons of a file. p is that of the sign flips of the paired differences."""
    for one in read_json(RESULTS / f"{name}.json"):
        found = rows_of(one["figure"], *BESIDE.get(one["figure"], ()))
        found = [row for row in of_kind(found, one["kind"]) if row["seed"] in SEEDS[name]]
        less = rows.minus(found, one["to"], one["measure"])
        less = [r for r in less if (r["label"], r["length"]) == (one["label"], one["length"])]
        values = np.array([row[one["measure"]] for row in less])
        assert len(values) == len(SEEDS[name]), f"seeds of {one} are missing"
        flips = stats.permutation_test((values,), np.mean, permutation_type="samples")
        numbers = {"seeds": len(values), "mean": float(values.mean())}
        numbers |= {"half_interval": float(half_interval(values)), "p": float(flips.pvalue)}
        yield one | numbers


def correct(found):
    """Holm's correction of the p of all comparisons, which are one family: adds p_holm."""
    worst = 0.0
    for rank, one in enumerate(sorted(found, key=lambda one: one["p"])):
        worst = max(worst, min(1.0, (len(found) - rank) * one["p"]))
        one["p_holm"] = worst


def primary_table(found):
    """Comparisons, and what they say: by the test, or by the interval alone."""
    measures = {"loss": ("loss", 1, 3), "accuracy": ("whole passkeys, %", 100, 0)}
    measures["token_accuracy"] = ("digits, %", 100, 0)
    lines = []
    for number, one in enumerate(found, 1):
        name, factor, digits = measures[one["measure"]]
        mean, half = (f"{factor * one[key]:+.{digits}f}" for key in ("mean", "half_interval"))
        so = "unclear"
        if abs(one["mean"]) > one["half_interval"]:
            so = "confirmed" if one["p_holm"] < 0.05 else "clear"
        elif one["measure"] == "loss" and abs(one["mean"]) + one["half_interval"] < 0.1:
            so = "level"
        compared = [f"{number}. {one['label']} minus {one['to']}", f"{name} at {one['length']}"]
        numbers = [f"{mean} ± {half[1:]}", str(one["seeds"]), f"{one['p_holm']:.2g}"]
        lines.append([*compared, *numbers, so])
    return markdown(["compared", "in", "difference", "models", "p (Holm)", "it is"], lines)


def named():
    found = [one for name in SEEDS for one in compare(name)]
    correct(found)
    return primary_table(found)


# --- all tables

CITED = (first, headline, summary, ngram, equations, untrained, more, harms, masked, steps, sizes)
CITED = {function.__name__: function for function in (*CITED, cause, peaks, score, places, named)}


def table_of_file(name):
    """All that a json file of this folder holds."""
    if name in SEEDS:
        return primary_table(read_json(RESULTS / f"{name}.json"))
    return rows.tables(rows_of(name), to=("FoPE", "RoPE"))


def all_tables():
    """Of every json file its tables, where it is from, and its checksum."""
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        content = read_json(path)
        every = content if isinstance(content, list) else [content]
        sources = Counter(f"commit {r['commit']}, {r['hardware']}" for r in every if "commit" in r)
        told = "; ".join(f"{n} of {source}" for source, n in sorted(sources.items()))
        command = f"; the first by `{every[0]['command']}`" if "command" in every[0] else ""
        about = f"Results: {told or len(every)}{command}. sha256 {file_sha256(path)[:16]}."
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
