"""
What eval_perplexity.py and eval_passkey.py share: flags, the model that is read, lengths, results.
"""

import argparse
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

import common
from checkpoint import load_checkpoint, with_pos
from common import Refused
from fope import PositionError
from recipe import MAY_CHANGE, Keywords, parse_lengths


def spread_windows(data, length, n):
    """n windows of length + 1 tokens, spread evenly over a split of data: (n, length + 1)."""
    if len(data) <= length:
        raise Refused(f"a text of {length:,} tokens is to be read, {data.folder} has {len(data):,}")
    starts = np.linspace(0, len(data) - 1 - length, n).astype(int)
    return np.stack([data.read(int(start), length + 1) for start in starts])


def evaluation_parser(doc):
    parser = common.ArgumentParser(doc)
    add = parser.add_argument
    add("run", type=Path, help="the --out folder of a training run")
    add("--lengths", help="1x,4x of the training length, or 128,256; by default the recipe's")
    add("--out", type=Path, help="json file of the result; by default in the run's folder")
    add("--label", help="name in figures and tables; by default what is special about the model")
    common.add_device_flag(parser)
    keywords = dict(nargs="*", metavar="K=V", action=Keywords, default={})
    add(
        "--pos_args",
        **keywords,
        help="changed keywords of the embedding, such as window=512; with --out",
    )
    add(
        "--rope_scaling",
        **keywords,
        help="lower frequencies without training: kind=yarn, ntk, slow, interpolate or none; "
        "temperature=true; factor=4, or by default the length that is read / the training length; "
        "with --out",
    )
    return parser


def load_for_evaluation(args, **fields):
    """
    (model, what its result says of its training) of the run args.run, with its embedding changed as
    the flags say. fields: of the recipe; those that are not None change it.
    """
    device = common.init_distributed(args.device)
    model, about, state = load_checkpoint(args.run)
    fields = {name: value for name, value in fields.items() if value is not None}
    flags = ("pos_args", "rope_scaling")
    changes = {flag: value for flag in flags if (value := getattr(args, flag))}
    config = model.config.read_with(**fields, **changes)
    if changes:
        if not args.out:
            raise Refused("a changed embedding needs --out, beside the trained one's result")
        changed = with_pos(model, config.check())
        longest = max(2 * config.train_len, *parse_lengths(config.lengths, config.train_len))
        check_effect(model, scaled_to(changed, longest)[0], longest)
        model = changed
        print(f"{config.pos} with {config.pos_args} {config.rope_scaling or ''}")
    model.config = config.check()
    trained = {"trained_on": about.get("data_sha256"), "step": state.get("step")}
    trained |= {name: value for name, value in about.items() if name == "own_code"}
    if (step := state.get("step", config.n_steps)) < config.n_steps:
        print(f"note: {args.run} is at step {step:,} of {config.n_steps:,}: --resume finishes it")
    return model.to(device), trained


@torch.no_grad()
def check_effect(old, new, length):
    """
    Refuse a changed embedding that attends as before, since one of one's own may ignore a keyword:
    what is read would have the name of a change and the number of none.
    """
    config, generator = new.config, torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, config.n_head, length, config.head_dim, generator=generator)
    try:
        before, after = (
            pos.attend(*pos.rotate(q, k), v)
            for pos in (model.blocks[0].attn.pos for model in (old, new))
        )
    except PositionError:  # the text is too long for it
        return
    if torch.equal(before, after):
        changes = f"{config.pos_args} {config.rope_scaling or ''}".strip()
        raise Refused(f"{config.pos} with {changes} reads {length:,} tokens as it does without")


def result_file(args, recipe, kind, corpus="", **read):
    """
    The path of the result, checked before the work: --out, or RUN/KIND.json or
    RUN/KIND_CORPUS.json. Refused where it holds a result of another kind or model, of one that has
    read something else, or of more lengths, tokens or trials.
    """
    out = args.out or Path(args.run) / f"{'_'.join(filter(None, (kind, corpus)))}.json"
    if out.exists():
        stored = common.read_json(out)
        stored = stored if isinstance(stored, dict) else {}  # a list of results, for example
        old = stored.get("recipe", {}) | {name: stored.get(name) for name in ("kind", *read)}
        new = asdict(recipe) | {"kind": kind, **read}
        if any(old.get(name) != value for name, value in new.items() if name not in MAY_CHANGE):
            raise Refused(f"--out {out} holds something else; give another name")
        lengths = map(str, parse_lengths(recipe.lengths, recipe.train_len))
        fewer = any(old.get(name, 0) > new[name] for name in ("read_tokens", "trials"))
        if fewer or not stored["lengths"].keys() <= set(lengths):
            raise Refused(f"{out} holds more than this would; give another name by --out")
    common.make_folder(out.parent)
    return out


def seed_int(text):
    """A type for argparse: what torch takes."""
    if not 0 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError("must be at least 0 and less than 2^63")
    return int(text)


def scaled_to(model, length):
    """
    (model, {}), or where its --rope_scaling has no factor the model whose frequencies are scaled to
    a text of this length, by length / original_len, and {"factor": that number}.
    """
    scaling = model.config.rope_scaling
    if not scaling or "factor" in scaling:
        return model, {}
    factor = {"factor": max(1.0, length / scaling["original_len"])}
    scaled = with_pos(model, replace(model.config, rope_scaling=scaling | factor))
    return scaled.to(model.head.weight.device), factor


def evaluate_lengths(model, evaluate):
    """
    evaluate(model, length) -> dict, for every length of the model's recipe, printed as a table: two
    dicts by length, the results and why a length was skipped: evaluate refuses it, the embedding
    cannot read it, or the memory does not suffice. Refused where no length is left, and for a model
    that gives no numbers.
    """
    results, skipped, train_len = {}, {}, model.config.train_len
    for length in parse_lengths(model.config.lengths, train_len):
        try:
            scaled, factor = scaled_to(model, length)
            row = evaluate(scaled, length) | factor
        except (Refused, PositionError) as e:
            skipped[length] = str(e)
        except (MemoryError, RuntimeError) as e:
            if not common.is_out_of_memory(e) or common.world_size() > 1:
                raise  # of several processes one cannot skip alone
            skipped[length] = "out of memory"
        if length in skipped:
            print(f"length {length:,} is skipped: {skipped[length]}", file=sys.stderr)
            continue
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        if not all(map(math.isfinite, numbers.values())):
            raise Refused(f"the model has diverged: it gives no finite loss at length {length:,}")
        results[length] = row
        if len(results) == 1:
            print(f"{'length':>15}" + "".join(f"{name:>16}" for name in numbers))
        cells = (f"{v:>16,}" if isinstance(v, int) else f"{v:>16.4f}" for v in numbers.values())
        print(f"{f'{length:,} ({length / train_len:g}x)':>15}{''.join(cells)}", flush=True)
    if not results:
        raise Refused("no length could be evaluated")
    return {"lengths": results, "skipped": skipped}


def write_result(out, model, about, measured):
    """The json of an evaluation: what was read by which model, from where, and how it did."""
    if common.rank() == 0:
        if measured["skipped"] and out.exists():  # what an earlier evaluation could read stays
            old = {int(n): row for n, row in common.read_json(out)["lengths"].items()}
            measured["lengths"] = dict(sorted((old | measured["lengths"]).items()))
        here = {"command": common.command(), **common.provenance(next(model.parameters()).device)}
        common.write_json(out, {"recipe": asdict(model.config), **here, **about, **measured})
    print(f"wrote {out}")
