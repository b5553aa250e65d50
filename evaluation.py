"""
What both evaluations share: their flags, the model with its position embedding as the flags say,
the table on the screen, and the json with its provenance.
"""

import math
import re
import sys
from dataclasses import asdict
from pathlib import Path

import common
from checkpoint import load_run, with_pos


def batch_rows(device, length):
    """How many windows of `length` tokens are read at once: on a CPU what stays in its cache."""
    return max(1, (2048 if device.type == "cpu" else 8192) // length)


class DoesNotFit(ValueError):
    """This length cannot be evaluated, and the message says why; others can."""


# --- flags


def evaluation_parser(doc):
    parser = common.ArgumentParser(doc)
    add = parser.add_argument
    add("checkpoint", help="the --out folder of a training run")
    add("--lengths", help="such as 128,256 tokens; without it 1x,2x,4x,8x,16x the training length")
    add("--out", help="the json file; without it beside the checkpoint")
    add("--label", help="the model's name in figures and tables, if not its embedding's")
    common.add_device_flag(parser)
    common.add_pos_flags(parser)
    return parser


def parse_lengths(text, train_len):
    if text is None:
        return [train_len * factor for factor in (1, 2, 4, 8, 16)]
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise ValueError(f"--lengths {text!r} is no list of token counts such as 128,256")
    return sorted({int(n) for n in text.split(",")})


def load_for_evaluation(args):
    """The run to evaluate, its embedding changed as the flags say: (model, metadata, state)."""
    device = common.init_distributed(args.device)
    model, metadata, state = load_run(args.checkpoint)
    pos_args = common.parse_keywords("--pos_args", args.pos_args)
    scaling = common.parse_rope_scaling(args, model.config)
    if pos_args or scaling:
        if not args.out:
            raise ValueError("a changed embedding needs --out, beside the trained one's result")
        config = model.config
        pos_args, scaling = config.pos_args | pos_args, scaling or config.rope_scaling
        model = with_pos(model, pos_args=pos_args, rope_scaling=scaling)
        print(f"{config.pos} with {pos_args} {scaling or ''}")
    return model.to(device), metadata, state


# --- the loop over lengths


def evaluate_lengths(args, kind, evaluate, model, metadata, **extra):
    """
    Run evaluate(length) -> dict of numbers for every length, print the table, write the json. A
    length for which evaluate raises DoesNotFit, or the memory does not suffice, is reported and
    skipped. ValueError where no length is left, and for a model that gives no numbers.
    """
    # the file, now and not after the work
    config = model.config
    out = Path(args.out or Path(args.checkpoint) / f"{kind}.json")
    if out.is_dir() or out.name == "config.json":
        raise ValueError(f"--out {out} is no file for results")
    out.parent.mkdir(parents=True, exist_ok=True)

    # length by length
    done, skipped = {}, {}
    for length in parse_lengths(args.lengths, config.train_len):
        try:
            row = evaluate(length)
        except DoesNotFit as e:
            skipped[length] = str(e)
        except (MemoryError, RuntimeError) as e:
            if common.world_size() > 1 or not common.is_out_of_memory(e):
                raise  # of several processes one cannot skip alone
            skipped[length] = "out of memory"
        if length in skipped:
            print(f"length {length:,} is skipped: {skipped[length]}", file=sys.stderr)
            continue
        shown = {k: v for k, v in row.items() if isinstance(v, int | float)}
        if not all(map(math.isfinite, shown.values())):
            what = f"it gives no finite loss at length {length:,}"
            raise ValueError(f"{args.checkpoint} has diverged: {what}")
        done[length] = row
        if len(done) == 1:
            print(f"{'length':>15}" + "".join(f"{name:>16}" for name in shown))
        cells = (f"{v:>16,}" if isinstance(v, int) else f"{v:>16.4f}" for v in shown.values())
        name = f"{length:,} ({length / config.train_len:g}x)"
        print(f"{name:>15}{''.join(cells)}", flush=True)
    if not done:
        raise ValueError("no length could be evaluated")

    # the result: what was read by which model, from where, and how it did
    sizes = asdict(config)
    embedding = ("pos", "pos_args", "rope_scaling", "train_len", "seed")
    result = {
        "kind": kind,
        "label": args.label,
        **{name: sizes.pop(name) for name in embedding},
        "model": sizes,
        "tokenizer": metadata["tokenizer"],
        "training": metadata["training"],
        **common.provenance(next(model.parameters()).device),
        **extra,
        "lengths": done,
        "skipped": skipped,
    }
    if common.rank() == 0:
        common.write_json(out, result)
    print(f"wrote {out}")
