"""The benchmark: that it measures what it says, on models small enough for a test."""

import json
import sys

import pytest
from conftest import ROOT, refuses

sys.path.insert(0, str(ROOT / "experiments"))

import bench

from paper import tables


@pytest.mark.slow
def test_bench_measures_and_shows(tmp_path, capsys):
    out = str(tmp_path / "b.json")
    sizes = ["--train_len=16", "--batch_size=1", "--eval_len=64", "--rounds=3", "--eval_rounds=2"]
    bench.main(["--pos", "nope", "fope", *sizes, "--device=cpu", "--out", out])
    result = json.loads((tmp_path / "b.json").read_text())
    assert {what: len(rounds) for what, rounds in result["rounds"].items()} == {
        "train": 3,
        "eval": 2,
    }
    rates = sorted(r["fope"] / r["nope"] for r in result["rounds"]["train"])
    row = result["summary"]["fope"]
    assert row["to_nope"]["train"] == pytest.approx(rates[1])
    assert result["summary"]["nope"]["to_nope"]["eval"] == 1
    assert 0.1e9 < row["eval_bytes"] <= 1.5 * row["train_bytes"] < 6e9
    shown = capsys.readouterr().out
    assert tables.bench_table(result) in shown and result["hardware"] in shown


@pytest.mark.slow
def test_training_and_decoding_in_a_llama(tmp_path, capsys):
    pytest.importorskip("transformers")
    out = str(tmp_path / "b.json")
    sizes = ["--train_len=16", "--batch_size=1", "--rounds=2", "--eval_rounds=3", "--device=cpu"]
    bench.main(["--llama", "--pos", "rope", "fope", *sizes, "--out", out])
    result = json.loads((tmp_path / "b.json").read_text())
    assert {what: len(rounds) for what, rounds in result["rounds"].items()} == {
        "train": 2,
        "decode": 3,
    }
    assert result["summary"]["rope"]["to_rope"] == {"train": 1, "decode": 1}
    refuses(bench.main, ["--llama", "--pos", "kerple", *sizes, "--out", out], "kerple")


def test_medians_are_of_ratios_within_a_round():
    train = [{"nope": n, "fope": f} for n, f in ((1.0, 1.0), (4.0, 2.0), (10.0, 3.0))]
    rounds = {"train": train, "eval": [{"nope": 8.0, "fope": 2.0}]}
    memory = {pos: {"train_bytes": 2e9, "eval_bytes": 2e9} for pos in ("nope", "fope")}
    summary = bench.summarise(rounds, memory)
    to_nope = {"train": 0.5, "eval": 0.25}
    expected = {"train": 2.0, "eval": 2.0, "train_bytes": 2e9, "eval_bytes": 2e9}
    assert summary["fope"] == {**expected, "to_nope": to_nope}
    result = dict(preset="tiny", train_len=16, batch_size=1, eval_len=64, summary=summary)
    lines = tables.bench_table(result).split("\n")
    head = "| tiny, T = 16, batch 1 | training, tokens/s | to nope | GB |"
    assert lines[0] == f"{head} reading 64, tokens/s | to nope | GB |"
    assert lines[1].count("|") == lines[0].count("|")
    assert lines[3] == "| fope | 2 | 0.50 | 2.00 | 2 | 0.25 | 2.00 |"


def test_bad_arguments_are_refused():
    refuses(bench.main, ["--rounds", "0"], "--rounds: must be at least 1")
    refuses(bench.main, ["--pos", "kerple, flex"], "invalid choice: 'kerple, flex'")
