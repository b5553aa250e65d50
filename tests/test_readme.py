"""The links, tables, numbers and commands of README and report are those of the project."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from paper import results, tables

TEXTS = ["README.md", "results/README.md", "results/mechanism/README.md", "assignments/README.md"]


def read(text):
    return (ROOT / text).read_text(encoding="utf-8")


def test_links_to_lines_show_the_code_they_quote():
    links = re.findall(r"\[(\w+\.py):(\d+)\]\((\w+\.py)#L(\d+)\) `([^`]+)`", read("README.md"))
    assert len(links) >= 5
    for shown_file, shown_line, file, line, code in links:
        assert (shown_file, shown_line) == (file, line)
        assert code in read(file).splitlines()[int(line) - 1], f"{file}:{line} is not `{code}`"


@pytest.mark.parametrize("text", [*TEXTS[:2], "docs/index.html", "results/TABLES.md"])
def test_tables_are_those_of_the_committed_results(text):
    assert "<!-- table " in read(text)
    how = f"run python -m paper.plot --tables {text}"
    assert tables.fill_tables(read(text), ROOT / "results") == read(text), how
    assert len(list((ROOT / "results").rglob("*.*"))) <= 80


def test_the_headline_is_that_of_the_results():
    """Perplexities at 1x and 16x, the shares of RoPE's rise that are kept, keys at 4x."""
    text = " ".join(read("README.md").split())
    found = results.load_results([ROOT / "results" / "figure1.json"])
    for label, words in (("RoPE", "RoPE's perplexity grows"), ("FoPE", "FoPE's")):
        rows = found["perplexity"][label]
        _, perplexity, _, n = results.seed_stats(rows, "perplexity", [512, 8192])
        start, end = (f"{p:.1f}" for p in perplexity)
        assert n == 10 and f"{words} from {start} to {end}" in text
    shares = results.rise_removed(found["perplexity"])["FoPE"]
    assert f"FoPE removes {100 * sum(shares) / 10:.0f} % of RoPE's rise" in text
    keys = {
        label: results.seed_stats(rows, "accuracy", [2048, 4096])[1]
        for label, rows in found["passkey"].items()
    }
    a, b, c = (f"{100 * share:.0f}" for share in (*keys["FoPE"], keys["RoPE"][0]))
    assert f"At 2048 tokens it finds {a} % of them and at 4096 {b} %, RoPE {c} % and none." in text
    assert keys["RoPE"][1] == keys["ALiBi"].max() == 0
    parts = results.load_results([ROOT / "results" / "parts.json"])["perplexity"]
    shares = results.rise_removed(parts)
    for label, words in (
        ("FoPE, CF alone", "Alone it removes {} %"),
        ("FoPE, FS alone, FoPE's table noise", "the series alone {} %"),
    ):
        share = 100 * sum(shares[label]) / len(shares[label])
        assert words.format(round(share)) in text
    assert all(
        row["loss"] <= r["lengths"][512]["loss"] + 0.01
        for r in found["perplexity"]["ALiBi"]
        for row in r["lengths"].values()
    )


def test_the_report_says_what_the_parts_are_worth():
    """Shares of RoPE's rise that are removed, with their intervals, and the rises with QK-norm."""
    text = " ".join(read("results/README.md").split())
    parts = results.load_results([ROOT / "results" / "parts.json"])["perplexity"]
    shares = {label: 100 * np.array(s) for label, s in results.rise_removed(parts).items()}
    for label, words in (
        ("FoPE, CF alone", "the floor alone removes {}"),
        ("FoPE", "with the series {}"),
        ("FoPE, FS alone, FoPE's table noise", "The series alone removes {}"),
        ("RoPE + QK-norm", "QK-norm (normalised queries and keys) alone removes {}"),
    ):
        share = f"{shares[label].mean():.0f} ± {results.half_interval(shares[label]):.0f}"
        assert words.format(share) in text, label
    each = shares["FoPE"]
    assert f"[{each.min():.0f} to {each.max():.0f} %]" in text
    rise = {
        label: np.diff(results.seed_stats(rows, "loss", [512, 8192])[1])[0]
        for label, rows in parts.items()
    }
    assert (
        f"RoPE's loss on text rises by {rise['RoPE']:.2f} nats, FoPE's by {rise['FoPE']:.2f}"
        in text
    )
    with_norm = results.rise_removed(parts, of="RoPE + QK-norm")["FoPE + QK-norm"]
    with_norm = 100 * np.array(with_norm)
    assert f"With QK-norm in both it removes {with_norm.mean():.0f} %" in text
    half = results.half_interval(with_norm)
    assert f"With QK-norm in both, FoPE removes {with_norm.mean():.0f} ± {half:.0f} %" in text
    series = shares["FoPE"] - shares["FoPE, CF alone"]
    most = series.mean() + results.half_interval(series)
    assert f"the series adds at most {most:.0f} % (level up to 4096, unclear at 8192)" in text
    pairs = (parts["FoPE, CF alone"], parts["FoPE"], "loss", [512, 1024, 2048, 4096, 8192])
    pairs = results.paired_differences(*pairs)
    within = np.abs(pairs.mean(axis=0)) + results.half_interval(pairs) < 0.05
    assert list(within) == [True] * 4 + [False]
    removed = []
    for to in (2048, 4096):
        near = {
            label: [r | {"lengths": {n: r["lengths"][n] for n in (512, to)}} for r in rows]
            for label, rows in parts.items()
        }
        share = 100 * np.array(results.rise_removed(near)["FoPE, FS alone, FoPE's table noise"])
        removed.append(f"{share.mean():.0f} ± {results.half_interval(share):.0f}")
    assert f"to 2048 and 4096, not named beforehand, {removed[0]} and {removed[1]}" in text
    far = [
        f"{results.seed_stats(parts[f'{name} + QK-norm'], 'perplexity', [8192])[1][0]:.1f}"
        for name in ("RoPE", "FoPE")
    ]
    both = f"With queries and keys normalised (QK-norm) RoPE's perplexity grows to {far[0]} and "
    assert both + f"FoPE's to {far[1]}." in " ".join(read("README.md").split())
    keys = results.load_results([ROOT / "results" / "parts.json"])["passkey"]
    for label, words in (
        ("FoPE, CF alone", "the floor alone finds {}, {}, {} and {} %"),
        ("FoPE", "FoPE {}, {}, {} and {}."),
        ("FoPE, FS alone, FoPE's table noise", "The series alone finds {}, {}, {} and {} %"),
        ("RoPE", "RoPE {}, {}, {} and {}."),
        ("FoPE + QK-norm", "With QK-norm FoPE finds {}, {}, {} and {} %"),
        ("RoPE + QK-norm", "RoPE {}, {}, {} and {}: FoPE is ahead"),
    ):
        assert {results.seed_of(r) for r in keys[label]} == {1, 2, 3, 4, 5}
        digits = results.seed_stats(keys[label], "token_accuracy", [1024, 2048, 4096, 8192])[1]
        assert words.format(*(round(100 * share) for share in digits)) in text, label
    far = [
        round(100 * results.seed_stats(keys[label], "token_accuracy", [8192])[1][0])
        for label in ("FoPE, CF alone", "FoPE", "FoPE, FS alone, FoPE's table noise", "RoPE")
    ]
    words = "floor {} %, FoPE {} %, series {} %, RoPE {} %".format(*far)
    for name in ("README.md", "results/README.md", "docs/index.html"):
        assert words in " ".join(read(name).split()), name
    lengths = [1024, 2048, 4096, 8192]
    assert len(keys["KERPLE"]) == 5
    assert not any(results.seed_stats(keys["KERPLE"], "token_accuracy", lengths)[1])
    for label, behind in (("FoPE, FS alone, FoPE's table noise", True), ("FoPE, CF alone", False)):
        pairs = 100 * results.paired_differences(
            keys[label], keys["FoPE"], "token_accuracy", lengths
        )
        half = results.half_interval(pairs)
        assert all((pairs.mean(axis=0) + half < 0)[1:] == behind), label
    assert f"but one of {half.min():.0f} to {half.max():.0f} points could hide" in text
    norm = " + QK-norm"
    for label, to, is_ahead in (
        ("FoPE" + norm, "RoPE" + norm, True),
        ("FoPE" + norm, "FoPE", False),
        ("RoPE" + norm, "RoPE", False),
    ):
        pairs = 100 * results.paired_differences(keys[label], keys[to], "token_accuracy", lengths)
        beyond = np.abs(pairs.mean(axis=0)) > results.half_interval(pairs)
        assert all(beyond == is_ahead) and (not is_ahead or pairs.mean() > 0), label


def test_the_report_says_what_yarn_and_the_others_are_worth():
    """RoPE-A and NoPE of figure 1; FoPE against RoPE with YaRN after a tenth and a quarter."""
    text, at = " ".join(read("results/README.md").split()), [512, 1024, 2048, 4096, 8192]
    for name, sign, words in (
        ("figure4_quarter", -1, "{:.2f} ± {:.2f} nats ahead of RoPE with YaRN here"),
        ("figure4", 1, "after a tenth {:.2f} ± {:.2f} behind"),
    ):
        rows = results.load_results([ROOT / "results" / f"{name}.json"])["perplexity"]
        yarn, fope = rows["RoPE to RoPE + YaRN x16"], rows["FoPE to FoPE + YaRN x16"]
        far = sign * results.paired_differences(rows["RoPE to FoPE"], yarn, "loss", [8192])[:, 0]
        assert words.format(far.mean(), results.half_interval(far)) in text
        both = results.paired_differences(fope, rows["FoPE to FoPE"], "loss", [8192])[:, 0]
        assert abs(both.mean()) < results.half_interval(both)
        assert all(results.paired_differences(fope, yarn, "loss", at).mean(axis=0) > 0)
        ahead = results.paired_differences(rows["RoPE to FoPE"], yarn, "loss", at).mean(axis=0) < 0
        assert list(ahead) == [False] * 4 + [sign < 0]
    rows = results.load_results([ROOT / "results" / "figure1_all.json"])["perplexity"]
    found = results.load_results([ROOT / "results" / "figure1.json"])
    found, keys = found["perplexity"], found["passkey"]["FoPE"]
    none = [r["lengths"][8192]["accuracy"] == 0 for r in keys]
    assert 2 * sum(none) == len(none) and "half of its seeds none" in text
    above = results.paired_differences(rows["RoPE-A"], rows["RoPE"], "loss", [8192]).mean()
    assert f"of RoPE-A, whose frequencies are rounded to whole cycles, are {above:.2f} nats" in text
    of_pieces = results.seed_stats(found["RoPE"], "loss", [512])[1][0]
    assert f"in pieces of 512 tokens keeps {of_pieces:.2f}, below FoPE at every" in text
    assert all(results.seed_stats(found["FoPE"], "loss", at)[1] > of_pieces)
    for label in ("ALiBi", "KERPLE"):
        falls = results.seed_stats(rows[label], "loss", [512, 8192])[1]
        assert 0 < falls[0] - falls[1] < 0.01
    fire = results.seed_stats(rows["FIRE"], "loss", [512, 8192])[1]
    assert f"FIRE (twice the rate) rises from {fire[0]:.2f} to {fire[1]:.2f}." in text
    assert {r["recipe"]["lr"] for r in rows["FIRE"]} == {2 * rows["NoPE"][0]["recipe"]["lr"]}
    keys = results.load_results([ROOT / "results" / "figure1_all.json"])["passkey"]["NoPE"]
    assert "NoPE learns it in no seed" in text and len(keys) == len(rows["FIRE"]) == 5
    assert not any(row["accuracy"] for r in keys for row in r["lengths"].values())
    nope = results.seed_stats(rows["NoPE"], "loss", at)[1]
    assert f"NoPE stays near {nope[0]:.2f}," in text and np.ptp(nope) < 0.015


def test_the_report_says_what_is_found_with_the_question_anywhere():
    text, name = " ".join(read("results/README.md").split()), "passkey_anywhere"
    found = results.load_results([ROOT / "results" / "anywhere.json"])[name]
    keys, digits = (
        {
            label: [
                round(100 * x) for x in results.seed_stats(rows, of, [1024, 2048, 4096, 8192])[1]
            ]
            for label, rows in found.items()
        }
        for of in ("accuracy", "token_accuracy")
    )
    words = (
        "FoPE finds {} % of the keys at 1024 and {} % at 2048; at 4096 and 8192 {} and {} %, but "
    )
    words = words.format(*keys["FoPE"]) + "{2} and {3} % of the digits.".format(*digits["FoPE"])
    assert words in text
    assert f"RoPE finds {keys['RoPE'][0]} % at 1024, then none." in text and not any(
        keys["RoPE"][1:]
    )
    assert keys["FoPE"][1] > keys["ALiBi"][1] > keys["RoPE"][1]
    for i in (2, 3):
        assert keys["ALiBi"][i] == max(k[i] for k in keys.values())
        assert digits["FoPE"][i] == max(d[i] for d in digits.values())


def test_the_report_says_what_the_20M_shape_gave():
    """Rises of perplexity by 16x, FoPE's above RoPE's at 1x, in % of all seeds; of nats removed."""
    text, above, removed, rises = " ".join(read("results/README.md").split()), [], [], []
    by_corpus = results.load_results([ROOT / "results" / "figure5_20M_cpu.json"])
    for corpus in ("books", "c4"):
        found = by_corpus[f"perplexity on {corpus}"]
        at = {
            label: {
                results.seed_of(r): [r["lengths"][n]["perplexity"] for n in (512, 8192)] for r in rs
            }
            for label, rs in found.items()
        }
        assert at["RoPE"].keys() == at["FoPE"].keys() == {0, 1, 2} and len(at["ALiBi"]) == 1
        assert all(far < near for near, far in at["ALiBi"].values())
        for label in ("RoPE", "FoPE"):
            rises.append(span(100 * (far / near - 1) for near, far in at[label].values()))
        above += [100 * (at["FoPE"][seed][0] / at["RoPE"][seed][0] - 1) for seed in at["FoPE"]]
        removed += [100 * share for share in results.rise_removed(found)["FoPE"]]
    rope, fope, rope_c4, fope_c4 = rises
    assert (
        f"rises by {rope} % on books and {rope_c4} % on C4, FoPE's by {fope} and {fope_c4} %"
        in text
    )
    assert f"FoPE removes {span(removed)} % in nats" in text
    assert f"at 1x it is {span(above)} % above RoPE " in text
    price = f"With 9.4M parameters FoPE starts {span(above)} % above RoPE"
    assert price in text and price in " ".join(read("README.md").split())


def span(values):
    values = [round(value) for value in values]
    return f"{min(values)} to {max(values)}"


def test_the_report_says_what_the_pilot_gave():
    text = " ".join(read("results/README.md").split())
    keys = results.load_results([ROOT / "results" / "pilot_512.json"])["passkey"]
    seeds = sorted({results.seed_of(r) for r in keys["FoPE"]})
    given = [" and ".join(", ".join(map(str, seeds)).rsplit(", ", 1))]
    for length, name in ((1024, "accuracy"), (8192, "token_accuracy")):
        for label in ("RoPE", "FoPE"):
            of = {results.seed_of(r): r["lengths"][length][name] for r in keys[label]}
            shares = [str(round(100 * of[seed])) for seed in seeds]
            given.append(" and ".join(", ".join(shares).rsplit(", ", 1)))
    alibi = {n: {r["lengths"][n]["accuracy"] for r in keys["ALiBi"]} for n in (512, 1024, 8192)}
    assert alibi == {512: {1.0}, 1024: {0.0}, 8192: {0.0}} and len(keys["ALiBi"]) == len(seeds)
    words = (
        "in seeds {} RoPE finds {} % of the keys at 1024, FoPE {}, ALiBi none; of the digits at "
    )
    words += "8192 RoPE "
    assert (words + "{} %, FoPE {}.").format(*given) in text


def test_the_attention_row_is_that_of_its_json():
    stored = json.loads(read("results/mechanism/attention_row.json"))
    beyond = stored["train_len"] // stored["step"]
    far = {name: f"{100 * sum(rows[-1][beyond:]):.0f} %" for name, rows in stored["rows"].items()}
    assert far["fope"] == far["fope_cf"]
    words = "{rope} of its attention to keys further away than in training, FoPE's and the floor "
    assert (words + "alone's {fope}, ALiBi's {alibi}").format(**far) in read(
        "results/mechanism/README.md"
    )


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
