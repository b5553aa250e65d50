"""The numbers, tables, links and commands of README, report and pages are those of the project."""

import functools
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from checkpoint import load_checkpoint
from data import load_tokenizer, window_loss
from eval_passkey import task_accuracy
from rows import half_interval, read_rows
from tasks import PasskeyAnywhere

README, REPORT = "README.md", "results/README.md"
TEXTS = [README, REPORT, "results/mechanism/README.md", "assignments/README.md"]
LENGTHS = [512, 1024, 2048, 4096, 8192]
FLOOR, SERIES, NORM = "FoPE, floor alone", "FoPE, series alone", " + QK-norm"


@functools.cache
def read(text):
    return (ROOT / text).read_text(encoding="utf-8")


# --- what the json files give


@functools.cache
def found(figure):
    return read_rows([ROOT / "results" / f"{figure}.json"])


def values(figure, label, name="loss", lengths=(512, 8192), kind="perplexity"):
    """One number: (seeds, lengths), by seed."""
    rows = [row for row in found(figure) if (row["kind"], row["label"]) == (kind, label)]
    return np.array([[row[name] for row in rows if row["length"] == n] for n in lengths]).T


def keys(figure, label):
    """Whole passkeys found at LENGTHS."""
    kind = "passkey_anywhere" if figure == "enough" else "passkey"
    return [
        f"{share:.0%}" for share in values(figure, label, "accuracy", LENGTHS, kind).mean(axis=0)
    ]


# --- and what the texts say of them


# who is ahead at each of LENGTHS, by the 95 % interval; =: level, all of it within 0.02 nats or 5
# points; 0: unclear
AUTHORS = "RoPE to FoPE, authors' way"
CLAIMS = [
    ("figure1", "loss", "RoPE", "FoPE", "0++++"),
    ("parts", "loss", FLOOR, "FoPE", "===00"),
    ("parts", "loss", "RoPE" + NORM, "FoPE", "---++"),
    ("parts", "loss", "FoPE" + NORM, "RoPE" + NORM, "++0--"),
    ("parts", "loss", "FoPE", "FoPE" + NORM, "+++0-"),
    ("figure4", "loss", "FoPE to FoPE + YaRN x16", "RoPE to RoPE + YaRN x16", "000++"),
    ("figure4", "loss", "FoPE to FoPE + YaRN x16", "FoPE to FoPE", "==-00"),
    ("figure4_quarter", "loss", "FoPE to FoPE + YaRN x16", "RoPE to RoPE + YaRN x16", "000+0"),
    ("figure4_quarter", "loss", "FoPE to FoPE + YaRN x16", "FoPE to FoPE", "==000"),
    ("figure4", "loss", AUTHORS, "RoPE to RoPE + YaRN x16", "+++++"),
    ("figure4", "loss", AUTHORS, "RoPE to FoPE", "+++++"),
    ("figure4_quarter", "loss", AUTHORS, "RoPE to RoPE + YaRN x16", "+++++"),
    ("figure4", "loss", "RoPE to FoPE", "RoPE to RoPE + YaRN x16", "===++"),
    ("figure4_quarter", "loss", "RoPE to FoPE", "RoPE to RoPE + YaRN x16", "====-"),
    ("figure4_quarter", "loss", "FoPE to FoPE, own pairs", "FoPE to FoPE", "==000"),
    ("figure1", "accuracy", "FoPE", "RoPE", "0+++0"),
    ("parts", "token_accuracy", SERIES, "FoPE", "=0---"),
    ("parts", "token_accuracy", "FoPE" + NORM, "RoPE" + NORM, "=++++"),
]


@pytest.mark.parametrize("figure, name, label, to, signs", CLAIMS)
def test_who_is_ahead_is_that_of_the_json_files(figure, name, label, to, signs):
    kind = "perplexity" if name == "loss" else "passkey"
    pair = [values(figure, la, name, LENGTHS, kind) for la in (label, to)]
    middle, half = (pair[0] - pair[1]).mean(axis=0), half_interval(pair[0] - pair[1])
    ahead = np.where(np.abs(middle) <= half, "0", np.where(middle > 0, "+", "-"))
    level = np.abs(middle) + half < (0.02 if name == "loss" else 0.05)
    assert "".join(np.where(level, "=", ahead)) == signs


def test_what_does_not_rise_and_who_finds_no_key():
    for figure, label in (("figure1", "ALiBi"), ("parts", "KERPLE")):
        near, far = values(figure, label).mean(axis=0)
        assert 0 < near - far < 0.01 and {*keys(figure, label)[1:]} == {"0%"}
    nope = values("figure1_all", "NoPE", lengths=LENGTHS).mean(axis=0)
    assert np.ptp(nope) < 0.015 and {*keys("figure1_all", "NoPE")} == {"0%"}
    fope = values("figure1", "FoPE", lengths=LENGTHS).mean(axis=0)
    in_pieces = values("figure1", "RoPE").mean(axis=0)[0]
    assert min(fope) > in_pieces < values("enough", "RoPE, theta 94").mean(axis=0)[1]
    assert {*keys("figure1", "RoPE")[3:]} == {*keys("enough", "RoPE")[2:]} == {"0%"}
    none = values("figure1", "FoPE", "accuracy", [8192], "passkey") == 0
    assert none.mean() == 0.5  # "half of its seeds none"


# --- the trained models


@pytest.mark.parametrize("pos", ["rope", "fope"])
def test_the_models_of_the_repository_have_learned_their_tasks(pos):
    text, about, _ = load_checkpoint(ROOT / "models" / f"text_{pos}")
    passage = json.loads(read("results/mechanism/strip.json"))["passages"][0]["text"]
    tokens = np.frombuffer(passage.encode()[:513], dtype=np.uint8).astype(np.int64)
    assert text.config.pos == pos and window_loss(text, tokens, 512).mean() < 1.7
    assert not about["commit"].endswith("dirty")
    folder = ROOT / "models" / f"keys_{pos}"
    keys, _, _ = load_checkpoint(folder)
    task = PasskeyAnywhere(load_tokenizer(keys.config.tokenizer, folder).encode_ordinary)
    assert task_accuracy(keys, task, 512, trials=10, seed=0)["accuracy"] >= 0.9


# --- links, commands


def test_the_classes_of_the_readme_work():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", read(README), re.S):
        exec(block, names)
    freqs = names["Mine"](head_dim=16, n_head=2, train_len=64).freqs
    assert freqs[3] > 0 and not freqs[4:].any()
    needles, question, answer = names["MultiKey"](list).trial(np.random.default_rng(0))
    assert (
        len(needles) == 3 and question + " is" not in needles and f"{question}{answer}." in needles
    )


def test_links_to_lines_show_the_code_they_quote():
    links = re.findall(r"\[(\w+\.py:\d+)\]\((\w+\.py)#L(\d+)\) `([^`]+)`", read(README))
    assert len(links) >= 5
    for shown, file, line, code in links:
        assert shown == f"{file}:{line}"
        assert code in read(file).splitlines()[int(line) - 1], f"{shown} is not `{code}`"


@pytest.mark.parametrize("text", TEXTS)
def test_links_lead_to_files_and_headings(text):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([\w-]+))?\)", read(text)):
        file = (ROOT / text).parent / target if target else ROOT / text
        assert target.startswith("http") or file.exists(), target
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{target}#{anchor}"


@pytest.mark.slow
def test_commands_and_flags_that_the_texts_name_exist():
    calls = {}
    pattern = r"(bash|python) ([\w./]+\.(?:sh|py))((?:[^\n`#\\]|\\\n)*)"
    for program, script, words in re.findall(pattern, "\n".join(map(read, TEXTS))):
        command = (program.replace("python", sys.executable), *script.split(), "--help")
        calls.setdefault(command, []).extend(re.findall(r"--[\w-]+", words))
    assert len(calls) > 8
    for command, flags in sorted(calls.items()):
        how = dict(cwd=ROOT, capture_output=True, text=True, check=True)
        shown = subprocess.run(command, **how).stdout
        if "sweep.py" in command:  # which takes all flags of train.py, too
            shown += subprocess.run([sys.executable, "train.py", "--help"], **how).stdout
        for flag in flags:
            assert flag in shown, f"{' '.join(command)} has no {flag}"
