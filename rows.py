"""
Results as rows: for each model, each kind of evaluation and each length its settings and numbers.

    python rows.py runs_out/rope/perplexity.json runs_out/fope/perplexity.json
    python rows.py results/figure1.json --to RoPE           and how far the others are from RoPE

This prints tables of means. Behind a mean of three models or more stands half of its 95 % interval.
Of passkeys a table also says how many models find 90 % of them; of one model it shows the interval
that so few trials allow. A difference is taken between two models of one seed. In a notebook:

    import pandas, rows
    pandas.DataFrame(rows.read_rows(["results/figure1.json"]))
"""

import itertools
import re
import sys
from pathlib import Path

import numpy as np
from scipy import stats

import common
from common import Refused, read_json
from recipe import MAY_CHANGE, Recipe, parse_lengths

NAMES = {  # the order of the embeddings everywhere, and their names
    "nope": "NoPE",
    "alibi": "ALiBi",
    "rope": "RoPE",
    "fope": "FoPE",
    "kerple": "KERPLE",
    "fire": "FIRE",
    "rope_a": "RoPE-A",
    "rope_taper": "RoPE, tapered",
}
MEASURED = ["loss", "perplexity", "bits_per_byte"]  # of text
MEASURED += ["accuracy", "accuracy_low", "accuracy_high", "token_accuracy", "answer_nll"]
OF_TASKS = [  # title, name, factor, digits
    ("whole answers, %", "accuracy", 100, 0),
    ("NLL of a token", "answer_nll", 1, 2),
    ("tokens, %", "token_accuracy", 100, 0),
]

# --- reading


def read_rows(paths):
    """
    The rows of json files, each of one result or of a list of them, as dicts. A row has each field
    of the recipe ("pos_args.sigma" is a keyword of the embedding), "kind" ("perplexity" or a task),
    "length", what was measured at this length, "corpus", "commit" and "label". By the label models
    are told apart: those of one label differ in their seed alone. Refused where a file is no
    result, where a label does not tell two models apart, and where other text was read.
    """
    results = []
    for path in paths:
        if Path(path).name == "config.json":  # of runs_out/*/*.json
            continue
        content = read_json(path)
        for result in content if isinstance(content, list) else [content]:
            try:
                results.append((settings_of(result), rows_of(result)))
            except (KeyError, TypeError, AttributeError, ValueError) as e:
                raise Refused(f"{path} is no result of this version of the code: {e!r}") from None
    if not results:
        raise Refused(f"there is no result in {', '.join(map(str, paths))}")
    for kind in {model["kind"] for model, _ in results}:
        add_labels([model for model, _ in results if model["kind"] == kind])
    rows = {}
    for row in (model | row for model, of_model in results for row in of_model):
        key = tuple(row[name] for name in ("kind", "corpus", "label", "seed", "length"))
        other = rows.setdefault(key, row)
        if any(row[name] != other[name] for name in MEASURED):
            raise Refused(
                f"there are two results of {row['label']}, seed {row['seed']}: {row['kind']} at "
                f"{row['length']}; tell them apart by the evaluation's --label"
            )
    rows = list(rows.values())
    name_corpora(rows)
    check_together(rows)
    return sorted(rows, key=lambda row: rank(row, [*NAMES, *(r["pos"] for r in rows)]))


def settings_of(result):
    """What is known of the model of a result, in one dict."""
    recipe, model = Recipe(**result["recipe"]), {"kind": result["kind"]}
    for name, value in vars(recipe).items():
        as_dict = isinstance(value, dict)
        model |= {f"{name}.{k}": v for k, v in value.items()} if as_dict else {name: value}
    others = ("commit", "trained_on", "data_sha256", "own_code")
    model |= {name: result.get(name) for name in others}
    model["label"] = " ".join((result.get("label") or "").split())  # on one line
    model["init_from"] = re.sub(rf"_s{recipe.seed}$", "", Path(recipe.init_from).name)
    model["data"] = Path(recipe.data).name
    model["corpus"] = Path(result.get("data") or "").name
    step = result.get("step") or recipe.n_steps
    unfinished = step < recipe.n_steps
    model["unfinished"] = f" (step {step:,} of {recipe.n_steps:,})" if unfinished else ""
    model["longest"] = parse_lengths(recipe.lengths, recipe.train_len)[-1]
    return model


def rows_of(result):
    train_len = Recipe(**result["recipe"]).train_len
    return [
        {"length": int(length), "n_read": row.get("tokens"), "by_position": row.get("by_position")}
        | {name: row.get(name) for name in MEASURED}
        | near_and_far(row, train_len)
        for length, row in result["lengths"].items()
    ]


def near_and_far(row, train_len):
    """
    Of a task's whole answers the shares that are right: where what is asked for stands as near to
    the answer as in training, and where it stands further back. None where it never does.
    """
    right, near = np.array(row.get("right", ())), np.array(row.get("distance", ())) < train_len
    parts = {"near": right[near], "far": right[~near]}
    return {name: float(part.mean()) if len(part) else None for name, part in parts.items()}


# --- labels

# An embedding's label has its keywords, and these fields. All other fields are in it where the
# models differ, the last ones only if nothing else differs. A default of OWN is in no label.
OWN = ("theta", "qk_norm", "init_from")
LAST = ("tokenizer", "task_share", "trained_on", "warmup_steps", "preset", "vocab_size")
NEVER = {"pos", "seed", *MAY_CHANGE}


def add_labels(models):
    """Give models of one kind of evaluation a label, unless the evaluation's --label gave one."""
    unnamed = [model for model in models if not model["label"]]
    keywords = dict.fromkeys(name for model in unnamed for name in model if "." in name)
    keywords = [name for name in keywords if not name.endswith("original_len")]
    shown = [*keywords, *OWN]
    fields = [name for name in vars(Recipe()) if name not in (*NEVER, *OWN, *LAST)]

    def n_apart(names):
        return len({str([model.get(name) for name in names]) for model in unnamed})

    shown += [name for name in fields if n_apart([name]) > 1]
    for name in LAST:
        if n_apart(["pos", *shown, name]) > n_apart(["pos", *shown]):
            shown.append(name)
    for model in unnamed:
        parts = [NAMES.get(model["pos"], model["pos"])]
        for name in shown:
            value = model["data"] if name == "trained_on" else model.get(name)
            is_default = name in (*keywords, *OWN) and value == getattr(Recipe, name, None)
            if value not in (None, "") and not is_default:
                parts.append(words(name, value))
        model["label"] = ", ".join(parts)
    for model in models:
        model["label"] += model["unfinished"]


def words(name, value):
    """A setting in a label: "theta=94", "qk_norm", "sigma=0" of pos_args.sigma."""
    name = {"trained_on": "data"}.get(name, name.rpartition(".")[2])
    value = str(value).split()[0] if name == "tokenizer" else value  # without its checksum
    if value is True:
        return name
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"


def name_corpora(rows):
    """Where models of one tokenizer were read on several texts, each text is a kind of its own."""
    texts = [row for row in rows if is_text(row)]
    pairs = {(row["tokenizer"], row["corpus"]) for row in texts}
    if len(pairs) > len({tokenizer for tokenizer, _ in pairs}):
        for row in texts:
            row["kind"] = f"perplexity on {row['corpus']}"


def check_together(rows):
    """Refuse a label whose models differ in more than their seed, and texts that differ."""
    fields = {name for row in rows for name in row if name.split(".")[0] in vars(Recipe())}
    fields = (fields | {"trained_on", "own_code"}) - NEVER
    refuse_several(rows, ("kind", "label"), fields, "--label")
    texts = [row for row in rows if is_text(row)]
    refuse_several(texts, ("kind", "tokenizer"), ["data_sha256"], "--data")
    how = ("kind", "tokenizer", "train_len", "length")
    refuse_several(texts, how, ["n_read", "longest"], "the evaluation's --max_tokens and --lengths")
    if any(len(grouped(of_one, "longest")) > 1 for of_one in grouped(texts, "tokenizer").values()):
        note = "note: models of several training lengths have read different parts of the text"
        print(
            f"{note}; the same --lengths in tokens, such as 128,512, compare them", file=sys.stderr
        )


def refuse_several(rows, by, names, flag):
    """Refuse rows that are alike in `by` and differ in one of these names."""
    for name in sorted(names):
        found = {}
        for row in rows:
            alike = tuple(row[key] for key in by)
            if str(row.get(name)) != str(found.setdefault(alike, row.get(name))):
                raise Refused(
                    f"{' of '.join(map(str, alike[:2]))}: {name} is {found[alike]} and "
                    f"{row.get(name)}, so they do not belong together ({flag})"
                )


def rank(row, order):
    """Text first, then by embedding, then by label, in which 256 stands before 1024."""
    label = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", row["label"])
    label[1::2] = map(float, label[1::2])
    return not is_text(row), order.index(row["pos"]), label, row["kind"], row["seed"], row["length"]


def is_text(row):
    return row["kind"].startswith("perplexity")


# --- means over the models


def grouped(rows, name):
    """{a value of this name: its rows}, in the order of the rows."""
    groups = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def n_models(rows, number):
    return len({row["seed"] for row in rows if row[number] is not None})


def values_at(rows, number, length):
    """A number of each model of one label, by seed. [] unless all of them have this length."""
    values = [row[number] for row in rows if row["length"] == length and row[number] is not None]
    return values if len(values) == n_models(rows, number) else []  # some alone would mislead


def half_interval(values):
    """Half the 95 % interval of the mean of n values (n, ...), by Student's t."""
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


def cell(values, factor=1, digits=2, sign=""):
    """The mean, of three values or more ± half its 95 % interval; "" of none. sign="+": signed."""
    values = factor * np.array(values, dtype=float)
    if len(values) < 3:
        return f"{values.mean():{sign}z.{digits}f}" if len(values) else ""
    mean, half = values.mean(), half_interval(values)
    return f"{mean:{sign}z.{digits}f} ± {half:.{digits}f}"


def minus(rows, to, number):
    """Of one kind: `number` less that of the label `to` with the same seed and length, as rows."""
    theirs = {(row["seed"], row["length"]): row[number] for row in rows if row["label"] == to}
    pairs = [(row, theirs.get((row["seed"], row["length"]))) for row in rows if row["label"] != to]
    both = [(row, other) for row, other in pairs if None not in (other, row[number])]
    return [row | {number: row[number] - other} for row, other in both]


# --- as Markdown


def markdown(columns, rows):
    """A table, whose first column is text. What a cell holds is text, too, no mark."""
    cells = [[re.sub(r"[|<]", r"\\\g<0>", cell) for cell in row] for row in (columns, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    lines.insert(1, "|---" + "|--:" * (len(columns) - 1) + "|")
    return "\n".join(lines)


def table(rows, title, number, factor, digits, sign=""):
    """A row for each label, a column for each length; "" where nothing is to be shown."""
    lengths, lines = sorted({row["length"] for row in rows}), []
    train_lens = {row["train_len"] for row in rows}
    for label, models in grouped(rows, "label").items():
        n = n_models(models, number)
        if n > 1 or (n and not sign):  # one difference says nothing
            cells = [cell(values_at(models, number, n), factor, digits, sign) for n in lengths]
            if number == "accuracy" and not sign:
                cells = [f"{c}{spread(models, n)}" for c, n in zip(cells, lengths, strict=True)]
            lines.append([label, str(n), *cells])
    columns = map(str, lengths)
    if len(train_lens) == 1:
        columns = [f"{n} ({n / min(train_lens):g}x)" for n in lengths]
    return markdown([title, "models", *columns], lines) if lines else ""


def spread(models, length):
    """Of whole answers: how many models find 90 %; of one model its 95 % interval."""
    found = values_at(models, "accuracy", length)
    if len(found) > 1:
        return f" ({sum(share >= 0.9 for share in found)} of {len(found)})"
    low, high = (values_at(models, f"accuracy_{end}", length) for end in ("low", "high"))
    return f" ({100 * low[0]:.0f} to {100 * high[0]:.0f})" if low else ""


def unit(rows):
    """(what stands on a text's axis, its name in a row): of several tokenizers bits per byte."""
    tokenizers = {row["tokenizer"] for row in rows}
    if len(tokenizers) > 1:
        return "bits per byte", "bits_per_byte"
    return f"perplexity per {'byte' if tokenizers == {'byte'} else 'token'}", "perplexity"


def tables(rows, to=()):
    """All means, and paired differences to each of these labels: tables of Markdown."""
    parts = []
    for kind, group in grouped(rows, "kind").items():
        if is_text(group[0]):
            title, number = unit(group)
            corpus = kind.removeprefix("perplexity")
            numbers = [(title + corpus, number, 1, 2)]
            nats = f"nats per {title.rpartition(' ')[2]}{corpus}"
            differences = [(nats, "loss", 1, 3)] if number == "perplexity" else []
        else:
            numbers = [(f"{kind}: {title}", *how) for title, *how in OF_TASKS]
            differences = [how for how in numbers if how[1] != "answer_nll"]
        parts += [table(group, *how) for how in numbers]
        for label, (title, number, *how) in itertools.product(to, differences):
            less = minus(group, label, number)
            parts.append(table(less, f"minus {label}, {title}", number, *how, sign="+"))
    return "\n\n".join(filter(None, parts))


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("results", nargs="+", help="json files of evaluations")
    add("--to", nargs="+", default=[], metavar="LABEL", help="labels to take differences to")
    args = parser.parse_args(argv)
    rows = read_rows(args.results)
    if unknown := set(args.to) - grouped(rows, "label").keys():
        raise Refused(f"--to {unknown.pop()} is none of {', '.join(grouped(rows, 'label'))}")
    print(tables(rows, args.to))


if __name__ == "__main__":
    common.one_sentence_errors(main)()
