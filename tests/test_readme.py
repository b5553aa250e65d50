"""What the README says about code and results must be so."""

import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

import bench
import plot
from model import read_json

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_to_lines_show_the_code_they_quote():
    links = re.findall(r"\[(\w+\.py):(\d+)\]\((\w+\.py)#L(\d+)\) `([^`]+)`", README)
    assert len(links) >= 5
    for shown_file, shown_line, file, line, code in links:
        assert (shown_file, shown_line) == (file, line)
        assert code in (ROOT / file).read_text().splitlines()[int(line) - 1], f"{file}:{line} is not `{code}`"


def test_tables_are_those_of_the_committed_results():
    names = re.findall(r"<!-- table (\w+) -->", README)
    assert names
    for name in names:
        files = sorted((ROOT / "results" / name).glob("*.json"))
        measure = "loss" if f"<!-- table {name} -->\n| loss" in README else "perplexity"
        table = bench.table(read_json(*files)) if name == "bench" else plot.markdown_table(plot.load_results(files), measure)
        assert f"<!-- table {name} -->\n{table}\n<!-- end {name} -->" in README, f"run plot.py --readme for {name}"


def test_what_a_seed_is_worth():
    section = README.split("### What a seed is worth")[1].split("###")[0]
    section = " ".join(section.split())

    def lengths(folder, name):
        return list(read_json(ROOT / f"results/{folder}/{name}.json")["lengths"].values())

    for pos in ("nope", "alibi", "rope", "fope", "kerple", "fire", "rope_a"):
        for seed in (0, 1):
            name = f"{pos}_s{seed}_perplexity"
            curves = (read_json(ROOT / f"results/repeated/{folder}/{name}.json")["curve"] for folder in ("once", "again"))
            for _, (before, after) in zip(range(10), zip(*curves, strict=True), strict=False):  # one for each 10 steps
                assert abs(before[1] - after[1]) < 1.01e-4
            pairs = zip(lengths("repeated/once", name), lengths("repeated/again", name), strict=True)
            changes = [abs(after["perplexity"] / before["perplexity"] - 1) for before, after in pairs]
            assert changes[0] < 0.005 and max(changes) < (0.054 if pos in ("rope", "fope", "rope_a") else 1e-4)

    ten = {}
    for pos, gain in (("rope", "rope_g1"), ("fope", "fope_g2")):
        runs = [lengths("repeated/once", f"{pos}_s{seed}_passkey") for seed in range(3)]
        runs += [lengths("zero_gain", f"{gain}_s{seed}_passkey") for seed in range(5)]
        runs += [lengths("repeated/again", f"{pos}_s{seed}_passkey") for seed in range(2)]
        ten[pos] = np.array([[100 * run[2]["token_accuracy"], 100 * run[1]["accuracy"]] for run in runs])
        assert len(ten[pos]) == 10
    (rope, rope_keys), (fope, fope_keys) = ten["rope"].T, ten["fope"].T
    error = np.sqrt((rope.var(ddof=1) + fope.var(ddof=1)) / 10)
    assert f"RoPE finds {rope.mean():.0f} % ({rope.min():.0f} to {rope.max():.0f})" in section
    assert f"FoPE {fope.mean():.0f} % ({fope.min():.0f} to {fope.max():.0f})" in section
    assert f"differ by {fope.mean() - rope.mean():.0f} ± {error:.0f}" in section
    for keys in (rope_keys, fope_keys):
        assert f"{keys.mean():.0f} % ({keys.min():g} to {keys.max():.0f})" in section


def test_files_and_flags_that_it_names_exist():
    for target in re.findall(r"\]\(([^)#]+)(?:#L\d+)?\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    for script in sorted({*re.findall(r"(?:bash|python) ([\w./]+\.(?:sh|py))", README)}):
        command = ["bash" if script.endswith(".sh") else sys.executable, script, "--help"]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for call in re.findall(rf"(?:bash|python) {re.escape(script)}([^\n`#]*)", README):
            for flag in re.findall(r"--\w+", call):
                assert flag in text, f"{script} has no {flag}"


@pytest.mark.parametrize("word", ["TODO", "VERDICT", "MINUTES", "TESTMIN", "<!-- claim -->", "<!-- reading -->"])
def test_nothing_is_left_to_fill_in(word):
    assert word not in README
