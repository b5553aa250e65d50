"""
Spectrum damage: what linear layers, activation functions and a finite text do to pure tones
(sections 3.2 and 3.3).

    python experiments/spectrum_leakage.py        10 seconds

1. One pure tone per dimension goes through a linear layer: each output dimension holds every tone,
   with the amplitude that the weight matrix says (leakage, Eq. 7 of the paper's last version).
2. Two tones go through ReLU, GELU and SiLU: what comes out has the frequencies j w1 + k w2 and no
   other (Lemma 3.1). The lemma as printed sums over j, k >= 0, which leaves out the differences,
   such as w2 - w1. Look at: how much of the new energy lies there (printed_share in the json).
3. A tone is cut off at the training length N. The last version's Eq. 10 (Eq. 6 in the first) splits
   it into the floor(N/N_m) whole cycles of length N_m, an impulse at w_m, and a rest, whose
   spectrum is spread out. But N samples of any tone have no impulse, they have the same smeared
   line; under the floor those of w and -w, and the mean, can no longer be told apart. Look at: the
   rest's share of the N tokens for every RoPE frequency, and how much of a real tone's measured
   energy is not at its own frequency.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from shared import BLACK, BLUE, BROWN, GREEN, GREY, RED, Parser, plt, save, tidy

from common import one_sentence_errors
from fope import rope_freqs

ACTIVATIONS = {"ReLU": (F.relu, RED), "GELU": (F.gelu, BLUE), "SiLU": (F.silu, GREEN)}
TONES, SAMPLES = (1489, 2203), 2**15  # the bins of panel 2's two tones


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


def rest_of_eq_10(freqs, N):
    """The share of N tokens in no whole cycle, (N - alpha N_m) / N with alpha = floor(N / N_m)."""
    period = 2 * np.pi / np.asarray(freqs, dtype=np.float64)
    return (N - np.floor(N / period) * period) / N


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


# -----------------------------------------------------------------------------
# the four panels; each returns its numbers


def panel_linear(ax):
    bins, before, after, _ = linear_layer()
    own = np.diag(after[:, bins]) ** 2 / (after[:, bins] ** 2).sum(axis=1)
    stem = dict(basefmt=" ")
    ax.stem(bins, before[2, bins], linefmt=GREY, markerfmt="s", label="before: one tone", **stem)
    ax.stem(bins + 3, after[2, bins], linefmt=BLUE, markerfmt="o", label="after: all tones", **stem)
    title = f"A linear layer leaves {100 * own.mean():.0f} % of a dimension's\n"
    title += "energy at its own frequency (mean of 8 dimensions)"
    tidy(ax, "frequency (bins of 1024)", "amplitude in one dimension", title)
    return {"bins": bins.tolist(), "own_share_by_dimension": own.round(5).tolist(), "seed": 0}


def panel_activations(ax):
    lemma = {"bins": TONES, "samples": SAMPLES, "order": 12}
    shown = np.array(combinations(order=5))
    for (name, (g, colour)), shift in zip(ACTIVATIONS.items(), (0, 90, 180), strict=True):
        result = activation(g)
        heights = np.maximum(result.pop("amplitude")[shown], 1e-4)
        ax.vlines(shown + shift, 1e-4, heights, color=colour, lw=1.5, label=name)
        lemma[name] = result
    for b, name in zip(TONES, ("w1", "w2"), strict=True):
        ax.annotate(name, (b, 0.75), ha="center", fontsize=9)
    ax.set(yscale="log", ylim=(1e-4, 1.2))
    relu, gelu, silu = (100 * lemma[name]["new_share"] for name in ACTIVATIONS)
    title = f"ReLU moves {relu:.0f} % of two tones' energy to new frequencies,\n"
    title += f"GELU {gelu:.0f} %, SiLU {silu:.0f} %"
    tidy(ax, "frequency (bins of 32768; GELU, SiLU drawn 90, 180 right)", "amplitude", title)
    return lemma


def panel_truncation(ax, N, floor):
    freqs = rope_freqs(64).double().numpy()
    rest, misplaced = rest_of_eq_10(freqs, N), misplaced_energy(freqs, N)
    outside, away = "tokens outside whole cycles", "energy away from its own frequency"
    ax.plot(freqs, 100 * rest, "o-", color=BROWN, ms=4, label=f"Eq. 10: {outside}")
    ax.plot(freqs, 100 * misplaced, "s-", color=BLUE, ms=4, label=f"measured: {away}")
    ax.axvline(floor, color=BLACK, lw=0.8, ls=":")
    ax.annotate(" floor 2 pi / N", (floor, 80), fontsize=9)
    ax.set(xscale="log", ylim=(-5, 140))
    above, under = (100 * misplaced[which].mean() for which in (freqs >= floor, freqs < floor))
    title = f"Cut off at N = {N}: tones above the floor misplace {above:.0f} % of their\n"
    title += f"energy, those under it {under:.0f} %"
    legend = dict(frameon=True, framealpha=1, edgecolor="none", loc="upper right")
    tidy(ax, "RoPE frequency (radians per token)", "share (%)", title, **legend)
    shares = {"rest_of_eq_10": rest, "misplaced_energy": misplaced}
    return {"freqs": freqs.tolist()} | {k: v.round(6).tolist() for k, v in shares.items()}


def panel_examples(ax, N, floor):
    grid = np.arange(0, 8 * floor, floor / 64)
    for cycles, colour in ((5.5, GREEN), (1, BLUE), (0.3, RED)):
        x = np.cos(cycles * floor * np.arange(N))
        spectrum = np.abs(np.exp(-1j * np.outer(grid, np.arange(N))) @ (x - x.mean())) / N
        label = f"{cycles} {'cycle' if cycles == 1 else 'cycles'} in N"
        ax.plot(grid / floor, spectrum, color=colour, label=label)
        ax.axvline(cycles, color=colour, lw=0.8, ls=":")
    title = "A tone with less than one cycle in the text\nlooks like a tone of another frequency"
    legend = dict(loc="upper center", bbox_to_anchor=(0.43, 1))
    xlabel = "frequency (cycles in N); dotted: where the tone is"
    tidy(ax, xlabel, "|X| / N, mean removed", title, **legend)


def main(argv=None):
    args = Parser(__doc__).parse_args(argv)
    cut = {"N": 512, "floor": 2 * math.pi / 512}
    fig, axes = plt.subplots(2, 2, figsize=(10, 7.4), layout="constrained")
    numbers = {
        "linear": panel_linear(axes[0, 0]),
        "lemma_3_1": panel_activations(axes[0, 1]),
        "truncation": {**cut, **panel_truncation(axes[1, 0], **cut)},
    }
    panel_examples(axes[1, 1], **cut)
    save(numbers, args.out, "spectrum_leakage", fig)


if __name__ == "__main__":
    one_sentence_errors(main)()
