"""
What a first call on a GPU should confirm: the attention kernel, time and memory of a step of each
embedding, under what roofline.py expects; and whether FlexAttention would make KERPLE faster.

    python experiments/card.py      some minutes; --preset tiny --device cpu to see that it runs
"""

from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from bench import Workload
from roofline import modelled
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.benchmark import Timer

import common
from fope import POSITION_EMBEDDINGS
from model import make_pos
from recipe import RECIPES


def median_ms(call):
    """Of the calls of two seconds, after three that compile and fill caches."""
    for _ in range(3):
        call()
    return 1000 * Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=2).median


def kernels_of(call):
    """The names of the kernels that scaled_dot_product_attention chooses within call()."""
    names, attend = set(), F.scaled_dot_product_attention

    def note(q, k, v, attn_mask=None, is_causal=False, scale=None):
        chosen = torch._fused_sdp_choice(q, k, v, attn_mask, 0.0, is_causal, scale=scale)
        names.add(SDPBackend(chosen).name.lower())
        return attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)

    with patch.object(F, "scaled_dot_product_attention", note):
        call()
    return ", ".join(sorted(names))


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add, names = parser.add_argument, list(POSITION_EMBEDDINGS)
    add("--preset", choices=RECIPES, default="60M", help="size of the model and its micro-batch")
    add("--pos", nargs="+", choices=names, default=names, help="which embeddings")
    common.add_device_flag(parser)
    args = parser.parse_args(argv)
    device, recipe = common.init_distributed(args.device), RECIPES[args.preset]
    B, T = recipe.batch_size // recipe.grad_accum, recipe.train_len
    vars(args).update(batch_size=B, train_len=T, eval_len=1, compile=False)  # for bench.py
    print(f"{args.preset} on {common.provenance(device)['hardware']}\n")
    print("| embedding | | ms a step | peak GB | kernels |\n|---|---|--:|--:|---|")
    for how in ("eager", "compiled"):
        ms, _, _, gb = modelled(args.preset, how == "compiled")
        print(f"| RoPE on an H100, modelled | {how} | {sum(ms.values()):.1f} | {gb:.1f} | |")
    for pos, how in [(pos, how) for pos in args.pos for how in ("eager", "compiled")]:
        torch._dynamo.reset()
        work, gb = Workload(args, pos, device), float("nan")
        kernels = kernels_of(work.step)
        if how == "compiled":
            work.model.compile_parts()
        ms = median_ms(work.step)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            work.step()
            gb = torch.cuda.max_memory_allocated(device) / 1e9
        print(f"| {pos} | {how} | {ms:.1f} | {gb:.1f} | {kernels} |", flush=True)
    if device.type == "cpu":
        return  # FlexAttention has no backward pass there
    kerple = make_pos(recipe.changed(pos="kerple")).to(device)

    def biased(score, b, h, i, j):
        return score - kerple.r1[h].abs() * torch.log1p(kerple.r2[h].abs() * (i - j))

    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=device)
    flex = partial(torch.compile(flex_attention), score_mod=biased, block_mask=causal)
    q = torch.randn(B, recipe.n_head, T, recipe.head_dim).bfloat16().to(device).requires_grad_()
    for name, attend in (("as it is", kerple.attend), ("by FlexAttention", flex)):
        ms = median_ms(lambda attend=attend: attend(q, q, q).sum().backward())
        print(f"KERPLE's attention of a layer {name}: {ms:.2f} ms")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
