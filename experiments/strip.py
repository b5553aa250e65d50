"""
The text on docs/index.html: what trained models lose at each byte of a text that is too long.

    python experiments/strip.py runs_out/tiny/text/{rope,rope_cycles1,fope,alibi}_s3
    python experiments/strip.py --page                 put the numbers into docs/index.html

The passages are the beginnings of the first two validation documents that have LENGTH bytes, one
document each. A model reads an end of text and then the passage, in one piece. The loss of a byte
is in nats. RoPE's model reads each passage as it is and in five more ways, without any training:
wrap.py says what its conditions are, baselines.py what YaRN is.

One passage is not the mean of many texts. "mean" has the mean loss of the first train_len bytes
and of the others, on this passage and in the table: the mean of all models and texts in results/.
"""

import json
import re
import string
from dataclasses import replace
from pathlib import Path

import numpy as np
from shared import ROOT, Parser, save
from wrap import CONDITIONS, HELD, PutBack, held_distance

from checkpoint import load_checkpoint, with_pos
from common import Refused, one_sentence_errors, read_json, write_atomically
from data import TokenData, window_loss
from paper.results import load_results, seed_stats

LENGTH, PASSAGES = 2048, 2
LENGTHS = [512, 1024, 2048, 4096, 8192]  # of the charts
DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
STEP = 0.125  # nats; the page holds a loss as one of 64 digits, a whole number of these
PUT_BACK = {"slow": "slow, held 0.5x", "new": "slow, held 1.5x", "fast": "fast, held 0.5x"}
YARN = "RoPE, YaRN told the length"
READ = {  # name on the page: name of the run, figure and label in results/
    "rope": ("rope", "figure1", "RoPE"),
    "slow": ("rope", None, PUT_BACK["slow"]),
    "new": ("rope", None, PUT_BACK["new"]),
    "fast": ("rope", None, PUT_BACK["fast"]),
    "yarn": ("rope", "untrained", YARN),
    "window": ("rope", "untrained", "RoPE, window of 512"),
    "cycle": ("rope_cycles1", "enough", "RoPE, theta 94"),
    "fope": ("fope", "figure1", "FoPE"),
    "alibi": ("alibi", "figure1", "ALiBi"),
}
FLOOR = "FoPE, floor alone"
PERPLEXITY = {name: of for name, (_, *of) in READ.items() if of[0]} | {"floor": ("parts", FLOOR)}
PASSKEYS = {name: ("enough", PERPLEXITY[name][1]) for name in ("rope", "cycle", "fope", "alibi")}
PASSKEYS |= {"floor": ("enough", FLOOR)}
AT_2048 = {"yarn": ("keys", f"{YARN}, with temperature"), "yarn_alone": ("keys", YARN)}


def passages(data, length, n):
    """[(number of the document, its first `length` tokens)], of the first n that have so many."""
    tokens, eot = data.read(0, len(data)), data.meta["eot"]
    documents = np.split(tokens, np.flatnonzero(tokens == eot) + 1)
    found = [(i, doc[:length]) for i, doc in enumerate(documents) if len(doc) > length]
    if len(found) < n:
        raise Refused(f"{data.folder} has fewer than {n} validation texts of {length:,} tokens")
    return found[:n]


def changed(model, name, length):
    """The model of RoPE's run, as the page's `name` lets it read a text of this length."""
    if name == "yarn":
        N = model.config.train_len
        scaling = {"kind": "yarn", "original_len": N, "factor": length / N}
        return with_pos(model, replace(model.config, rope_scaling=scaling))
    condition = "near" if name == "window" else PUT_BACK.get(name, "none")
    for block in model.blocks:
        block.attn.pos = PutBack(block.attn.pos, *CONDITIONS[condition])
    return model


def in_parts(losses, train_len):
    """[mean of the first train_len bytes, mean of the others]; losses: (..., T), evenly spread."""
    losses = np.asarray(losses)
    first = losses.shape[-1] * train_len // LENGTH
    return [round(float(part.mean()), 3) for part in np.split(losses, [first], axis=-1)]


def table_means(name, train_len):
    """in_parts() of all models and texts that were read at this length for the report."""
    _, figure, label = READ[name]
    if figure:
        results = load_results([ROOT / "results" / f"{figure}.json"])["perplexity"][label]
        return in_parts([r["lengths"][LENGTH]["by_position"] for r in results], train_len)
    runs = read_json(ROOT / "results" / "mechanism" / "wrap_held.json")["runs"]
    first = np.mean([in_parts(run["by_position"]["none"], train_len)[0] for run in runs])
    whole = np.mean([run["loss"][label] for run in runs])
    return [round(float(first), 3), round(float((4 * whole - first) / 3), 3)]


def measure(folders, out):
    """Read the passages with the models of these runs; out/strip.json."""
    runs = {Path(folder).name.rpartition("_s")[0]: folder for folder in folders}
    if missing := {run for run, *_ in READ.values()} - set(runs):
        raise Refused(f"folders NAME_sSEED are missing for {', '.join(sorted(missing))}")
    rows = []
    for name, (run, *_) in READ.items():
        model, _, _ = load_checkpoint(runs[run])
        recipe, data = model.config, TokenData(model.config.data, "val")
        if run == "rope" and name != "rope":
            model = changed(model, name, LENGTH)
        for i, (document, tokens) in enumerate(passages(data, LENGTH, PASSAGES)):
            losses = window_loss(model, np.append(data.meta["eot"], tokens), LENGTH)[0]
            if len(rows) <= i:
                text = bytes(tokens.astype(np.uint8)).decode("latin-1")
                rows.append({"document": document, "text": text, "mean": {}, "losses": {}})
            rows[i]["losses"][name] = losses.round(2).tolist()
            mean = {"passage": in_parts(losses, recipe.train_len)}
            rows[i]["mean"][name] = mean | {"table": table_means(name, recipe.train_len)}
            print(f"{name:8} document {document}: {mean['passage']}", flush=True)
    about = {"runs": folders, "seed": recipe.seed, "data": recipe.data, "length": LENGTH}
    save(about | {"train_len": recipe.train_len, "passages": rows}, out, "strip")


def page_numbers(folder):
    """What docs/index.html draws: folder/strip.json, wrap_held.json, and two charts of results/."""
    strip, held = read_json(folder / "strip.json"), read_json(folder / "wrap_held.json")
    page = {"train_len": strip["train_len"], "step": STEP, "digits": DIGITS, "passages": []}
    page["lengths"] = LENGTHS
    for row in strip["passages"]:
        losses = {name: packed(row["losses"][name]) for name in READ if name != "window"}
        means = {name: [m["passage"][1], m["table"][1]] for name, m in row["mean"].items()}
        page["passages"].append({"text": row["text"], "past": means, "losses": losses})
    places = {place: held_distance(place, held["train_len"]) for place in HELD}
    page["left"] = {"distance": list(places.values()), "models": len(held["runs"])}
    for pairs in ("slow", "fast"):
        removed = [[run["removed"][f"{pairs}, {p}"] for p in places] for run in held["runs"]]
        page["left"][pairs] = (100 - 100 * np.mean(removed, axis=0)).round().tolist()
    page["perplexity"] = by_length(PERPLEXITY, "perplexity", "perplexity", 1)
    page["passkeys"] = by_length(PASSKEYS, "passkey_anywhere", "accuracy", 100)
    page["at_2048"] = by_length(AT_2048, "passkey_anywhere", "accuracy", 100, [2048])
    return page


def by_length(curves, kind, number, factor, lengths=LENGTHS):
    """{name: [models, mean at each length, ...]} of one number of results/, times a factor."""
    rows = {}
    for name, (figure, label) in curves.items():
        found = load_results([ROOT / "results" / f"{figure}.json"])[kind][label]
        _, mean, _, n = seed_stats(found, number, lengths)
        rows[name] = [n, *(factor * mean).round(2).tolist()]
    return rows


def packed(losses):
    """Losses as one digit each; more than 7.9 nats count as 7.9."""
    steps = np.clip(np.round(np.array(losses) / STEP), 0, len(DIGITS) - 1).astype(int)
    return "".join(DIGITS[step] for step in steps)


def fill_page(path, numbers):
    """Put them into the page's element that holds them."""
    rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in numbers.items())
    element = r'(<script type="application/json" id="measured">\n).*?(\n</script>)'
    text = path.read_text(encoding="utf-8")
    text = re.sub(element, lambda m: f"{m[1]}{{{rows}}}{m[2]}", text, flags=re.S)
    write_atomically(path, lambda f: f.write(text.encode()))


def main(argv=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="folders NAME_sSEED of text models")
    add("--page", action="store_true", help="put the numbers into docs/index.html")
    args = parser.parse_args(argv)
    if args.runs:
        measure(args.runs, args.out)
    if args.page:
        fill_page(ROOT / "docs" / "index.html", page_numbers(args.out))


if __name__ == "__main__":
    one_sentence_errors(main)()
