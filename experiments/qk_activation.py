"""
Do the frequencies under the floor hold larger queries and keys? (appendix A.1 and its figure)

    python experiments/qk_activation.py runs_out/tiny/text/{rope,fope}_s{1,2,3}      a minute

Reads 1000 random tokens, as the paper does, and takes the magnitude of the mean query and key over
them, before the rotation: one number per layer and dimension, a mean over the heads. Dimension i
turns with i + head_dim/2; the pairs whose frequency is under 2 pi / train_len are marked. Look at:
whether the marked dimensions are brighter, and by what factor. The figure has the first model of
each embedding, on one scale.
"""

import math

import torch
from shared import RED, Parser, plt, save

from checkpoint import load_checkpoint
from common import one_sentence_errors, positive_int
from fope import rope_freqs
from rows import NAMES


def mean_activation(model, n_tokens):
    """The magnitude of the mean q and k over random tokens: two (n_layer, head_dim)."""
    c = model.config
    shape = (math.ceil(n_tokens / c.train_len), c.train_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(c.vocab_size, shape, generator=generator)
    outputs = []  # q and k of the first layer, q and k of the second, ...: (B, n_head, T, head_dim)
    for block in model.blocks:
        for module in (block.attn.q_norm, block.attn.k_norm):
            module.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad():
        model.eval()(tokens)
    means = torch.stack([x.mean(dim=(0, 2)).abs().mean(dim=0) for x in outputs])
    return means[::2], means[1::2]


def under_the_floor(head_dim, theta, train_len):
    """Which dimensions turn less than once in the training length: (head_dim,) bool."""
    return (rope_freqs(head_dim, theta) < 2 * math.pi / train_len).repeat(2)


def measure(run, n_tokens):
    model, _, _ = load_checkpoint(run)
    c, (q, k) = model.config, mean_activation(model, n_tokens)
    slow = under_the_floor(c.head_dim, c.theta, c.train_len)
    found = {"checkpoint": run, "pos": c.pos, "train_len": c.train_len, "theta": c.theta}
    for name, x in (("q", q), ("k", k)):
        found[f"ratio_{name}"] = (x[:, slow].mean() / x[:, ~slow].mean()).item()
        found[name] = x.tolist()
    return found | {"under_the_floor": slow.tolist()}


def draw(models):
    """A column for each model: queries above, keys below; a row is a layer."""
    shape = dict(figsize=(5.2 * len(models), 4.2), sharex=True, squeeze=False)
    fig, axes = plt.subplots(2, len(models), layout="constrained", **shape)
    scale = dict(vmin=0, vmax=max(max(map(max, m[name])) for m in models for name in "qk"))
    for column, m in zip(axes.T, models, strict=True):
        slow, half = sum(m["under_the_floor"]) // 2, len(m["under_the_floor"]) // 2
        for ax, name in zip(column, "qk", strict=True):
            image = ax.imshow(m[name], aspect="auto", cmap="cividis", **scale)
            for end in (half, 2 * half):  # in each half the slow dimensions come last
                ax.axvspan(end - slow - 0.5, end - 0.5, fill=False, edgecolor=RED, lw=2)
            ax.set(ylabel=f"layer, {name}", yticks=range(len(m[name])))
            ratio = f"under the floor {m[f'ratio_{name}']:.2f} times the others"
            ax.set_title(f"{NAMES.get(m['pos'], m['pos'])}, {name}: {ratio}", fontsize=10)
        column[1].set_xlabel("dimension of a head; boxes: under the floor")
    fig.colorbar(image, ax=axes, label="magnitude of the mean")
    return fig


def main(argv=None):
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of train.py")
    parser.add_argument("--tokens", type=positive_int, default=1000)
    args = parser.parse_args(argv)
    models = [measure(run, args.tokens) for run in args.runs]
    first = list({m["pos"]: m for m in reversed(models)}.values())[::-1]
    save({"tokens": args.tokens, "models": models}, args.out, "qk_activation", draw(first))


if __name__ == "__main__":
    one_sentence_errors(main)()
