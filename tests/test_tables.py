"""The statistics and Markdown tables that paper/ makes of result files."""

import csv
import json
import math
import re
import sys

import numpy as np
import pytest
from conftest import ROOT
from scipy import stats
from test_plot import result_file

from common import Refused
from paper import plot, tables
from paper import results as res
from paper.figures import FIGURES, PRIMARY

sys.path.insert(0, str(ROOT / "experiments"))
from strip import page_numbers


def write(path, results):
    path.write_text(json.dumps(results))
    return path


def evaluations(tmp_path, losses, kind="perplexity", data="bytes"):
    """Results of {label: [loss of seed 0, 1, ...]}, of RoPE as far as the files say."""
    results = []
    for label, values in losses.items():
        for seed, value in enumerate(values):
            result = json.loads(result_file(tmp_path, kind, "rope", seed, value).read_text())
            for row in result["lengths"].values():
                row |= {"loss": value, "perplexity": math.exp(value)}
            results.append(result | {"label": label, "data": f"data/{data}"})
    return results


def test_differences_are_paired_by_seed_with_a_t_interval(tmp_path):
    """Seeds that vary by 1 nat, and a difference that varies by a hundredth of it."""
    fope, rope = [1.0, 2.0, 3.0, 9.0], [1.11, 2.10, 3.09]
    path = write(tmp_path / "a.json", evaluations(tmp_path, {"FoPE": fope, "RoPE": rope}))
    table = tables.markdown_table(res.load_results([path]))
    half = stats.ttest_rel(rope, fope[:3]).confidence_interval(0.95).high - 0.1
    assert f"| RoPE | 3 | +0.100 ± {half:.3f} |" in table and "minus FoPE, nats" in table
    # nothing to pair with, or one seed alone: no differences
    assert "minus" not in tables.markdown_table(res.load_results([path]), to="ALiBi")
    single = evaluations(tmp_path, {"FoPE": fope[:1], "RoPE": rope[:1]})
    path = write(tmp_path / "b.json", single)
    assert "minus" not in tables.markdown_table(res.load_results([path]))


def test_where_all_are_equal_there_is_no_interval(tmp_path):
    results = []
    for pos in ("rope", "fope"):
        for seed in range(3):
            path = result_file(tmp_path, "passkey", pos, seed, 1.0)
            results.append(json.loads(path.read_text()))
    path = write(tmp_path / "a.json", results)
    table = tables.markdown_table(res.load_results([path]))
    assert "| RoPE | 3 | 0 | 0 |" in table and "minus FoPE, % of tokens" in table


def test_two_corpora_have_a_table_and_a_panel_each(tmp_path):
    results = evaluations(tmp_path, {"FoPE": [1.0, 1.2], "RoPE": [1.1, 1.3]}, data="books")
    results += evaluations(tmp_path, {"FoPE": [1.5, 1.7], "RoPE": [1.7, 1.9]}, data="c4")
    found = res.load_results([write(tmp_path / "a.json", results)])
    kinds = ["perplexity on books", "perplexity on c4"]
    assert list(found) == kinds
    table = tables.markdown_table(found)
    assert "perplexity per token on c4" in table
    assert "minus FoPE, nats per token on c4" in table and "| RoPE | 2 | 0.200 |" in table
    figure = plot.figure_length(found)
    assert [ax.get_title().lower().partition("\n(")[0] for ax in figure.axes] == kinds


def test_the_excess_over_rope_at_its_training_length(tmp_path):
    """In pairs of one seed: RoPE's own rise, and how far above its start the others end."""
    results = evaluations(tmp_path, {"RoPE": [1.0, 2.0], "FoPE": [1.5, 2.5]})
    for result in results:
        row = result["lengths"]["256"] = dict(result["lengths"]["256"])
        row["loss"] += {"RoPE": 0.5, "FoPE": 0.1}[result["label"]]
    write(tmp_path / "a.json", results)
    _, _, *rows = tables.excess_table(res.load_results([tmp_path / "a.json"])).split("\n")
    assert rows == [
        "| FoPE | 2 | 0.500 ± 0.000 | 0.600 ± 0.000 |",
        "| RoPE | 2 | 0.000 ± 0.000 | 0.500 ± 0.000 |",
    ]


def test_keys_by_their_place(tmp_path):
    """Of two seeds at 4 times 128 tokens: near is nearer than 128, whole is every digit right."""
    results = []
    for seed, share in ((0, [1, 0.4, 0.8, 0]), (1, [0, 0.2, 1, 1])):
        result = json.loads(result_file(tmp_path, "passkey", "fope", seed, 0.5).read_text())
        row = {"accuracy": 0.5, "token_accuracy": 0.5, "answer_nll": 2.3}
        row |= {"distance": [512, 300, 128, 20], "share_right": share}
        longer = row | {"distance": [2000, 127, 1000, 20]}
        results.append(result | {"lengths": {"512": row, "2048": longer}})
    write(tmp_path / "a.json", results)
    lines = tables.table_of("a", "place", tmp_path).split("\n")
    assert lines[2] == "| FoPE | 2 | 50 | 33 | 25 | 50 |"


def test_primary_comparisons_are_corrected_for_their_number(tmp_path):
    """
    Holm's method: the smallest of three p times 3, the next times 2, never below the last. Seed 0
    is left out.
    """
    generator, comparisons, expected, flips = np.random.default_rng(0), [], {}, {}
    for name in "abc":
        losses = {"FoPE": 5 + generator.normal(size=7), "RoPE": 6 + generator.normal(size=7)}
        differences = (losses["RoPE"] - losses["FoPE"])[1:]
        expected[name] = stats.ttest_1samp(differences, 0)
        exact = stats.permutation_test((differences,), np.mean, permutation_type="samples")
        flips[name] = exact.pvalue
        losses = {label: values.tolist() for label, values in losses.items()}
        write(tmp_path / f"{name}.json", evaluations(tmp_path, losses))
        comparisons.append((name, "perplexity", "loss", "RoPE", "FoPE", 2))
    beside = dict.fromkeys("abc", ())
    with pytest.raises(Refused, match="not all of the 7 seeds"):  # 6 of which are there
        res.compare(comparisons, range(1, 8), tmp_path, beside)
    rows = res.compare(comparisons, range(1, 7), tmp_path, beside)
    ordered = sorted(rows, key=lambda row: row["p"])
    running = 0.0
    for row, factor in zip(ordered, (3, 2, 1), strict=True):
        test = expected[row["figure"]]
        assert row["p_t"] == pytest.approx(test.pvalue) and row["seeds"] == 6
        assert row["p"] == pytest.approx(flips[row["figure"]])
        assert row["mean"] - row["half_interval"] == pytest.approx(test.confidence_interval().low)
        running = max(running, min(1, factor * row["p"]))
        assert row["p_holm"] == pytest.approx(running)
    assert "| RoPE minus FoPE, loss at 256 (a) | 6 | " in tables.primary_table(rows)


@pytest.mark.parametrize("name", PRIMARY)
def test_at_most_ten_comparisons_are_primary_and_all_are_of_figures(name):
    seeds, named = PRIMARY[name]
    assert len(set(named)) == len(named) <= 10
    assert 2 * len(named) / 2 ** len(seeds) < 0.05  # so all of them can survive Holm's correction
    for figure, kind, _, label, to, multiple in named:
        figures = [FIGURES[one] for one in (figure, *FIGURES[figure].beside)]
        models = {m.label or res.NAMES.get(m.name) for one in figures for m in one.models}
        models |= {read.label for one in figures for m in one.models for read in m.reads}
        assert {label, to} <= models and multiple in (1, 2, 4, 8, 16)
        assert kind == "perplexity" or kind in FIGURES[figure].kinds


@pytest.mark.parametrize("name", [n for n in PRIMARY if (ROOT / "results" / f"{n}.json").exists()])
def test_the_committed_comparisons_are_those_of_the_committed_results(name):
    committed = json.loads((ROOT / "results" / f"{name}.json").read_text())
    beside = {figure: FIGURES[figure].beside for figure in FIGURES}
    again = res.compare(PRIMARY[name][1], PRIMARY[name][0], ROOT / "results", beside)
    for row, new in zip(committed, again, strict=True):
        assert row == {k: pytest.approx(v) if isinstance(v, float) else v for k, v in new.items()}


def test_the_table_to_cite_is_the_mean_of_the_results():
    """Else run python -m paper.plot --tables results/*.md."""
    with open(ROOT / "results" / "summary.csv", encoding="utf-8") as f:
        _, *rows = csv.reader(f)
    assert rows == [[str(cell) for cell in row] for row in tables.summary_rows(ROOT / "results")]
    figure1 = json.loads((ROOT / "results" / "figure1.json").read_text())
    alibi = [r for r in figure1 if r["recipe"]["pos"] == "alibi" and r["kind"] == "perplexity"]
    bits = [r["lengths"]["8192"]["loss"] / math.log(2) for r in alibi]
    low, high = stats.ttest_1samp(bits, 0).confidence_interval()
    mean, half = f"{np.mean(bits):.2f}", f"{(high - low) / 2:.2f}"
    assert ["ALiBi", "bits per byte", "8192", "10", mean, half] in rows
    in_bits = tables.cited_table(ROOT / "results", ["bits per byte"], {"bits per byte": "models"})
    assert f"| ALiBi | 1.93 ± 0.01 | 1.92 ± 0.01 | {mean} ± {half} | 10 |" in in_bits


def test_the_page_holds_the_numbers_of_the_results():
    """Else run python experiments/strip.py --page."""
    page = (ROOT / "docs" / "index.html").read_text(encoding="utf-8")
    held = re.search('id="measured">(.*?)</script>', page, re.S)[1]
    assert json.loads(held) == page_numbers(ROOT / "results" / "mechanism")
