"""
README's picture, light and dark, into docs/: python experiments/loss_by_position.py

Above, lines of a real text, of which one model of strip.json reads the first 2,048 bytes. The
redder a letter, the higher the loss around it. Below, the loss at each place of texts of 8,192
bytes, means over the models of results/. Perplexity is e to this loss, so the axis is that of
README's table.
"""

import matplotlib.ticker
import numpy as np
from shared import ROOT, plt

from common import read_json
from paper.plot import STYLES
from paper.results import load_results
from paper.tables import OF_ONE_BUDGET

LENGTH = 8192
# label in the results, name at the curve's end, and how far above that end the name stands
CURVES = [
    ("RoPE", "RoPE", 1.0),
    ("RoPE, theta 94", "RoPE, theta 94", 1.01),
    ("RoPE, YaRN told the length", "RoPE with YaRN", 0.91),
    ("FoPE", "FoPE", 1.08),
    ("ALiBi", "ALiBi", 0.98),
]


RED, MIDDLE = "#DE281C", dict(va="center", ha="center", size=10, family="DejaVu Sans Mono")
WIDTH = 92
LINES = [  # name in strip.json, first byte, what it is
    ("rope", 360, "RoPE reads the text, from byte 360:"),
    ("rope", 1474, "RoPE, from byte 1,474. Red is what the model does not expect:"),
    ("slow", 1474, "the same model, but slow pairs show far bytes at an angle that training had:"),
    ("fope", 1474, "a model that was trained with FoPE:"),
]


def draw_text(ax, passage, ink):
    """LINES of a passage of strip.json. A tint is the mean of 65 bytes, as on docs/index.html."""
    ax.set(xlim=(0, WIDTH), ylim=(2 * len(LINES), 0))
    ax.axis("off")
    for row, (name, first, title) in enumerate(LINES):
        losses = np.array(passage["losses"][name])
        ax.text(0, 2 * row + 0.55, title, color=ink, va="center", size=10)
        for i, letter in enumerate(passage["text"][first : first + WIDTH].replace("\n", " ")):
            loss = losses[first + i - 32 : first + i + 33].mean()
            alpha = np.clip(0.8 * (loss - 1.2) / 1.2, 0, 0.8)
            ax.add_patch(plt.Rectangle((i, 2 * row + 1), 1, 0.9, color=RED, alpha=alpha, lw=0))
            ax.text(i + 0.5, 2 * row + 1.45, letter, color=ink, **MIDDLE)


def draw(by_label, passage, dark):
    height = {"height_ratios": [1, 2.1]}
    fig, (top, ax) = plt.subplots(2, 1, figsize=(9.2, 6), layout="constrained", gridspec_kw=height)
    ink = "#E6E6E6" if dark else "#1A1A1A"
    draw_text(top, passage, ink)
    for label, name, shift in CURVES:
        if label not in by_label:
            continue
        rows = [result["lengths"][LENGTH]["by_position"] for result in by_label[label]]
        perplexity = np.exp(np.mean(rows, axis=0).reshape(-1, 2).mean(axis=1))  # less jagged
        places = (np.arange(len(perplexity)) + 0.5) * LENGTH / len(perplexity)
        colour = STYLES[label][2 if dark else 0]
        ax.plot(places, perplexity, color=colour, lw=2)
        end = perplexity[-4:].mean()
        ax.text(LENGTH + 60, end * shift, name, color=colour, va="center", size=12)
    ax.axvspan(0, 512, color=ink, alpha=0.12, lw=0)
    ax.text(560, 24, "trained on 512 bytes", color=ink, va="center", size=12)
    ax.set(xlim=(0, LENGTH + 1900), ylim=(3, 32), yscale="log")
    ax.set_xticks([512, 2048, 4096, 6144, 8192])
    ax.yaxis.set_major_locator(matplotlib.ticker.FixedLocator([3, 4, 6, 10, 15, 20, 30]))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    ax.set_xlabel("place in the text, in bytes", color=ink, size=12)
    ax.set_ylabel("perplexity there (log axis, lower is better)", color=ink, size=12)
    ax.tick_params(colors=ink, labelsize=11)
    ax.grid(alpha=0.2, color=ink)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(ink)
    return fig


if __name__ == "__main__":
    files = [ROOT / "results" / f"{figure}.json" for figure in OF_ONE_BUDGET]
    results = load_results([file for file in files if file.exists()])["perplexity"]
    passage = read_json(ROOT / "results" / "mechanism" / "strip.json")["passages"][0]
    plt.rcParams["svg.hashsalt"] = "the same file each time"
    for dark, name in ((False, "loss.svg"), (True, "loss_dark.svg")):
        metadata = {"Date": None}
        draw(results, passage, dark).savefig(
            ROOT / "docs" / name, transparent=True, metadata=metadata
        )
