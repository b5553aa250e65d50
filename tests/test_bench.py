"""The benchmark: that it measures what it says, on models small enough for a test."""

import json

import pytest
from conftest import refuses

import bench


def test_bench_measures_shows_and_refuses(tmp_path, capsys):
    sizes = ["--train_len=16", "--batch_size=1", "--eval_len=64", "--rounds=3", "--eval_rounds=2"]
    bench.main(["--pos", "nope", "fope, rebuilt", *sizes, "--device=cpu", "--out", str(tmp_path / "b.json")])
    result = json.loads((tmp_path / "b.json").read_text())
    # 6 N + 6 L C T: 4 layers of 12 n_embd^2 + norms, a head of 50,304 tokens
    n_params = 4 * (16 * 128**2 + 2 * 128) + 128 + 50304 * 128
    assert result["model_flops_per_token"] == 6 * n_params + 6 * 4 * 128 * 16 and result["model_flops_used"] is None
    assert [set(r) for r in result["rounds"]] == [{"train", "eval"}, {"train", "eval"}, {"train"}]
    rates = sorted(r["train"]["fope, rebuilt"] / r["train"]["nope"] for r in result["rounds"])
    row = result["summary"]["fope, rebuilt"]
    assert row["to_nope"]["train"] == pytest.approx(rates[1]) and result["summary"]["nope"]["to_nope"]["eval"] == 1
    assert 0.1e9 < row["eval_bytes"] <= 1.5 * row["train_bytes"] < 6e9
    (tmp_path / "README.md").write_text("<!-- table bench -->\n<!-- end bench -->\n")
    bench.main(["--show", str(tmp_path / "b.json"), "--readme", str(tmp_path / "README.md")])
    assert "| fope, rebuilt | " in (tmp_path / "README.md").read_text() and "median of 3 rounds" in capsys.readouterr().out
    (tmp_path / "b.json").write_text("{}")
    refuses(bench.main, ["--show", tmp_path / "b.json"], "no result of bench.py")
    refuses(bench.main, ["--rounds", "0"], "--rounds must be at least 1")
    refuses(bench.main, ["--pos", "kerple, flex", "--device=cpu"], "for CUDA alone")
    refuses(bench.main, ["--profile", "kerple, flex", "--device=cpu"], "for CUDA alone")


def test_rebuilt_tables_are_the_same_tables():
    import torch

    from fope import FoPE

    shape = dict(head_dim=16, n_head=2, train_len=40)
    torch.manual_seed(0)
    rebuilt = bench.RebuiltFoPE(**shape)
    torch.manual_seed(0)
    kept = FoPE(**shape)
    q, k = torch.randn(2, 1, 2, 30, 16)
    for a, b in zip(rebuilt.rotate(q, k), kept.rotate(q, k), strict=True):
        assert torch.equal(a, b)
    assert rebuilt.tables(30)[0] is not rebuilt.tables(30)[0] and kept.tables(30)[0].data_ptr() == kept.tables(30)[0].data_ptr()
