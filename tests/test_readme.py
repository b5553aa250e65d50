"""The numbers, tables, links and commands of README, report and pages are those of the project."""

import functools
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from paper import results, tables

README, REPORT, ARGUMENTS = "README.md", "results/README.md", "results/mechanism/README.md"
COURSE = "assignments/README.md"
TEXTS = [README, REPORT, ARGUMENTS, COURSE]
LENGTHS, RIVALS = [512, 1024, 2048, 4096, 8192], ["RoPE", "FoPE"]
FLOOR, SERIES, NORM = "FoPE, CF alone", "FoPE, FS alone, FoPE's table noise", " + QK-norm"
FLOOR_1024 = "FoPE, floor of 1024 alone"
PUT_BACK, PAIRS = ("slow, wrapped", "fast, wrapped"), ("slow", "fast")


@functools.cache
def read(text):
    return (ROOT / text).read_text(encoding="utf-8")


# --- what the json files give


@functools.cache
def found(figure):
    return results.load_results([ROOT / "results" / f"{figure}.json"])


def values(figure, label, name="loss", lengths=(512, 8192), kind="perplexity"):
    """One number: (seeds, lengths), by seed."""
    rows = sorted(found(figure)[kind][label], key=results.seed_of)
    return np.array([[row["lengths"][n][name] for n in lengths] for row in rows])


def removed(label, of="RoPE", to=8192, figure="parts", kind="perplexity"):
    """The share of the rise of `of` that it has not, in %, for each seed."""
    own, whole = (np.diff(values(figure, la, "loss", (512, to), kind)) for la in (label, of))
    return 100 * (1 - own / whole)[:, 0]


def keys(figure, label, name="accuracy"):
    """Whole passkeys found (token_accuracy: digits) at LENGTHS."""
    kind = "passkey_anywhere" if figure == "enough" else "passkey"
    return [f"{share:.0%}" for share in values(figure, label, name, LENGTHS, kind).mean(axis=0)]


def rise(figure, label, name="perplexity", digits=1):
    near, far = values(figure, label, name).mean(axis=0)
    return f"{near:.{digits}f}", f"{far:.{digits}f}"


def differences(name):
    """Of comparisons named beforehand: how large each is, and whether it is decided."""
    rows = json.loads(read(f"results/{name}.json"))
    places = {"loss": (1, 3 if name == "primary_enough" else 2)}
    for row in rows:
        factor, digits = places.get(row["measure"], (100, 0))
        numbers = (abs(factor * row[key]) for key in ("mean", "half_interval"))
        yield " ± ".join(f"{number:.{digits}f}" for number in numbers), row["p_holm"] < 0.05


def percent(shares):
    return f"{np.mean(shares):.0f}%"


def plus(differences, digits=0):
    return f"{differences.mean():.{digits}f} ± {results.half_interval(differences):.{digits}f}"


def span(values):
    return f"{min(values):.0f} to {max(values):.0f}"


# --- and where the texts say it


def sentences():
    """(text, words and numbers ...), which stand in the text in this order, near each other."""
    whole, floor, series = (percent(removed(label)) for label in ("FoPE", FLOOR, SERIES))
    with_norm, found_by = removed("FoPE" + NORM, of="RoPE" + NORM), found("parts")["passkey"]
    digits = {label: keys("parts", label, "token_accuracy")[1:] for label in found_by}

    # the paper's smallest model
    rises, shares, price = [], [], []
    for kind in ("perplexity on books", "perplexity on c4"):
        how = ("perplexity", (512, 8192), kind)
        at = [values("figure5_20M_cpu", pos, *how) for pos in RIVALS]
        rises += [span(100 * (ppl[:, 1] / ppl[:, 0] - 1)) for ppl in at]
        shares += [*removed("FoPE", figure="figure5_20M_cpu", kind=kind)]
        price += [*100 * (at[1] / at[0] - 1)[:, 0]]
    yield REPORT, "rises by", rises[0], rises[2], "FoPE's", rises[1], rises[3], span(shares)
    yield REPORT, "At 1x", span(price)

    # 60M on a GPU: books, then C4
    kinds, less = ("perplexity on books", "perplexity on c4"), ("RoPE, theta 94", "FoPE", FLOOR)
    gone = [[percent(removed(la, "RoPE", 8192, "gpu_60M", kind)) for la in less] for kind in kinds]
    how = "bits_per_byte", (512, 8192), kinds[0]
    nats = [values("gpu_60M", label, *how)[0] * np.log(2) for label in ("RoPE", *less)]
    assert np.ptp([near for near, _ in nats]) < 0.002
    yield REPORT, f"{nats[0][0]:.2f} nats per byte", *(f"{far:.2f}" for _, far in nats)
    yield REPORT, "theta 94 reads best", *gone[0], "C4", *(share[:-1] for share in gone[1])
    yield REPORT, "at 60M 80 %", "theta 94", gone[0][0]
    yield REPORT, "removes 84 %", "at 60M", gone[0][1]
    runs = json.loads(read("results/mechanism/wrap_60M.json"))["runs"]
    by_name = {run["name"]: run for run in runs}
    back = [percent([100 * by_name["rope"]["removed"][which]]) for which in PUT_BACK]
    yield REPORT, "slow pairs put back (wrapped;", *back
    yield README, "at 60M (one model)", *back
    others = [by_name[name] for name in ("theta94", "fope", "floor")]
    share = [percent([100 * run["damage"] / by_name["rope"]["damage"]])[:-1] for run in others]
    fast = [percent([100 * run["removed"]["fast, wrapped"]])[:-1] for run in others]
    yield REPORT, "Theta 94, FoPE and floor have", *share, "fast pairs", *fast
    speed = json.loads(read("results/bench_60M_cuda.json"))["summary"]
    for how in ("compiled", "train"):
        rates = [f"{round(speed[pos][how], -3):,.0f}" for pos in ("rope", "fope", "alibi")]
        yield REPORT, "compiled", *rates
    yield README, f"{round(speed['rope']['compiled'], -3):,.0f} tokens/s"

    # what was found
    rope = rise("figure1", "RoPE")
    yield README, "floor alone", floor, "FoPE", whole, "series alone", series
    price = np.diff([values("figure1", pos)[:, 0].mean() for pos in RIVALS])[0]
    norms = (rise("parts", pos + NORM)[1] for pos in RIVALS)
    yield README, "pieces", rope[0], "QK-norm", *norms
    runs = json.loads(read("results/mechanism/wrap.json"))["runs"]
    back = [percent([100 * run["removed"][which] for run in runs]) for which in PUT_BACK]
    held, at = json.loads(read("results/mechanism/wrap_held.json"))["runs"], {}
    for pairs in PAIRS:
        places = {"old": (" 0.5x", " 0.75x"), "edge": ("",), "new": (" 1.5x", " 2x", " 3x")}
        for angles, where in places.items():
            names = [f"{pairs}, held{place}" for place in where]
            shares = [[100 * run["removed"][name] for name in names] for run in held]
            at[pairs, angles] = np.mean(shares, axis=1)
    slow, fast = ([percent(at[pairs, angles]) for angles in places] for pairs in PAIRS)
    yield README, "At angles of training", *slow, "all angles", *fast, "Wrapped", *back
    yield REPORT, "in trained models", *slow, "wrapped back", *back
    yield ARGUMENTS, "at old angles", *slow[::2]
    for text in ("docs/index.html", "experiments/tour.ipynb"):
        yield text, "255 or 383", *slow[::2], "the fast ones", *fast[::2]
    yield REPORT, "held at 255, 383", *(plus(at[pairs, "old"]) for pairs in PAIRS)
    yield REPORT, "held at 767, 1023, 1535", *(plus(at[pairs, "new"]) for pairs in PAIRS)
    recent = json.loads(read("results/mechanism/wrap_recent.json"))["runs"]
    recent = np.array([100 * run["removed"]["slow, recent"] for run in recent])
    yield REPORT, "wrapped into 0 to 255", plus(recent)
    ends = [values("figure1", pos, "by_position", [8192])[:, 0].mean(axis=0) for pos in RIVALS]
    ends = [f"{part.mean():.1f}" for part in (ends[0][:4], ends[0][-4:], ends[1][-4:])]
    yield README, "loss climbs from", *ends
    files = [ROOT / "results" / f"{name}.json" for name in ("figure1", "parts", "enough")]
    every = results.load_results(files)
    asked_of = every["passkey_anywhere"]
    for label in ("RoPE", "RoPE, theta 94", "FoPE", FLOOR, "ALiBi"):
        text, asked = every["perplexity"][label], asked_of[label]
        _, ppl, _, n = results.seed_stats(text, "perplexity", [512, 8192])
        row = f"| {label.replace('CF', 'floor')} | {ppl[0]:.1f} | {ppl[1]:.1f}"
        _, share, _, of_keys = results.seed_stats(asked, "token_accuracy", [512, 2048])
        yield README, row + f" | {100 * share[0]:.0f} | {100 * share[1]:.0f} | {n}, {of_keys} |"
    at_512 = ("accuracy", [512], "passkey_anywhere")
    learned = {la: (values("enough", la, *at_512) >= 0.95).ravel() for la in asked_of}
    n = {label: f"{sum(seeds)} of {len(seeds)}" for label, seeds in learned.items()}
    assert n["RoPE, theta 94"] == "1 of 8" and n["FoPE"] == "8 of 8"
    yield README, "one of theta 94's 8 seeds copies 95 %", "all 8 of FoPE", f"{n['RoPE']} of RoPE"
    of_floor = f"{sum(learned[FLOOR])} of the floor"
    yield REPORT, "95 % of them", "8 of 8 seeds of FoPE", of_floor, "1 of theta 94", n["RoPE"]
    shares = results.rise_removed(every["perplexity"])
    less, higher = (100 * np.array(shares[label]) for label in ("RoPE, theta 94", FLOOR_1024))
    yield README, "completes all turns", percent(less), "60M", *gone[0]
    shares = {label: 100 * np.array(share) for label, share in shares.items()}
    of_128, of_256, of_2048 = (shares[f"FoPE, floor of {n} alone"] for n in (128, 256, 2048))
    far = percent(of_128), "1024", percent(higher)
    yield README, "floor alone removes", floor, "128", *far
    yield REPORT, "Floors of", *map(plus, (of_128, of_256, shares[FLOOR], higher, of_2048))
    thetas = [percent(shares[f"RoPE, theta {theta}"]) for theta in (22, 46, 94, 192)]
    yield REPORT, "half a cycle, remove", *thetas
    yield REPORT, "as fast", plus(shares["RoPE, tapered"])
    sigmas = [percent(shares[f"FoPE, sigma {sigma}"]) for sigma in (0.1, 0.6, 1.2)]
    sigmas.insert(1, whole)
    yield REPORT, "FoPE with sigma", *sigmas, percent(shares["FoPE, D = 64"])
    (at_1x, at_16x, higher_floor, louder, of_keys, of_floor), decided = zip(
        *differences("primary_enough"), strict=True
    )
    assert decided == (True, True, True, False, True, False)
    yield REPORT, "completes a cycle", at_1x, "at 512", at_16x, plus(less)
    yield REPORT, "0.6 cycles", higher_floor, "8192"
    yield REPORT, "sigma 1.2", louder, "below the floor alone"
    three = [asked_of[label] for label in ("FoPE", FLOOR, "RoPE, theta 94")]
    shares = [results.seed_stats(rs, "token_accuracy", [2048])[1][0] for rs in three]
    found_by = [f"{share:.0%}" for share in shares]
    yield REPORT, "digits at 2048 FoPE finds", *found_by, of_keys, of_floor
    of_rope = results.seed_stats(asked_of["RoPE"], "token_accuracy", [2048])[1][0]
    yield REPORT, "at 2048 RoPE finds", f"{of_rope:.0%}", *reversed(found_by)
    how = "token_accuracy", [2048], "passkey_anywhere"
    of_rope = 100 * values("enough", "RoPE", *how)  # seeds 3 to 7
    ahead = 100 * values("enough", "RoPE, theta 94", *how)[: len(of_rope)] - of_rope
    yield REPORT, "points behind FoPE, the floor", plus(ahead[:, 0]), "behind theta 94"
    still = 100 * values("enough", "p-RoPE, p = 0.5", *how)  # seeds 3 to 6
    by = [100 * values("enough", la, *how)[:4] for la in ("RoPE, theta 94", "FoPE")]
    ahead, behind = plus((still - by[0])[:, 0]), plus((by[1] - still)[:, 0])
    copied = 100 * values("enough", "p-RoPE, p = 0.5", "accuracy", [512], how[-1])
    yield REPORT, "p-RoPE (four seeds)", f"{still.mean():.1f}", ahead, behind, percent(copied)
    how = [512], "passkey_anywhere"
    copied = 100 * values("longer", "RoPE, theta 94, twice the tokens", "accuracy", *how).ravel()
    how = "token_accuracy", [2048], "passkey_anywhere"
    found_by = 100 * values("longer", "RoPE, theta 94, twice the tokens", *how).ravel()
    yield REPORT, "twice the tokens", *map(percent, copied), "finds", *map(percent, found_by)
    yield README, "twice the tokens", percent(copied), percent(found_by), "at 2048"
    losses = (f"{np.diff(values('figure1', pos)).mean():.2f}" for pos in RIVALS)
    yield REPORT, "RoPE's loss", *losses, whole, "QK-norm", percent(with_norm)
    yield REPORT, "At 512 it starts", f"{price:.2f} nats"
    yield REPORT, "floor alone removes", floor, whole, "series alone", series, percent(less)
    parts = [rise("parts", label) for label in ("RoPE", FLOOR, SERIES, "FoPE")]
    yield COURSE, "RoPE", *parts[0], "floor", *parts[1], "series", *parts[2], "both", *parts[3]

    # what was named beforehand
    said = [number for number, is_decided in differences("primary") if is_decided]
    assert len(said) == 6
    for number in said:
        yield REPORT, number

    # text
    pieces, each = rise("figure1", "RoPE", digits=2, name="loss")[0], removed("FoPE")
    above = (values("figure1_all", "RoPE-A") - values("figure1_all", "RoPE"))[:, 1].mean()
    yield REPORT, plus(each), span(each), "pieces", pieces, "RoPE-A", f"{above:.2f} nats above"
    more = each - removed(FLOOR)
    yield REPORT, "floor alone", plus(removed(FLOOR)), plus(each), "adds", plus(more)
    yield REPORT, "series alone removes", plus(removed(SERIES))
    yield REPORT, "QK-norm", plus(removed("RoPE" + NORM)), "in both", plus(with_norm)
    for figure, sign, words in (("figure4_quarter", -1, "nats ahead"), ("figure4", 1, "behind")):
        gap = values(figure, "RoPE to FoPE") - values(figure, "RoPE to RoPE + YaRN x16")
        yield REPORT, plus(sign * gap[:, 1], 2), words

    # passkeys
    rope, fope = keys("figure1", "RoPE"), keys("figure1", "FoPE")
    yield REPORT, "FoPE finds", *fope, "RoPE", *rope, "ALiBi", keys("figure1", "ALiBi")[0]
    yield REPORT, "four times", fope[2], "RoPE", rope[2], "sixteen times", fope[4]
    at_4096 = 100 * values("figure1", "FoPE", "accuracy", [4096], "passkey").ravel()
    yield REPORT, "at 4096 it finds from", span(at_4096)
    some = keys("enough", "FoPE", "token_accuracy")
    anywhere = keys("enough", "FoPE")
    yield REPORT, "FoPE finds", anywhere[2], "2048", anywhere[4], "8192, of the digits", some[4]
    by_place = tables.place_table({"passkey": found("enough")["passkey_anywhere"]}).split("\n")
    by_place = {row.split(" | ")[0][2:]: re.findall(r"\d+", row)[-8:] for row in by_place}
    yield REPORT, "in which the key stands", *by_place["ALiBi"][:4]
    yield REPORT, "by quarter", *by_place["FoPE"][4:]
    yield REPORT, "floor alone finds", *digits[FLOOR], "FoPE", *digits["FoPE"]
    yield REPORT, "series alone finds", *digits[SERIES], "RoPE", *digits["RoPE"]
    how = ("token_accuracy", LENGTHS[1:], "passkey")
    hidden = results.half_interval(values("parts", FLOOR, *how) - values("parts", "FoPE", *how))
    yield REPORT, "one of", span(100 * hidden), "points could hide"
    shares = [values("pilot_512", pos, "accuracy", [1024], "passkey") for pos in RIVALS]
    yield REPORT, "RoPE", *(f"{share:.0%}" for share in np.ravel(shares))
    at_512 = [values("figure1", pos, "accuracy", [512], "passkey") for pos in (*RIVALS, "ALiBi")]
    learned = [str((shares >= 0.95).sum()) for shares in at_512]
    yield REPORT, "RoPE misses", learned[0], "of 10", "FoPE", learned[1], "ALiBi", learned[2]

    # the cause
    runs = json.loads(read("results/mechanism/wrap.json"))["runs"]
    damage = np.mean([run["damage"] for run in runs])
    yield REPORT, "far keys hidden", f"{damage:.2f} nats"
    for how in ("wrapped", "held"):
        shares = [[run["removed"][f"{p}, {how}"] for run in runs] for p in ("slow", "fast", "both")]
        yield REPORT, how, *(plus(100 * np.array(share)) for share in shares)
    others = json.loads(read("results/mechanism/wrap_others.json"))["runs"]
    three = {name: [r for r in others if r["name"] == name] for name in ("fope", "rope_a")}
    three["cycle"] = [run for run in others if run["name"] == "rope_cycles1"]
    nats = {k: f"{np.mean([run['damage'] for run in runs]):.2f}" for k, runs in three.items()}
    gone = np.mean([run["removed"]["both, wrapped"] for run in three["rope_a"]])
    yield REPORT, "theta 94", nats["cycle"], "FoPE", nats["fope"], "RoPE-A", nats["rope_a"]
    yield REPORT, "wrapped", f"{gone:.0%}", "standing still"

    row = json.loads(read("results/mechanism/attention_row.json"))
    beyond = row["train_len"] // row["step"]
    # a half goes up, whichever way Python sums
    shares = [f"{sum(rows[-1][beyond:]) + 1e-9:.0%}" for rows in row["rows"].values()]
    yield ARGUMENTS, "RoPE's last layer", shares[0], "FoPE's", shares[1], "ALiBi's", shares[3]


def test_numbers_of_the_texts_are_those_of_the_json_files():
    stale = []
    for text, *words in sentences():
        # "33 %" may stand in a list: "33, 20 and 10 %"
        parts = [rf"(?<![\d.]){re.escape(word.removesuffix('%'))}(?!\d)" for word in words]
        if not re.search(".{1,80}?".join(parts), " ".join(read(text).split())):
            stale.append(f"{text} should say: {' ... '.join(words)}")
    assert not stale, "\n".join(stale)


# who is ahead at each of LENGTHS, by the 95 % interval; =: level, all of it within 0.02 nats or 5
# points; 0: unclear
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
    ("figure1", "accuracy", "FoPE", "RoPE", "0+++0"),
    ("parts", "token_accuracy", SERIES, "FoPE", "=0---"),
    ("parts", "token_accuracy", "FoPE" + NORM, "RoPE" + NORM, "=++++"),
]


@pytest.mark.parametrize("figure, name, label, to, signs", CLAIMS)
def test_who_is_ahead_is_that_of_the_json_files(figure, name, label, to, signs):
    kind = "perplexity" if name == "loss" else "passkey"
    pair = [values(figure, la, name, LENGTHS, kind) for la in (label, to)]
    middle, half = (pair[0] - pair[1]).mean(axis=0), results.half_interval(pair[0] - pair[1])
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


def test_the_moving_picture_is_drawn_from_the_results(monkeypatch):
    drawn = []
    monkeypatch.setattr(Path, "write_text", lambda *path_and_text: drawn.append(path_and_text))
    runpy.run_path(str(ROOT / "experiments" / "moving_picture.py"), run_name="__main__")
    assert len(drawn) == 2 and all(path.read_text() == svg for path, svg in drawn)


# --- tables, links, commands


@pytest.mark.parametrize("text", [README, REPORT, "results/TABLES.md"])
def test_tables_are_those_of_the_committed_results(text):
    assert "<!-- table " in read(text)
    how = f"run python -m paper.plot --tables {text}"
    assert tables.fill_tables(read(text), ROOT / "results") == read(text), how


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
    pattern = r"(bash|python) (-m [\w.]+|[\w./]+\.(?:sh|py))([^\n`#]*)"
    for program, script, words in re.findall(pattern, "\n".join(map(read, TEXTS))):
        command = (program.replace("python", sys.executable), *script.split(), "--help")
        calls.setdefault(command, []).extend(re.findall(r"--[\w-]+", words))
    assert len(calls) > 8
    for command, flags in sorted(calls.items()):
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for flag in flags:
            assert flag in shown, f"{' '.join(command)} has no {flag}"
