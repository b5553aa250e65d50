"""
What the experiments share: the way to the project's modules, flags, colours, and how a figure and
its numbers are saved.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from paper import matplotlib  # noqa: E402  which says where it comes from if it is missing

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

from common import (  # noqa: E402
    ArgumentParser,
    command,
    file_errors,
    make_folder,
    provenance,
    write_json,
)

# Okabe and Ito's colours, the same for a method as in paper/plot.py
BLACK, GREY, ORANGE, BLUE = "#000000", "#666666", "#E69F00", "#0072B2"
RED, GREEN, PINK = "#D55E00", "#009E73", "#CC79A7"


class Parser(ArgumentParser):
    def __init__(self, doc):
        super().__init__(doc)
        default = ROOT / "results" / "mechanism"
        self.add_argument("--out", type=Path, default=default, help="folder for figure and json")

    def parse_args(self, *args):
        args = super().parse_args(*args)
        make_folder(args.out)  # now, not after minutes of work
        return args


def save(fig, numbers, out, name):
    """The figure as png, the numbers behind it as json."""
    with file_errors():
        fig.savefig(out / f"{name}.png", dpi=160)
    plt.close(fig)
    about = {"command": command(), **provenance(torch.device("cpu"))}
    write_json(out / f"{name}.json", about | numbers)
    print(f"figure: {out / name}.png")


def tidy(ax, xlabel, ylabel, title, **legend):
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, fontsize=10)
    ax.grid(alpha=0.25)
    ax.legend(**{"frameon": False, "fontsize": 9, **legend})
