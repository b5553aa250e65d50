"""The links, tables, numbers and commands of README and report are those of the project."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

from paper import results, tables

NAMES = ("RoPE", "FoPE", "ALiBi")
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


def test_the_headline_is_the_reports():
    """The mean perplexities at 16x, as the first paragraph has them."""
    found = results.load_results([ROOT / "results" / "figure1.json"])["perplexity"]
    ends = [results.seed_stats(found[label], "perplexity")[1][-1] for label in NAMES]
    rope, fope, alibi = (f"{end:.1f}" for end in ends)
    sentence = f"RoPE ends at a perplexity of {rope}, FoPE at {fope}, ALiBi at {alibi} ("
    assert sentence in " ".join(read("README.md").split("## Quickstart")[0].split())
    found = results.load_results([ROOT / "results" / "figure5_20M_cpu.json"])
    on_books = found["perplexity on books"]
    ends = [on_books[name][0]["lengths"][8192]["perplexity"] for name in NAMES]
    sentence = "at 16x RoPE's perplexity is {:.0f}, FoPE's {:.0f}, ALiBi's {:.0f};".format(*ends)
    assert sentence in read("README.md")


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
