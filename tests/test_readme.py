"""The links, tables, numbers and commands of README and report are those of the project."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

from paper import results, tables

TEXTS = ["README.md", "results/README.md", "assignments/README.md"]


def read(text):
    return (ROOT / text).read_text(encoding="utf-8")


def test_links_to_lines_show_the_code_they_quote():
    links = re.findall(r"\[(\w+\.py):(\d+)\]\((\w+\.py)#L(\d+)\) `([^`]+)`", read("README.md"))
    assert len(links) >= 5
    for shown_file, shown_line, file, line, code in links:
        assert (shown_file, shown_line) == (file, line)
        assert code in read(file).splitlines()[int(line) - 1], f"{file}:{line} is not `{code}`"


@pytest.mark.parametrize("text", [*TEXTS[:2], "docs/index.html"])
def test_tables_are_those_of_the_committed_results(text):
    assert "<!-- table " in read(text)
    how = "python -m paper.plot --tables README.md results/README.md docs/index.html"
    assert tables.fill_tables(read(text), ROOT / "results") == read(text), f"run {how}"


def test_every_gathered_result_is_in_the_report():
    named = set(re.findall(r"<!-- table (\w+)", read("results/README.md")))
    assert named == {path.stem for path in (ROOT / "results").glob("*.json")}
    assert len(list((ROOT / "results").rglob("*.*"))) <= 80


def test_the_headline_is_that_of_the_results():
    """Perplexities at 1x and 16x, and the share of RoPE's rise in loss that FoPE has, by seed."""
    found = results.load_results([ROOT / "results" / "figure1.json"])["perplexity"]
    text, rises = " ".join(read("README.md").split()), {}
    for label, words in (
        ("RoPE", "RoPE's perplexity grows from 4.8 to 12.9"),
        ("FoPE", "FoPE's from 4.8 to 6.6"),
    ):
        _, perplexity, _, n = results.seed_stats(found[label], "perplexity")
        start, end = (f"{p:.1f}" for p in perplexity[[0, -1]])
        assert n == 5 and words in text and words.endswith(f"from {start} to {end}")
        rows = [r["lengths"] for r in found[label]]
        rises[label] = [row[2048]["loss"] - row[128]["loss"] for row in rows]
    shares = [fope / rope for fope, rope in zip(rises["FoPE"], rises["RoPE"], strict=True)]
    assert 0.28 < sum(shares) / 5 < 0.36 and "about a third of what RoPE loses" in text
    flat = results.load_results([ROOT / "results" / "figure1_all.json"])["perplexity"]
    for label in ("ALiBi", "KERPLE"):
        _, loss, _, _ = results.seed_stats(flat[label], "loss")
        assert loss[-1] <= loss[0]


def test_readme_is_a_page():
    text = read("README.md")
    assert text.count("\n") <= 130 and len(text.split()) <= 1500


@pytest.mark.parametrize("text", TEXTS)
def test_files_that_it_names_exist(text):
    folder = (ROOT / text).parent
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", read(text)):
        assert target.startswith("http") or (folder / target).exists(), target


def help_of(script):
    command = ["bash" if script.endswith(".sh") else sys.executable, script, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_scripts_and_flags_that_the_texts_name_exist():
    calls = {}
    for text in TEXTS:
        pattern = r"(?:bash|python) ([\w./]+\.(?:sh|py))([^\n`#]*)"
        for script, words in re.findall(pattern, read(text)):
            calls.setdefault(script, []).extend(re.findall(r"--[\w-]+", words))
    assert len(calls) > 8
    for script, flags in sorted(calls.items()):
        known = help_of(script)
        for flag in flags:
            assert flag in known, f"{script} has no {flag}"
