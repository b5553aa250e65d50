"""
What both evaluations share: their flags, the model with its position embedding as the flags say,
the table on the screen, and the json with its provenance.
"""

import json
import math
import re
import sys
from pathlib import Path

from checkpoint import load_run, with_pos
from common import (
    ArgumentParser,
    add_device_flag,
    init_distributed,
    is_out_of_memory,
    number,
    provenance,
    rank,
    write_json,
)

# On a CPU what stays in its cache is read a third faster.
TOKENS_PER_BATCH = {"cpu": 2048, "accelerator": 8192}


def batch_rows(device, length):
    """How many windows of `length` tokens are read at once."""
    kind = "cpu" if device.type == "cpu" else "accelerator"
    return max(1, TOKENS_PER_BATCH[kind] // length)


class DoesNotFit(ValueError):
    """This length cannot be evaluated, and the message says why; others can."""


# -----------------------------------------------------------------------------
# flags


def evaluation_parser(doc):
    parser = ArgumentParser(doc)
    add = parser.add_argument
    add("checkpoint", help="the --out folder of a training run")
    add("--lengths", help="such as 128,256 tokens; without it 1x,2x,4x,8x,16x the training length")
    add("--out", help="the json file; without it beside the checkpoint")
    add("--label", help="the model's name in figures and tables, if not its embedding's")
    add_device_flag(parser)
    add_pos_flags(parser)
    return parser


def add_pos_flags(parser):
    """Flags of the position embedding, which training and evaluation both have."""
    add, factor = parser.add_argument, number(float, 1, 10**9)
    add("--pos_args", nargs="*", default=[], metavar="K=V", help="such as variant=paper sigma=0.4")
    add("--yarn_scale", type=factor, help="read this many times the trained length, by YaRN")
    add("--yarn_temperature", action="store_true", help="as YaRN's paper; FoPE's leaves it out")
    add("--pi_scale", type=factor, help="the same, but by position interpolation")


def parse_pos_args(pairs):
    """["sigma=0.4", "variant=paper"] -> {"sigma": 0.4, "variant": "paper"}."""
    keywords = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or key in keywords:
            raise ValueError(f"--pos_args {pair!r} is not of the form keyword=value, each once")
        try:
            keywords[key] = json.loads(text)
        except ValueError:
            keywords[key] = text
    return keywords


def parse_rope_scaling(args, trained):
    """
    GPTConfig.rope_scaling as the flags say, None where they say nothing. They lower frequencies
    that a model, whose config is `trained`, has learned at its training length.
    """
    if args.yarn_scale and args.pi_scale:
        raise ValueError("--yarn_scale and --pi_scale both lower the frequencies: give one of them")
    factor = args.yarn_scale or args.pi_scale
    if factor is None:
        if args.yarn_temperature:
            raise ValueError("--yarn_temperature goes with --yarn_scale")
        return None
    if trained is None:
        raise ValueError("--yarn_scale and --pi_scale are for a trained model: use --init_from")
    original_len = (trained.rope_scaling or {}).get("original_len", trained.train_len)
    kind = "yarn" if args.yarn_scale else "interpolate"
    scaling = {"kind": kind, "factor": factor, "original_len": original_len}
    return scaling | ({"temperature": True} if args.yarn_temperature else {})


def parse_lengths(text, train_len):
    if text is None:
        return [train_len * factor for factor in (1, 2, 4, 8, 16)]
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise ValueError(f"--lengths {text!r} is no list of token counts such as 128,256")
    return sorted({int(n) for n in text.split(",")})


def load_for_evaluation(args):
    """The run to evaluate, its embedding changed as the flags say: (model, metadata, state)."""
    device = init_distributed(args.device)
    model, metadata, state = load_run(args.checkpoint)
    pos_args, scaling = parse_pos_args(args.pos_args), parse_rope_scaling(args, model.config)
    if pos_args or scaling:
        if not args.out:
            raise ValueError("a changed embedding needs --out, beside the trained one's result")
        config = model.config
        pos_args, scaling = config.pos_args | pos_args, scaling or config.rope_scaling
        model = with_pos(model, pos_args=pos_args, rope_scaling=scaling)
        print(f"{config.pos} with {pos_args} {scaling or ''}")
    return model.to(device), metadata, state


# -----------------------------------------------------------------------------
# the loop over lengths


def evaluate_lengths(args, kind, evaluate, model, metadata, **extra):
    """
    Run evaluate(length) -> dict for every length, print the table, write the json. A length for
    which evaluate raises DoesNotFit, or the memory does not suffice, is reported and skipped.
    ValueError where no length is left, and for a model that gives no numbers.
    """
    config = model.config
    out = Path(args.out or Path(args.checkpoint) / f"{kind}.json")
    if out.is_dir() or out.name == "config.json":
        raise ValueError(f"--out {out} is no file for results")
    out.parent.mkdir(parents=True, exist_ok=True)  # now, not after the work
    done, skipped = {}, {}
    for length in parse_lengths(args.lengths, config.train_len):
        try:
            row = evaluate(length)
        except (DoesNotFit, MemoryError, RuntimeError) as e:
            if not isinstance(e, DoesNotFit) and not is_out_of_memory(e):
                raise
            skipped[length] = str(e) if isinstance(e, DoesNotFit) else "out of memory"
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
    sizes = ("n_layer", "n_head", "n_embd", "vocab_size", "theta", "init_std", "qk_norm")
    embedding = ("pos", "pos_args", "rope_scaling", "train_len", "seed")
    result = {
        "kind": kind,
        "label": args.label,
        **{name: getattr(config, name) for name in embedding},
        "model": {name: getattr(config, name) for name in sizes},
        "tokenizer": metadata["tokenizer"],
        "training": metadata["training"],
        **provenance(next(model.parameters()).device),
        **extra,
        "lengths": done,
        "skipped": skipped,
    }
    if rank() == 0:
        write_json(out, result)
    print(f"wrote {out}")
