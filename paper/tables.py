"""
Results to Markdown tables.
"""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from common import file_sha256, peak_flops, read_json
from paper.results import (
    common_lengths,
    half_interval,
    is_task,
    load_results,
    paired_differences,
    part_of_answer,
    seed_of,
    train_len_of,
    unit_of,
)

# --- tables

ROWS = {  # title, name in the json, factor, digits
    "perplexity": [("perplexity per {unit}{corpus}", "perplexity", 1, 2)],
    "task": [
        ("whole {task}s, %", "accuracy", 100, 0),
        ("{task}: NLL of a token of the answer", "answer_nll", 1, 2),
        ("{task}: {part}, %", "token_accuracy", 100, 0),
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
    """A Markdown table, whose first column is text. What a label holds is text, too, no mark."""
    cells = [[re.sub(r"[|<]", r"\\\g<0>", cell) for cell in row] for row in (columns, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    lines.insert(1, "|---" + "|--:" * (len(columns) - 1) + "|")
    return "\n".join(lines)


def markdown_table(results, to="FoPE", only_differences=False):
    """
    Each number by length: its mean over the seeds, with several of them ± half the 95 % interval.
    Below them, or without them, the paired differences to the label `to`. A cell is empty where a
    label was not read at a length.
    """
    tables = []
    for kind, by_label in results.items():
        every = [r for rs in by_label.values() for r in rs]
        names = dict(unit=unit_of(every), part=part_of_answer(every), to=to)
        task = kind.removesuffix("_anywhere")
        names |= dict(task=task, corpus=kind.removeprefix("perplexity"))
        where = ", question anywhere" if task != kind else ""
        lengths, train_len = sorted({n for r in every for n in r["lengths"]}), train_len_of(every)
        columns = ["models", *(f"{n} ({n / train_len:g}x)" for n in lengths)]
        measure = "task" if is_task(kind) else "perplexity"
        for title, *number in [] if only_differences else ROWS[measure]:
            rows = [[label, *mean_cells(rs, lengths, *number)] for label, rs in by_label.items()]
            tables.append(grid([title.format(**names) + where, *columns], rows))
        others = {label: rs for label, rs in by_label.items() if label != to and to in by_label}
        for title, *number in DIFFERENCES[measure]:
            rows = [
                [label, *difference_cells(rs, by_label[to], lengths, *number)]
                for label, rs in others.items()
            ]
            if rows := [row for row in rows if len(row) > 1]:
                tables.append(grid([title.format(**names) + where, *columns], rows))
    return "\n\n".join(tables)


def mean_cells(results, lengths, name, factor, digits):
    """The number of seeds, then for each length the mean ± half the interval."""
    there, cells = common_lengths(results), []
    for length in lengths:
        values = factor * np.array([r["lengths"][length][name] for r in results if length in there])
        half = f" ± {half_interval(values):.{digits}f}" if len(values) > 1 else ""
        cells.append(f"{values.mean():.{digits}f}{half}" if len(values) else "")
    return [str(len(results)), *cells]


def difference_cells(results, reference, lengths, name, factor, digits):
    """The number of pairs, then for each length the mean ± half the interval; [] for one pair."""
    there, cells = common_lengths([*results, *reference]), []
    pairs = paired_differences(results, reference, name, there)
    if len(pairs) < 2:
        return []
    for length in lengths:
        if length not in there:
            cells.append("")
            continue
        values = factor * pairs[:, there.index(length)]
        mean, half = values.mean().round(digits) + 0.0, half_interval(values)  # no -0
        cells.append(f"{mean:+.{digits}f} ± {half:.{digits}f}" if half else f"{mean:.{digits}f}")
    return [str(len(pairs)), *cells]


def excess_table(results, of="RoPE"):
    """The loss of each label minus that of `of` at its training length, in pairs of one seed."""
    tables = []
    for kind, by_label in results.items():
        if is_task(kind) or of not in by_label:
            continue
        every = [r for rs in by_label.values() for r in rs]
        lengths, train_len, rows = common_lengths(every), train_len_of(every), []
        trained = {seed_of(r): r["lengths"].get(train_len) for r in by_label[of]}
        for label, models in by_label.items():
            start = [trained[seed_of(r)]["loss"] for r in models if trained.get(seed_of(r))]
            paired = [r["lengths"] for r in models if trained.get(seed_of(r))]
            if len(paired) < 2:
                continue
            cells = []
            for n in lengths:
                values = np.array([at[n]["loss"] for at in paired]) - start
                cells.append(f"{values.mean():.3f} ± {half_interval(values):.3f}")
            rows.append([label, str(len(paired)), *cells])
        title = f"nats above {of} at {train_len}{kind.removeprefix('perplexity')}"
        tables.append(grid([title, "models", *map(str, lengths)], rows) if rows else "")
    return "\n\n".join(filter(None, tables))


def place_table(results, multiples=(4, 16)):
    """
    Whole passkeys, in % of the trials of all seeds, by whether the key stands nearer than the
    training length, of texts of so many times that length.
    """
    tables = []
    for by_label in (by_label for task, by_label in results.items() if is_task(task)):
        every = [r for rs in by_label.values() for r in rs]
        train_len, rows = train_len_of(every), []
        for label, rs in by_label.items():
            row = [label, str(len(rs))]
            for n in multiples:
                trials = [r["lengths"][n * train_len] for r in rs]
                near = np.concatenate([trial["distance"] for trial in trials]) < train_len
                whole = np.concatenate([trial["share_right"] for trial in trials]) == 1
                row += [f"{100 * whole[near].mean():.0f}", f"{100 * whole[~near].mean():.0f}"]
            rows.append(row)
        columns = [f"{n * train_len}: {where}" for n in multiples for where in ("near", "far")]
        tables.append(grid(["whole passkeys found, %", "models", *columns], rows))
    return "\n\n".join(tables)


def primary_table(rows):
    """What compare() returns."""
    measures = {"loss": ("loss", 1, 3), "accuracy": ("whole passkeys, %", 100, 0)}
    measures["token_accuracy"] = ("digits, %", 100, 0)
    lines = []
    for r in rows:
        name, factor, digits = measures[r["measure"]]
        mean, half = (f"{factor * r[key]:+.{digits}f}" for key in ("mean", "half_interval"))
        difference = f"{r['label']} minus {r['to']}, {name} at {r['length']} ({r['figure']})"
        lines.append([difference, str(r["seeds"]), f"{mean} ± {half[1:]}", f"{r['p_holm']:.2g}"])
    return grid(["primary comparison", "models", "difference", "p (Holm)"], lines)


def bench_table(result):
    """A result of experiments/bench.py: a row for each thing that an embedding does."""
    rows, peak = [], peak_flops(result["hardware"])
    references = [name for name in ("nope", "rope") if name in result["summary"]]
    step = result["batch_size"] * result["train_len"]
    works = {"train": step, "compiled": step, "eval": result["eval_len"]}
    for pos, row in result["summary"].items():
        for what in (what for what in works if what in row):
            cells = [f"{pos}, {what}", f"{1000 * works[what] / row[what]:,.1f}"]
            cells += [f"{row[what]:,.0f}", *(f"{row[f'to_{r}'][what]:.2f}" for r in references)]
            has_mfu = peak and f"{what}_flops" in row
            cells += [f"{row[what] * row[f'{what}_flops'] / peak:.1%}" if has_mfu else "-"]
            cells += [f"{row[f'{what}_bytes'] / 1e9:.2f}"]
            rows.append([*cells, row.get(f"{what}_kernels", "-")])
    title = f"{result['preset']}, T = {result['train_len']}, batch {result['batch_size']}"
    ratios = [f"to {name}" for name in references]
    return grid([title, "ms", "tokens/s", *ratios, "MFU", "GB", "attention"], rows)


# --- the tables to cite

# the figures at 512 tokens whose models are trained alike
AS_TRAINED = ["figure1", "figure1_all", "parts", "enough", "partial", "table2", "figure6c"]
OF_ONE_BUDGET = [*AS_TRAINED, "untrained", "keys"]  # the last two read otherwise
READ_LATER = ["temperature"]  # models of keys, at 8192 alone: another result of the same model
GROUPS = (OF_ONE_BUDGET, READ_LATER)  # within a group a model has one result
CITED = {  # of each kind its numbers: title, name in the json, factor, digits
    "perplexity": [
        ("nats per byte", "loss", 1, 2),
        ("bits per byte", "bits_per_byte", 1, 2),
        ("perplexity", "perplexity", 1, 1),
    ],
    "passkey_anywhere": [
        ("% of whole passkeys", "accuracy", 100, 0),
        ("NLL of a digit", "answer_nll", 1, 2),
        ("% of digits", "token_accuracy", 100, 0),
    ],
}
# the rows of README's table: a label, and its name there
HEADLINE = {
    "RoPE": "RoPE",
    "RoPE, newer models": "RoPE, other models for passkeys",
    "RoPE, YaRN told the length, with temperature": "RoPE that reads with YaRN and its temperature",
    "RoPE, YaRN told the length": "RoPE that reads with YaRN, no temperature",
    "RoPE, window of 512": "RoPE that reads with a window of 512",
    "RoPE, theta 94": "RoPE with theta 94",
    "FoPE": "FoPE",
    "FoPE, with temperature": "FoPE that reads with this temperature",
    "FoPE, floor alone": "FoPE, the floor alone",
    "p-RoPE, p = 0.5": "the floor alone, stopped pairs count once",
    "ALiBi": "ALiBi",
}


def summary_rows(folder, groups=GROUPS):
    """[[embedding, number, length, models, mean, half its 95 % interval], ...], as text."""
    rows = []
    for figures in groups:
        rows += rows_of([Path(folder) / f"{figure}.json" for figure in figures])
    return rows


def rows_of(paths):
    rows, paths = [], [path for path in paths if path.exists()]
    for kind, by_label in load_results(paths).items() if paths else ():
        for label, results in by_label.items() if kind in CITED else ():
            for title, name, factor, digits in CITED[kind]:
                for length in common_lengths(results):
                    values = factor * np.array([r["lengths"][length][name] for r in results])
                    half = f"{half_interval(values):.{digits}f}" if len(values) > 1 else ""
                    mean = f"{values.mean():.{digits}f}"
                    rows.append([label, title, length, len(values), mean, half])
    return rows


def cells_to_cite(folder, titles, lengths, groups=GROUPS):
    """{label: {(title, length): a cell, title: the number of models}} of summary_rows."""
    found = {}
    for label, title, length, n_models, mean, half in summary_rows(folder, groups):
        if title in titles:
            cells = found.setdefault(label, {})
            cells[title] = str(n_models)
            if length in lengths:
                cells[title, length] = f"{mean} ± {half}" if half else mean
    return found


def cited_table(folder, titles, counted, groups=GROUPS):
    """
    A row for each embedding: these numbers at three lengths. counted: {title: the name of a column
    that says how many models have this number}.
    """
    columns = [(title, length) for title in titles for length in (512, 2048, 8192)]
    rows = [
        [
            label,
            *(cells.get(column, "") for column in columns),
            *(cells.get(t, "0") for t in counted),
        ]
        for label, cells in cells_to_cite(folder, titles, (512, 2048, 8192), groups).items()
    ]
    names = [f"{title}, {length}" for title, length in columns]
    return grid(["embedding", *names, *counted.values()], rows)


def summary_table(folder):
    """Text and passkeys of models trained on as many tokens, and read as they were trained."""
    counted = {"nats per byte": "models for text", "% of whole passkeys": "for passkeys"}
    return cited_table(folder, tuple(counted), counted, groups=(AS_TRAINED,))


def keys_table(folder):
    """Passkeys: whole ones, the NLL, digits."""
    titles = tuple(title for title, *_ in CITED["passkey_anywhere"])
    return cited_table(folder, titles, {titles[0]: "models"})


def rows_to_cite(folder, names, columns, titles):
    """Rows for these labels, by {label: name}: the numbers of columns, then how many models."""
    found = cells_to_cite(folder, titles, {length for _, length in columns})
    return [
        [name, *(found[label].get(column, "-") for column in (*columns, *titles))]
        for label, name in names.items()
        if label in found
    ]


def headline_table(folder):
    """README's: how well text is read at 512 and 8192, how many whole passkeys are found."""
    titles = ("perplexity", "% of whole passkeys")
    columns = [(title, n) for title in titles for n in (512, 2048, 8192)]
    columns.remove(("perplexity", 2048))
    names = ["perplexity at 512", "at 8192", "whole passkeys found at 512, %", "at 2048", "at 8192"]
    names += ["models for text", "for passkeys"]
    return grid(["", *names], rows_to_cite(folder, HEADLINE, columns, titles))


def cause_table(folder):
    """
    What experiments/wrap.py found: how much is left of the damage of far tokens where their slow or
    fast pairs show another distance, in %, mean over the models ± half the 95 % interval.
    """
    stored = read_json(Path(folder) / "mechanism" / "wrap_held.json")
    places = {"0": "0x", "32": "0.06x", "64": "0.12x", "128": "0.25x", "255": "0.5x"}
    places |= {"383": "0.75x", "511": "", "767": "1.5x", "1023": "2x", "1279": "2.5x", "1535": "3x"}
    lines = []
    for pairs in ("slow", "fast"):
        cells = []
        for place in places.values():
            condition = f"{pairs}, held {place}".strip()
            left = [100 * (1 - run["removed"][condition]) for run in stored["runs"]]
            cells.append(f"{np.mean(left):.0f} ± {half_interval(left):.0f}")
        lines.append([f"{pairs} pairs", *cells])
    return grid(["% of the damage left if held at", *places], lines)


UNTRAINED = {  # the rows of the table: a label, and its name there
    "RoPE": "RoPE, as it was trained",
    "RoPE, YaRN told the length": "YaRN told the length",
    "RoPE, YaRN told the length, with temperature": "YaRN told the length, with its temperature",
    "RoPE, YaRN x16": "YaRN x16",
    "RoPE, slow pairs told the length": "slow pairs told the length",
    "RoPE, NTK told the length": "NTK told the length",
    "RoPE, window of 512": "a window of 512",
    "FoPE": "trained with FoPE",
    "FoPE, window of 512": "trained with FoPE, a window of 512",
    "RoPE, theta 94": "trained with theta 94",
    "RoPE, theta 94, window of 512": "trained with theta 94, a window of 512",
}


def untrained_table(folder, lengths=(512, 1024, 2048, 4096, 8192)):
    """Nats per byte of RoPE models that read otherwise than they were trained, and of others."""
    columns = [("nats per byte", n) for n in lengths]
    rows = rows_to_cite(folder, UNTRAINED, columns, ("nats per byte",))
    return grid(["nats per byte", *(f"{n} ({n // 512}x)" for n in lengths), "models"], rows)


def sizes_table(folder, lengths=(512, 2048, 8192)):
    """The 60M models: nats per byte of books and of C4, and whole passkeys."""
    results, rows = load_results([Path(folder) / "gpu_60M.json"]), {}
    for kind in ("perplexity on books", "perplexity on c4"):
        for label, models in results[kind].items():
            at = models[0]["lengths"]
            nats = [at[length]["bits_per_byte"] * np.log(2) for length in lengths]
            rows.setdefault(label, [label]).extend(f"{loss:.2f}" for loss in nats)
    columns = [f"{text}, {n}" for text in ("nats per byte of books", "of C4") for n in lengths]
    return grid(["60M", *columns], rows.values())


MORE = {  # the rows of the table: a label, and its name there
    "RoPE to RoPE": "RoPE",
    "RoPE to RoPE + YaRN x16": "RoPE with YaRN",
    "RoPE to FoPE, authors' way": "RoPE changed to FoPE, moved",
    "RoPE to FoPE": "RoPE changed to FoPE, kept",
    "FoPE to FoPE": "FoPE from the start, by the authors' code",
    "FoPE to FoPE, own pairs": "FoPE from the start, a new pair for each new frequency",
    "FoPE to FoPE + YaRN x16": "FoPE from the start, with YaRN",
}


def more_table(folder):
    """Nats per byte of models that got more training, a tenth of their first or a quarter."""
    rows, shares = [[name] for name in MORE.values()], {"tenth": "", "quarter": "_quarter"}
    for suffix in shares.values():
        of_label = load_results([Path(folder) / f"figure4{suffix}.json"])["perplexity"]
        for row, label in zip(rows, MORE, strict=True):
            row += mean_cells(of_label[label], (1024, 8192), "loss", 1, 2)[1:]
    columns = [("nats per byte", n) for n in (1024, 8192)]
    untrained = {"RoPE, YaRN told the length": "RoPE, no more training, reads with YaRN"}
    untrained["RoPE, window of 512"] = "RoPE, no more training, reads with a window of 512"
    for name, *cells, _ in rows_to_cite(folder, untrained, columns, ("nats per byte",)):
        rows.append([name, *cells, *cells])
    names = [f"a {share} more, at {n}" for share in shares for n in (1024, 8192)]
    return grid(["nats per byte", *names], rows)


# --- tables in a text

TABLES_TO_CITE = {"summary": summary_table, "keys": keys_table, "headline": headline_table}
TABLES_TO_CITE |= {"cause": cause_table, "untrained": untrained_table, "sizes": sizes_table}
TABLES_TO_CITE |= {"more": more_table}
OTHER_TABLES = {"bench": bench_table, "primary": primary_table}


def table_of(name, options, folder):
    """
    The table that a mark <!-- table NAME --> asks for, from folder/NAME.json. The only option is
    place, for place_table.
    """
    path = Path(folder) / f"{name}.json"
    if name == "all":
        return all_tables(folder)
    if name in TABLES_TO_CITE:
        return TABLES_TO_CITE[name](folder)
    if other := OTHER_TABLES.get(name.partition("_")[0]):
        return other(read_json(path, kind=dict | list))
    results = load_results([path])
    return place_table(results) if "place" in options else markdown_table(results)


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
        parts += [markdown_table(kinds, to="RoPE", only_differences=True), excess_table(kinds)]
    return "\n\n".join(filter(None, parts))


def fill_tables(text, folder):
    """`text` with the table between each <!-- table ... --> and <!-- end table --> made anew."""

    def made(mark):
        first, name, options, end = mark.groups()
        return f"{first}{table_of(name, options, folder)}\n{end}"

    old = "(?:(?!<!-- table ).)*?"  # up to the next mark at most: one may lack its end
    pattern = rf"(<!-- table (\w+)([^>]*) -->\n){old}(<!-- end table -->)"
    return re.sub(pattern, made, text, flags=re.S)
