"""The benchmark: that it measures what it says, on models small enough for a test."""

import json
import sys

import pytest
from conftest import ROOT, refuses

sys.path.insert(0, str(ROOT / "experiments"))

import bench


@pytest.mark.slow
def test_bench_measures_and_shows(tmp_path, capsys):
    sizes = ["--train_len=16", "--batch_size=1", "--eval_len=64", "--rounds=3", "--eval_rounds=2"]
    out = tmp_path / "b.json"
    bench.main(["--pos", "nope", "fope", *sizes, "--device=cpu", "--out", str(out)])
    result = json.loads(out.read_text())
    assert [len(result["rounds"][what]) for what in ("train", "eval")] == [3, 2]
    rates = sorted(r["fope"] / r["nope"] for r in result["rounds"]["train"])
    row = result["summary"]["fope"]
    assert row["to_nope"]["train"] == pytest.approx(rates[1])  # a median of ratios in a round
    assert result["summary"]["nope"]["to_nope"]["eval"] == 1
    assert 0.1e9 < row["eval_bytes"] <= 1.5 * row["train_bytes"] < 6e9
    assert row["train_kernels"] == "flash_attention"  # as torch names them
    shown = capsys.readouterr().out
    assert "| fope, eval |" in shown and result["hardware"] in shown


def test_the_share_of_a_cards_peak(monkeypatch):
    """MFU = tokens/s x FLOP of a token / the card's peak."""
    monkeypatch.setattr(bench.common, "peak_flops", lambda hardware: 1e12)
    row = dict(train=4.0, train_flops=2e10, train_bytes=2e9, train_kernels="math")
    result = dict(preset="tiny", hardware="", train_len=16, batch_size=2, eval_len=64)
    *_, line = bench.bench_table(result | {"summary": {"fire": row}}).split("\n")
    assert line == "| fire, train | 8,000.0 | 4 | 8.0% | 2.00 | math |"


def test_a_bad_argument_is_refused():
    refuses(bench.main, ["--rounds", "0"], "--rounds")
