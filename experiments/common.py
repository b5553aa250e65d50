"""What the experiments share: the way to the project's files, colours, and how a figure and its numbers are saved."""

import re
import shlex
import sys
from pathlib import Path

import matplotlib
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

from eval_perplexity import provenance  # noqa: E402
from model import write_json  # noqa: E402
from prepare_data import ArgumentParser, one_sentence_errors  # noqa: E402, F401

# Okabe and Ito's colours, the same for a method as in plot.py
BLACK, GREY, ORANGE, BLUE, RED, GREEN, PINK = (
    "#000000", "#666666", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7"
)  # fmt: skip


class Parser(ArgumentParser):
    def __init__(self, doc):
        super().__init__(doc)
        self.add_argument("--out", default=ROOT / "results" / "mechanism", type=Path, help="folder for figure and json")

    def parse_args(self, *args):
        args = super().parse_args(*args)
        for name, value in vars(args).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"--{name} must be at least 1")
        if not re.fullmatch(r"\w[\w.-]*", getattr(args, "name", "x")):
            raise ValueError(f"--name {args.name!r} is no file name without an ending")
        try:
            args.out.mkdir(parents=True, exist_ok=True)  # now, not after minutes of work
        except OSError as e:
            raise ValueError(f"--out {args.out} cannot be made a folder: {e.strerror}") from None
        return args


def save(fig, numbers, out, name):
    """Figure as png and svg, the numbers behind it as json."""
    fig.savefig(out / f"{name}.png", dpi=160)
    with plt.rc_context({"svg.hashsalt": name}):
        fig.savefig(out / f"{name}.svg", metadata={"Date": None})
    plt.close(fig)
    command = shlex.join(["python", f"experiments/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    write_json(out / f"{name}.json", {**provenance(torch.device("cpu")), "command": command, **numbers})
    print(f"figure: {out / name}.png")


def tidy(ax, xlabel, ylabel, title):
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_title(title, fontsize=10)
    ax.grid(alpha=0.25)
