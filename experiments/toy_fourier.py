"""
The paper's toy (its figure 3): does a Fourier series per dimension match what an MLP makes of two
tones?

    python experiments/toy_fourier.py        5 seconds

Two dimensions, one tone each, go through y = g(W x). Query and key are y itself, so the score of a
dimension at distance n is the mean over t of y_m(t) y_m(t + n): its spectrum says, frequency by
frequency, what the score is really made of. That is the ground truth. RoPE gives the whole power of
dimension m to the one frequency w_m; FoPE (Eq. 11, the last version) to w_m and, with small random
weights, to all D frequencies.

Look at: the mean error of each, per component and summed, over many random W and draws. A random
weight of mean zero knows nothing of this W: its expected squared error is RoPE's plus its own
variance. The paper shows one draw where FoPE is closer. What FoPE gains in training needs another
reason than a better match at the start.
"""

import math
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from shared import BLACK, BLUE, RED, Parser, plt, save, tidy

from common import one_sentence_errors

N = 256  # distances shown, and the period of the lowest tone that fits
SAMPLES, SEEDS = 2**13, 200
BINS = np.array([SAMPLES // 64, SAMPLES // 24 + 1])  # periods of 64 and about 24 tokens


def tones(bins, n=N):
    """cos(w t), t = 0 .. n-1, of the frequency of each bin: (bins, n)."""
    return np.cos(2 * np.pi * np.outer(bins, np.arange(n)) / SAMPLES)


def ground_truth(W):
    """Of y = SiLU(W x): a dimension's power by frequency and score by distance, (2, _) each."""
    y = F.silu(torch.from_numpy(W @ tones(BINS, SAMPLES))).numpy()
    y -= y.mean(axis=1, keepdims=True)
    power = np.abs(np.fft.rfft(y, axis=1)) ** 2 / SAMPLES**2
    power[:, 1:-1] *= 2
    bins = np.nonzero(power.sum(axis=0) > 1e-12)[0]
    return power, power[:, bins] @ tones(bins)


def rope_scores(power):
    return power.sum(axis=1, keepdims=True) * tones(BINS)


def fope_scores(power, sigma, rng, n_freq=16):
    """Eq. 11 with weights a ~ N(0, sigma) on all n_freq frequencies."""
    b1, b2 = BINS  # their sum, difference and harmonics are among the frequencies, others random
    bins = [b1, b2, b1 + b2, b2 - b1, 2 * b1, 2 * b2]
    bins = np.concatenate((bins, rng.integers(1, SAMPLES // 2, n_freq - len(bins))))
    own = np.hstack((np.eye(2), np.zeros((2, n_freq - 2))))
    weights = own + sigma * rng.standard_normal((2, n_freq))
    return power.sum(axis=1, keepdims=True) * (weights @ tones(bins))


def relative_error(scores, truth):
    """Root mean square error as a share of the truth's, per dimension and of the sum: (3,)."""
    scores, truth = (np.vstack((s, s.sum(axis=0))) for s in (scores, truth))
    return np.sqrt(((scores - truth) ** 2).mean(axis=1) / (truth**2).mean(axis=1))


def draw(seed):
    """(power, truth) of one random W, and the generator for FoPE's weights."""
    rng = np.random.default_rng(seed)
    return *ground_truth(rng.standard_normal((2, 2)) / math.sqrt(2)), rng


def measure():
    """{method: relative_error of every seed, (SEEDS, 3)}."""
    errors = defaultdict(list)
    for seed in range(SEEDS):
        power, truth, rng = draw(seed)
        errors["RoPE"].append(relative_error(rope_scores(power), truth))
        for s in (0.02, 0.1, 0.3):
            errors[f"FoPE, sigma {s}"].append(relative_error(fope_scores(power, s, rng), truth))
    return {name: np.array(e) for name, e in errors.items()}


def summarise(errors, rope_errors):
    """Mean and std of a method's errors, and how often it is closer than RoPE."""
    return {
        "mean_component_1_2_sum": errors.mean(axis=0).round(4).tolist(),
        "std": errors.std(axis=0, ddof=1).round(4).tolist(),
        "closer_than_rope": (errors[:, 2] < rope_errors[:, 2]).mean().round(3),
    }


def main(argv=None):
    args = Parser(__doc__).parse_args(argv)
    errors = measure()
    shown_seed = int(np.argsort(errors["RoPE"][:, 2])[SEEDS // 2])  # a typical one for RoPE
    numbers = {
        "seeds": SEEDS,
        "periods": (SAMPLES / BINS).round(3).tolist(),
        "errors": {name: summarise(e, errors["RoPE"]) for name, e in errors.items()},
        "shown_seed": shown_seed,
    }
    power, truth, rng = draw(shown_seed)
    curves = {"ground truth": (truth, BLACK), "RoPE": (rope_scores(power), BLUE)}
    curves["FoPE, sigma 0.3, one draw"] = (fope_scores(power, 0.3, rng), RED)
    fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, (curve, colour) in curves.items():
        ax.plot(curve.sum(axis=0), color=colour, label=name, lw=1.8 if colour == BLACK else 1.2)
    won = numbers["errors"]["FoPE, sigma 0.3"]["closer_than_rope"]
    title = "An MLP mixes two tones. A random series per dimension (sigma 0.3)"
    title += f"\nis closer to the result than RoPE in {100 * won:.1f} % of {SEEDS} draws"
    tidy(ax, "distance (tokens)", "score, sum of two dimensions", title)
    save(numbers, args.out, "toy_fourier", fig)


if __name__ == "__main__":
    one_sentence_errors(main)()
