"""
What the experiments share: the way to the project's modules, flags, colours, and how a figure and
its numbers are saved.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import ArgumentParser, command, make_folder, provenance, write_json  # noqa: E402
from figure import PAIRS, STYLES, matplotlib  # noqa: E402

matplotlib.use("Agg")
matplotlib.style.use("default")  # no matplotlibrc of one's own
import matplotlib.pyplot as plt  # noqa: E402

# a method's colour is that of figure.py
GREY, GREEN, BLUE, RED = (STYLES[name][0] for name in ("NoPE", "ALiBi", "RoPE", "FoPE"))
SLOW, FAST = (PAIRS[name][0] for name in ("slow", "fast"))
BLACK, BROWN, PINK = "#000000", "#8A6D00", "#B83280"


class Parser(ArgumentParser):
    def __init__(self, doc):
        super().__init__(doc)
        default = ROOT / "results" / "mechanism"
        self.add_argument("--out", type=Path, default=default, help="folder for figure and json")

    def parse_args(self, *args):
        args = super().parse_args(*args)
        make_folder(args.out)  # now, not after minutes of work
        return args


def save(numbers, out, name, fig=None, device=None):
    """The numbers as json, with where they are from; the figure that shows them as png."""
    if fig:
        fig.savefig(out / f"{name}.png", dpi=160)
        plt.close(fig)
    about = {"command": command(), **provenance(device or torch.device("cpu"))}
    write_json(out / f"{name}.json", about | numbers)
    print(f"wrote {out / name}.json")


def tidy(ax, xlabel, ylabel, title, **legend):
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, fontsize=10)
    ax.grid(alpha=0.25)
    ax.legend(**{"frameon": False, "fontsize": 9, **legend})
