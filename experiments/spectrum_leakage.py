"""
Spectrum damage: what linear layers, activation functions and a finite text do to pure tones
(sections 3.2 and 3.3).

    python experiments/spectrum_leakage.py        10 seconds

1. One pure tone per dimension goes through a linear layer: each output dimension holds every tone,
   with the amplitude that the weight matrix says (leakage, Eq. 7 of the paper's last version).
2. Two tones go through ReLU, GELU and SiLU: what comes out has the frequencies j w1 + k w2 and no
   other (Lemma 3.1). The lemma as printed sums over j, k >= 0. Look at: how much of the new energy
   lies where one of them must be negative.
3. A tone is cut off at the training length N. The last version's Eq. 10 (Eq. 6 in the first) splits
   it into the floor(N/N_m) whole cycles of length N_m, an impulse at w_m, and a rest, whose
   spectrum is spread out. Look at: the rest's share of the N tokens for every RoPE frequency, and
   how much of a real tone's measured energy is not at its own frequency.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from shared import BLACK, BLUE, GREEN, GREY, ORANGE, RED, Parser, plt, save, tidy

from common import one_sentence_errors
from fope import rope_freqs

ACTIVATIONS = {"ReLU": (F.relu, RED), "GELU": (F.gelu, BLUE), "SiLU": (F.silu, GREEN)}
DIFFERS_FROM_THE_PAPER = (
    "Lemma 3.1 needs negative j or k: its sum over j, k >= 0 leaves out the differences, such as "
    "w2 - w1. Eq. 10 gives a cut-off tone an impulse; the spectrum of N samples has none, it is "
    "the same smeared line for every frequency. What goes wrong under the floor is that the lines "
    "of w and -w, and the mean, can no longer be told apart."
)


def amplitude(x):
    """
    Amplitude of each frequency 2 pi b / n, b = 0 .. n/2, in real signals x (..., n):
    (..., n/2 + 1).
    """
    X = np.abs(np.fft.rfft(np.asarray(x, dtype=np.float64), axis=-1)) / np.shape(x)[-1]
    X[..., 1:-1] *= 2
    return X


def linear_layer(n=1024, dims=8, seed=0):
    """
    Amplitudes before and after y = W x, where dimension m of x is a tone in its own bin:
    (bins, before, after, W).
    """
    bins = np.array([7 * (m + 1) ** 2 for m in range(dims)])  # any different ones
    x = np.cos(2 * np.pi * np.outer(bins, np.arange(n)) / n)
    W = torch.randn(dims, dims, generator=torch.Generator().manual_seed(seed)).numpy()
    W = W / math.sqrt(dims)
    return bins, amplitude(x), amplitude(W @ x), W


def combinations(b1, b2, n, order):
    """
    {bin: smallest |j| + |k| that gives it}, and the same for j, k >= 0 alone, of j b1 + k b2 folded
    into 0 .. n/2.
    """
    signed, unsigned = {}, {}
    for total in range(order + 1):
        for j in range(total + 1):
            for sign in (1, -1):
                b = (j * b1 + sign * (total - j) * b2) % n
                b = min(b, n - b)
                signed.setdefault(b, total)
                if sign > 0:
                    unsigned.setdefault(b, total)
    return signed, unsigned


def activation(g, n=2**15, b1=1489, b2=2203, order=12):
    """
    Lemma 3.1 for g: the energy that is not at the two tones or at 0, and its shares at the lemma's
    frequencies.
    """
    t = np.arange(n)
    x = np.cos(2 * np.pi * b1 * t / n) + np.cos(2 * np.pi * b2 * t / n)
    y = g(torch.from_numpy(x)).numpy()
    energy = amplitude(y) ** 2 / 2
    energy[0] = 0.0
    new = energy.copy()
    new[[b1, b2]] = 0.0
    signed, unsigned = combinations(b1, b2, n, order)
    return {
        "new_share": new.sum() / energy.sum(),
        "predicted_share": new[sorted(signed)].sum() / new.sum(),
        "printed_share": new[sorted(unsigned)].sum() / new.sum(),
        "amplitude": amplitude(y),
        "predicted_bins": signed,
    }


def rest_of_eq_10(freqs, N):
    """
    The share of N tokens that completes no whole cycle, (N - alpha N_m) / N with
    alpha = floor(N / N_m), per frequency.
    """
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
        total = far = 0.0
        for phase in np.arange(8) * np.pi / 8:
            x = np.cos(w * np.arange(N) + phase)
            energy = np.abs(np.fft.rfft(x - x.mean(), N * oversampling)) ** 2
            grid = np.arange(len(energy)) * 2 * np.pi / (N * oversampling)
            total += energy.sum()
            far += energy[np.abs(grid - w) > 2 * np.pi / N].sum()
        shares.append(far / total)
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
    ax.legend(frameon=False, fontsize=9)
    return {"bins": bins.tolist(), "own_share_by_dimension": own.round(5).tolist(), "seed": 0}


def panel_activations(ax):
    lemma = {"bins": [1489, 2203], "samples": 2**15, "order": 12}
    for (name, (g, colour)), shift in zip(ACTIVATIONS.items(), (0, 90, 180), strict=True):
        result = activation(g)
        shown = np.array([b for b, order in result["predicted_bins"].items() if order <= 5])
        heights = np.maximum(result["amplitude"][shown], 1e-4)
        ax.vlines(shown + shift, 1e-4, heights, color=colour, lw=1.5, label=name)
        shares = ("new_share", "predicted_share", "printed_share")
        lemma[name] = {share: float(result[share]) for share in shares}
        new, explained, printed = (100 * share for share in lemma[name].values())
        print(f"{name}: {new:.1f} % of the energy is at new frequencies; of that, at j w1 + k w2")
        print(f"    with |j| + |k| <= 12: {explained:.2f} %; with j, k >= 0 alone: {printed:.1f} %")
    for b, name in zip(lemma["bins"], ("w1", "w2"), strict=True):
        ax.annotate(name, (b, 0.75), ha="center", fontsize=9)
    ax.set_yscale("log")
    ax.set_ylim(1e-4, 1.2)
    moved = {name: f"{100 * lemma[name]['new_share']:.0f} %" for name in ACTIVATIONS}
    title = f"ReLU moves {moved['ReLU']} of two tones' energy to new frequencies,\n"
    title += f"GELU {moved['GELU']}, SiLU {moved['SiLU']}"
    tidy(ax, "frequency (bins of 32768; GELU, SiLU drawn 90, 180 right)", "amplitude", title)
    ax.legend(frameon=False, fontsize=9)
    return lemma


def panel_truncation(ax, N):
    freqs, floor = rope_freqs(64).double().numpy(), 2 * math.pi / N
    rest, misplaced = rest_of_eq_10(freqs, N), misplaced_energy(freqs, N)
    label = "Eq. 10: tokens outside whole cycles"
    ax.plot(freqs, 100 * rest, color=ORANGE, marker="o", ms=4, label=label)
    label = "measured: energy away from its own frequency"
    ax.plot(freqs, 100 * misplaced, color=BLUE, marker="s", ms=4, label=label)
    ax.axvline(floor, color=BLACK, lw=0.8, ls=":")
    ax.annotate(" floor 2 pi / N", (floor, 80), fontsize=9)
    ax.set_xscale("log")
    for name, share in (("rest of Eq. 10", rest), ("measured, misplaced", misplaced)):
        above, under = (100 * share[which].mean() for which in (freqs >= floor, freqs < floor))
        print(f"{name}: above the floor {above:.1f} %, under it {under:.1f} %")
    title = f"Cut off at N = {N}: tones above the floor misplace {above:.0f} % of their\n"
    title += f"energy, those under it {under:.0f} %"
    tidy(ax, "RoPE frequency (radians per token)", "share (%)", title)
    ax.set_ylim(-5, 140)
    ax.legend(framealpha=1, edgecolor="none", fontsize=9, loc="upper right")
    numbers = {"N": N, "floor": floor, "freqs": freqs.tolist()}
    shares = {"rest_of_eq_10": rest, "misplaced_energy": misplaced}
    return numbers | {name: share.round(6).tolist() for name, share in shares.items()}


def panel_examples(ax, N):
    floor = 2 * math.pi / N
    grid = np.arange(0, 8 * floor, floor / 64)
    for cycles, colour in ((5.5, GREEN), (1, BLUE), (0.3, RED)):
        x = np.cos(cycles * floor * np.arange(N))
        spectrum = np.abs(np.exp(-1j * np.outer(grid, np.arange(N))) @ (x - x.mean())) / N
        label = f"{cycles} {'cycle' if cycles == 1 else 'cycles'} in N"
        ax.plot(grid / floor, spectrum, color=colour, label=label)
        ax.axvline(cycles, color=colour, lw=0.8, ls=":")
    title = "A tone with less than one cycle in the text\nlooks like a tone of another frequency"
    xlabel = "frequency (cycles in N); dotted: where the tone is"
    tidy(ax, xlabel, "|X| / N, mean removed", title)
    ax.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.43, 1))


def main(argv=None):
    args = Parser(__doc__).parse_args(argv)
    fig, axes = plt.subplots(2, 2, figsize=(10, 7.4), layout="constrained")
    numbers = {
        "linear": panel_linear(axes[0, 0]),
        "lemma_3_1": panel_activations(axes[0, 1]),
        "truncation": panel_truncation(axes[1, 0], N=512),
        "differs_from_the_paper": DIFFERS_FROM_THE_PAPER,
    }
    panel_examples(axes[1, 1], N=512)
    print(numbers["differs_from_the_paper"])
    save(fig, numbers, args.out, "spectrum_leakage")


if __name__ == "__main__":
    one_sentence_errors(main)()
