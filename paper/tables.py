"""
Results to Markdown tables.
"""

import html
import json
import re
import shlex
from collections import Counter
from pathlib import Path

import numpy as np

from common import Refused, file_sha256, read_json
from paper.results import (
    common_lengths,
    half_interval,
    is_task,
    load_results,
    paired_differences,
    part_of_answer,
    rise_removed,
    seed_stats,
    train_len_of,
    unit_of,
)

# --- tables

ROWS = {  # title, name in the json, factor, digits
    "perplexity": [("perplexity per {unit}{corpus}", "perplexity", 1, 2)],
    "loss": [("loss in nats per {unit}{corpus}", "loss", 1, 2)],
    "task": [
        ("whole {task}s, %", "accuracy", 100, 0),
        ("{task} {part}, %", "token_accuracy", 100, 0),
    ],
}
DIFFERENCES = {  # the same, of what is compared seed by seed
    "perplexity": [("minus {to}, nats per {unit}{corpus}", "loss", 1, 3)],
    "task": [
        ("minus {to}, % of whole {task}s", "accuracy", 100, 0),
        ("minus {to}, % of {part}", "token_accuracy", 100, 0),
    ],
}


def grid(columns, rows):
    """A Markdown table, whose first column is text."""
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def markdown_table(results, measure="perplexity", to="FoPE", only_differences=False, whole=False):
    """
    Perplexity (or loss), whole keys and digits by length: mean (± std over several seeds). Below
    them, or without them, where there are several seeds, the paired differences to the label `to`:
    mean ± half the 95 % interval.
    """
    tables = []
    for kind, by_label in results.items():
        every = [r for rs in by_label.values() for r in rs]
        words = dict(unit=unit_of(every), part=part_of_answer(every), to=to)
        words |= dict(task=kind, corpus=kind.removeprefix("perplexity"))
        lengths, train_len = common_lengths(every), train_len_of(every)
        columns = ["seeds", *(f"{n} ({n / train_len:g}x)" for n in lengths)]
        numbers = [] if only_differences else ROWS["task" if is_task(kind) else measure]
        numbers = numbers[:1] if whole else numbers
        for title, *number in numbers:
            rows = [[label, *mean_cells(rs, lengths, *number)] for label, rs in by_label.items()]
            tables.append(grid([title.format(**words), *columns], rows))
        others = {label: rs for label, rs in by_label.items() if label != to and to in by_label}
        for title, *number in DIFFERENCES["task" if is_task(kind) else "perplexity"]:
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
        lines = [line.strip("| ").split(" | ") for line in html.escape(table, False).split("\n")]
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


def removed_table(results):
    """rise_removed, in %: mean ± half its interval, then each seed."""
    rows = []
    for kind, by_label in results.items():
        for label, shares in ({} if is_task(kind) else rise_removed(by_label)).items():
            values = 100 * np.array(shares)
            half = f" ± {half_interval(values):.0f}" if len(values) > 1 else ""
            name = label + kind.removeprefix("perplexity")
            each = ", ".join(f"{value:.0f}" for value in values)
            rows.append([name, str(len(values)), f"{values.mean():.0f}{half}", each])
    columns = ["of RoPE's rise to the longest text, %", "seeds", "removed", "each seed"]
    return grid(columns, rows) if rows else ""


def distance_table(results):
    """Whole answers of a task, in % of the trials of all seeds, by the distance of the needle."""
    tables = []
    for task, by_label in results.items():
        if not is_task(task):
            continue
        every, rows = [r for rs in by_label.values() for r in rs], []
        lengths, train_len = common_lengths(every), train_len_of(every)
        for label, rs in by_label.items():
            cells = {f"{label}, within {train_len}": [], f"{label}, further": []}
            for length in lengths:
                trials = [r["lengths"][length] for r in rs]
                far = np.concatenate([trial["distance"] for trial in trials]) >= train_len
                right = np.concatenate([trial["right"] for trial in trials])
                for row, chosen in zip(cells.values(), (right[~far], right[far]), strict=True):
                    row.append(f"{100 * chosen.mean():.0f} ({len(chosen)})" if len(chosen) else "")
            rows += [[name, *row] for name, row in cells.items()]
        columns = ["whole keys, % (of trials)", *(f"{n} ({n / train_len:g}x)" for n in lengths)]
        tables.append(grid(columns, rows))
    return "\n\n".join(tables)


def primary_table(rows):
    """What compare() returns."""
    words = {"loss": ("loss", 1, 3), "accuracy": ("whole keys, %", 100, 0)}
    words["token_accuracy"] = ("digits, %", 100, 0)
    lines = []
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


def page_numbers(folder):
    """
    What the first screen of docs/index.html draws, as JSON: attention rows (experiments/
    attention_row.py), and the loss by position, in the same steps, over the seeds.
    """
    attention, loss, rows = read_json(folder / "mechanism" / "attention_row.json"), {}, {}
    step, n = attention["step"], 4 * attention["train_len"] // attention["step"]
    for name, (figure, label, run) in ON_THE_PAGE.items():
        results = load_results([folder / f"{figure}.json"])["perplexity"][label]
        longest = common_lengths(results)[-1]
        parts = np.mean([r["lengths"][longest]["by_position"] for r in results], axis=0)
        by_step = parts.reshape(-1, len(parts) * step // longest).mean(axis=1)[:n]
        loss[name] = [round(x, 3) for x in by_step.tolist()]
        rows[name] = attention["rows"][run]
    numbers = dict(train_len=attention["train_len"], step=step, loss=loss, attention=rows)
    lines = (
        json.dumps(numbers).replace('"loss"', '\n"loss"').replace('"attention"', '\n"attention"')
    )
    return f'<script type="application/json" id="measured">\n{lines}\n</script>'


# --- tables in a text

ON_THE_PAGE = {  # name there: figure, label, name of the runs
    "rope": ("figure1", "RoPE", "rope"),
    "floor": ("parts", "FoPE, CF alone", "fope_cf"),
    "fope": ("figure1", "FoPE", "fope"),
    "alibi": ("figure1", "ALiBi", "alibi"),
}
OTHER_TABLES = {"bench": bench_table, "primary": primary_table}


def table_of(name, options, folder):
    """The table that a mark <!-- table NAME OPTIONS --> asks for, from folder/NAME.json."""
    path, options = Path(folder) / f"{name}.json", shlex.split(options)
    if name in ("page", "all"):
        return (page_numbers if name == "page" else all_tables)(Path(folder))
    if other := OTHER_TABLES.get(name.partition("_")[0]):
        return other(read_json(path, kind=dict | list))
    results, to = load_results([path]), "FoPE"
    for option in options:
        key, _, value = option.partition("=")
        if key == "kind":
            results = {kind: of for kind, of in results.items() if kind == value}
        elif key == "to":
            to = value
        elif key == "only":
            results = {kind: {value: of[value]} for kind, of in results.items() if value in of}
        elif option not in ("loss", "whole", "distance", "html"):
            raise Refused(f"the mark of table {name} has {option}, which is no option")
        if not results:
            raise Refused(f"{path} has no {key} {value}, which the mark of table {name} asks for")
    if "distance" in options:
        return distance_table(results)
    measure = "loss" if "loss" in options else "perplexity"
    table = markdown_table(results, measure, to, whole="whole" in options)
    return html_tables(table) if "html" in options else table


def all_tables(folder):
    """Of every json in the folder all tables, where it is from, and its checksum."""
    parts = []
    for path in sorted(Path(folder).glob("*.json")):
        content = read_json(path, kind=dict | list)
        every = content if isinstance(content, list) else [content]
        sources = Counter(f"commit {r['commit']}, {r['hardware']}" for r in every if "commit" in r)
        told = "; ".join(f"{n} of {source}" for source, n in sorted(sources.items()))
        first = f"; the first by `{every[0]['command']}`" if "command" in every[0] else ""
        about = f"Results: {told or len(every)}{first}. sha256 {file_sha256(path)[:16]}."
        parts += [f"## {path.stem}", about, table_of(path.stem, "", folder)]
        if OTHER_TABLES.get(path.stem.partition("_")[0]):
            continue
        kinds = load_results([path])
        parts += [markdown_table(kinds, to="RoPE", only_differences=True), removed_table(kinds)]
    return "\n\n".join(filter(None, parts))


def fill_tables(text, folder):
    """`text` with the table between each <!-- table ... --> and <!-- end table --> made anew."""
    ends = re.findall("<!-- (end )?table", text)
    if ends != ["", "end "] * (len(ends) // 2):
        raise Refused("each <!-- table ... --> needs an <!-- end table --> before the next")

    def made(mark):
        first, name, options, end = mark.groups()
        if not (table := table_of(name, options, folder)):
            raise Refused(f"the mark of table {name}{options} makes no table")
        return f"{first}{table}\n{end}"

    return re.sub(r"(<!-- table (\w+)([^>]*) -->\n).*?(<!-- end table -->)", made, text, flags=re.S)
