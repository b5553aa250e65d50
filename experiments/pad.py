"""
What does it cost to read FoPE with another sine of the constant pairs than it was trained with?

    python experiments/pad.py runs_out/tiny/text/fope_s*       one recipe, several seeds; minutes

Released code pads the sine with 1, the paper's equations with 0 (docs/implementations.md). First
random queries and keys in the shape of Intern-S1-Pro: how far the logits move. Then trained models,
on held-out text at 1x to 16x: the loss with their own pad, with the other, and with the other
repaired by a factor on the weights. Look at: mean and standard deviation over the seeds.
"""

import math

import torch
from shared import Parser, write_json

from checkpoint import load_run, with_pos
from common import Refused, command, one_sentence_errors, provenance
from data import TokenData
from evaluation import spread_windows, window_loss
from fope import FoPE

INTERN = dict(head_dim=128, n_head=4, train_len=262_144, theta=5e6, sigma=0.5, cap=False)


def of_random_logits(n_keys=512):
    """Std of the logits with pad 1 and 0, and how often the most attended of n_keys stays."""
    logits = {}
    for pad in (1.0, 0.0):
        torch.manual_seed(0)
        pos = FoPE(**INTERN, sin_pad=pad)
        q, k = pos.rotate(*torch.randn(2, 1, 4, n_keys, 128))
        logits[pad] = q[0] @ k[0].transpose(-2, -1) / math.sqrt(128)
    same = logits[1.0].argmax(-1) == logits[0.0].argmax(-1)
    change = (logits[1.0] - logits[0.0]).std() / logits[1.0].std()
    stds = {f"std_pad_{pad:.0f}": x.std().item() for pad, x in logits.items()}
    return stds | {"change_in_stds": change.item(), "same_key": same.float().mean().item()}


@torch.no_grad()
def repair(model, factor):
    """Multiply q and k by a factor in FoPE's constant pairs, in the weights that make them."""
    for attn in (block.attn for block in model.blocks):
        series, half = attn.pos.cos_coef.size(-1), attn.head_dim // 2
        scale = torch.ones(2, half)
        scale[:, series:] = factor
        if model.config.qk_norm:
            attn.q_norm.weight *= scale.flatten()
            attn.k_norm.weight *= scale.flatten()
        else:  # the rows of q and k, head by head; those of v stay
            n = 2 * attn.n_head * attn.head_dim
            attn.qkv.weight[:n] *= scale.flatten().repeat(2 * attn.n_head)[:, None]
    return model


def losses(run):
    """{reading: the loss at 1x, 2x, .. 16x} of a run of train.py, FoPE with sine 1."""
    model, _, _ = load_run(run)
    recipe = model.config
    if recipe.pos != "fope" or model.blocks[0].attn.pos.sin_pad != 1:
        raise Refused(f"{run} is no FoPE whose constant pairs have sine 1")
    other = recipe.changed(pos_args={"sin_pad": 0.0})
    readings = {"own": model, "other": with_pos(model, other)}
    readings["repaired"] = repair(with_pos(model, other), math.sqrt(2))
    lengths = [recipe.train_len * multiple for multiple in (1, 2, 4, 8, 16)]
    windows = spread_windows(TokenData(recipe.data, "val"), lengths[-1], 8)
    return {
        name: [float(window_loss(model, windows, n).mean()) for n in lengths]
        for name, model in readings.items()
    }


def main(argv=None):
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="FoPE models of one recipe")
    args = parser.parse_args(argv)
    numbers = {"random": of_random_logits(), "runs": {run: losses(run) for run in args.runs}}
    print("random q and k:", ", ".join(f"{k} {v:.3f}" for k, v in numbers["random"].items()))
    for name in ("other", "repaired") if args.runs else ():
        added = torch.tensor([r[name] for r in numbers["runs"].values()])
        added -= torch.tensor([r["own"] for r in numbers["runs"].values()])
        shown = [f"{x.mean():+.4f} ({x.std(correction=0):.4f})" for x in added.T]
        print(f"{name:8} more nats than its own pad at 1x to 16x, mean (std):", *shown)
    about = {"command": command(), **provenance(torch.device("cpu"))}
    write_json(args.out / "pad.json", about | numbers)


if __name__ == "__main__":
    one_sentence_errors(main)()
