"""
Results to figures and Markdown tables.

    python -m paper.plot results/figure1.json                         results/figure1.png, its table
    python -m paper.plot runs_out/{rope,fope}/perplexity.json --out runs_out/mine
    python -m paper.plot --tables README.md results/*.md    the tables in these texts, and
                                                            results/summary.csv, are made again

Models that differ in their seed alone are drawn as their mean. Up to five curves also show how far
the models differ: on text by a band of one standard deviation, on passkeys by a dot for each model.
(The tables have 95 % intervals instead.)
"""

import csv
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
from paper.results import is_task, load_results, part_of_answer, seed_stats, train_len_of, unit_of
from paper.tables import fill_tables, markdown_table, summary_rows

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# One method has one colour and one marker, in every figure and on docs/index.html.
# Colour on white, marker, colour on a dark ground. Those of the page are apart by their lightness,
# too, for print in grey and for colour-blind readers (tests/test_plot.py).
STYLES = {
    "NoPE": ("#4A4A4A", "s", "#D0D0D0"),
    "ALiBi": ("#01A060", "^", "#0A9056"),
    "RoPE": ("#0C6BA0", "o", "#0DAAFC"),
    "RoPE, theta 94": ("#744B00", "*", "#EAA847"),
    "RoPE, YaRN told the length": ("#04354E", ">", "#AAE6F0"),
    "RoPE, window of 512": ("#1F2226", "x", "#EEF1F4"),
    "FoPE": ("#D24B02", "D", "#F55F13"),
    "FoPE, floor alone": ("#67207E", "v", "#FCADFF"),
    "KERPLE": ("#8A6D00", "<", "#D9B83C"),
    "FIRE": ("#B83280", "P", "#F08CC4"),
    "RoPE-A": ("#000000", "X", "#FFFFFF"),
}
# no methods, but kinds of pairs: greys
PAIRS = {"slow": ("#333333", "o", "#DDDDDD"), "fast": ("#858585", "s", "#8F8F8F")}
MORE_STYLES = [("#5C7F00", "p"), ("#A0522D", "h"), ("#7A7A7A", "d"), ("#00688B", "H")]
MORE_STYLES += [("#A3326F", "8"), ("#3B3B8F", "1"), ("#2E6B5E", "2")]

FEW = 5  # more curves have no bands and no dots around them
SMALL = 9  # points: ten pixels, where a figure is 838 px wide, as in a README


def styles(labels):
    """
    {label: line style}: fixed for the plain embeddings, the same dashed with QK-norm, further ones
    for everything else. What goes on from RoPE ("RoPE to FoPE") is dashed, too.
    """
    fixed = {name: {"color": colour, "marker": m} for name, (colour, m, _) in STYLES.items()}
    fixed |= {f"{name} + QK-norm": {**style, "ls": "--"} for name, style in fixed.items()}
    used = {fixed[label]["color"] for label in labels if label in fixed}
    more = [{"color": c, "marker": marker} for c, marker in MORE_STYLES if c not in used]
    more = itertools.cycle([style | ls for ls in ({}, {"ls": ":"}, {"ls": "-."}) for style in more])
    style = {label: fixed[label] if label in fixed else next(more) for label in labels}
    goes_on = {label: {"ls": "--"} for label in labels if label.startswith("RoPE to ")}
    return {label: line | goes_on.get(label, {}) for label, line in style.items()}


def no_tex(text):
    return text.replace("$", r"\$")


def draw_lines(ax, by_label, name, style, spread):
    """The mean over seeds of each label, with a "band" of std or each seed's "dots" around it."""
    for i, (label, results) in enumerate(by_label.items()):
        lengths, mean, std, n = seed_stats(results, name)
        colour = style[label]["color"]
        ax.plot(lengths, mean, ms=5, **style[label])
        if n > 1 and spread == "band":
            ax.fill_between(lengths, mean - std, mean + std, color=colour, alpha=0.15, lw=0)
        if n > 1 and spread == "dots":  # beside each other, not upon each other
            x = np.array(lengths) * 2 ** (0.07 * (i - (len(by_label) - 1) / 2))
            for r in results:
                y = [r["lengths"][length][name] for length in lengths]
                ax.scatter(x, y, s=10, color=colour, alpha=0.5, lw=0)


def draw_panel(ax, by_label, kind, name, style, spread):
    """One number of one kind of result against the length that is read."""
    every = [r for rs in by_label.values() for r in rs]
    draw_lines(ax, by_label, name, style, spread)
    if is_task(kind):
        part = part_of_answer(every)
        plural = "passkeys, question anywhere" if kind == "passkey_anywhere" else f"{kind}s"
        title = f"Whole {plural}" if name == "accuracy" else f"{plural.capitalize()}: {part}"
        ax.set_ylabel("share that is right (higher is better)")
        ax.set_ylim(-0.03, 1.03)
        if name == "token_accuracy" and part == "digits":
            ax.axhline(0.1, color="black", lw=0.8, ls=":", zorder=1)
            ax.text(0, 0.11, " guessing", transform=ax.get_yaxis_transform(), size=SMALL)
    else:
        title = kind.capitalize().replace("c4", "C4")
        ax.set_ylabel(f"perplexity per {unit_of(every)} (lower is better), log axis")
        ax.set_yscale("log")  # so that equal losses in nats have equal heights
        low, high = ax.get_ylim()
        places = matplotlib.ticker.MaxNLocator(8, steps=[1, 2, 5, 10])
        if high > 30 * low:  # of a wide range these would all be at its top
            places = matplotlib.ticker.LogLocator(subs=(1, 2, 5))
        ax.yaxis.set_major_locator(places)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    few, many = (f(map(len, by_label.values())) for f in (min, max))
    seeds = f"mean of {few if few == many else f'{few} to {many}'} seeds"
    seeds += {"band": ", band: std", "dots": ", dots: each"}.get(spread, "")
    ax.set_title(f"{no_tex(title)}\n({'one seed' if many == 1 else seeds})", fontsize=10)
    train_len, lengths = train_len_of(every), sorted({n for r in every for n in r["lengths"]})
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{n}\n{n / train_len:g}x" for n in lengths])
    ax.minorticks_off()
    ax.axvline(train_len, color="black", lw=0.8, ls=":", zorder=1)
    ax.set_xlabel("length that is read (tokens); dotted: training")
    ax.grid(alpha=0.25)


def figure_length(results, message="", answers="accuracy"):
    """
    Perplexity and passkeys against length: the paper's figure 1. Of passkeys `answers`, without
    text whole ones and digits.
    """
    of_text = [(kind, "perplexity") for kind in results if not is_task(kind)]
    of_tasks = (answers,) if of_text else ("accuracy", "token_accuracy")
    panels = of_text + [(kind, name) for kind in results if is_task(kind) for name in of_tasks]
    style = styles(list(dict.fromkeys(label for labels in results.values() for label in labels)))
    columns = min(len(panels), 2)  # more would make text too small in a README
    in_legend = 4 if len(style) == 4 else 3  # side by side
    in_lines = [textwrap.fill(no_tex(label), 112 // in_legend) for label in style]
    rows, legend_rows = -(-len(panels) // columns), -(-len(style) // in_legend)
    legend_rows *= 1 + max(label.count("\n") for label in in_lines)
    size = dict(figsize=(10.4, 4 * rows + 0.25 * legend_rows + 0.2 * bool(message)))
    fig, axes = plt.subplots(rows, columns, **size, squeeze=False, layout="constrained")
    axes = axes.flat
    for ax in axes[len(panels) :]:
        ax.remove()
    for ax, (kind, name) in zip(axes, panels, strict=False):
        spread = "" if len(style) > FEW else "dots" if is_task(kind) else "band"
        draw_panel(ax, results[kind], kind, name, style, spread)
    if message:
        fig.suptitle(message, fontsize=12, fontweight="bold")
    handles = [plt.Line2D([], [], ms=5, **line) for line in style.values()]
    layout = dict(loc="outside lower center", ncols=in_legend, frameon=False, fontsize=SMALL)
    fig.legend(handles, in_lines, **layout)  # not by ax.legend, which leaves "_x" out
    return fig


def draw(results, out, **how):
    """OUT.png, whose path it returns; how: of figure_length."""
    fig = figure_length(results, **how)
    common.make_folder(Path(out).parent)
    common.write_atomically(f"{out}.png", partial(fig.savefig, format="png", dpi=160))
    plt.close(fig)
    return f"{out}.png"


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("results", nargs="*", help="json files of evaluations")
    add("--out", help="path of the figure, without .png; by default that of the first json file")
    add(
        "--tables",
        nargs="+",
        default=[],
        metavar="TEXT.md",
        help="texts; their tables are made again",
    )
    args = parser.parse_args(argv)
    results = common.ROOT / "results"
    for path in map(Path, args.tables):
        text = fill_tables(path.read_text(encoding="utf-8"), results)
        common.write_atomically(path, lambda f, text=text: f.write(text.encode()))
    if args.tables:
        with open(results / "summary.csv", "w", newline="", encoding="utf-8") as f:
            names = ["embedding", "what", "tokens", "seeds", "mean", "half of 95 % interval"]
            csv.writer(f, lineterminator="\n").writerows([names, *summary_rows(results)])
    if paths := [path for path in args.results if Path(path).name != "config.json"]:  # RUN/*.json
        results = load_results(paths)
        out = (args.out or str(Path(paths[0]).with_suffix(""))).removesuffix(".png")
        if not Path(out).name or Path(out).is_dir() or out.endswith("/"):
            raise Refused(f"--out {out} is a folder; give a name in it, without .png")
        every = [r for labels in results.values() for rows in labels.values() for r in rows]
        quick = all("quick" in r["recipe"].get("preset", "") for r in every)  # demo.sh --quick
        few = f"After {every[0].get('step', 'few')} steps of training this means nothing"
        message = few if quick else ""
        drawn = draw(results, out, message=message)
        print(markdown_table(results))
        print(f"\nfigure: {drawn}", file=sys.stderr)
    elif not args.tables:
        raise Refused("there is nothing to draw: give json files, or --tables")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
