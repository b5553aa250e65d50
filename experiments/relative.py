"""
Is the score a function of the distance i - j alone?

    python experiments/relative.py        5 seconds

RoPE turns query and key by e^{i w n} (Eq. 2), so their product knows only i - j (Eq. 3). FoPE turns them by a Fourier series
each, and the product of two series has terms of two frequencies, w_a i - w_b j; besides, cosines and sines have random weights
of their own. Here the same content stands at every position, and S(i, j) is split into its mean over all pairs of one distance
and the rest. Look at: how much is the rest, as a share of S's standard deviation, against sigma, for both variants.

What it means for the claim of periodic extension (section 3): with sigma > 0 the score is periodic, or nearly, in i and in
j, not in i - j; a pair far out meets a combination of i and j that training has not shown, although its distance was.
"""

import torch
from common import BLUE, ORANGE, RED, Parser, one_sentence_errors, plt, save, tidy

from fope import FoPE, RoPE

SHAPE = dict(head_dim=64, n_head=8, train_len=512)
SIGMAS = [0, 0.1, 0.2, 0.3, 0.4, 0.5]


def scores_of_one_content(pos, T, seed=0):
    """S(i, j) for one query and one key, drawn per head, repeated at all T positions: (n_head, T, T)."""
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, pos.n_head, 1, pos.head_dim, generator=g).expand(-1, -1, T, -1) for _ in range(2))
    return pos.scores(q, k)[0]


def not_relative(scores):
    """The std of what the distance does not explain, over that of all: 0 for a function of i - j. Mean over the heads."""
    T = scores.size(-1)
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    causal = distance >= 0
    index, values = distance[causal], scores[:, causal].double()
    sums = torch.zeros(scores.size(0), T, dtype=torch.float64).index_add_(1, index, values)
    mean = sums / torch.bincount(index)
    return ((values - mean[:, index]).std(dim=1) / values.std(dim=1)).mean().item()


def measure(seeds=3, T=512):
    shares = {}
    for variant in ("released", "paper"):
        for sigma in SIGMAS:
            values = []
            for seed in range(seeds):
                torch.manual_seed(seed)
                values.append(not_relative(scores_of_one_content(FoPE(**SHAPE, sigma=sigma, variant=variant), T, seed)))
            shares.setdefault(variant, []).append(sum(values) / seeds)
    rope = not_relative(scores_of_one_content(RoPE(**SHAPE), T))
    return {"sigma": SIGMAS, "seeds": seeds, "positions": T, "not_relative": shares, "rope": rope, **SHAPE}


def main(argv=None):
    args = Parser(__doc__).parse_args(argv)
    numbers = measure()
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    for variant, colour, note in (("released", ORANGE, "noise std sigma/14"), ("paper", RED, "noise std sigma")):
        shares = numbers["not_relative"][variant]
        left.plot(SIGMAS, [100 * s for s in shares], color=colour, marker="o", label=f"FoPE, {variant} ({note})")
        print(f"FoPE, {variant}: not explained by i - j, % of the std: " + ", ".join(f"{100 * s:.1f}" for s in shares))
    left.axhline(100 * numbers["rope"], color=BLUE, label="RoPE")
    print(f"RoPE: {100 * numbers['rope']:.4f} %")
    at = SIGMAS.index(0.3)
    paper, released = (100 * numbers["not_relative"][v][at] for v in ("paper", "released"))
    title = f"What i - j leaves unexplained at sigma 0.3:\n{paper:.0f} % (equations), {released:.0f} % (released code)"
    tidy(left, "sigma", "not a function of i - j (% of std)", title)
    left.legend(frameon=False, fontsize=9)

    T, d = 512, 20
    for cls, kwargs, colour, label in (
        (RoPE, {}, BLUE, "RoPE"),
        (FoPE, {"variant": "paper"}, RED, "FoPE, equations, sigma 0.3"),
    ):
        torch.manual_seed(0)
        s = scores_of_one_content(cls(**SHAPE, **kwargs), T)[0]
        right.plot(range(d, T), s.diagonal(-d), color=colour, lw=1, label=label)
        numbers[f"example_{cls.__name__}"] = [round(v, 4) for v in s.diagonal(-d).tolist()]
    tidy(right, "position i of the query", f"S(i, i - {d})", f"Same query, same key, always {d} tokens apart")
    right.legend(frameon=False, fontsize=9)
    save(fig, numbers, args.out, "relative")


if __name__ == "__main__":
    one_sentence_errors(main)()
