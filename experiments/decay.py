"""
Where RoPE's decay with distance comes from (appendix A.2, its figure).

    python experiments/decay.py        5 seconds

The mean score of query and key n tokens apart, over q and k drawn from N(mu, 1), is mu^2 times the
sum of cos(w_m n) over the frequencies: with mu = 0 there is nothing to decay. Left: 1000 draws for
mu = 0, 0.1 and 1 beside the exact curves, per dimension; mu = 1 is also the "ideal" of constant
ones in RoPE's paper. Right: the same sum, from its value at distance 0, for all of RoPE's
frequencies, for those above FoPE's floor, for those under it, for FoPE and for NoPE.

Look at: the slow frequencies are why the curve does not come back to zero, and its slope over the
training length; those above the floor alone fall off within a few tokens and then swing around
zero. FoPE adds its zero frequencies, a constant.
"""

import math

import torch
from shared import BLACK, BLUE, BROWN, GREEN, GREY, PINK, RED, Parser, plt, save, tidy

from common import one_sentence_errors
from fope import FoPE, NoPE, RoPE, above_floor, rope_freqs

SHAPE = dict(head_dim=64, n_head=1, train_len=512)


def mean_cosine(freqs, T):
    """The mean over frequencies of cos(w n), n = 0 .. T-1: (T,)."""
    return torch.cos(torch.outer(torch.arange(T).double(), freqs.double())).mean(dim=1)


def sampled_scores(pos, mu, T, draws=1000, seed=0):
    """q.k / head_dim of key 0 and query n, drawn from N(mu, 1): mean and its error, two (T,)."""
    g = torch.Generator().manual_seed(seed)
    q, k = (mu + torch.randn(draws, 1, 1, pos.head_dim, generator=g) for _ in range(2))
    rotated, _ = pos.rotate(q.expand(-1, -1, T, -1), q.expand(-1, -1, T, -1))
    key = pos.rotate(k, k)[1]
    scores = (rotated @ key.transpose(-2, -1))[:, 0, :, 0] / pos.head_dim
    return scores.mean(dim=0), scores.std(dim=0) / math.sqrt(draws)


def constant_content(pos, T, spans=64):
    """Score of constant ones by distance, 1 at 0, mean over `spans` positions of the key: (T,)."""
    x = torch.ones(1, 1, T + spans, pos.head_dim)
    s = pos.scores(x, x)[0, 0].double()
    curve = torch.stack([s[j : j + T, j] for j in range(spans)]).mean(dim=0)
    return curve / curve[0]


def measure(T=1024):
    floor = 2 * math.pi / SHAPE["train_len"]
    freqs = rope_freqs(SHAPE["head_dim"])
    numbers = {"distance": list(range(T)), **SHAPE, "floor": floor, "sampled": {}, "exact": {}}
    for mu in (0.0, 0.1, 1.0):
        mean, error = sampled_scores(RoPE(**SHAPE), mu, T)
        numbers["sampled"][str(mu)] = {"mean": mean.tolist(), "error": error.tolist()}
        numbers["exact"][str(mu)] = (mu**2 * mean_cosine(freqs, T)).tolist()
    torch.manual_seed(0)
    curves = {
        "RoPE": constant_content(RoPE(**SHAPE), T),
        "RoPE, above the floor": mean_cosine(above_floor(freqs, SHAPE["train_len"]), T),
        "RoPE, under the floor": mean_cosine(freqs[freqs < floor], T),
        "FoPE": constant_content(FoPE(**SHAPE), T),
        "NoPE": constant_content(NoPE(**SHAPE), T),
    }
    numbers["constant"] = {name: curve.tolist() for name, curve in curves.items()}
    return numbers


def main(argv=None):
    args = Parser(__doc__).parse_args(argv)
    numbers = measure()
    n, N = numbers["distance"], SHAPE["train_len"]
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")

    colours = (GREEN, BROWN, BLUE)
    for (mu, sampled), colour in zip(numbers["sampled"].items(), colours, strict=True):
        mean, error = torch.tensor(sampled["mean"]), torch.tensor(sampled["error"])
        left.plot(n, mean, color=colour, label=f"mean {mu}")
        left.fill_between(n, mean - 2 * error, mean + 2 * error, color=colour, alpha=0.2, lw=0)
        label = "exact" if mu == "1.0" else None
        left.plot(n, numbers["exact"][mu], color=BLACK, lw=0.8, ls="--", label=label)
    title = "RoPE decays with distance only where q and k\nhave a mean; with mean 0 nothing is left"
    legend = dict(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)
    tidy(left, "distance (tokens)", "mean of q.k per dimension", title, **legend)

    colours = (BLUE, BROWN, PINK, RED, GREY)
    for (name, curve), colour in zip(numbers["constant"].items(), colours, strict=True):
        right.plot(n, curve, color=colour, label=name, lw=1.3)
    title = "The slow decay is made by the frequencies\nunder the floor, which FoPE holds constant"
    tidy(
        right,
        "distance (tokens)",
        "score of constant q and k (1 at distance 0)",
        title,
        **legend | dict(ncols=3),
    )
    right.set_ylim(-0.5, 1.1)
    right.annotate(" training length", (N, 1.03), fontsize=9)
    for ax in (left, right):
        ax.axvline(N, color=BLACK, lw=0.8, ls=":")
    save(numbers, args.out, "decay", fig)


if __name__ == "__main__":
    one_sentence_errors(main)()
