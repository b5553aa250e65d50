"""
How long training should take on an H100, modelled and not measured (card.py measures): what
multiplies matrices by its operations, all else by the bytes that it moves, with these constants.

    python experiments/roofline.py
"""

import math

import torch
from shared import ROOT  # noqa: F401, the way to the modules of the project

from common import ArgumentParser, one_sentence_errors
from model import GPT, LOGITS_PER_SLICE
from recipe import RECIPES
from train import PEAK_FLOPS

FLOPS, BANDWIDTH = PEAK_FLOPS["H100"], 3.35e12  # a second; bytes a second
MATMUL, ATTENTION, MEMORY = 0.5, 0.3, 0.75  # the share of these that long kernels reach

# Bytes that each element costs, read or written, forward and backward: (eager, compiled). Eager
# each operation reads and writes all that it works on, mostly in fp32; compiled one kernel does it.
NORM = 124, 26  # x * rsqrt(mean(x^2)) * weight in fp32, then bf16
RESIDUAL = 16, 8  # x in fp32 plus y in bf16
ROTATION = 104, 8  # q and k to fp32, four products and two sums, and back
SWIGLU = 28, 16  # silu(gate) * up in bf16
LOGIT = 40, 6  # log-softmax, one-hot, the gradient in bf16
SLICE = 12, 12  # of an output weight for each slice of the loss: its gradient, summed up in fp32
WEIGHT = 24, 24  # to bf16; its gradient to fp32, added to that of earlier micro-batches
OPTIMIZER = 40, 40  # of a weight in each step: clipping and AdamW
# Bytes in memory: until the backward pass for each of n_embd, and of n_head * head_dim, in a block;
# for each logit of a slice; for each weight, with its gradient, AdamW's moments and a copy in bf16
KEPT, KEPT_HEADS, KEPT_LOGIT, KEPT_WEIGHT = (52, 36), (14, 10), (11, 4), (18, 18)


def modelled(preset, compiled):
    """({part: ms of a micro-batch}, tokens/s, MFU, peak of memory in GB) with RoPE."""
    recipe = RECIPES[preset].changed(pos="rope")
    with torch.device("meta"):
        model = GPT(recipe)
    weights, (V, C) = sum(p.numel() for p in model.parameters()), model.head.weight.shape
    L, T, W = recipe.n_layer, recipe.train_len, recipe.n_head * recipe.head_dim
    N = recipe.batch_size // recipe.grad_accum * T
    n_slices = 2 ** max(0, math.ceil(math.log2(N * V / (8 * LOGITS_PER_SLICE))))

    def linear(n_in, n_out):  # the output, and two gradients, in bf16
        moved = 2 * (N * n_in + N * n_out + n_in * n_out) / (MEMORY * BANDWIDTH)
        return 3000 * max(2 * N * n_in * n_out / (MATMUL * FLOPS), moved)

    def moves(elements, cost):
        return 1000 * elements * cost[compiled] / (MEMORY * BANDWIDTH)

    ms = {
        "linear layers": L * (linear(C, 3 * W) + linear(W, C) + 3 * linear(C, 4 * C)),
        # two products of T x T, half of it masked; with the backward pass seven
        "attention": 1000 * L * 7 * N * T * W / (ATTENTION * FLOPS),
        "norms and residual": moves((2 * L + 1) * N * C, NORM) + moves(2 * L * N * C, RESIDUAL),
        "rotation": moves(L * 2 * N * W, ROTATION),
        "SwiGLU": moves(L * N * 4 * C, SWIGLU),
        "output layer": linear(C, V),
        "loss": moves(N * V, LOGIT) + moves(n_slices * V * C, SLICE),
        "weights": moves(weights, WEIGHT) + moves(weights / recipe.grad_accum, OPTIMIZER),
    }
    rate = 1000 * N / sum(ms.values())
    kept = L * N * (C * KEPT[compiled] + W * KEPT_HEADS[compiled])
    kept += N * V / n_slices * KEPT_LOGIT[compiled] + weights * KEPT_WEIGHT[compiled]
    return ms, rate, rate * model.flops_per_token() / FLOPS, kept / 1e9


def main(argv=None):
    ArgumentParser(__doc__).parse_args(argv)
    print("modelled, not measured\n\n| | | ms | tokens/s | MFU | hours for 10B tokens | peak GB |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for preset in ("20M", "60M", "180M"):
        for how in ("eager", "compiled"):
            ms, rate, mfu, gb = modelled(preset, how == "compiled")
            cells = f"{sum(ms.values()):.1f} | {rate:,.0f} | {mfu:.0%} | {1e10 / rate / 3600:.1f}"
            print(f"| {preset} | {how} | {cells} | {gb:.1f} |")
    print("\n| 60M compiled | ms |\n|---|--:|")
    for part, ms in modelled("60M", True)[0].items():
        print(f"| {part} | {ms:.1f} |")


if __name__ == "__main__":
    one_sentence_errors(main)()
