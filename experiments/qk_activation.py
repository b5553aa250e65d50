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

import torch
from shared import RED, Parser, file_name, plt, save

from checkpoint import load_checkpoint
from common import one_sentence_errors, positive_int
from fope import rope_freqs


def mean_activation(model, layers, heads, head_dim, tokens):
    """
    |q| and |k| averaged over tokens and heads: two (n_layer, head_dim). `layers` are pairs of
    modules whose outputs are q and k, (B, n_head, T, head_dim) or (B, T, n_head * head_dim);
    `heads` is the number of heads of each.
    """
    seen = {}

    def keep(name, n_head):
        def hook(module, inputs, output):
            x = output.detach().float().abs()
            x = x if x.dim() == 4 else x.unflatten(-1, (n_head, head_dim))
            seen[name] = x.mean(dim=(0, 1, 2))

        return hook

    handles = [
        module.register_forward_hook(keep((i, j), heads[j]))
        for i, pair in enumerate(layers)
        for j, module in enumerate(pair)
    ]
    with torch.no_grad():
        model.eval()(tokens)
    for handle in handles:
        handle.remove()
    return tuple(torch.stack([seen[i, j] for i in range(len(layers))]) for j in range(2))


def random_tokens(vocab_size, shape):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))


def read_ours(folder, n_tokens):
    """((q, k), train_len, theta, pos) of a run of train.py."""
    model, _, _ = load_checkpoint(folder)
    c = model.config
    layers = [(b.attn.q_norm, b.attn.k_norm) for b in model.blocks]
    shape = (math.ceil(n_tokens / c.train_len), c.train_len)
    tokens, heads = random_tokens(c.vocab_size, shape), (c.n_head, c.n_head)
    q_and_k = mean_activation(model, layers, heads, c.head_dim, tokens)
    return q_and_k, c.train_len, c.theta, c.pos


def read_llama(model, n_tokens, train_len):
    """The same for a Llama of the transformers library."""
    c = model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    theta = getattr(c, "rope_theta", None) or c.rope_parameters["rope_theta"]
    layers = [(layer.self_attn.q_proj, layer.self_attn.k_proj) for layer in model.model.layers]
    tokens = random_tokens(c.vocab_size, (1, n_tokens))
    heads = (c.num_attention_heads, c.num_key_value_heads)
    q_and_k = mean_activation(model, layers, heads, head_dim, tokens)
    return q_and_k, train_len or c.max_position_embeddings, theta, "rope"


def read(args):
    """The same for whatever the command line names."""
    try:
        ours = read_ours(args.checkpoint, args.tokens)
    except FileNotFoundError:
        pass
    else:
        if args.train_len:
            raise ValueError("--train_len is for Llama models; a run of train.py knows its own")
        return ours
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        what = "is no run of train.py, and for other models transformers is not installed"
        raise ValueError(f"{args.checkpoint} {what}") from None
    try:
        llama = AutoModelForCausalLM.from_pretrained(args.checkpoint)
        return read_llama(llama, args.tokens, args.train_len)
    except (OSError, ValueError, AttributeError) as e:
        why = str(e).splitlines()[0]
        raise ValueError(f"{args.checkpoint} is no Llama model that can be loaded: {why}") from None


def under_the_floor(head_dim, theta, train_len):
    """Which dimensions turn less than once in the training length: (head_dim,) bool."""
    return (rope_freqs(head_dim, theta) < 2 * math.pi / train_len).repeat(2)


def main(argv=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("checkpoint", help="a run of train.py, or what transformers' from_pretrained takes")
    add("--tokens", type=positive_int, default=1000)
    add("--train_len", type=positive_int, help="of a Llama, if not its max_position_embeddings")
    add("--name", type=file_name, default="qk_activation", help="of figure and json")
    args = parser.parse_args(argv)
    (q, k), train_len, theta, pos = read(args)

    head_dim = q.size(1)
    slow = under_the_floor(head_dim, theta, train_len)
    if not 0 < slow.sum() < head_dim:
        what = "the frequencies are not on both sides of the floor"
        raise ValueError(f"at a training length of {train_len} {what}")
    ratios = [(x[:, slow].mean() / x[:, ~slow].mean()).item() for x in (q, k)]
    fig, axes = plt.subplots(2, 1, figsize=(9, 5), layout="constrained", sharex=True)
    for ax, x, name in zip(axes, (q, k), "qk", strict=True):
        image = ax.imshow(x.numpy(), aspect="auto", cmap="cividis", interpolation="nearest")
        for start in (0, head_dim // 2):  # in each half the slow dimensions come last
            first, end = start + int((~slow).sum()) // 2, start + head_dim // 2
            ax.axvspan(first - 0.5, end - 0.5, fill=False, edgecolor=RED, lw=2)
        ax.set_ylabel("layer")
        ax.set_yticks(range(len(x)))
        fig.colorbar(image, ax=ax, label=f"mean |{name}|")
    axes[1].set_xlabel("dimension of a head; boxes: under the floor")
    ratio_q, ratio_k = (f"{ratio:.2f}" for ratio in ratios)
    title = f"{pos}: dimensions under the floor have {ratio_q} (q) and {ratio_k} (k) times\n"
    axes[0].set_title(f"{title}the mean activation of the others", fontsize=10)
    what = "mean |q| and |k| under the floor, as a multiple of that above it"
    print(f"{what}: {ratio_q}, {ratio_k}")
    numbers = {
        "checkpoint": str(args.checkpoint),
        "pos": pos,
        "train_len": train_len,
        "theta": theta,
        "tokens": args.tokens,
        "under_the_floor": slow.tolist(),
        "ratio_q": ratios[0],
        "ratio_k": ratios[1],
        "q": q.tolist(),
        "k": k.tolist(),
    }
    save(fig, numbers, args.out, args.name)


if __name__ == "__main__":
    one_sentence_errors(main)()
