"""
The comparisons that were named before their models were read past the training length.

    python results/named.py            tests them again; primary.json and the others hold the same

A p is that of the sign flips of the paired differences; p_holm is corrected for the number of all
comparisons here. This list is closed.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
from scipy import stats

RESULTS = Path(__file__).resolve().parent
sys.path.insert(0, str(RESULTS.parent))

from common import Refused, one_sentence_errors, write_json  # noqa: E402
from rows import half_interval, markdown, minus, read_rows  # noqa: E402

# Of the six, the text models of floor and FoPE had been read. For each the seeds, and then the json
# file, kind of result, number, label, what it is compared with, multiple of the training length.
# Seeds that had been seen are left out: 0 of the first ten, 0 to 2 of the six. "accuracy" is that
# of whole passkeys, "token_accuracy" of digits.
TEXT, KEYS = ("perplexity", "loss"), ("passkey", "accuracy")
DIGITS, ANYWHERE = ("passkey", "token_accuracy"), ("passkey_anywhere", "token_accuracy")
WHOLE_ANYWHERE = ("passkey_anywhere", "accuracy")
PRIMARY = {
    "primary": (
        range(1, 11),
        (
            ("figure1", *TEXT, "RoPE", "FoPE", 1),
            ("figure1", *TEXT, "RoPE", "FoPE", 16),
            ("figure1", *TEXT, "ALiBi", "FoPE", 16),
            ("figure1", *KEYS, "RoPE", "FoPE", 2),
            ("figure1", *KEYS, "RoPE", "FoPE", 4),
            ("figure1", *KEYS, "ALiBi", "FoPE", 4),
            ("figure1", *DIGITS, "RoPE", "FoPE", 16),
            ("parts", *TEXT, "FoPE, floor alone", "FoPE", 16),
            ("parts", *TEXT, "FoPE, series alone", "RoPE", 16),
            ("parts", *TEXT, "RoPE + QK-norm", "FoPE + QK-norm", 16),
        ),
    ),
    "primary_enough": (
        range(3, 11),
        (
            ("enough", *TEXT, "RoPE, theta 94", "FoPE", 1),
            ("enough", *TEXT, "RoPE, theta 94", "FoPE", 16),
            ("enough", *TEXT, "FoPE, floor of 1024 alone", "FoPE, floor alone", 16),
            ("enough", *TEXT, "FoPE, sigma 1.2", "FoPE, floor alone", 16),
            ("enough", *ANYWHERE, "RoPE, theta 94", "FoPE", 4),
            ("enough", *ANYWHERE, "FoPE, floor alone", "FoPE", 4),
        ),
    ),
    # Named before a model of "untrained" or "rates" was trained. Two are level if the 95 % interval
    # of their difference lies within 0.1 nats, or within 15 points of whole passkeys; else one is
    # ahead, or it is unclear. Whole passkeys are those at 2048, each embedding at its own rate:
    # "rates" has left all of them at 3.5e-4. So FoPE and theta 94 are the models of "enough", which
    # had been seen. If the interval of the last comparison lies below 20 points, "keys need pairs
    # that stand still" is overturned; if above, it stands; else it is undecided.
    "primary_untrained": (
        range(3, 11),
        (
            ("untrained", *TEXT, "RoPE, YaRN told the length", "FoPE", 16),
            ("keys", *WHOLE_ANYWHERE, "RoPE, YaRN told the length", "FoPE", 4),
            ("enough", *WHOLE_ANYWHERE, "FoPE", "RoPE, theta 94", 4),
        ),
    ),
}
# some models of a comparison are in other files
BESIDE = {"enough": ("figure1", "parts"), "untrained": ("figure1",), "keys": ("enough",)}


def sign_flip_p(values):
    """
    The exact p value of paired differences (n,), n <= 20, of which neither sign is special: the
    share of the 2^n ways to flip their signs whose mean is as far from 0 as theirs.
    """
    signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
    means = np.abs((signs * values).mean(axis=1))
    return float((means >= np.abs(values.mean()) * (1 - 1e-12)).mean())


def compare(named, seeds, folder=RESULTS):
    """
    Test comparisons that were named together, as PRIMARY has them. Refused until all seeds are
    there.
    """
    found = []
    for file, kind, name, label, to, multiple in named:
        files = [Path(folder) / f"{one}.json" for one in (file, *BESIDE.get(file, ()))]
        rows = [row for row in read_rows(files) if row["kind"] == kind and row["seed"] in seeds]
        length = multiple * rows[0]["train_len"] if rows else 0
        less = [row for row in minus(rows, to, name) if row["label"] == label]
        values = np.array([row[name] for row in less if row["length"] == length])
        if len(values) != len(seeds):
            raise Refused(
                f"{folder} has not all of the {len(seeds)} seeds of {label} and {to}, "
                f"whose {kind} is to be compared ({file})"
            )
        found.append(
            {"figure": file, "kind": kind, "measure": name, "label": label, "to": to}
            | {"length": length, "seeds": len(values), "mean": float(values.mean())}
            | {"half_interval": float(half_interval(values)), "p": sign_flip_p(values)}
            | {"p_t": float(stats.ttest_1samp(values, 0).pvalue)}
        )
    return found


def correct(found):
    """Holm's correction of the p of all comparisons, which are one family: adds p_holm."""
    worst = 0.0
    for rank, one in enumerate(sorted(found, key=lambda one: one["p"])):
        worst = max(worst, min(1.0, (len(found) - rank) * one["p"]))
        one["p_holm"] = worst


def primary_table(found):
    """What compare() returns."""
    measures = {"loss": ("loss", 1, 3), "accuracy": ("whole passkeys, %", 100, 0)}
    measures["token_accuracy"] = ("digits, %", 100, 0)
    lines = []
    for one in found:
        name, factor, digits = measures[one["measure"]]
        mean, half = (f"{factor * one[key]:+.{digits}f}" for key in ("mean", "half_interval"))
        compared = f"{one['label']} minus {one['to']}, {name} at {one['length']} ({one['figure']})"
        lines.append([compared, str(one["seeds"]), f"{mean} ± {half[1:]}", f"{one['p_holm']:.2g}"])
    return markdown(["primary comparison", "models", "difference", "p (Holm)"], lines)


def main():
    found = {name: compare(named, seeds) for name, (seeds, named) in PRIMARY.items()}
    correct([one for group in found.values() for one in group])
    for name, group in found.items():
        write_json(RESULTS / f"{name}.json", group)
        print(primary_table(group))


if __name__ == "__main__":
    one_sentence_errors(main)()
