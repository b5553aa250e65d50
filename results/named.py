"""
The comparisons that were named before their models were read past the training length.

    python results/named.py            tests them again; primary.json and the others hold the same

A p is that of the sign flips of the paired differences; p_holm is corrected for the number of all
comparisons here. This list is closed.
"""

import sys
from pathlib import Path

import numpy as np
from scipy import stats

RESULTS = Path(__file__).resolve().parent
sys.path.insert(0, str(RESULTS.parent))

from common import one_sentence_errors, read_json, write_json  # noqa: E402
from rows import half_interval, markdown, minus, read_rows  # noqa: E402

# Each json file holds comparisons that were named together: the study, the kind of result, the
# number, the label and what it is compared with, the length. These are their seeds; STUDIES.md says
# more.
SEEDS = {"primary": range(1, 11), "primary_enough": range(3, 11), "primary_untrained": range(3, 11)}
# some models of a comparison are in other files
BESIDE = {"enough": ("figure1", "parts"), "untrained": ("figure1",), "keys": ("enough",)}


def compare(named, seeds, folder=RESULTS):
    """Test comparisons that were named together."""
    found = []
    for one in named:
        studies = (one["figure"], *BESIDE.get(one["figure"], ()))
        rows = read_rows([folder / f"{study}.json" for study in studies])
        rows = [row for row in rows if row["kind"] == one["kind"] and row["seed"] in seeds]
        less = minus(rows, one["to"], one["measure"])
        less = [r for r in less if (r["label"], r["length"]) == (one["label"], one["length"])]
        values = np.array([row[one["measure"]] for row in less])
        assert len(values) == len(seeds), f"seeds of {one} are missing in {folder}"
        numbers = {"seeds": len(values), "mean": float(values.mean())}
        flips = stats.permutation_test((values,), np.mean, permutation_type="samples")
        numbers |= {"half_interval": float(half_interval(values)), "p": float(flips.pvalue)}
        found.append(one | numbers | {"p_t": float(stats.ttest_1samp(values, 0).pvalue)})
    return found


def correct(found):
    """Holm's correction of the p of all comparisons, which are one family: adds p_holm."""
    worst = 0.0
    for rank, one in enumerate(sorted(found, key=lambda one: one["p"])):
        worst = max(worst, min(1.0, (len(found) - rank) * one["p"]))
        one["p_holm"] = worst


def primary_table(found):
    """What compare() returns, and what it says: by the test, or by the interval alone."""
    measures = {"loss": ("loss", 1, 3), "accuracy": ("whole passkeys, %", 100, 0)}
    measures["token_accuracy"] = ("digits, %", 100, 0)
    lines = []
    for one in found:
        name, factor, digits = measures[one["measure"]]
        mean, half = (f"{factor * one[key]:+.{digits}f}" for key in ("mean", "half_interval"))
        so = "unclear"
        if abs(one["mean"]) > one["half_interval"]:
            so = "clear" if one["p_holm"] < 0.05 else "clear by the interval alone"
        elif one["measure"] == "loss" and abs(one["mean"]) + one["half_interval"] < 0.1:
            so = "level"
        compared = [f"{one['label']} minus {one['to']}", f"{name} at {one['length']}"]
        numbers = [f"{mean} ± {half[1:]}", str(one["seeds"]), f"{one['p_holm']:.2g}"]
        lines.append([*compared, *numbers, so])
    return markdown(["compared", "in", "difference", "models", "p (Holm)", "it is"], lines)


def main():
    paths = {RESULTS / f"{name}.json": seeds for name, seeds in SEEDS.items()}
    found = {path: compare(read_json(path), seeds) for path, seeds in paths.items()}
    correct([one for group in found.values() for one in group])
    for path, group in found.items():
        write_json(path, group)
        print(primary_table(group))


if __name__ == "__main__":
    one_sentence_errors(main)()
