"""
Do the frequencies under the floor hold larger queries and keys? (appendix A.1 and its figure)

    python experiments/qk_activation.py runs_out/tiny/text/rope_s0                  10 seconds
    python experiments/qk_activation.py meta-llama/Llama-2-7b-hf --train_len 4096
                                                   any Llama of the transformers library

Reads 1000 random tokens, as the paper does, and averages |q| and |k| before the rotation over
tokens and heads: one number per layer and dimension. Dimension i turns with i + head_dim/2; the
pairs whose frequency is under 2 pi / train_len are marked. Look at: whether the marked dimensions
are brighter, and by what factor.
"""

import math
from pathlib import Path

import torch
from shared import RED, Parser, plt, save

from checkpoint import load_checkpoint
from common import Refused, one_sentence_errors, positive_int
from fope import rope_freqs
from paper.results import NAMES


def mean_activation(model, layers, head_dim, shape):
    """
    |q| and |k| averaged over random tokens of that shape, (B, T), and heads: two (n_layer,
    head_dim). `layers` are pairs of modules whose outputs are q and k, (B, n_head, T, head_dim) or
    (B, T, n_head * head_dim).
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, shape, generator=generator)
    outputs = []  # q and k of the first layer, q and k of the second, ...
    for module in (module for pair in layers for module in pair):
        module.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad():
        model.eval()(tokens)
    heads = (x.float().abs().unflatten(-1, (-1, head_dim)) for x in outputs)
    means = torch.stack([x.mean(dim=tuple(range(x.dim() - 1))) for x in heads])
    return means[::2], means[1::2]


def read_ours(folder, n_tokens):
    """((q, k), train_len, theta, name) of a run of train.py."""
    model, _, _ = load_checkpoint(folder)
    c = model.config
    layers = [(b.attn.q_norm, b.attn.k_norm) for b in model.blocks]
    shape = (math.ceil(n_tokens / c.train_len), c.train_len)
    return mean_activation(model, layers, c.head_dim, shape), c.train_len, c.theta, c.pos


def read_llama(model, n_tokens):
    """The same for a Llama of the transformers library."""
    c = model.config
    theta = getattr(c, "rope_theta", None) or c.rope_parameters["rope_theta"]
    layers = [(layer.self_attn.q_proj, layer.self_attn.k_proj) for layer in model.model.layers]
    q_and_k = mean_activation(model, layers, c.head_dim, (1, n_tokens))
    return q_and_k, c.max_position_embeddings, theta, "llama"


def read(checkpoint, n_tokens):
    """The same for either."""
    if (Path(checkpoint) / "checkpoint.pt").exists():
        return read_ours(checkpoint, n_tokens)
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        what = "is no run of train.py, and for other models transformers is not installed"
        raise Refused(f"{checkpoint} {what}") from None
    try:
        return read_llama(AutoModelForCausalLM.from_pretrained(checkpoint), n_tokens)
    except (OSError, ValueError, AttributeError) as e:
        why = str(e).splitlines()[0]
        raise Refused(f"{checkpoint} is no Llama model that can be loaded: {why}") from None


def under_the_floor(head_dim, theta, train_len):
    """Which dimensions turn less than once in the training length: (head_dim,) bool."""
    return (rope_freqs(head_dim, theta) < 2 * math.pi / train_len).repeat(2)


def main(argv=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("checkpoint", help="a run of train.py, or what transformers' from_pretrained takes")
    add("--tokens", type=positive_int, default=1000)
    add("--train_len", type=positive_int, help="if not what the model's config says")
    args = parser.parse_args(argv)
    (q, k), train_len, theta, pos = read(args.checkpoint, args.tokens)
    train_len = args.train_len or train_len
    head_dim = q.size(1)
    slow = under_the_floor(head_dim, theta, train_len)
    ratios = [(x[:, slow].mean() / x[:, ~slow].mean()).item() for x in (q, k)]
    fig, axes = plt.subplots(2, 1, figsize=(9, 5), layout="constrained", sharex=True)
    look = dict(vmin=0, vmax=max(q.max(), k.max()), cmap="cividis", interpolation="nearest")
    for ax, x, name in zip(axes, (q, k), "qk", strict=True):
        image = ax.imshow(x.numpy(), aspect="auto", **look)
        for start in (0, head_dim // 2):  # in each half the slow dimensions come last
            first, end = start + int((~slow).sum()) // 2, start + head_dim // 2
            ax.axvspan(first - 0.5, end - 0.5, fill=False, edgecolor=RED, lw=2)
        ax.set_ylabel(f"layer, {name}")
        ax.set_yticks(range(len(x)))
    fig.colorbar(image, ax=axes, label="mean |q|, mean |k|")
    axes[1].set_xlabel("dimension of a head; boxes: under the floor")
    title = f"{NAMES.get(pos, pos)}: dimensions under the floor have {ratios[0]:.2f} (q) and "
    title += f"{ratios[1]:.2f} (k) times\nthe mean activation of the others"
    axes[0].set_title(title, fontsize=10)
    numbers = {"checkpoint": args.checkpoint, "pos": pos, "train_len": train_len, "theta": theta}
    numbers |= {"tokens": args.tokens, "under_the_floor": slow.tolist()}
    numbers |= {"ratio_q": ratios[0], "ratio_k": ratios[1], "q": q.tolist(), "k": k.tolist()}
    save(numbers, args.out, f"qk_activation_{pos}", fig)


if __name__ == "__main__":
    one_sentence_errors(main)()
