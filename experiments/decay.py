"""
Where RoPE's decay with distance comes from (appendix A.2, its figure).

    python experiments/decay.py        5 seconds

The mean score of query and key n tokens apart, over q and k drawn from N(mu, 1), is mu^2 times the
sum of cos(w_m n) over the frequencies: with mu = 0 there is nothing to decay. Constant ones, the
"ideal" of RoPE's paper, give that sum. Here it is for all of RoPE's frequencies, for those above
FoPE's floor, for those under it, for FoPE and for NoPE.

Look at: the slow frequencies are why the curve does not come back to zero, and its slope over the
training length; those above the floor alone fall off within a few tokens and then swing around
zero. FoPE adds its zero frequencies, a constant.
"""

import math

import torch
from shared import BLACK, BLUE, FAST, GREY, RED, SLOW, Parser, plt, save, tidy

from common import one_sentence_errors
from fope import FoPE, NoPE, RoPE, above_floor, rope_freqs

SHAPE = dict(head_dim=64, n_head=1, train_len=512)


def mean_cosine(freqs, T):
    """The mean over frequencies of cos(w n), n = 0 .. T-1: (T,)."""
    return torch.cos(torch.outer(torch.arange(T).double(), freqs.double())).mean(dim=1)


def constant_content(pos, T, spans=64):
    """Score of constant ones by distance, 1 at 0, mean over `spans` positions of the key: (T,)."""
    x = torch.ones(1, 1, T + spans, pos.head_dim)
    s = pos.scores(x, x)[0, 0].double()
    curve = torch.stack([s[j : j + T, j] for j in range(spans)]).mean(dim=0)
    return curve / curve[0]


def main(argv=None, T=1024):
    args = Parser(__doc__).parse_args(argv)
    freqs, N = rope_freqs(SHAPE["head_dim"]), SHAPE["train_len"]
    floor = 2 * math.pi / N
    torch.manual_seed(0)
    curves = {
        "RoPE": (constant_content(RoPE(**SHAPE), T), BLUE),
        "RoPE, above the floor": (mean_cosine(above_floor(freqs, N), T), FAST),
        "RoPE, under the floor": (mean_cosine(freqs[freqs < floor], T), SLOW),
        "FoPE": (constant_content(FoPE(**SHAPE), T), RED),
        "NoPE": (constant_content(NoPE(**SHAPE), T), GREY),
    }
    fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, (curve, colour) in curves.items():
        ax.plot(curve, color=colour, label=name, lw=1.3)
    title = "The slow decay is made by the frequencies under the floor, which FoPE holds constant"
    tidy(
        ax,
        "distance (tokens; dotted: training length)",
        "score of constant q and k",
        title,
        loc="upper center",
        ncols=3,
    )
    ax.set_ylim(-0.5, 1.6)  # room for the legend
    ax.axvline(N, color=BLACK, lw=0.8, ls=":")
    numbers = {name: curve.numpy().round(4).tolist() for name, (curve, _) in curves.items()}
    save(SHAPE | {"floor": floor, "constant": numbers}, args.out, "decay", fig)


if __name__ == "__main__":
    one_sentence_errors(main)()
