"""
How long training should take on a GPU, by arithmetic: what multiplies matrices by its operations,
all else by the bytes that it moves.

    python experiments/roofline.py                              the paper's models on an H100
    python experiments/roofline.py --card "RTX 4090" --preset 20M

A model with the constants below, not a measurement; experiments/card.py measures. Of one
micro-batch, forward and backward, with its share of the optimizer's step, of a model with RoPE.
"""

import math

import shared  # noqa: F401, the way to the project's modules

import common
from fope import RoPE
from model import LOGITS_PER_SLICE, make_pos
from recipe import RECIPES
from train import PEAK_FLOPS

# bytes/s of a card's memory, as the makers say
BANDWIDTH = {"H100 PCIe": 2.0e12, "H100": 3.35e12, "H200": 4.8e12, "A100": 2.0e12, "L40S": 0.86e12}
BANDWIDTH |= {"A6000": 0.77e12, "RTX 4090": 1.01e12, "RTX 3090": 0.94e12}

# the share of a card's peak that long kernels reach
MATMUL, ATTENTION, MEMORY = 0.6, 0.3, 0.8

# Bytes that each element costs, read or written, forward and backward: (eager, compiled). Eager
# each operation reads and writes all that it works on, mostly in fp32; compiled one kernel does a
# row of this table.
NORM = 124, 26  # x * rsqrt(mean(x^2)) * weight in fp32, then bf16
RESIDUAL = 16, 8  # x in fp32 plus y in bf16
ROTATION = 104, 8  # q and k to fp32, four products and two sums, and back
SWIGLU = 28, 16  # silu(gate) * up in bf16
LOGIT = 40, 6  # log-softmax, one-hot, the gradient in bf16
WEIGHT = 24, 24  # to bf16; its gradient to fp32, added to that of earlier micro-batches
OPTIMIZER = 40, 40  # of a weight in each step: clipping and AdamW
SLICE = 12, 12  # of an output weight for each slice of the loss: its gradient, summed up in fp32
# Bytes that stay until the backward pass, of each of n_embd in a block, and of n_head * head_dim
KEPT_EMBD, KEPT_HEADS = (52, 36), (14, 10)
KEPT_LOGIT = 11, 4  # in the slice that is at work
STATE = 18  # bytes of a weight, its gradient and AdamW's two moments in fp32, its copy in bf16


def sizes(recipe):
    """(tokens of a micro-batch N, n_embd C, n_head * head_dim W, padded vocabulary V, slices)."""
    N = recipe.batch_size // recipe.grad_accum * recipe.train_len
    V = -(-recipe.vocab_size // 128) * 128
    n_slices = 2 ** max(0, math.ceil(math.log2(N * V / (8 * LOGITS_PER_SLICE))))
    return N, recipe.n_embd, recipe.n_head * recipe.head_dim, V, n_slices


def n_weights(recipe):
    """(all, those that the FLOP of a token are counted by: all but the input table)."""
    _, C, W, V, _ = sizes(recipe)
    counted = recipe.n_layer * (4 * C * W + 12 * C * C) + V * C
    return counted + V * C, counted


def milliseconds(recipe, card, compiled):
    """{part: milliseconds of a micro-batch}."""
    (N, C, W, V, n_slices), L, T = sizes(recipe), recipe.n_layer, recipe.train_len
    weights, _ = n_weights(recipe)
    flops, bandwidth = PEAK_FLOPS[card], MEMORY * BANDWIDTH[card]

    def linear(n_in, n_out):  # the output, and two gradients
        moved = 2 * (N * n_in + N * n_out + n_in * n_out)  # bf16
        return 3 * max(2 * N * n_in * n_out / (MATMUL * flops), moved / bandwidth)

    def moves(elements, cost):
        return elements * cost[compiled] / bandwidth

    rotates = isinstance(make_pos(recipe), RoPE)
    seconds = {
        "linear layers": L * (linear(C, 3 * W) + linear(W, C) + 3 * linear(C, 4 * C)),
        # two products of T x T, half of it masked; seven in all with the backward pass
        "attention": L * 7 * N * T * W / (ATTENTION * flops),
        "norms and residual": moves((2 * L + 1) * N * C, NORM) + moves(2 * L * N * C, RESIDUAL),
        "rotation": moves(rotates * L * 2 * N * W, ROTATION),
        "SwiGLU": moves(L * N * 4 * C, SWIGLU),
        "output layer": linear(C, V),
        "loss": moves(N * V, LOGIT) + moves(n_slices * V * C, SLICE),
        "weights": moves(weights, WEIGHT) + moves(weights / recipe.grad_accum, OPTIMIZER),
    }
    return {part: 1000 * s for part, s in seconds.items()}


def summary(recipe, card, compiled):
    """(milliseconds of a micro-batch, tokens/s, MFU, peak of memory in GB)."""
    (N, C, W, V, n_slices), (weights, counted) = sizes(recipe), n_weights(recipe)
    ms = sum(milliseconds(recipe, card, compiled).values())
    attention = 12 * recipe.n_layer * W * recipe.train_len
    mfu = (6 * counted + attention) * N / (ms / 1000) / PEAK_FLOPS[card]
    kept = recipe.n_layer * N * (C * KEPT_EMBD[compiled] + W * KEPT_HEADS[compiled])
    kept += N * V / n_slices * KEPT_LOGIT[compiled] + STATE * weights
    return ms, 1000 * N / ms, mfu, kept / 1e9


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--card", choices=BANDWIDTH, default="H100")
    add("--preset", choices=RECIPES, default="60M", help="whose parts are shown")
    args = parser.parse_args(argv)
    print(f"modelled, not measured: {args.card}\n")
    print("| model | | ms a micro-batch | tokens/s | MFU | hours for 10B tokens | peak GB |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for preset in ("20M", "60M", "180M"):
        for compiled in (False, True):
            ms, rate, mfu, gb = summary(RECIPES[preset].changed(pos="rope"), args.card, compiled)
            cells = f"{ms:.1f} | {rate:,.0f} | {mfu:.0%} | {1e10 / rate / 3600:.1f} | {gb:.1f}"
            print(f"| {preset} | {'compiled' if compiled else 'eager'} | {cells} |")
    print(f"\n| {args.preset}, ms | eager | compiled |\n|---|--:|--:|")
    recipe = RECIPES[args.preset].changed(pos="rope")
    eager, compiled = (milliseconds(recipe, args.card, c) for c in (False, True))
    for part in eager:
        print(f"| {part} | {eager[part]:.1f} | {compiled[part]:.1f} |")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
