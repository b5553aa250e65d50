"""
Do the frequencies under the floor hold larger queries and keys? (appendix A.1 and its figure)

    python experiments/qk_activation.py runs_out/tiny/text/{rope,fope}_s{1,2,3}      a minute
    python experiments/qk_activation.py meta-llama/Llama-2-7b-hf --train_len 4096
                                                   any Llama of the transformers library

Reads 1000 random tokens, as the paper does, and averages |q| and |k| before the rotation over
tokens and heads: one number per layer and dimension. Dimension i turns with i + head_dim/2; the
pairs whose frequency is under 2 pi / train_len are marked. Look at: whether the marked dimensions
are brighter, and by what factor. The figure has the first model of each embedding, on one scale.
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


def measure(checkpoint, n_tokens, train_len):
    (q, k), its_len, theta, pos = read(checkpoint, n_tokens)
    train_len = train_len or its_len
    slow = under_the_floor(q.size(1), theta, train_len)
    found = {"checkpoint": checkpoint, "pos": pos, "train_len": train_len, "theta": theta}
    for name, x in (("q", q), ("k", k)):
        found[f"ratio_{name}"] = (x[:, slow].mean() / x[:, ~slow].mean()).item()
        found[name] = x.tolist()
    return found | {"under_the_floor": slow.tolist()}


def draw(models):
    """A column for each model: |q| above, |k| below; a row is a layer."""
    shape = dict(figsize=(5.2 * len(models), 4.2), sharex=True, squeeze=False)
    fig, axes = plt.subplots(2, len(models), layout="constrained", **shape)
    look = dict(vmin=0, vmax=max(max(map(max, m[name])) for m in models for name in "qk"))
    for column, m in zip(axes.T, models, strict=True):
        slow, half = sum(m["under_the_floor"]) // 2, len(m["under_the_floor"]) // 2
        for ax, name in zip(column, "qk", strict=True):
            image = ax.imshow(m[name], aspect="auto", cmap="cividis", **look)
            for end in (half, 2 * half):  # in each half the slow dimensions come last
                ax.axvspan(end - slow - 0.5, end - 0.5, fill=False, edgecolor=RED, lw=2)
            ax.set(ylabel=f"layer, {name}", yticks=range(len(m[name])))
            ratio = f"under the floor {m[f'ratio_{name}']:.2f} times the others"
            ax.set_title(f"{NAMES.get(m['pos'], m['pos'])}, {name}: {ratio}", fontsize=10)
        column[1].set_xlabel("dimension of a head; boxes: under the floor")
    fig.colorbar(image, ax=axes, label="mean |q|, mean |k|")
    return fig


def main(argv=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "checkpoints",
        nargs="+",
        help="runs of train.py, or what transformers' from_pretrained takes",
    )
    add("--tokens", type=positive_int, default=1000)
    add("--train_len", type=positive_int, help="if not what the model's config says")
    args = parser.parse_args(argv)
    models = [measure(name, args.tokens, args.train_len) for name in args.checkpoints]
    first = list({m["pos"]: m for m in reversed(models)}.values())[::-1]
    save({"tokens": args.tokens, "models": models}, args.out, "qk_activation", draw(first))


if __name__ == "__main__":
    one_sentence_errors(main)()
