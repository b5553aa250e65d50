"""
Results to statistics and Markdown tables.

A file holds one evaluation, as eval_perplexity.py and eval_passkey.py write it beside the
checkpoint, or a list of them, as paper.py gathers them. Two labels with the same seeds are compared
seed by seed: models of one seed share initial weights, data and order, so their difference varies
less than they do. Models read on two corpora have a table for each, and one for the ratio.
"""

import math
import re
import shlex
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy import stats

from common import read_json

# The order of the embeddings everywhere, and their names.
NAMES = {
    "nope": "NoPE",
    "alibi": "ALiBi",
    "rope": "RoPE",
    "fope": "FoPE",
    "kerple": "KERPLE",
    "fire": "FIRE",
    "rope_a": "RoPE-A",
}
MEASURES = {"perplexity": ("loss", "perplexity"), "passkey": ("accuracy", "token_accuracy")}

# --- reading


def load_results(paths):
    """
    {kind: {label: [result of one seed, ...]}} in the order of NAMES. Kinds are those of MEASURES,
    but with several corpora "perplexity on CORPUS" and their ratio. ValueError for what is no
    result, and for results that do not belong into one figure.
    """
    every = []
    for path in paths:
        content = read_json(path, kind=dict | list)
        for result in content if isinstance(content, list) else [content]:
            check_result(result, path)
            every.append((result, path))
    texts = [result for result, _ in every if result["kind"] == "perplexity"]
    kinds = {corpus: f"perplexity on {corpus}" for corpus in map(corpus_of, texts)}
    if len(kinds) < 2:
        kinds = dict.fromkeys(kinds, "perplexity")
    by_kind = {kind: defaultdict(list) for kind in (*kinds.values(), "passkey")}
    for result, path in every:
        kind = kinds[corpus_of(result)] if result["kind"] == "perplexity" else "passkey"
        same = by_kind[kind][label_of(result)]
        if result["seed"] in [r["seed"] for r in same]:
            what = f"a second result of {label_of(result)} with seed {result['seed']}"
            raise ValueError(f"{path} has {what}; tell them apart by --label")
        same.append(result)
    check_together([result for result, _ in every], by_kind)
    order = [*NAMES, *(result["pos"] for result, _ in every)]
    for kind, labels in by_kind.items():
        ranks = {label: (order.index(rs[0]["pos"]), label) for label, rs in labels.items()}
        by_kind[kind] = {label: labels[label] for label in sorted(labels, key=ranks.get)}
    return add_ratio(by_kind, *kinds.values()) if len(kinds) == 2 else by_kind


def check_together(every, by_kind):
    """Refuse results that do not belong into one figure."""
    if len(train_lens := {result["train_len"] for result in every}) > 1:
        raise ValueError(f"these results have several training lengths: {sorted(train_lens)}")
    if len({unit_of([r]) for r in every if r["kind"] == "perplexity"}) > 1:
        raise ValueError("losses per byte and losses per token cannot be compared")
    for kind, labels in by_kind.items():
        if labels and not common_lengths([r for rs in labels.values() for r in rs]):
            raise ValueError(f"these {kind} results have no length in common")


def corpus_of(result):
    return Path(result.get("data", "")).name


def add_ratio(by_kind, first, second):
    """And the perplexity on the second corpus divided by that on the first, for each seed."""
    ratios = defaultdict(list)
    for label, results in by_kind[first].items():
        theirs = {r["seed"]: r["lengths"] for r in by_kind[second].get(label, [])}
        for r in (r for r in results if r["seed"] in theirs):
            rows = {}
            for n in set(r["lengths"]) & set(theirs[r["seed"]]):
                loss = theirs[r["seed"]][n]["loss"] - r["lengths"][n]["loss"]
                rows[n] = {"loss": loss, "perplexity": math.exp(loss)}
            ratios[label].append({**r, "lengths": rows})
    name = f"{second} / {first.removeprefix('perplexity ')}"
    passkeys = {"passkey": by_kind["passkey"]}
    return {first: by_kind[first], second: by_kind[second], name: dict(ratios)} | passkeys


def check_result(result, path):
    """Refuse what is no evaluation; its lengths become numbers."""
    try:
        result["lengths"] = {int(length): row for length, row in result["lengths"].items()}
        names = MEASURES[result["kind"]]
        numbers = [row[name] for row in result["lengths"].values() for name in names]
        numbers += [result["seed"], result["train_len"]]
        ok = all(isinstance(x, int | float) for x in numbers) and result["train_len"] > 0
        ok = ok and isinstance(label_of(result), str)
    except (KeyError, TypeError, ValueError, AttributeError):
        ok = False
    if not ok:
        raise ValueError(f"{path} is no result of eval_perplexity.py or eval_passkey.py")
    if label_of(result).startswith("_"):
        raise ValueError(f"{path} has the label {label_of(result)}; matplotlib hides such names")


def label_of(result):
    """The --label, or else the embedding with what is special about it."""
    if result.get("label"):
        return result["label"]
    name = NAMES.get(result["pos"], result["pos"])
    if result.get("model", {}).get("qk_norm"):
        name += " + QK-norm"
    changes = [f"{k}={v}" for k, v in result.get("pos_args", {}).items()]
    if scaling := result.get("rope_scaling"):
        changes.append(f"{scaling['kind']} x{scaling['factor']:g}")
    return f"{name} ({', '.join(changes)})" if changes else name


def unit_of(results):
    return "byte" if results[0].get("tokenizer") == "byte" else "token"


def part_of_key(results):
    """What a token of a passkey is: our own tokenizers split numbers into digits, others do not."""
    digits = results[0].get("tokenizer", "").startswith(("byte", "bpe"))
    return "digits" if digits else "tokens"


def common_lengths(results):
    return sorted(set.intersection(*(set(r["lengths"]) for r in results)))


# --- over the seeds


def seed_stats(results, name, lengths=None):
    """(lengths, mean, std, n) of one number, over the seeds, at the lengths that all have."""
    lengths = lengths or common_lengths(results)
    rows = [[r["lengths"][length][name] for length in lengths] for r in results]
    values = np.array(rows, dtype=float)  # (seeds, lengths)
    std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(lengths))
    return lengths, values.mean(axis=0), std, len(values)


def paired_differences(results, reference, name, lengths):
    """Of one number, results - reference, for each seed that both have: (seeds, lengths)."""
    theirs = {r["seed"]: r["lengths"] for r in reference}
    pairs = [(r["lengths"], theirs[r["seed"]]) for r in results if r["seed"] in theirs]
    rows = [[a[n][name] - b[n][name] for n in lengths] for a, b in pairs]
    return np.array(rows, dtype=float).reshape(len(rows), len(lengths))


def half_interval(values):
    """Half the 95 % interval of the mean of n values (n, ...), by Student's t."""
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


def compare(primary, folder):
    """
    The comparisons that were named before the models were trained, with p values of paired t tests,
    corrected by Holm's method for their number. primary: [(figure, kind, number, label, label to
    compare with, multiple of the training length), ...]; folder: of the gathered results.
    """
    rows = []
    for figure, kind, name, label, to, multiple in primary:
        by_label = load_results([Path(folder) / f"{figure}.json"])[kind]
        length = multiple * by_label[label][0]["train_len"]
        values = paired_differences(by_label[label], by_label[to], name, [length])[:, 0]
        if len(values) < 2 or not values.std():
            raise ValueError(f"{figure}: {label} and {to} need two seeds and a difference to test")
        row = dict(figure=figure, kind=kind, measure=name, label=label, to=to, length=length)
        row |= dict(seeds=len(values), mean=values.mean(), half_interval=half_interval(values))
        rows.append(row | dict(p=stats.ttest_1samp(values, 0).pvalue))
    worst = 0.0
    for rank, row in enumerate(sorted(rows, key=lambda row: row["p"])):
        worst = max(worst, min(1.0, (len(rows) - rank) * row["p"]))
        row["p_holm"] = worst
    return [
        {k: float(v) if isinstance(v, np.floating) else v for k, v in row.items()} for row in rows
    ]


# --- tables

ROWS = {  # title, name in the json, factor, digits
    "perplexity": [("perplexity per {unit}{corpus}", "perplexity", 1, 2)],
    "loss": [("loss in nats per {unit}{corpus}", "loss", 1, 2)],
    "passkey": [
        ("whole passkeys, %", "accuracy", 100, 0),
        ("passkey {part}, %", "token_accuracy", 100, 0),
    ],
}
DIFFERENCES = {  # the same, of what is compared seed by seed
    "perplexity": [("minus {to}, nats per {unit}{corpus}", "loss", 1, 3)],
    "passkey": [
        ("minus {to}, % of whole passkeys", "accuracy", 100, 0),
        ("minus {to}, % of {part}", "token_accuracy", 100, 0),
    ],
}


def grid(columns, rows):
    """A Markdown table, whose first column is text."""
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def markdown_table(results, measure="perplexity", to="FoPE", only_differences=False):
    """
    Perplexity (or loss), whole keys and digits by length: mean (± std over several seeds). Below
    them, or without them, where there are several seeds, the paired differences to the label `to`:
    mean ± half the 95 % interval.
    """
    tables = []
    for kind, by_label in results.items():
        if not by_label:
            continue
        is_passkey, every = kind == "passkey", [r for rs in by_label.values() for r in rs]
        corpus = "" if is_passkey else kind.removeprefix("perplexity")
        words = dict(unit=unit_of(every), part=part_of_key(every), corpus=corpus, to=to)
        lengths, train_len = common_lengths(every), every[0]["train_len"]
        columns = ["seeds", *(f"{n} ({n / train_len:g}x)" for n in lengths)]
        numbers = [] if only_differences else ROWS["passkey" if is_passkey else measure]
        for title, *number in numbers:
            rows = [[label, *mean_cells(rs, lengths, *number)] for label, rs in by_label.items()]
            tables.append(grid([title.format(**words), *columns], rows))
        others = {label: rs for label, rs in by_label.items() if label != to and to in by_label}
        for title, *number in DIFFERENCES["passkey" if is_passkey else "perplexity"]:
            rows = [
                [label, *difference_cells(rs, by_label[to], lengths, *number)]
                for label, rs in others.items()
            ]
            if rows := [row for row in rows if len(row) > 1]:
                tables.append(grid([title.format(**words), *columns], rows))
    return "\n\n".join(tables)


def html_tables(markdown):
    """The same as HTML, for docs/index.html, which draws its curves from them."""
    tables = []
    for table in markdown.split("\n\n"):
        lines = [line.strip("| ").split(" | ") for line in table.split("\n")]
        rows = ["".join(f'<th scope="col">{cell}</th>' for cell in lines[0])]
        for label, *cells in lines[2:]:
            values = "".join(f"<td>{cell}</td>" for cell in cells)
            rows.append(f'<th scope="row">{label}</th>{values}')
        tables.append("<table><tr>" + "</tr>\n<tr>".join(rows) + "</tr></table>")
    return "\n".join(tables)


def mean_cells(results, lengths, name, factor, digits):
    """The number of seeds, then mean ± std at each length."""
    _, mean, std, n = seed_stats(results, name, lengths)
    spread = [f" ± {factor * s:.{digits}f}" if n > 1 else "" for s in std]
    return [str(n), *(f"{factor * m:.{digits}f}{s}" for m, s in zip(mean, spread, strict=True))]


def difference_cells(results, reference, lengths, name, factor, digits):
    """The number of pairs, then mean ± half interval; nothing for one pair."""
    values = factor * paired_differences(results, reference, name, lengths)
    if len(values) < 2:
        return []
    mean = values.mean(axis=0).round(digits) + 0.0  # no -0
    cells = zip(mean, half_interval(values), strict=True)
    written = [
        f"{m:+.{digits}f} ± {half:.{digits}f}" if half else f"{m:.{digits}f}" for m, half in cells
    ]
    return [str(len(values)), *written]


def rates_table(results):
    """The loss at the training length by learning rate: of text, and of a passkey's answer."""
    cells, columns = {}, {}
    for r in results:
        task, name = ("text", "loss") if r["kind"] == "perplexity" else ("passkeys", "answer_nll")
        column = task == "passkeys", r["training"]["lr"]
        columns[column] = f"{task}, {column[1]:g}"
        cells[r["pos"], column] = f"{r['lengths'][str(r['train_len'])][name]:.3f}"
    embeddings = [pos for pos in NAMES if any(pos == p for p, _ in cells)]
    rows = [[NAMES[pos], *(cells.get((pos, c), "") for c in sorted(columns))] for pos in embeddings]
    return grid(["nats at 1x", *(columns[c] for c in sorted(columns))], rows)


def primary_table(rows):
    """What compare() returns."""
    lines, words = [], {"loss": ("loss", 1, 3), "token_accuracy": ("digits, %", 100, 0)}
    for r in rows:
        name, factor, digits = words[r["measure"]]
        mean, half = (f"{factor * r[key]:+.{digits}f}" for key in ("mean", "half_interval"))
        what = f"{r['label']} minus {r['to']}, {name} at {r['length']} ({r['figure']})"
        lines.append([what, str(r["seeds"]), f"{mean} ± {half[1:]}", f"{r['p_holm']:.2g}"])
    return grid(["primary comparison", "seeds", "difference", "p (Holm)"], lines)


def bench_table(result):
    """A result of experiments/bench.py: speed and memory of each embedding."""
    summary = result["summary"]
    references = [name for name in ("nope", "rope") if name in summary]
    ratios = [f"to {name}" for name in references]
    title = f"{result['preset']}, T = {result['train_len']}, batch {result['batch_size']}"
    columns = [title, "training, tokens/s", *ratios, "GB"]
    columns += [f"reading {result['eval_len']}, tokens/s", *ratios, "GB"]
    rows = []
    for pos, row in summary.items():
        cells = [pos]
        for what in ("train", "eval"):
            cells += [f"{row[what]:,.0f}", *(f"{row[f'to_{r}'][what]:.2f}" for r in references)]
            cells.append(f"{row[f'{what}_bytes'] / 1e9:.2f}")
        rows.append(cells)
    return grid(columns, rows)


# --- tables in a text

OTHER_TABLES = {"bench": bench_table, "rates": rates_table, "primary": primary_table}


def table_of(name, options, folder):
    """The table that a mark <!-- table NAME OPTIONS --> asks for, from folder/NAME.json."""
    path, options = Path(folder) / f"{name}.json", shlex.split(options)
    if other := OTHER_TABLES.get(name.partition("_")[0]):
        return other(read_json(path, kind=dict | list))
    results, to = load_results([path]), "FoPE"
    for option in options:
        key, _, value = option.partition("=")
        if key == "seed":
            for by_label in results.values():
                for label, rs in by_label.items():
                    by_label[label] = [r for r in rs if r["seed"] == int(value)]
        elif key == "kind":
            results = {value: results[value]}
        elif key == "copies":  # passkeys of models that find nearly all at the training length
            results = {"passkey": only_copying(results["passkey"])}
        elif key == "to":
            to = value
    measure = "loss" if "loss" in options else "perplexity"
    table = markdown_table(results, measure, to, "differences" in options)
    return html_tables(table) if "html" in options else table


def only_copying(by_label, share=0.95):
    """The models that find this share of the keys at 1x: others say nothing about 2x."""

    def copies(r):
        return r["lengths"][r["train_len"]]["accuracy"] >= share

    return {label: [r for r in rs if copies(r)] for label, rs in by_label.items()}


def fill_tables(text, folder):
    """`text` with the table between each <!-- table ... --> and <!-- end table --> made anew."""
    mark = re.compile(r"(<!-- table (\w+)([^>]*) -->\n).*?(<!-- end table -->)", re.S)
    return mark.sub(lambda m: f"{m[1]}{table_of(m[2], m[3], folder)}\n{m[4]}", text)
