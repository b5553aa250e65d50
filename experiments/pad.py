"""
What does it cost to read FoPE with another sine of the stopped pairs than it was trained with?

    python experiments/pad.py runs_out/tiny/text/fope_s*        one recipe, any seeds; minutes

Released code pads the sine with 1, the paper's equations with 0 (docs/implementations.md). Look at:
how far the logits of random queries and keys move in the shape of Intern-S1-Pro; and with trained
models, the loss at 1x and 8x with sine 0 over that with their own 1, mean and std over the seeds.
"""

import math

import torch
from shared import Parser, save

from checkpoint import load_checkpoint, with_pos
from common import Refused, one_sentence_errors
from data import TokenData, window_loss
from evaluation import spread_windows
from fope import FoPE

INTERN = dict(head_dim=128, n_head=4, train_len=262_144, theta=5e6, sigma=0.5, cap=False)


def of_random_logits(n_keys=512):
    """Std of the logits with sine 1 and 0, and how often the most attended of n_keys stays."""
    logits = {}
    for sin_pad in (1, 0):
        torch.manual_seed(0)
        pos = FoPE(**INTERN, sin_pad=float(sin_pad))
        q, k = pos.rotate(*torch.randn(2, 1, 4, n_keys, 128))
        logits[sin_pad] = q[0] @ k[0].transpose(-2, -1) / math.sqrt(128)
    ones, zeros = logits[1], logits[0]
    stays = (ones.argmax(-1) == zeros.argmax(-1)).float().mean()
    numbers = {"std_1": ones.std(), "std_0": zeros.std(), "same_key": stays}
    numbers["change_in_stds"] = (ones - zeros).std() / ones.std()
    return {name: x.item() for name, x in numbers.items()}


def losses(run):
    """{"1x" and "8x": [the loss with sine 1, with sine 0]} of a FoPE model of train.py."""
    model, _, _ = load_checkpoint(run)
    recipe = model.config
    if recipe.pos != "fope" or model.blocks[0].attn.pos.sin_pad != 1:
        raise Refused(f"{run} is no FoPE whose stopped pairs have sine 1")
    models = model, with_pos(model, recipe.changed(pos_args={"sin_pad": 0.0}))
    windows = spread_windows(TokenData(recipe.data, "val"), 8 * recipe.train_len, 16)
    return {
        f"{n}x": [float(window_loss(m, windows, n * recipe.train_len).mean()) for m in models]
        for n in (1, 8)
    }


def main(argv=None):
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="FoPE models of one recipe")
    args = parser.parse_args(argv)
    numbers = {"random": of_random_logits(), "runs": {run: losses(run) for run in args.runs}}
    for n in ("1x", "8x") if args.runs else ():
        more = torch.tensor([row[n][1] - row[n][0] for row in numbers["runs"].values()])
        print(f"{n}: {more.mean():+.4f} nats, std over the runs {more.std():.4f}")
    print("random q and k:", numbers["random"])
    save(numbers, args.out, "pad")


if __name__ == "__main__":
    one_sentence_errors(main)()
