"""
Spectrum damage: what linear layers, activation functions and a finite text do to pure tones
(sections 3.2 and 3.3).

    python experiments/spectrum_leakage.py        10 seconds

1. One pure tone per dimension goes through a linear layer: each output dimension holds every tone,
   with the amplitude that the weight matrix says (leakage, Eq. 7 of the paper's last version).
2. Two tones go through ReLU, GELU and SiLU: what comes out has the frequencies j w1 + k w2 and no
   other (Lemma 3.1). The lemma as printed sums over j, k >= 0, which leaves out the differences,
   such as w2 - w1. Look at: how much of the new energy lies there (printed_share in the json).
3. A tone is cut off at the training length N. Its spectrum is no line then, but smeared, and under
   the floor the lines of w and -w, and the mean, can no longer be told apart. Look at: how much of
   a real tone's energy is not at its own frequency (the figure; it answers the paper's Eq. 10).
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from shared import BLACK, BLUE, Parser, plt, save, tidy

from common import one_sentence_errors
from fope import rope_freqs

ACTIVATIONS = {"ReLU": F.relu, "GELU": F.gelu, "SiLU": F.silu}
TONES, SAMPLES = (1489, 2203), 2**15  # the bins of the two tones of 2


def amplitude(x):
    """Of each frequency 2 pi b / n, b = 0 .. n/2, in real signals x (..., n): (..., n/2 + 1)."""
    X = np.abs(np.fft.rfft(np.asarray(x, dtype=np.float64), axis=-1)) / np.shape(x)[-1]
    X[..., 1:-1] *= 2
    return X


def linear_layer(n=1024, dims=8, seed=0):
    """(bins, amplitudes of x, amplitudes of y, W), y = W x, where x_m is a tone in its own bin."""
    bins = np.array([7 * (m + 1) ** 2 for m in range(dims)])  # any different ones
    x = np.cos(2 * np.pi * np.outer(bins, np.arange(n)) / n)
    W = torch.randn(dims, dims, generator=torch.Generator().manual_seed(seed)).numpy()
    W /= math.sqrt(dims)
    return bins, amplitude(x), amplitude(W @ x), W


def combinations(order, signs=(1, -1)):
    """The bins of j w1 + k w2, |j| + |k| <= order, k of these signs, folded into 0 .. n/2."""
    bins = set()
    for j in range(order + 1):
        for k in range(order + 1 - j):
            for sign in signs:
                b = (j * TONES[0] + sign * k * TONES[1]) % SAMPLES
                bins.add(min(b, SAMPLES - b))
    return sorted(bins)


def activation(g, order=12):
    """Lemma 3.1 for g: the share of the energy that is new, and of that, at its frequencies."""
    x = sum(np.cos(2 * np.pi * b * np.arange(SAMPLES) / SAMPLES) for b in TONES)
    y = amplitude(g(torch.from_numpy(x)).numpy())
    energy = y**2 / 2
    energy[0] = 0.0
    new = energy.copy()
    new[list(TONES)] = 0.0
    return {
        "amplitude": y,
        "new_share": new.sum() / energy.sum(),
        "predicted_share": new[combinations(order)].sum() / new.sum(),
        "printed_share": new[combinations(order, signs=[1])].sum() / new.sum(),
    }


def misplaced_energy(freqs, N, oversampling=64):
    """
    The share of the energy of cos(w n), n < N, mean removed, that its spectrum has farther than one
    DFT bin, 2 pi / N, from w. Averaged over 8 phases. The spectrum of the cut-off tone is that of
    an endless one, smeared by sin(N w / 2) / sin(w / 2).
    """
    shares = []
    for w in np.asarray(freqs, dtype=np.float64):
        x = np.cos(w * np.arange(N) + np.arange(8)[:, None] * np.pi / 8)
        x -= x.mean(axis=1, keepdims=True)
        energy = (np.abs(np.fft.rfft(x, N * oversampling)) ** 2).sum(axis=0)
        grid = np.arange(len(energy)) * 2 * np.pi / (N * oversampling)
        far = np.abs(grid - w) > 2 * np.pi / N
        shares.append(energy[far].sum() / energy.sum())
    return np.array(shares)


def draw(freqs, misplaced, N):
    fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    floor = 2 * math.pi / N
    above, under = (100 * misplaced[which].mean() for which in (freqs >= floor, freqs < floor))
    ax.plot(freqs, 100 * misplaced, "s-", color=BLUE, ms=4, label="RoPE's 32 frequencies")
    ax.axvline(floor, color=BLACK, lw=0.8, ls=":")
    ax.annotate(" floor 2 pi / N", (floor, 22), fontsize=9)
    ax.set_xscale("log")
    title = f"Cut off at N = {N}: tones above the floor misplace {above:.0f} % of their energy,\n"
    title += f"those under it {under:.0f} %"
    tidy(ax, "frequency (radians per token)", "energy elsewhere (%)", title)
    return fig


def main(argv=None):
    args = Parser(__doc__).parse_args(argv)
    bins, _, after, _ = linear_layer()
    own = np.diag(after[:, bins]) ** 2 / (after[:, bins] ** 2).sum(axis=1)
    lemma = {"bins": TONES, "samples": SAMPLES, "order": 12}
    for name, g in ACTIVATIONS.items():
        lemma[name] = {key: value for key, value in activation(g).items() if key != "amplitude"}
    freqs, N = rope_freqs(64).double().numpy(), 512
    misplaced = misplaced_energy(freqs, N)
    numbers = {
        "linear": {"bins": bins.tolist(), "own_share_by_dimension": own.round(5).tolist()},
        "lemma_3_1": lemma,
        "truncation": {"N": N, "freqs": freqs.tolist(), "misplaced": misplaced.round(6).tolist()},
    }
    save(numbers, args.out, "spectrum_leakage", draw(freqs, misplaced, N))


if __name__ == "__main__":
    one_sentence_errors(main)()
