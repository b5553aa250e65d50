"""The README's links, tables and commands are those of the project. What its sentences say: test_claims.py."""

import re
import subprocess
import sys

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
