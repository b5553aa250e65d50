"""
Is the score a function of the distance i - j alone?

    python experiments/relative.py        5 seconds

RoPE turns query and key by e^{i w n} (Eq. 2), so their product knows only i - j (Eq. 3). FoPE turns
them by a Fourier series each, and the product of two series has terms of two frequencies,
w_a i - w_b j; besides, cosines and sines have random weights of their own. Here the same content
stands at every position, and S(i, j) is split into its mean over all pairs of one distance and the
rest. Look at: how much is the rest, as a share of S's standard deviation, against sigma, for both
variants.

What it means for the claim of periodic extension (section 3): with sigma > 0 the score is periodic,
or nearly, in i and in j, not in i - j; a pair far out meets a combination of i and j that training
has not shown, although its distance was.
"""

import torch
from shared import BLUE, BROWN, RED, Parser, plt, save, tidy

from common import one_sentence_errors
from fope import FoPE, RoPE

SHAPE = dict(head_dim=64, n_head=8, train_len=512)
SIGMAS = [0, 0.1, 0.2, 0.3, 0.4, 0.5]


def scores_of_one_content(pos, T, seed=0):
    """S(i, j) of one query and key, drawn per head, repeated at all positions: (n_head, T, T)."""
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, pos.n_head, 1, pos.head_dim, generator=g) for _ in range(2))
    return pos.scores(q.expand(-1, -1, T, -1), k.expand(-1, -1, T, -1))[0]


def not_relative(scores):
    """The std of what i - j does not explain, over that of all: 0 for a function of i - j."""
    T = scores.size(-1)
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    causal = distance >= 0
    index, values = distance[causal], scores[:, causal].double()
    sums = torch.zeros(scores.size(0), T, dtype=torch.float64).index_add_(1, index, values)
    mean = sums / torch.bincount(index)
    return ((values - mean[:, index]).std(dim=1) / values.std(dim=1)).mean().item()


def measure(seeds=3, T=512):
    shares = {"released": [], "paper": []}
    for variant in shares:
        for sigma in SIGMAS:
            values = []
            for seed in range(seeds):
                torch.manual_seed(seed)
                pos = FoPE(**SHAPE, sigma=sigma, variant=variant)
                values.append(not_relative(scores_of_one_content(pos, T, seed)))
            shares[variant].append(sum(values) / seeds)
    rope = not_relative(scores_of_one_content(RoPE(**SHAPE), T))
    numbers = {"sigma": SIGMAS, "seeds": seeds, "positions": T, **SHAPE}
    numbers |= {"not_relative": shares, "rope": rope}
    return numbers


def main(argv=None):
    args = Parser(__doc__).parse_args(argv)
    numbers = measure()
    fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    percent = {v: [100 * s for s in shares] for v, shares in numbers["not_relative"].items()}
    for variant, colour, std in (("released", RED, "sigma/14"), ("paper", BROWN, "sigma")):
        label = f"FoPE, {variant} (noise std {std})"
        ax.plot(SIGMAS, percent[variant], "o-", color=colour, label=label)
    ax.axhline(100 * numbers["rope"], color=BLUE, label="RoPE")
    paper, released = (percent[v][SIGMAS.index(0.3)] for v in ("paper", "released"))
    title = f"What i - j leaves unexplained at sigma 0.3: {paper:.0f} % (equations), "
    title += f"{released:.0f} % (released code)"
    tidy(ax, "sigma", "not a function of i - j (% of std)", title)
    save(numbers, args.out, "relative", fig)


if __name__ == "__main__":
    one_sentence_errors(main)()
