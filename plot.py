"""
Results to figures and Markdown tables.

    python plot.py results/figure1.json                               results/figure1.png, its table
    python plot.py runs_out/rope/*.json runs_out/fope/*.json --out runs_out/mine
    python plot.py --tables README.md results/README.md               their tables, anew

A file holds one evaluation, as eval_perplexity.py and eval_passkey.py write it beside the
checkpoint, or a list of them, as paper.py gathers them. Seeds of one label are drawn as mean and
standard deviation.
"""

import itertools
import re
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib
import matplotlib.ticker
import numpy as np

from common import ArgumentParser, one_sentence_errors, read_json, write_atomically

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
MORE_STYLES += [("#882255", "<"), ("#332288", ">"), ("#999933", "p"), ("#AA4499", "h")]  # Tol's

MEASURES = {"perplexity": ("loss", "perplexity"), "passkey": ("accuracy", "token_accuracy")}

# --- reading


def load_results(paths):
    """
    {kind: {label: [result of one seed, ...]}} in the order of STYLES. ValueError for what is no
    result, and for results that do not belong into one figure.
    """
    by_kind = {kind: defaultdict(list) for kind in MEASURES}
    for path in paths:
        content = read_json(path, kind=dict | list)
        for result in content if isinstance(content, list) else [content]:
            check_result(result, path)
            same = by_kind[result["kind"]][label_of(result)]
            if result["seed"] in [r["seed"] for r in same]:
                what = f"a second result of {label_of(result)} with seed {result['seed']}"
                raise ValueError(f"{path} has {what}; tell them apart by --label")
            same.append(result)
    every = {kind: [r for rs in labels.values() for r in rs] for kind, labels in by_kind.items()}
    if len(train_lens := {r["train_len"] for rs in every.values() for r in rs}) > 1:
        raise ValueError(f"these results have several training lengths: {sorted(train_lens)}")
    for kind, results in every.items():
        if results and not common_lengths(results):
            raise ValueError(f"these {kind} results have no length in common")
    if len({unit_of([r]) for r in every["perplexity"]}) > 1:
        raise ValueError("losses per byte and losses per token cannot be compared")
    order = [*STYLES, *(r["pos"] for results in every.values() for r in results)]
    for kind, labels in by_kind.items():
        ranks = {label: (order.index(rs[0]["pos"]), label) for label, rs in labels.items()}
        by_kind[kind] = {label: labels[label] for label in sorted(labels, key=ranks.get)}
    return by_kind


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
    name = STYLES[result["pos"]][0] if result["pos"] in STYLES else result["pos"]
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


def seed_stats(results, name):
    """(lengths, mean, std, n) of one number, over the seeds, at the lengths that all have."""
    lengths = common_lengths(results)
    rows = [[r["lengths"][length][name] for length in lengths] for r in results]
    values = np.array(rows, dtype=float)  # (seeds, lengths)
    std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(lengths))
    return lengths, values.mean(axis=0), std, len(values)


# --- figures


def styles(labels):
    """
    {label: line style}: fixed for the plain embeddings, the same dashed with QK-norm, further ones
    for everything else: one for the same change to two embeddings ("RoPE, YaRN x4" and "FoPE, YaRN
    x4"), the second dashed.
    """
    fixed = {name: {"color": colour, "marker": marker} for name, colour, marker in STYLES.values()}
    fixed |= {f"{name} + QK-norm": {**style, "ls": "--"} for name, style in fixed.items()}
    used = {fixed[label]["color"] for label in labels if label in fixed}
    more = [{"color": c, "marker": marker} for c, marker in MORE_STYLES if c not in used]
    more = itertools.cycle(more)
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


def draw_lines(ax, by_label, name, style, band=True, **kwargs):
    for label, results in by_label.items():
        lengths, mean, std, n = seed_stats(results, name)
        ax.plot(lengths, mean, ms=5, label=label, **{**style[label], **kwargs})
        if n > 1 and band:
            colour = style[label]["color"]
            ax.fill_between(lengths, mean - std, mean + std, color=colour, alpha=0.15, lw=0)


def length_axis(ax, train_len, lengths):
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{n}\n{n / train_len:g}x" for n in lengths])
    ax.minorticks_off()
    ax.axvline(train_len, color="black", lw=0.8, ls=":")
    ax.set_xlabel("evaluation length (tokens); dotted line: training length")
    ax.grid(alpha=0.25)


def perplexity_panel(ax, by_label, measure, style, note):
    draw_lines(ax, by_label, measure, style)
    name = "loss in nats" if measure == "loss" else measure
    ax.set_ylabel(f"{name} per {unit_of(next(iter(by_label.values())))} (lower is better)")
    ax.set_title(f"{measure.capitalize()} ({note})", fontsize=11)
    low, high = ax.get_ylim()
    if high > 4 * max(low, 1):
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def passkey_panel(ax, by_label, style, note):
    thin = dict(ls="--", lw=0.9, alpha=0.6)
    draw_lines(ax, by_label, "accuracy", style)
    draw_lines(ax, by_label, "token_accuracy", style, band=False, **thin)
    ax.set_ylim(-0.03, 1.03)
    ax.set_ylabel("passkeys retrieved (higher is better)")
    part = part_of_key(next(iter(by_label.values())))
    lines = f"solid: whole key, dashed: share of its {part}"
    ax.set_title(f"Passkey retrieval ({note})\n{lines}", fontsize=11)


def figure_length(results, measure="perplexity"):
    """Perplexity (or loss) and passkey accuracy against length: the paper's figure 1."""
    panels = [kind for kind in results if results[kind]]
    style = styles(list(dict.fromkeys(label for kind in panels for label in results[kind])))
    beside = len(style) > 6  # so many lines leave no room for the legend
    size = (5.2 * len(panels) + 2.4 * beside, 4.2)
    fig, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for ax, kind in zip(axes[0], panels, strict=True):
        by_label = results[kind]
        seeds = max(len(rs) for rs in by_label.values())
        note = f"mean of {seeds} seeds, band: std" if seeds > 1 else "one seed"
        if kind == "perplexity":
            perplexity_panel(ax, by_label, measure, style, note)
        else:
            passkey_panel(ax, by_label, style, note)
        every = [r for rs in by_label.values() for r in rs]
        length_axis(ax, every[0]["train_len"], sorted({n for r in every for n in r["lengths"]}))
        # one legend where all panels have the same lines
        if ax is axes[0, -beside] or list(by_label) != list(results[panels[0]]):
            handles, labels = ax.get_legend_handles_labels()
            unique = dict(zip(labels[::-1], handles[::-1], strict=True))
            place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if beside else {}
            place |= dict(framealpha=1, edgecolor="none")  # the dotted line ends at it
            ax.legend([unique[label] for label in by_label], by_label, **place)
    return fig


def figure_depth(by_label):
    """Passkey accuracy by the depth of the key and the length of the prompt: heat maps."""
    size, n = (2.6 * len(by_label) + 0.8, 3.4), len(by_label)
    layout = dict(figsize=size, sharey=True, squeeze=False, layout="constrained")
    fig, axes = plt.subplots(1, n, **layout)
    for ax, (label, results) in zip(axes[0], by_label.items(), strict=True):
        lengths = common_lengths(results)
        weights, values = (
            np.array([[r["lengths"][n][name] for n in lengths] for r in results], dtype=float)
            for name in ("trials_by_depth", "accuracy_by_depth")
        )
        with np.errstate(invalid="ignore"):  # nan where a depth had no trial
            grid = np.nansum(values * weights, axis=0) / weights.sum(axis=0)
        image = ax.imshow(grid.T, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        ax.set_title(label, fontsize=11)
        ax.set_xticks(range(len(lengths)), [str(n) for n in lengths], rotation=45)
        ax.set_yticks([-0.5, 4.5, 9.5], ["0 %", "50 %", "100 %"])
        ax.set_xlabel("length (tokens)")
    axes[0, 0].set_ylabel("depth of the key in the filler")
    seeds = max(len(rs) for rs in by_label.values())
    note = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    fig.suptitle(f"Whole keys retrieved, {note}", fontsize=11)
    fig.colorbar(image, ax=axes[0].tolist(), fraction=0.05)
    return fig


def draw(results, out, measure="perplexity", depth=False):
    """OUT.png, and with depth OUT_depth.png of the passkeys. Returns their paths."""
    figures = {out: figure_length(results, measure)}
    if depth and results["passkey"]:
        figures[f"{out}_depth"] = figure_depth(results["passkey"])
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    for name, fig in figures.items():
        fig.savefig(f"{name}.png", dpi=160)
        plt.close(fig)
    return [f"{name}.png" for name in figures]


# --- tables

ROWS = {  # title, name in the json, factor, digits
    "perplexity": [("perplexity per {unit}", "perplexity", 1, 2)],
    "loss": [("loss in nats per {unit}", "loss", 1, 2)],
    "passkey": [
        ("whole passkeys, %", "accuracy", 100, 0),
        ("passkey {part}, %", "token_accuracy", 100, 0),
    ],
}


def markdown_table(results, measure="perplexity"):
    """Perplexity (or loss), whole keys and digits by length, mean (± std over several seeds)."""
    lines = []
    for kind, by_label in results.items():
        for title, name, factor, digits in ROWS[measure if kind == "perplexity" else kind]:
            if not by_label:
                continue
            every = [r for rs in by_label.values() for r in rs]
            title = title.format(unit=unit_of(every), part=part_of_key(every))
            lengths, train_len = common_lengths(every), every[0]["train_len"]
            multiples = [f"{n} ({n / train_len:g}x)" for n in lengths]
            lines += ["| " + " | ".join([title, "seeds", *multiples]) + " |"]
            lines += ["|---|--:|" + "--:|" * len(lengths)]
            for label, rs in by_label.items():
                own_lengths, mean, std, n_seeds = seed_stats(rs, name)
                cells = []
                for i in map(own_lengths.index, lengths):
                    spread = f" ± {factor * std[i]:.{digits}f}" if n_seeds > 1 else ""
                    cells.append(f"{factor * mean[i]:.{digits}f}{spread}")
                lines.append("| " + " | ".join([label, str(n_seeds), *cells]) + " |")
            lines.append("")
    return "\n".join(lines).strip()


def bench_table(result):
    """A result of experiments/bench.py: speed and memory of each embedding."""
    summary = result["summary"]
    references = [name for name in ("nope", "rope") if name in summary]
    ratios = [f"to {name}" for name in references]
    title = f"{result['preset']}, T = {result['train_len']}, batch {result['batch_size']}"
    columns = [title, "training, tokens/s", *ratios, "GB"]
    columns += [f"reading {result['eval_len']}, tokens/s", *ratios, "GB"]
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    for pos, row in summary.items():
        cells = [pos]
        for what in ("train", "eval"):
            cells += [f"{row[what]:,.0f}", *(f"{row[f'to_{r}'][what]:.2f}" for r in references)]
            cells.append(f"{row[f'{what}_bytes'] / 1e9:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table_of(name, options, folder):
    """The table that a mark <!-- table NAME OPTIONS --> asks for, from folder/NAME.json."""
    path, options = Path(folder) / f"{name}.json", options.split()
    if name.startswith("bench"):
        return bench_table(read_json(path))
    results = load_results([path])
    for option in options:
        key, _, value = option.partition("=")
        if key == "seed":
            for by_label in results.values():
                for label, rs in by_label.items():
                    by_label[label] = [r for r in rs if r["seed"] == int(value)]
        elif key == "kind":
            results = {value: results[value]}
    return markdown_table(results, "loss" if "loss" in options else "perplexity")


def fill_tables(text, folder):
    """`text` with the table between each <!-- table ... --> and <!-- end table --> made anew."""
    mark = re.compile(r"(<!-- table (\w+)([^>]*) -->\n).*?(<!-- end table -->)", re.S)
    return mark.sub(lambda m: f"{m[1]}{table_of(m[2], m[3], folder)}\n{m[4]}", text)


def main(argv=None):
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("results", nargs="*", help="json files of evaluations, single or gathered")
    add("--out", help="of the figure, without .png; else that of the first json file")
    add("--loss", action="store_true", help="the loss in nats instead of the perplexity")
    add("--depth", action="store_true", help="also passkeys by depth")
    add("--tables", nargs="+", default=[], metavar="TEXT.md", help="put the tables into these")
    args = parser.parse_args(argv)
    for path in map(Path, args.tables):
        text = fill_tables(path.read_text(encoding="utf-8"), Path(__file__).parent / "results")
        write_atomically(path, lambda f, text=text: f.write(text.encode()))
    if args.results:
        results = load_results(args.results)
        measure = "loss" if args.loss else "perplexity"
        out = args.out or Path(args.results[0]).with_suffix("")
        figures = draw(results, out, measure, args.depth)
        print(markdown_table(results, measure))
        print(f"\nfigures: {', '.join(figures)}", file=sys.stderr)
    elif not args.tables:
        raise ValueError("there is nothing to draw: give json files, or --tables")


if __name__ == "__main__":
    one_sentence_errors(main)()
