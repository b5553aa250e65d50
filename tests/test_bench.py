"""The benchmark: that it measures what it says, on models small enough for a test."""

import json
import sys

import pytest
import torch
from conftest import ROOT, draw_qkv, make_embedding, refuses

sys.path.insert(0, str(ROOT / "experiments"))

import bench

import plot


@pytest.mark.slow
def test_bench_measures_and_shows(tmp_path, capsys):
    out = str(tmp_path / "b.json")
    sizes = ["--train_len=16", "--batch_size=1", "--eval_len=64", "--rounds=3", "--eval_rounds=2"]
    bench.main(["--pos", "nope", "fope, rebuilt", *sizes, "--device=cpu", "--out", out])
    result = json.loads((tmp_path / "b.json").read_text())
    # 6 N + 6 L C T: 4 layers of 12 n_embd^2 + norms, a head of 50,304 tokens
    n_params = 4 * (16 * 128**2 + 2 * 128) + 128 + 50304 * 128
    assert result["model_flops_per_token"] == 6 * n_params + 6 * 4 * 128 * 16
    assert result["model_flops_used"] is None
    assert [set(r) for r in result["rounds"]] == [{"train", "eval"}, {"train", "eval"}, {"train"}]
    rates = sorted(r["train"]["fope, rebuilt"] / r["train"]["nope"] for r in result["rounds"])
    row = result["summary"]["fope, rebuilt"]
    assert row["to_nope"]["train"] == pytest.approx(rates[1])
    assert result["summary"]["nope"]["to_nope"]["eval"] == 1
    assert 0.1e9 < row["eval_bytes"] <= 1.5 * row["train_bytes"] < 6e9
    capsys.readouterr()
    bench.main(["--show", out])
    shown = capsys.readouterr().out
    assert plot.bench_table(result) in shown and "median of 3 rounds" in shown


def test_medians_are_of_ratios_within_a_round():
    rounds = [{"train": {"nope": n, "fope": f}} for n, f in ((1.0, 1.0), (4.0, 2.0), (10.0, 3.0))]
    rounds[0]["eval"] = {"nope": 8.0, "fope": 2.0}
    memory = {(pos, what): 2e9 for pos in ("nope", "fope") for what in ("train", "eval")}
    summary = bench.summarise(rounds, memory)
    to_nope = {"train": 0.5, "eval": 0.25}
    expected = {"train": 2.0, "eval": 2.0, "train_bytes": 2e9, "eval_bytes": 2e9}
    assert summary["fope"] == {**expected, "to_nope": to_nope}
    result = dict(preset="tiny", train_len=16, batch_size=1, eval_len=64, summary=summary)
    shares = {"nope": 0.3, "fope": 0.2}
    for used, title, cell in ((None, "", ""), (shares, " FLOPs used |", " 20 % |")):
        lines = plot.bench_table({**result, "model_flops_used": used}).split("\n")
        head = "| tiny, T = 16, batch 1 | training, tokens/s | to nope | GB |"
        assert lines[0] == f"{head}{title} reading 64, tokens/s | to nope | GB |"
        assert lines[1].count("|") == lines[0].count("|")
        assert lines[3] == f"| fope | 2 | 0.50 | 2.00 |{cell} 2 | 0.25 | 2.00 |"


def test_rebuilt_fope_trains_with_tables_made_anew():
    """The tables are the same, and made at every call."""
    kept, rebuilt = make_embedding("fope"), make_embedding("fope")
    rebuilt.__class__ = bench.RebuiltFoPE
    q, k, _ = draw_qkv(30)
    for a, b in zip(rebuilt.rotate(q, k), kept.rotate(q, k), strict=True):
        assert torch.equal(a, b)
    assert rebuilt.tables(30)[0] is not rebuilt.tables(30)[0]
    assert kept.tables(30)[0].data_ptr() == kept.tables(30)[0].data_ptr()
    flags = ["--train_len=16", "--batch_size=1", "--eval_len=64", "--device=cpu"]
    device = torch.device("cpu")
    work = bench.Workload(bench.parse_args(flags), "fope, rebuilt", device)
    assert {type(block.attn.pos) for block in work.model.blocks} == {bench.RebuiltFoPE}
    assert work.rate("train") > 0 and work.rate("eval") > 0


def test_bad_arguments_are_refused(tmp_path):
    (tmp_path / "b.json").write_text("{}")
    refuses(bench.main, ["--show", tmp_path / "b.json"], "no result of bench.py")
    refuses(bench.main, ["--rounds", "0"], "--rounds: must be at least 1")
    refuses(bench.main, ["--pos", "kerple, flex"], "invalid choice: 'kerple, flex'")
    refuses(bench.main, ["--device=cpu", "--out", tmp_path], "is a folder, not a file")
