"""
Evaluations as tables and a figure: text and passkeys against the length that is read.

    python figure.py results/figure1.json                                   results/figure1.png
    python figure.py runs_out/{rope,mine}/perplexity.json --out runs_out/mine.png

A curve is the mean of the models that differ in their seed alone. Up to five curves also show how
far the models differ: by a dot for each model, or on text, of three models or more, by the 95 %
interval of the mean. An embedding keeps its colour, whatever its settings; these have lines of
their own. Where models have several training lengths, and were not read at the same number of
tokens, the axis shows multiples of the training length.
"""

import itertools
import re
import sys
import textwrap
from functools import partial
from pathlib import Path

import matplotlib.style
import matplotlib.ticker
import numpy as np
from matplotlib.figure import Figure

import common
from common import Refused
from rows import grouped, half_interval, is_text, n_models, read_rows, tables, unit, values_at

# One method has one colour and one marker, in every figure and on docs/index.html.
# Colour on white, marker, colour on a dark ground. Those of the page are apart by their lightness,
# too, for print in grey and for colour-blind readers (tests/test_figure.py).
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
MORE_STYLES += [("#A3326F", "8")]

FEW = 5  # more curves have no intervals and no dots around them
SMALL = 9  # points: ten pixels, where a figure is 838 px wide, as in a README


def method(label):
    """A label without settings, such as lr=0.001 or qk_norm: what has the same colour."""
    settings = r", (\w+(=[^,]*)?|with temperature|newer models)(?=,|$)| \+ QK-norm"
    return re.sub(settings, "", label)


def styles(labels):
    """{label: line style}: the colour is that of the method, the line tells its settings apart."""
    fixed = {name: {"color": colour, "marker": m} for name, (colour, m, _) in STYLES.items()}
    methods = dict.fromkeys(map(method, labels))
    taken = {fixed[name]["color"] for name in methods if name in fixed}
    more = [{"color": c, "marker": marker} for c, marker in MORE_STYLES if c not in taken]
    more = itertools.cycle(more)
    colours = {name: fixed.get(name) or next(more) for name in methods}
    lines = {style["color"]: itertools.cycle(("-", "--", ":", "-.")) for style in colours.values()}
    style = {label: colours[method(label)] for label in labels}
    return {label: line | {"ls": next(lines[line["color"]])} for label, line in style.items()}


def draw_curves(ax, rows, number, style, multiples, around):
    """A number against the length, for each label. around: "band", "dots" or ""."""
    for i, (label, models) in enumerate(grouped(rows, "label").items()):
        at = {n: values_at(models, number, n) for n in sorted({row["length"] for row in models})}
        at = {n: values for n, values in at.items() if values}
        x = np.array(list(at)) / (models[0]["train_len"] if multiples else 1)
        mean, colour = np.array([np.mean(values) for values in at.values()]), style[label]["color"]
        ax.plot(x, mean, ms=5, **style[label])
        n = n_models(models, number)
        if around == "band" and n > 2:
            half = np.array([half_interval(values) for values in at.values()])
            ax.fill_between(x, mean - half, mean + half, color=colour, alpha=0.15, lw=0)
        elif around and n > 1:  # dots, beside each other
            shift = 2 ** (0.07 * (i - (len(style) - 1) / 2))
            for dots in np.array(list(at.values())).T:
                ax.scatter(x * shift, dots, s=10, color=colour, alpha=0.5, lw=0)


def draw_panel(ax, rows, number, style, multiples, around):
    """One kind of evaluation."""
    kind, what = rows[0]["kind"], "share that is right"
    title = f"{kind}: whole answers" if number == "accuracy" else f"{kind}: tokens"
    if is_text(rows[0]):
        title, (what, number) = "Text" + kind.removeprefix("perplexity"), unit(rows)
    draw_curves(ax, rows, number, style, multiples, around)
    if is_text(rows[0]):
        ax.set_ylabel(f"{what} (lower is better), log axis")
        ax.set_yscale("log")  # so that equal losses in nats have equal heights
        every = [row[number] for row in rows if row[number] is not None]
        low, high = 0.95 * min(every), 1.05 * max(every)  # the interval of two models is wider
        ax.set_ylim(low, high)
        places = matplotlib.ticker.MaxNLocator(8, steps=[1, 2, 5, 10])
        if high > 30 * low:  # of a wide range these would all be at its top
            places = matplotlib.ticker.LogLocator(subs=(1, 2, 5))
        ax.yaxis.set_major_locator(places)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    else:
        ax.set_ylabel(f"{what} (higher is better)")
        ax.set_ylim(-0.03, 1.03)
    counts = [n_models(models, number) for models in grouped(rows, "label").values()]
    few, many = min(counts), max(counts)
    seeds = f"mean of {few if few == many else f'{few} to {many}'} seeds"
    seeds += {"band": ", band: 95 % interval", "dots": ", dots: each"}.get(around, "")
    ax.set_title(f"{title}\n({'one seed' if many == 1 else seeds})", fontsize=10)
    train_lens = sorted({row["train_len"] for row in rows})
    ax.set_xscale("log", base=2)
    if multiples:
        ticks = sorted({row["length"] / row["train_len"] for row in rows})
        ax.set_xticks(ticks, [f"{n:g}x" for n in ticks])
        ax.set_xlabel("times the training length")
    else:
        ticks = sorted({row["length"] for row in rows})
        several = len(train_lens) > 1
        names = [f"{n}" if several else f"{n}\n{n / train_lens[0]:g}x" for n in ticks]
        ax.set_xticks(ticks, names)
        ax.set_xlabel("length that is read (tokens); dotted: training")
    ax.minorticks_off()
    for train_len in [1] if multiples else train_lens:
        ax.axvline(train_len, color="black", lw=0.8, ls=":", zorder=1)
    ax.grid(alpha=0.25)


def draw(rows, number="accuracy"):
    """A panel for each kind of evaluation. number: of passkeys, "accuracy" or "token_accuracy"."""
    kinds = grouped(rows, "kind").values()
    style = styles(list(grouped(rows, "label")))
    of_len = grouped(rows, "train_len").values()
    multiples = len({frozenset(row["length"] for row in alike) for alike in of_len}) > 1
    n_columns = min(len(kinds), 2)  # more would make text too small in a README
    in_legend = 4 if len(style) == 4 else 3  # side by side
    in_lines = [textwrap.fill(label, 112 // in_legend) for label in style]
    n_rows, legend_rows = -(-len(kinds) // n_columns), -(-len(style) // in_legend)
    legend_rows *= 1 + max(label.count("\n") for label in in_lines)
    fig = Figure((10.4, 4 * n_rows + 0.25 * legend_rows), layout="constrained")
    axes = fig.subplots(n_rows, n_columns, squeeze=False).flat
    for ax in axes[len(kinds) :]:
        ax.remove()
    for ax, of_kind in zip(axes, kinds, strict=False):
        many = max(n_models(models, "label") for models in grouped(of_kind, "label").values())
        around = "band" if is_text(of_kind[0]) and many > 2 else "dots"
        around = around if len(style) <= FEW else ""
        draw_panel(ax, of_kind, number, style, multiples, around)
    handles = [matplotlib.lines.Line2D([], [], ms=5, **line) for line in style.values()]
    layout = dict(loc="outside lower center", ncols=in_legend, frameon=False, fontsize=SMALL)
    fig.legend(handles, in_lines, **layout)  # not by ax.legend, which leaves "_x" out
    return fig


def save(rows, out, number="accuracy"):
    """The figure of draw, as png or pdf. A matplotlibrc of one's own changes nothing."""
    common.make_folder(Path(out).parent)
    with matplotlib.style.context("default"):
        fig = draw(rows, number)
        common.write_atomically(out, partial(fig.savefig, format=Path(out).suffix[1:], dpi=160))
    print(f"figure: {out}", file=sys.stderr)


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("results", nargs="+", help="json files of evaluations")
    add("--out", type=Path, help="a .png or .pdf; by default a .png beside the first json file")
    add("--only", nargs="+", metavar="LABEL", help="the curves, if not all")
    add("--kind", nargs="+", help="the panels, if not all: perplexity, passkey, ...")
    numbers = dict(choices=["accuracy", "token_accuracy"], default="accuracy")
    add("--number", **numbers, help="of passkeys: whole answers, or their tokens")
    args = parser.parse_args(argv)
    out = args.out or Path(args.results[0]).with_suffix(".png")
    if out.suffix not in (".png", ".pdf") or out.is_dir():
        raise Refused(f"--out {out} is no name of a .png or .pdf file")
    rows = read_rows(args.results)
    for name, shown in (("kind", args.kind), ("label", args.only)):
        if unknown := set(shown or ()) - grouped(rows, name).keys():
            raise Refused(f"{name} {unknown.pop()} is none of {', '.join(grouped(rows, name))}")
        rows = [row for row in rows if row[name] in (shown or [row[name]])]
    print(tables(rows))
    save(rows, out, args.number)


if __name__ == "__main__":
    common.one_sentence_errors(main)()
