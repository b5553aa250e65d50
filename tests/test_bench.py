"""The benchmark: that it measures what it says, on models small enough for a test."""

import json
import sys

import pytest
import torch
from conftest import ROOT, refuses

sys.path.insert(0, str(ROOT / "experiments"))

import bench

from paper import tables


def measure(tmp_path, *flags):
    """The result of a small benchmark of 3 training steps and 2 of what else is measured."""
    sizes = ["--train_len=16", "--batch_size=1", "--eval_len=64", "--rounds=3", "--eval_rounds=2"]
    bench.main([*flags, *sizes, "--device=cpu", "--out", str(tmp_path / "b.json")])
    return json.loads((tmp_path / "b.json").read_text())


@pytest.mark.slow
def test_bench_measures_and_shows(tmp_path, capsys):
    result = measure(tmp_path, "--pos", "nope", "fope")
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
    assert "| fope, eval |" in shown and result["hardware"] in shown


def test_kernels_of_attention():
    """As torch names them: a mask that needs a gradient leaves the plain formula alone."""
    q = torch.randn(1, 2, 8, 16)
    mask = torch.zeros(8, 8, requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention

    def run():
        bench.F.scaled_dot_product_attention(q, q, q, is_causal=True)
        bench.F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    assert bench.attention_kernels(run) == "flash_attention, math"
    assert bench.F.scaled_dot_product_attention is attend


def test_the_share_of_a_cards_peak(monkeypatch):
    """MFU = tokens/s x FLOP of a token / the card's peak."""
    monkeypatch.setattr(tables, "peak_flops", lambda hardware: 1e12)
    row = dict(train=4.0, train_flops=2e10, train_bytes=2e9, train_kernels="math")
    result = dict(preset="tiny", hardware="", train_len=16, batch_size=2, eval_len=64)
    *_, line = tables.bench_table(result | {"summary": {"fire": row}}).split("\n")
    assert line == "| fire, train | 8,000.0 | 4 | 8.0% | 2.00 | math |"


def test_medians_are_of_ratios_within_a_round():
    train = [{"nope": n, "fope": f} for n, f in ((1.0, 1.0), (4.0, 2.0), (10.0, 3.0))]
    rounds = {"train": train, "eval": [{"nope": 8.0, "fope": 2.0}]}
    memory = {pos: {"train_bytes": 2e9, "eval_bytes": 2e9} for pos in ("nope", "fope")}
    summary = bench.summarise(rounds, memory)
    to_nope = {"train": 0.5, "eval": 0.25}
    expected = {"train": 2.0, "eval": 2.0, "train_bytes": 2e9, "eval_bytes": 2e9}
    assert summary["fope"] == {**expected, "to_nope": to_nope}


def test_bad_arguments_are_refused(tmp_path):
    refuses(bench.main, ["--rounds", "0"], "--rounds")
    refuses(bench.main, ["--pos", "kerple, flex"], "kerple, flex")
    (tmp_path / "mine.json").write_text('{"a": 1}')
    refuses(bench.main, ["--device=cpu", "--out", tmp_path / "mine.json"], "--out")
