"""
Figures and README tables, from the json files of the evaluations alone.

    python plot.py results/demo/*.json --out results/demo
    python plot.py results/demo/*.json --out results/demo --readme README.md     also puts the table into the README
    python plot.py results/qk_norm/*.json --out results/qk_norm --loss           nats instead of perplexity

Writes, as png and svg: length (perplexity and passkey accuracy against length), depth (passkey accuracy by depth and
length) and training (loss against tokens); prints the Markdown table. Seeds of one embedding are drawn as mean and standard
deviation.
"""

import itertools
import re
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib
import matplotlib.ticker
import numpy as np

from model import read_json, write_atomically
from prepare_data import ArgumentParser, one_sentence_errors

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's colours stay apart for colour-blind readers; the markers stay apart in grey.
STYLES = {
    "nope": ("NoPE", "#666666", "s"),
    "alibi": ("ALiBi", "#E69F00", "^"),
    "rope": ("RoPE", "#0072B2", "o"),
    "fope": ("FoPE", "#D55E00", "D"),
    "kerple": ("KERPLE", "#009E73", "v"),
    "fire": ("FIRE", "#CC79A7", "P"),
    "rope_a": ("RoPE-A", "#56B4E9", "X"),
}
MORE_STYLES = [("#009E73", "v"), ("#CC79A7", "P"), ("#56B4E9", "X"), ("#000000", "*")]
MORE_STYLES += [("#882255", "<"), ("#332288", ">"), ("#999933", "p"), ("#AA4499", "h")]  # Tol's muted ones


MEASURES = {"perplexity": ("loss", "perplexity"), "passkey": ("accuracy", "token_accuracy")}


def load_results(paths):
    """
    {kind: {label: [result of one seed, ...]}} in the order of STYLES. Raises ValueError for what is no result, and for
    results that do not belong into one figure.
    """
    results = {"perplexity": defaultdict(list), "passkey": defaultdict(list)}
    order = list(STYLES)
    for path in paths:
        result = read_json(path)
        try:
            kind, label = result["kind"], label_of(result)
            result["lengths"] = {int(length): row for length, row in result["lengths"].items()}
            numbers = [row[name] for row in result["lengths"].values() for name in MEASURES[kind]]
            if not all(isinstance(x, int | float) for x in (result["seed"], *numbers)) or not result["train_len"] > 0:
                raise TypeError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(f"{path} is no result of eval_perplexity.py or eval_passkey.py") from None
        if label.startswith("_"):
            raise ValueError(f"{path} has the label {label}; matplotlib hides what begins with _")
        if result["seed"] in [r["seed"] for r in results[kind][label]]:
            raise ValueError(f"{path} is a second result of {label} with seed {result['seed']}; tell them apart by --label")
        results[kind][label].append(result)
    every = {kind: [r for rs in by_label.values() for r in rs] for kind, by_label in results.items()}
    if len(train_lens := {r["train_len"] for rs in every.values() for r in rs}) > 1:
        raise ValueError(f"these results have several training lengths: {sorted(train_lens)}")
    for kind, rs in every.items():
        if rs and not set.intersection(*(set(r["lengths"]) for r in rs)):
            raise ValueError(f"these {kind} results have no length in common")
    if len({unit_of([r]) for r in every["perplexity"]}) > 1:
        raise ValueError("these results have losses per byte and losses per token: they cannot be compared")

    def rank(label):
        pos = next(r["pos"] for by_label in results.values() for r in by_label.get(label, []))
        return (order.index(pos) if pos in order else len(order), label)

    return {kind: {label: by_label[label] for label in sorted(by_label, key=rank)} for kind, by_label in results.items()}


def label_of(result):
    if result.get("label"):
        return result["label"]
    name = STYLES[result["pos"]][0] if result["pos"] in STYLES else result["pos"]
    if result.get("model", {}).get("qk_norm"):
        name += " + QK-norm"
    changes = ", ".join(f"{k}={v}" for k, v in result.get("pos_args", {}).items() if k != "original_len")
    return f"{name} ({changes})" if changes else name


def unit_of(results):
    return "byte" if results[0].get("tokenizer") == "byte" else "token"


def part_of_key(results):
    """What a token of a passkey is: our own tokenizers split numbers into digits, GPT-2's and others do not."""
    return "digits" if results[0].get("tokenizer", "").startswith(("byte", "bpe")) else "tokens"


def styles(labels):
    """
    {label: line style}: fixed for the plain embeddings, the same dashed with QK-norm, further ones for everything else: one for
    the same change to two embeddings ("RoPE, YaRN x4" and "FoPE, YaRN x4"), the second dashed.
    """
    fixed = {name: {"color": colour, "marker": marker} for name, colour, marker in STYLES.values()}
    fixed |= {f"{name} + QK-norm": {**style, "ls": "--"} for name, style in fixed.items()}
    used = {fixed[label]["color"] for label in labels if label in fixed}
    more = itertools.cycle([{"color": colour, "marker": marker} for colour, marker in MORE_STYLES if colour not in used])
    style, unpaired = {}, {}
    for label in labels:
        name, _, change = label.partition(", ")
        if label in fixed:
            style[label] = fixed[label]
        elif change in unpaired and name in fixed:
            style[label] = {**unpaired.pop(change), "ls": "--"}
        else:
            style[label] = unpaired[change] = next(more)
    return style


def seed_stats(results, name):
    """(lengths, mean, std, n): of one number over the seeds that have all of these lengths."""
    lengths = sorted(set.intersection(*(set(r["lengths"]) for r in results)))
    values = np.array([[r["lengths"][length][name] for length in lengths] for r in results], dtype=float)
    std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(lengths))
    return lengths, values.mean(axis=0), std, len(values)


def draw_lines(ax, by_label, name, style, band=True, **kwargs):
    for label, results in by_label.items():
        lengths, mean, std, n = seed_stats(results, name)
        ax.plot(lengths, mean, ms=5, label=label, **{**style[label], **kwargs})
        if n > 1 and band:
            ax.fill_between(lengths, mean - std, mean + std, color=style[label]["color"], alpha=0.15, lw=0)


def length_axis(ax, train_len, lengths):
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{n}\n{n / train_len:g}x" for n in lengths])
    ax.minorticks_off()
    ax.axvline(train_len, color="black", lw=0.8, ls=":")
    ax.set_xlabel("evaluation length (tokens); dotted line: training length")
    ax.grid(alpha=0.25)


def figure_length(results, measure="perplexity"):
    """Perplexity (or loss) and passkey accuracy against length: the paper's figure 1."""
    panels = [kind for kind in results if results[kind]]
    style = styles(list(dict.fromkeys(label for kind in panels for label in results[kind])))
    beside = len(panels) == 1 and len(style) > 6  # so many lines leave no room for the legend
    width = 5.2 * len(panels) + 2.4 * beside
    fig, axes = plt.subplots(1, len(panels), figsize=(width, 4.2), squeeze=False, layout="constrained")
    for ax, kind in zip(axes[0], panels, strict=True):
        first = next(iter(results[kind].values()))
        seeds = max(len(rs) for rs in results[kind].values())
        note = f"mean of {seeds} seeds, band: std" if seeds > 1 else "one seed"
        if kind == "perplexity":
            draw_lines(ax, results[kind], measure, style)
            name = "loss in nats" if measure == "loss" else measure
            ax.set_ylabel(f"{name} per {unit_of(first)} (lower is better)")
            ax.set_title(f"{measure.capitalize()} ({note})", fontsize=11)
            low, high = ax.get_ylim()
            if high > 4 * max(low, 1):
                ax.set_yscale("log")
                ax.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
                ax.yaxis.set_major_formatter("{x:g}")
                ax.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        else:
            draw_lines(ax, results[kind], "accuracy", style)
            draw_lines(ax, results[kind], "token_accuracy", style, band=False, ls="--", lw=0.9, alpha=0.6)
            ax.set_ylim(-0.03, 1.03)
            ax.set_ylabel("passkeys retrieved (higher is better)")
            lines = f"solid: whole key, dashed: share of its {part_of_key(first)}"
            ax.set_title(f"Passkey retrieval ({note})\n{lines}", fontsize=11)
        length_axis(ax, first[0]["train_len"], sorted({n for rs in results[kind].values() for r in rs for n in r["lengths"]}))
        # one legend where all panels have the same lines
        if ax is axes[0, 0] or list(results[kind]) != list(results[panels[0]]):
            handles, labels = ax.get_legend_handles_labels()
            unique = dict(zip(labels[::-1], handles[::-1], strict=True))
            place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if beside else {}
            ax.legend([unique[label] for label in results[kind]], list(results[kind]), frameon=False, **place)
    return fig


def figure_depth(by_label):
    """Passkey accuracy by the depth of the key and the length of the prompt, one heat map per embedding."""
    fig, axes = plt.subplots(
        1, len(by_label), figsize=(2.6 * len(by_label) + 0.8, 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for ax, (label, results) in zip(axes[0], by_label.items(), strict=True):
        lengths = sorted(set.intersection(*(set(r["lengths"]) for r in results)))
        weights = np.array([[r["lengths"][n]["trials_by_depth"] for n in lengths] for r in results], dtype=float)
        values = np.array([[r["lengths"][n]["accuracy_by_depth"] for n in lengths] for r in results], dtype=float)
        with np.errstate(invalid="ignore"):
            grid = np.nansum(values * weights, axis=0) / weights.sum(axis=0)  # nan where a depth had no trial
        image = ax.imshow(grid.T, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        ax.set_title(label, fontsize=11)
        ax.set_xticks(range(len(lengths)), [str(n) for n in lengths], rotation=45)
        ax.set_yticks([-0.5, 4.5, 9.5], ["0 %", "50 %", "100 %"])
        ax.set_xlabel("length (tokens)")
    axes[0, 0].set_ylabel("depth of the key in the filler")
    seeds = max(len(rs) for rs in by_label.values())
    fig.suptitle(f"Whole keys retrieved, {f'mean of {seeds} seeds' if seeds > 1 else 'one seed'}", fontsize=11)
    fig.colorbar(image, ax=axes[0].tolist(), fraction=0.05)
    return fig


def figure_training(by_label):
    """Training loss (thin) and validation loss (with markers) against tokens."""
    style = styles(list(by_label))
    fig, ax = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for label, results in by_label.items():
        for r in results:
            curve = np.array([[np.nan if v is None else v for v in row] for row in r.get("curve", [])], dtype=float)
            if not len(curve):
                continue
            ax.plot(curve[:, 0] / 1e6, smooth(curve[:, 1]), color=style[label]["color"], lw=0.7, alpha=0.5)
            has_val = ~np.isnan(curve[:, 2])
            name = label if r is results[0] else None
            ax.plot(curve[has_val, 0] / 1e6, curve[has_val, 2], ms=4, label=name, **style[label])
    ax.set_xlabel("training tokens (millions)")
    ax.set_ylabel(f"loss on text (nats per {unit_of(next(iter(by_label.values())))})")
    ax.set_title("Training (thin, running mean) and validation (markers) at the training length", fontsize=10)
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    return fig


def smooth(values, n=15):
    n = min(n, len(values))
    padded = np.concatenate((np.repeat(values[0], n // 2), values, np.repeat(values[-1], n - 1 - n // 2)))
    return np.convolve(padded, np.ones(n) / n, mode="valid")


def markdown_table(results, measure="perplexity"):
    """Perplexity (or loss), whole keys and digits by length, mean (std over seeds where there are several)."""
    lines = []
    rows = {
        "perplexity": [("loss in nats per {unit}" if measure == "loss" else "perplexity per {unit}", measure, 1, 2)],
        "passkey": [("whole passkeys, %", "accuracy", 100, 0), ("passkey {part}, %", "token_accuracy", 100, 0)],
    }
    for kind, by_label in results.items():
        for title, name, factor, digits in rows[kind] if by_label else []:
            first = next(iter(by_label.values()))
            title = title.format(unit=unit_of(first), part=part_of_key(first))
            lengths = seed_stats([r for rs in by_label.values() for r in rs], name)[0]
            train_len = first[0]["train_len"]
            lines += ["| " + " | ".join([title, "seeds", *(f"{n} ({n / train_len:g}x)" for n in lengths)]) + " |"]
            lines += ["|---|--:|" + "--:|" * len(lengths)]
            for label, rs in by_label.items():
                all_lengths, mean, std, n_seeds = seed_stats(rs, name)
                cells = []
                for length in lengths:
                    i = all_lengths.index(length)
                    spread = f" ± {factor * std[i]:.{digits}f}" if n_seeds > 1 else ""
                    cells.append(f"{factor * mean[i]:.{digits}f}{spread}")
                lines.append("| " + " | ".join([label, str(n_seeds), *cells]) + " |")
            lines.append("")
    return "\n".join(lines).strip()


def put_into_readme(path, name, table):
    """Replace what stands between <!-- table NAME --> and <!-- end NAME --> in a Markdown file."""
    text = Path(path).read_text(encoding="utf-8")
    pattern = re.compile(f"(<!-- table {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.S)
    if not pattern.search(text):
        raise ValueError(f"{path} has no lines '<!-- table {name} -->' and '<!-- end {name} -->' to put the table between")
    text = pattern.sub(lambda m: f"{m[1]}{table}\n{m[2]}", text)
    write_atomically(Path(path), lambda f: f.write(text.encode()))


def main(argv=None):
    parser = ArgumentParser(__doc__)
    parser.add_argument("results", nargs="+", help="json files of eval_perplexity.py and eval_passkey.py")
    parser.add_argument("--out", default="results", help="folder for the figures")
    parser.add_argument("--loss", action="store_true", help="show the loss in nats instead of the perplexity")
    parser.add_argument("--readme", help="Markdown file to put the table into, at the marks named after the --out folder")
    args = parser.parse_args(argv)
    results = load_results(args.results)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    measure = "loss" if args.loss else "perplexity"
    figures = {"length": figure_length(results, measure)}
    if results["passkey"]:
        figures["depth"] = figure_depth(results["passkey"])
    if any(r.get("curve") for rs in results["perplexity"].values() for r in rs):
        figures["training"] = figure_training(results["perplexity"])
    for name, fig in figures.items():
        fig.savefig(out / f"{name}.png", dpi=160)
        # no date and fixed ids: the same results give the same file
        with plt.rc_context({"svg.hashsalt": name}):
            fig.savefig(out / f"{name}.svg", metadata={"Date": None})
        plt.close(fig)
    table = markdown_table(results, measure)
    print(table)
    print(f"\nfigures: {', '.join(str(out / f'{name}.png') for name in figures)}", file=sys.stderr)
    if args.readme:
        put_into_readme(args.readme, out.name, table)


if __name__ == "__main__":
    one_sentence_errors(main)()
