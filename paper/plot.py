"""
Results to figures and Markdown tables.

    python -m paper.plot results/figure1.json                         results/figure1.png, its table
    python -m paper.plot runs_out/rope/*.json runs_out/fope/*.json --out runs_out/mine
    python -m paper.plot --tables README.md results/*.md docs/index.html       their tables, anew

Seeds of one label are drawn as their mean, with the standard deviation or each as a dot around it.
"""

import itertools
import sys
import textwrap
from functools import partial
from pathlib import Path

import matplotlib
import matplotlib.ticker
import numpy as np

import common
from common import Refused
from paper.results import (
    TASK_MEASURES,
    common_lengths,
    half_interval,
    is_task,
    load_results,
    paired_differences,
    part_of_answer,
    seed_stats,
    train_len_of,
    unit_of,
)
from paper.tables import fill_tables, markdown_table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Apart for colour-blind readers, by their lightness, too, and 3 : 1 or more on white; the same in
# docs/index.html. The markers stay apart in grey.
STYLES = {
    "NoPE": ("#4A4A4A", "s"),
    "ALiBi": ("#009E73", "^"),
    "RoPE": ("#1F77C4", "o"),
    "FoPE": ("#D1480C", "D"),
    "FoPE, CF alone": ("#6B1F7C", "v"),
    "KERPLE": ("#8A6D00", "<"),
    "FIRE": ("#B83280", "P"),
    "RoPE-A": ("#000000", "X"),
}
MORE_STYLES = [("#8A6D00", "<"), ("#B83280", "P"), ("#000000", "X"), ("#6B1F7C", "v")]
MORE_STYLES += [("#00688B", ">"), ("#5C7F00", "p"), ("#A0522D", "h"), ("#7A7A7A", "*")]

FEW = 5  # curves are labelled at their ends; more have a legend beside them, no bands and no dots
PANELS_A_ROW = 2  # more would make text smaller than 10 px in a page that is 838 px wide
SMALL = 9  # points

# --- figures


def styles(labels):
    """
    {label: line style}: fixed for the plain embeddings, the same dashed with QK-norm, further ones
    for everything else. What goes on from RoPE ("RoPE to FoPE") is dashed, too.
    """
    fixed = {name: {"color": colour, "marker": m} for name, (colour, m) in STYLES.items()}
    fixed |= {f"{name} + QK-norm": {**style, "ls": "--"} for name, style in fixed.items()}
    used = {fixed[label]["color"] for label in labels if label in fixed}
    more = [{"color": c, "marker": marker} for c, marker in MORE_STYLES if c not in used]
    more = itertools.cycle(more)
    style = {label: fixed[label] if label in fixed else next(more) for label in labels}
    goes_on = {label: {"ls": "--"} for label in labels if label.startswith("RoPE to ")}
    return {label: line | goes_on.get(label, {}) for label, line in style.items()}


def draw_lines(ax, by_label, name, style, spread):
    """The mean over seeds of each label, with a "band" of std or each seed's "dots" around it."""
    for i, (label, results) in enumerate(by_label.items()):
        lengths, mean, std, n = seed_stats(results, name)
        ax.plot(lengths, mean, label=label, ms=5, **style[label])
        colour = style[label]["color"]
        if n > 1 and spread == "band":
            ax.fill_between(lengths, mean - std, mean + std, color=colour, alpha=0.15, lw=0)
        if n > 1 and spread == "dots":  # beside each other, not upon each other
            x = np.array(lengths) * 2 ** (0.07 * (i - (len(by_label) - 1) / 2))
            for r in results:
                y = [r["lengths"][length][name] for length in lengths]
                ax.scatter(x, y, s=10, color=colour, alpha=0.5, lw=0)


def label_ends(fig, labelled):
    """
    The label of each curve at its right end, moved apart where they would be upon each other.
    labelled: for each of the axes [(label, last y, colour)].
    """
    fig.draw_without_rendering()  # so that positions are known
    for ax, curves in labelled.items():
        words = [textwrap.fill(label, 22) for label, *_ in curves]
        ends = [ax.transData.transform((1, y))[1] for _, y, _ in curves]
        order, places = np.argsort(ends), np.sort(ends)
        heights = np.array([words[i].count("\n") + 1 for i in order]) * 1.15 * SMALL * fig.dpi / 72
        for _ in range(100):  # neighbours push each other
            push = np.maximum(0, (heights[1:] + heights[:-1]) / 2 - np.diff(places)) / 2
            places[1:] += push
            places[:-1] -= push
        for i, place in zip(order, places, strict=True):
            _, y, colour = curves[i]
            ax.annotate(
                words[i].replace("$", r"\$"),  # or it would be TeX
                (1, y),
                (4, (place - ends[i]) * 72 / fig.dpi),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=colour,
                size=SMALL,
                va="center",
                annotation_clip=False,
            )


def seeds_note(by_label):
    few, many = (f(len(rs) for rs in by_label.values()) for f in (min, max))
    if many == 1:
        return "one seed"
    return f"mean of {many} seeds" if few == many else f"mean of {few} to {many} seeds"


def length_axis(ax, train_len, lengths):
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{n}\n{n / train_len:g}x" for n in lengths])
    ax.minorticks_off()
    ax.axvline(train_len, color="black", lw=0.8, ls=":", zorder=1)
    ax.set_xlabel("length that is read (tokens); dotted: training")
    ax.grid(alpha=0.25)


def title_of(kind):
    return kind.capitalize().replace("c4", "C4")


def perplexity_panel(ax, by_label, measure, kind, style, note, spread):
    draw_lines(ax, by_label, measure, style, spread)
    name = "loss in nats" if measure == "loss" else measure
    unit = unit_of(next(iter(by_label.values())))
    ax.set_ylabel(f"{name} per {unit} (lower is better)")
    ax.set_title(f"{title_of(kind.replace('perplexity', measure))} ({note})", fontsize=10)
    if measure == "perplexity":  # so that equal losses in nats have equal heights
        ax.set_yscale("log")
        ax.set_ylabel(f"{ax.get_ylabel()}, log axis")
        ax.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8, steps=[1, 2, 5, 10]))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def same_span(axes):
    """The same factor from the bottom to the top of each of these log axes."""
    limits = np.log([ax.get_ylim() for ax in axes])
    half = np.ptp(limits, axis=1).max() / 2
    for ax, middle in zip(axes, limits.mean(axis=1), strict=True):
        ax.set_ylim(np.exp(middle - half), np.exp(middle + half))


def task_panel(ax, by_label, task, name, style, note, spread):
    draw_lines(ax, by_label, name, style, spread)
    part = part_of_answer(next(iter(by_label.values())))
    what = f"Whole {task}s" if name == "accuracy" else f"{task.capitalize()} {part}"
    if name == "token_accuracy" and part == "digits":
        ax.axhline(0.1, color="black", lw=0.8, ls=":", zorder=1)
        ax.text(0, 0.11, " guessing", transform=ax.get_yaxis_transform(), size=SMALL)
    ax.set_ylim(-0.03, 1.03)
    ax.set_ylabel("share that is right (higher is better)")
    ax.set_title(f"{what} ({note})", fontsize=10)


def figure_length(results, measure="perplexity", message=""):
    """
    Perplexity (or loss) and passkey accuracy against length: the paper's figure 1. Digits have a
    panel where there is no text.
    """
    of_tasks = TASK_MEASURES if all(map(is_task, results)) else TASK_MEASURES[:1]
    panels = [(k, n) for k in results for n in (of_tasks if is_task(k) else (measure,))]
    style = styles(list(dict.fromkeys(label for labels in results.values() for label in labels)))
    beside, columns = len(style) > FEW, min(len(panels), PANELS_A_ROW)
    rows = -(-len(panels) // columns)
    legend_rows = -(-len(style) // 3) if beside else 0
    size = (10.4 if columns > 1 else 7, 4 * rows + 0.25 * legend_rows + 0.4 * bool(message))
    fig, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    axes, labelled = axes.flat, {}
    for ax in axes[len(panels) :]:
        ax.remove()
    for ax, (kind, name) in zip(axes, panels, strict=False):
        by_label = results[kind]
        note, spread = seeds_note(by_label), "" if beside else "dots" if is_task(kind) else "band"
        if note != "one seed":
            note += {"band": ", band: std", "dots": ", dots: each"}.get(spread, "")
        if is_task(kind):
            task_panel(ax, by_label, kind, name, style, note, spread)
        else:
            perplexity_panel(ax, by_label, name, kind, style, note, spread)
        every = [r for rs in by_label.values() for r in rs]
        length_axis(ax, train_len_of(every), sorted({n for r in every for n in r["lengths"]}))
        labelled[ax] = [
            (label, seed_stats(rs, name)[1][-1], style[label]["color"])
            for label, rs in by_label.items()
        ]
    n_text = sum(not is_task(kind) for kind in results)  # the first panels
    if n_text and measure == "perplexity":
        same_span(axes[:n_text])
    if message:
        fig.suptitle(message, fontsize=12, fontweight="bold")
    if beside:
        handles = {}
        for ax in labelled:
            handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        shown = [label.replace("$", r"\$") for label in handles]
        fig.legend(handles.values(), shown, loc="outside lower center", ncols=3, fontsize=SMALL)
    else:
        label_ends(fig, labelled)
    return fig


def figure_differences(results, to):
    """
    Each label minus the label `to` within each seed: the mean, and its 95 % interval where there
    are several seeds. At 4x and 8x, for what would lie upon each other as curves.
    """
    every = [r for by_label in results.values() for rs in by_label.values() for r in rs]
    train_len = train_len_of(every)
    lengths = [n for n in common_lengths(every) if n in (4 * train_len, 8 * train_len)]
    if not lengths:
        raise Refused("differences are drawn at 4 and 8 times the training length, not read here")
    rows = max(map(len, results.values()))
    layout = dict(figsize=(10.4, (0.26 * rows + 1.2) * len(results)), layout="constrained")
    fig, axes = plt.subplots(len(results), len(lengths), sharey="row", squeeze=False, **layout)
    for row, (kind, by_label) in zip(axes, results.items(), strict=True):
        name, factor, what, better = "loss", 1, "nats", "left"
        if is_task(kind):
            name, factor, what, better = "accuracy", 100, "% of whole keys", "right"
        others = {
            label: paired_differences(rs, by_label[to], name, lengths)  # (seeds, lengths)
            for label, rs in by_label.items()
            if label != to
        }
        if alone := [label for label, pairs in others.items() if not len(pairs)]:
            raise Refused(f"{alone[0]} has no seed in common with {to}")
        row[0].set_yticks(range(len(others)), [label.replace("$", r"\$") for label in others])
        row[0].invert_yaxis()  # the first one on top
        for i, (ax, length) in enumerate(zip(row, lengths, strict=True)):
            for y, (label, pairs) in enumerate(others.items()):
                half = factor * half_interval(pairs[:, i]) if len(pairs) > 1 else None
                color, marker = STYLES.get(label.removesuffix(" + QK-norm"), ("black", "."))
                style = dict(color=color, marker=marker, capsize=2)
                ax.errorbar(factor * pairs[:, i].mean(), y, xerr=half, **style)
            ax.axvline(0, color="black", lw=0.8, ls=":", zorder=1)
            at = f"at {length} ({length / train_len:g}x), {seeds_note(others)}"
            ax.set_title(f"{title_of(kind)} {at}", fontsize=10)
            ax.set_xlabel(f"minus {to}, {what} ({better} is better)")
            ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6))
            ax.grid(alpha=0.25)
    return fig


def depth_grid(results, lengths):
    """The share of whole answers by depth of the needle, in tenths, and length: (10, lengths)."""
    weights, values = (
        np.array([[r["lengths"][n][name] for n in lengths] for r in results], dtype=float)
        for name in ("trials_by_depth", "accuracy_by_depth")
    )
    with np.errstate(invalid="ignore"):  # nan where a depth had no trial
        return (np.nansum(values * weights, axis=0) / weights.sum(axis=0)).T


def distance_grid(results, lengths):
    """The same by distance to the answer, under 32, 64, 128, ... tokens: (bins, lengths)."""
    grid = np.full((distance_bin(max(lengths) - 1) + 1, len(lengths)), np.nan)
    for column, length in enumerate(lengths):
        rows = [r["lengths"][length] for r in results]
        bins = distance_bin(np.concatenate([row["distance"] for row in rows]))
        right = np.concatenate([row["right"] for row in rows])
        for i in np.unique(bins):
            grid[i, column] = right[bins == i].mean()
    return grid


def distance_bin(tokens):
    return np.maximum(np.log2(np.maximum(tokens, 1)).astype(int) - 4, 0)


def figure_heat(by_label, by):
    """A task's accuracy by the "depth" or the "distance" of the needle, and length: heat maps."""
    size = (2.6 * len(by_label) + 0.8, 3.4)
    layout = dict(figsize=size, sharey=True, squeeze=False, layout="constrained")
    fig, axes = plt.subplots(1, len(by_label), **layout)
    for ax, (label, results) in zip(axes[0], by_label.items(), strict=True):
        lengths = common_lengths(results)
        grid = (depth_grid if by == "depth" else distance_grid)(results, lengths)
        image = ax.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        ax.set_title(label.replace("$", r"\$"), fontsize=11)
        ax.set_xticks(range(len(lengths)), [str(n) for n in lengths], rotation=45)
        ax.set_xlabel("length (tokens)")
    if by == "depth":
        axes[0, 0].set_ylabel("depth of the key in the filler")
        axes[0, 0].set_yticks([-0.5, 4.5, 9.5], ["0 %", "50 %", "100 %"])
    else:
        axes[0, 0].set_ylabel("tokens from key to answer, under")
        axes[0, 0].set_yticks(range(len(grid)), [str(2 ** (i + 5)) for i in range(len(grid))])
    fig.suptitle(f"Whole keys retrieved, {seeds_note(by_label)}", fontsize=11)
    fig.colorbar(image, ax=axes[0].tolist(), fraction=0.05)
    return fig


def draw(results, out, measure="perplexity", depth=False, message="", to=""):
    """
    OUT.png, by length or as differences to the label `to`, and with depth OUT_depth.png and
    OUT_distance.png of a task. Returns their paths.
    """
    by_length = not all({to} < by_label.keys() for by_label in results.values())
    figure = (
        figure_length(results, measure, message) if by_length else figure_differences(results, to)
    )
    figures = {out: figure}
    if depth and (tasks := [labels for kind, labels in results.items() if is_task(kind)]):
        every = [row for rs in tasks[0].values() for r in rs for row in r["lengths"].values()]
        for by, needed in (("depth", "accuracy_by_depth"), ("distance", "distance")):
            if all(needed in row for row in every):
                figures[f"{out}_{by}"] = figure_heat(tasks[0], by)
    common.make_folder(Path(out).parent)
    for name, fig in figures.items():
        common.write_atomically(f"{name}.png", partial(fig.savefig, format="png", dpi=160))
        plt.close(fig)
    return [f"{name}.png" for name in figures]


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("results", nargs="*", help="json files of evaluations, single or gathered")
    add("--out", help="of the figure, without .png; else that of the first json file")
    add("--loss", action="store_true", help="the loss in nats instead of the perplexity")
    add("--to", default="", metavar="LABEL", help="draw the differences to it at 4x and 8x")
    add("--depth", action="store_true", help="also passkeys by depth and distance")
    add("--tables", nargs="+", default=[], metavar="TEXT.md", help="put the tables into these")
    args = parser.parse_args(argv)
    for path in map(Path, args.tables):
        with common.file_errors():
            text = fill_tables(path.read_text(encoding="utf-8"), common.ROOT / "results")
        common.write_atomically(path, lambda f, text=text: f.write(text.encode()))
    if args.results:
        results = load_results(args.results)
        measure = "loss" if args.loss else "perplexity"
        out = (args.out or str(Path(args.results[0]).with_suffix(""))).removesuffix(".png")
        if not Path(out).name or Path(out).is_dir() or out.endswith("/"):
            raise Refused(f"--out {out} is a folder; give a name in it, without .png")
        if args.to and not all({args.to} < by_label.keys() for by_label in results.values()):
            raise Refused(f"--to {args.to} is no label beside others in all these results")
        figures = draw(results, out, measure, args.depth, to=args.to)
        print(markdown_table(results, measure))
        print(f"\nfigures: {', '.join(figures)}", file=sys.stderr)
    elif not args.tables:
        raise Refused("there is nothing to draw: give json files, or --tables")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
