"""
README's picture, light and dark, into docs/: python experiments/loss_by_position.py

The loss at each place of texts of 8,192 bytes, means over the models of results/. Perplexity is
e to this loss, so the axis is that of README's table.
"""

import matplotlib.ticker
import numpy as np
from shared import ROOT, plt

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


def draw(by_label, dark):
    fig, ax = plt.subplots(figsize=(9.2, 4.2), layout="constrained")
    ink = "#E6E6E6" if dark else "#1A1A1A"
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
    plt.rcParams["svg.hashsalt"] = "the same file each time"
    for dark, name in ((False, "loss.svg"), (True, "loss_dark.svg")):
        metadata = {"Date": None}
        draw(results, dark).savefig(ROOT / "docs" / name, transparent=True, metadata=metadata)
