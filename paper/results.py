"""
Results and their statistics.

A file holds one evaluation, as eval_perplexity.py and eval_passkey.py write it beside the
checkpoint, or a list of them, as paper/ gathers them. Two labels with the same seeds are compared
seed by seed: models of one seed share initial weights, data and order, so their difference varies
less than they do. Models read on two corpora have results for each.
"""

import itertools
import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import get_args

import numpy as np
from scipy import stats

from common import Refused, read_json
from recipe import MAY_CHANGE, Recipe, parse_lengths

# The order of the embeddings everywhere, and their names.
NAMES = {
    "nope": "NoPE",
    "alibi": "ALiBi",
    "rope": "RoPE",
    "fope": "FoPE",
    "kerple": "KERPLE",
    "fire": "FIRE",
    "rope_a": "RoPE-A",
    "rope_taper": "RoPE, tapered",
}
MAY_DIFFER = ("seed", "init_from", *MAY_CHANGE)  # between the models of one label

# --- reading


def is_a(value, kind):
    """Whether a value is of a type. A bool is no int, and an int may stand for a float."""
    kinds = get_args(kind) or (kind,)
    return object in kinds or type(value) in kinds or (type(value) is int and float in kinds)


def load_results(paths, of_today=()):
    """
    {kind: {label: [result of one seed, ...]}} in the order of NAMES. Kinds are perplexity, but with
    several corpora "perplexity on CORPUS", and names of tasks. of_today: results that stand in the
    place of those in files. Refused where one is no result, and where they do not belong into one
    figure.
    """
    new, known = [(result, "a new result") for result in of_today], []
    for path in paths:
        content = read_json(path, kind=dict | list)
        known += [(r, path) for r in (content if isinstance(content, list) else [content])]
    if not (new or known):
        raise Refused(f"there is no result in {', '.join(map(str, paths))}")
    for result, path in (*new, *known):
        check_result(result, path)
    of_new = {identity(result) for result, _ in new}
    every = new + [pair for pair in known if identity(pair[0]) not in of_new]
    corpora = {corpus_of(r) for r, _ in every if not is_task(r["kind"])}
    by_kind = defaultdict(lambda: defaultdict(list))
    for result, path in sorted(every, key=lambda pair: is_task(pair[0]["kind"])):  # text first
        kind, label = result["kind"], label_of(result)
        if not is_task(kind) and len(corpora) > 1:
            kind = f"perplexity on {corpus_of(result)}"
        if result in by_kind[kind][label]:
            continue  # the same one, in two files
        if seed_of(result) in map(seed_of, by_kind[kind][label]):
            raise Refused(
                f"{path} has a second result of {label} with seed {seed_of(result)}; "
                "tell them apart by the evaluation's --label"
            )
        by_kind[kind][label].append(result)
    check_together(by_kind)
    order = [*NAMES, *(result["recipe"]["pos"] for result, _ in every)]
    for kind, labels in by_kind.items():
        ranks = {  # by embedding, then by label, in which 256 stands before 1024
            la: (order.index(rs[0]["recipe"]["pos"]), re.sub(r"\d+", lambda n: n[0].zfill(9), la))
            for la, rs in labels.items()
        }
        by_kind[kind] = {label: labels[label] for label in sorted(labels, key=ranks.get)}
    return dict(by_kind)


def check_result(result, path):
    """Refuse what is no evaluation, or one of other code than this; its lengths become numbers."""
    if not (isinstance(result, dict) and {"kind", "recipe", "lengths"} <= result.keys()):
        raise Refused(f"{path} is no result of eval_perplexity.py or eval_passkey.py")
    if problem := next(problems(result), None):
        raise Refused(f"{path} is no result of this version of the code: {problem}")
    result["lengths"] = {int(length): row for length, row in result["lengths"].items()}


def problems(result):
    """What keeps a result from being drawn. Only the first is sure: others may follow from it."""
    kinds = dict(kind=str, recipe=dict, lengths=dict, label=str | None, step=int | None, data=str)
    for name, kind in kinds.items():
        if name in result and not is_a(result[name], kind):
            yield f"its {name} is {result[name]!r}"
    recipe, types = result["recipe"], {field.name: field.type for field in fields(Recipe)}
    for name in sorted({"pos", "seed", "train_len"} - recipe.keys()):
        yield f"its recipe has no {name}"
    for name, value in recipe.items():
        if name not in types or not is_a(value, types[name]):
            yield f"its recipe has {name}={value!r}"
    numbers = ("accuracy", "answer_nll", "token_accuracy")
    numbers = numbers if is_task(result["kind"]) else ("loss", "perplexity")
    for length, row in result["lengths"].items():
        if not str(length).isdecimal():
            yield f"it has a length of {length!r}"
        for name in numbers:
            if not isinstance(row, dict) or not is_a(row.get(name), float):
                yield f"its row of length {length} has no {name}"


def check_together(by_kind):
    """Refuse results that do not belong into one figure."""
    of_kind = {kind: [r for rs in by_kind[kind].values() for r in rs] for kind in by_kind}
    train_lens = {train_len_of([r]) for results in of_kind.values() for r in results}
    if len(train_lens) > 1:
        raise Refused(f"these results have several training lengths: {sorted(train_lens)}")
    for kind, results in of_kind.items():
        if not common_lengths(results):
            raise Refused(f"these {kind} results have no length in common")
        if not is_task(kind):
            check_same_text(kind, results)
        for label, seeds in by_kind[kind].items():
            trained = [
                r["recipe"] | {"step": r.get("step"), "training data": r.get("trained_on")}
                for r in seeds
            ]
            for name in set().union(*trained) - set(MAY_DIFFER):
                if len({str(recipe.get(name)) for recipe in trained}) > 1:
                    raise Refused(
                        f"the seeds of {label} differ in {name}; "
                        "tell them apart by the evaluation's --label"
                    )


def check_same_text(kind, results):
    first, train_len = common_lengths(results)[0], train_len_of(results)
    must_agree = {
        "tokenizers": [r["recipe"].get("tokenizer") for r in results],
        "texts": [r.get("data_sha256") for r in results],
        "--max_tokens": [r["lengths"][first].get("tokens") for r in results],
        "--lengths": [  # whole windows of the longest are read
            parse_lengths(r["recipe"].get("lengths", "1x"), train_len)[-1] for r in results
        ],
    }
    for what, values in must_agree.items():
        if len(set(map(str, values))) > 1:
            raise Refused(f"these {kind} results cannot be compared: several {what}")


def is_task(kind):
    return not kind.startswith("perplexity")


def seed_of(result):
    return result["recipe"]["seed"]


def train_len_of(results):
    return results[0]["recipe"]["train_len"]


def corpus_of(result):
    return Path(result.get("data", "")).name


def label_of(result):
    """The --label, or else the embedding with what is special about it; how far it is trained."""
    recipe = result["recipe"]
    step, steps = result.get("step"), Recipe(**recipe).n_steps
    half = f" (step {step:,} of {steps:,})" if step is not None and step < steps else ""
    if label := " ".join((result.get("label") or "").split()):  # on one line
        return label + half
    name = NAMES.get(recipe["pos"], recipe["pos"])
    if recipe.get("qk_norm"):
        name += " + QK-norm"
    changes = [f"{k}={v}" for k, v in recipe.get("pos_args", {}).items()]
    if (theta := recipe.get("theta", Recipe.theta)) != Recipe.theta:
        changes.insert(0, f"theta {theta:g}")
    if scaling := recipe.get("rope_scaling"):
        factor = f"x{scaling['factor']:g}" if "factor" in scaling else "told the length"
        kind, temperature = scaling.get("kind", "yarn"), scaling.get("temperature")
        changes += [f"{kind} {factor}"] if kind != "none" else []
        changes += ["with temperature"] if temperature else []
    return (f"{name} ({', '.join(changes)})" if changes else name) + half


def identity(result):
    """What tells a result from the others of its file."""
    recipe = result["recipe"]
    model = str({k: v for k, v in sorted(recipe.items()) if k == "seed" or k not in MAY_DIFFER})
    return result["kind"], result.get("label"), corpus_of(result), model


def unit_of(results):
    return "byte" if results[0]["recipe"].get("tokenizer") == "byte" else "token"


def part_of_answer(results):
    """What a token of a passkey is: our own tokenizers split numbers into digits, others do not."""
    digits = results[0]["recipe"].get("tokenizer", "").startswith(("byte", "bpe"))
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
    theirs = {seed_of(r): r["lengths"] for r in reference}
    pairs = [(r["lengths"], theirs[seed_of(r)]) for r in results if seed_of(r) in theirs]
    rows = [[a[n][name] - b[n][name] for n in lengths] for a, b in pairs]
    return np.array(rows, dtype=float) if rows else np.empty((0, len(lengths)))


def half_interval(values):
    """Half the 95 % interval of the mean of n values (n, ...), by Student's t."""
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


def sign_flip_p(values):
    """
    The exact p value of paired differences (n,), n <= 20, of which neither sign is special: the
    share of the 2^n ways to flip their signs whose mean is as far from 0 as theirs.
    """
    signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
    means = np.abs((signs * values).mean(axis=1))
    return float((means >= np.abs(values.mean()) * (1 - 1e-12)).mean())


def compare(named, seeds, folder, beside):
    """
    The comparisons that were named before the models were read, with p values of paired t tests and
    of sign flips, the latter corrected by Holm's method for their number. named: [(figure, kind,
    number, label, label to compare with, multiple of the training length), ...]; folder: of the
    gathered results; beside: {figure: others that are read with it}. Refused until all seeds are
    there.
    """
    rows = []
    for figure, kind, name, label, to, multiple in named:
        paths = [Path(folder) / f"{one}.json" for one in (figure, *beside[figure])]
        by_label = load_results([path for path in paths if path.exists()]).get(kind, {})
        pairs = [[r for r in by_label.get(la, ()) if seed_of(r) in seeds] for la in (label, to)]
        if not all(len(results) == len(seeds) for results in pairs):
            raise Refused(
                f"{folder} has not all of the {len(seeds)} seeds of {label} and {to}, "
                f"whose {kind} is to be compared ({figure})"
            )
        length = multiple * train_len_of(pairs[0])
        values = paired_differences(*pairs, name, [length])[:, 0]
        row = dict(figure=figure, kind=kind, measure=name, label=label, to=to, length=length)
        row |= dict(seeds=len(values), mean=float(values.mean()))
        row |= dict(half_interval=float(half_interval(values)), p=sign_flip_p(values))
        rows.append(row | dict(p_t=float(stats.ttest_1samp(values, 0).pvalue)))
    worst = 0.0
    for rank, row in enumerate(sorted(rows, key=lambda row: row["p"])):
        worst = max(worst, min(1.0, (len(rows) - rank) * row["p"]))
        row["p_holm"] = worst
    return rows
