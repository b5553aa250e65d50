"""
What a first call on a GPU should confirm: which attention kernel each embedding gets, how long a
step takes and how much memory, beside what experiments/roofline.py expects of a model with RoPE.

    python experiments/card.py                                          60M: some minutes
    python experiments/card.py --preset tiny --pos fope --device cpu    only to see that it runs

A step is one micro-batch of the preset, forward and backward, and the optimizer's; medians of ten.
The last lines time KERPLE's bias as baselines.py makes it against FlexAttention.
"""

import math
import statistics
import time
from unittest.mock import patch

import torch
import torch.nn.functional as F
from roofline import BANDWIDTH, summary
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import common
from baselines import KERPLE
from fope import POSITION_EMBEDDINGS
from model import GPT
from recipe import RECIPES
from train import accumulate_gradients, make_optimizer


def median_ms(call, device, n=10):
    """The median of n calls, after two that compile and fill caches."""
    times = []
    for _ in range(n + 2):
        start = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def kernels_of(call):
    """The names of the kernels that scaled_dot_product_attention chooses within call()."""
    names, attend = set(), F.scaled_dot_product_attention

    def note(q, k, v, attn_mask=None, is_causal=False, scale=None):
        chosen = torch._fused_sdp_choice(q, k, v, attn_mask, 0.0, is_causal, scale=scale)
        names.add(SDPBackend(chosen).name.removesuffix("_ATTENTION").lower())
        return attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)

    with patch.object(F, "scaled_dot_product_attention", note):
        call()
    return ", ".join(sorted(names))


def measure(recipe, device, compiled):
    """(kernels, ms of a step, peak GB, ms to read 16 times the length)."""
    torch._dynamo.reset()
    model, n = GPT(recipe).to(device), recipe.batch_size // recipe.grad_accum
    optimizer = make_optimizer(model, recipe)
    batch = torch.randint(recipe.vocab_size, (n, recipe.train_len + 1), device=device)
    text = torch.randint(recipe.vocab_size, (2, 1, 16 * recipe.train_len), device=device)

    def step():
        accumulate_gradients(model, batch, 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def read():
        with torch.no_grad(), common.autocast(device):
            model(*text, reduction="none")

    kernels = kernels_of(step)
    ms_read = median_ms(read, device, n=3)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if compiled:
        model.compile_parts()
    ms = median_ms(step, device)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else math.nan
    return kernels, ms, peak, ms_read


def kerple_ms(recipe, device, B, T):
    """Forward and backward of one layer's attention: (as baselines.py does it, FlexAttention)."""
    H, dtype = recipe.n_head, torch.bfloat16 if device.type == "cuda" else torch.float32
    pos = KERPLE(head_dim=recipe.head_dim, n_head=H, train_len=recipe.train_len).to(device)
    q, k, v = torch.randn(3, B, H, T, recipe.head_dim, device=device, dtype=dtype).unbind()
    q.requires_grad_()

    def bias(score, b, h, i, j):
        return score - pos.r1[h].abs() * torch.log1p(pos.r2[h].abs() * (i - j))

    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=device)
    flex = torch.compile(flex_attention)
    ours = median_ms(lambda: pos.attend(q, k, v).sum().backward(), device)
    try:
        call = lambda: flex(q, k, v, score_mod=bias, block_mask=causal).sum().backward()  # noqa: E731
        return ours, f"{median_ms(call, device):.1f} ms"
    except Exception as e:  # whatever the compiler raises: that is the answer
        return ours, f"{type(e).__name__}: {e}".splitlines()[0][:120]


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    names = list(POSITION_EMBEDDINGS)
    add("--preset", choices=RECIPES, default="60M", help="size of the model")
    add("--pos", nargs="+", choices=names, default=names, help="which embeddings")
    common.add_device_flag(parser)
    args = parser.parse_args(argv)
    device, recipe = common.init_distributed(args.device), RECIPES[args.preset]
    hardware = common.provenance(device)["hardware"]
    card = next((name for name in BANDWIDTH if name in hardware), None)
    print(f"{args.preset} on {hardware}\n")
    print("| embedding | attention | | ms a step | modelled | peak GB | modelled | ms to read |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for pos in args.pos:
        for compiled in (False, True):
            kernels, ms, peak, ms_read = measure(recipe.changed(pos=pos), device, compiled)
            should, _, _, gb = summary(recipe, card, compiled) if card else (math.nan,) * 4
            cells = f"{ms:.1f} | {should:.1f} | {peak:.1f} | {gb:.1f} | {ms_read:.1f}"
            how = "compiled" if compiled else "eager"
            print(f"| {pos} | {kernels} | {how} | {cells} |", flush=True)
    n = recipe.batch_size // recipe.grad_accum
    for B, T in ((n, recipe.train_len), (1, 16 * recipe.train_len)):
        ours, flex = kerple_ms(recipe, device, B, T)
        print(f"KERPLE, {B} x {T}: {ours:.1f} ms; by FlexAttention {flex}")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
