"""
What is measured, of windows of text and of a task, and what both command lines share:
eval_perplexity.py and eval_passkey.py.
"""

import argparse
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import common
from checkpoint import load_checkpoint, with_pos
from common import Refused
from data import cut, slices, window_loss
from recipe import MAY_CHANGE, Keywords, parse_lengths


def spread_windows(data, length, n):
    """n windows of length + 1 tokens, spread evenly over a split of data: (n, length + 1)."""
    if len(data) <= length:
        raise Refused(f"a text of {length:,} tokens is to be read, {data.folder} has {len(data):,}")
    starts = np.linspace(0, len(data) - 1 - length, n).astype(int)
    return np.stack([data.read(int(start), length + 1) for start in starts])


def bytes_of_tokens(encoding):
    """The length in bytes of each token: (n_vocab,) int64. The end of text has none."""
    tokens = map(encoding.decode_single_token_bytes, range(encoding.eot_token))  # it is the last
    return np.array([*map(len, tokens), 0])


def text_row(model, tokens, length, token_bytes, show=False):
    """
    What a result says of text at one length, tokens as window_loss takes them, and the bytes of
    each token: nats per token, perplexity, and bits per byte, in which all tokenizers can be
    compared; then the loss along the window, in at most 128 bins, and that of each window.
    """
    losses, (_, targets) = window_loss(model, tokens, length, show), cut(tokens, length)
    loss, n_bytes = float(losses.mean()), int(token_bytes[targets].sum())
    bins = np.array_split(losses.mean(axis=0), min(128, losses.shape[1]))
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss * targets.size / n_bytes / math.log(2),
        "tokens": targets.size,
        "by_position": [round(float(b.mean()), 4) for b in bins],
        "by_window": losses.mean(axis=1).round(4).tolist(),
    }


# --- tasks


@torch.no_grad()
def task_accuracy(model, task, length, trials, seed=0, generate=False, show=False):
    """
    The results of `trials` trials of a task, of `length` tokens: a dict with exact-match accuracy
    and its 95 % interval, the share of answer tokens right, and the answer's mean NLL in nats per
    token; then for each trial the distance in tokens from the end of the needle to the answer,
    whether it was right, and the share of its answer tokens that was.

    Greedy decoding gives the answer if and only if every answer token is the arg-max given the
    true prefix: up to the first wrong token both have read the same. So one forward pass decides a
    trial, and at the same time shows how many of the tokens come out right when the ones before
    are given. With generate=True exact match is taken from decoding token by token instead, which
    is slower and must agree.
    """
    rng = np.random.default_rng((seed, length))  # the same trials for every model
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    samples = [task.sample(length, rng) for _ in range(trials)]
    results = np.zeros((3, trials))
    exact, share, nll = results
    for rows in slices(trials, length, device, show):
        tokens = torch.from_numpy(np.stack([t for t, *_ in samples[rows]])).to(device)
        n_max = max(n for _, n, *_ in samples[rows])
        answers = tokens[:, -n_max:]
        with common.autocast(device):
            logits = model(tokens[:, :-1], positions=slice(-n_max, None)).float()
        right = (logits.argmax(dim=-1) == answers).cpu().numpy()  # (rows, n_max)
        losses = F.cross_entropy(logits.transpose(1, 2), answers, reduction="none").cpu().numpy()
        for r, (_, n, *_) in enumerate(samples[rows]):
            i = rows.start + r
            exact[i], share[i] = right[r, -n:].all(), right[r, -n:].mean()
            nll[i] = losses[r, -n:].mean()
            if generate:
                with common.autocast(device):
                    decoded = [*model.generate(tokens[r : r + 1, :-n], n, temperature=0)]
                exact[i] = torch.equal(torch.cat(decoded, dim=1)[0], tokens[r, -n:])
    model.train(was_training)
    common.all_reduce_sum(torch.from_numpy(results))  # in place: each process has its own trials
    each = {"distance": [distance for *_, distance in samples]}
    each |= {"right": exact.astype(int).tolist(), "share_right": share.round(2).tolist()}
    return summary(exact, share, nll) | each


def summary(exact, share, nll):
    """What task_accuracy returns, from the results of each trial."""
    low, high = wilson_interval(int(exact.sum()), len(exact))
    return {
        "accuracy": float(exact.mean()),
        "accuracy_low": low,
        "accuracy_high": high,
        "token_accuracy": float(share.mean()),
        "answer_nll": float(nll.mean()),
        "trials": len(exact),
    }


def wilson_interval(successes, n, z=1.959964):
    """The 95 % score interval of a proportion (Wilson, 1927): honest also near 0 and 1."""
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


# --- what both command lines share


def evaluation_parser(doc):
    parser = common.ArgumentParser(doc)
    add = parser.add_argument
    add("run", type=Path, help="the --out folder of a training run")
    add("--lengths", help="such as 1x,4x of the training length, or 128,256; else the recipe's")
    add("--out", type=Path, help="the json file; without it beside the checkpoint")
    add("--label", help="the model's name in figures and tables, if not its embedding's")
    common.add_device_flag(parser)
    words = dict(nargs="*", metavar="K=V", action=Keywords, default={})
    add("--pos_args", **words, help="change the embedding's keywords, such as window=512")
    kinds = "yarn, ntk, slow or interpolate; without factor=4 the factor follows from each length"
    add("--rope_scaling", **words, help=f"slower frequencies, untrained: kind=yarn ({kinds})")
    return parser


def load_for_evaluation(args, **asked):
    """
    (model, what its result says of the training) of args.run. asked: fields of the recipe, those
    that are not None change it. The embedding is changed as the flags say.
    """
    device = common.init_distributed(args.device)
    model, about, state = load_checkpoint(args.run)
    asked = {name: value for name, value in asked.items() if value is not None}
    flags = ("pos_args", "rope_scaling")
    changes = {flag: value for flag in flags if (value := getattr(args, flag))}
    config = model.config.read_with(**asked, **changes)
    if changes:
        if not args.out:
            raise Refused("a changed embedding needs --out, beside the trained one's result")
        model = with_pos(model, config)
        print(f"{config.pos} with {config.pos_args} {config.rope_scaling or ''}")
    model.config = config.check()
    trained = {"trained_on": about.get("data_sha256"), "step": state.get("step")}
    if (step := state.get("step", config.n_steps)) < config.n_steps:
        print(f"note: {args.run} is at step {step:,} of {config.n_steps:,}: --resume finishes it")
    return model.to(device), trained


def result_file(args, recipe, kind, corpus="", **read):
    """
    Where the result goes, RUN/KIND.json or RUN/KIND_CORPUS.json if not to --out: known now and not
    after the work. It may replace one of the same kind and model, which has read the same, alone.
    """
    out = args.out or Path(args.run) / f"{'_'.join(filter(None, (kind, corpus)))}.json"
    if out.exists():
        old = common.read_json(out)
        was = old.get("recipe", {}) | {name: old.get(name) for name in ("kind", *read)}
        asked = asdict(recipe) | {"kind": kind, **read}
        if any(was.get(name) != x for name, x in asked.items() if name not in MAY_CHANGE):
            raise Refused(f"--out {out} holds something else; give another name")
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
    dicts by length, the results and why a length was skipped. That is one which evaluate refuses,
    or for which the memory does not suffice. Refused where no length is left, and for a model that
    gives no numbers.
    """
    results, skipped, train_len = {}, {}, model.config.train_len
    for length in parse_lengths(model.config.lengths, train_len):
        try:
            scaled, factor = scaled_to(model, length)
            row = evaluate(scaled, length) | factor
        except (Refused, MemoryError, RuntimeError) as e:
            no_memory = common.is_out_of_memory(e) and common.world_size() == 1
            if not isinstance(e, Refused) and not no_memory:
                raise  # of several processes one cannot skip alone
            skipped[length] = "out of memory" if no_memory else str(e)
            print(f"length {length:,} is skipped: {skipped[length]}", file=sys.stderr)
            continue
        shown = {k: v for k, v in row.items() if isinstance(v, int | float)}
        if not all(map(math.isfinite, shown.values())):
            raise Refused(f"the model has diverged: it gives no finite loss at length {length:,}")
        results[length] = row
        if len(results) == 1:
            print(f"{'length':>15}" + "".join(f"{name:>16}" for name in shown))
        cells = (f"{v:>16,}" if isinstance(v, int) else f"{v:>16.4f}" for v in shown.values())
        print(f"{f'{length:,} ({length / train_len:g}x)':>15}{''.join(cells)}", flush=True)
    if not results:
        raise Refused("no length could be evaluated")
    return {"lengths": results, "skipped": skipped}


def write_result(out, model, about, measured):
    """The json of an evaluation: what was read by which model, from where, and how it did."""
    if common.rank() == 0:
        here = {"command": common.command(), **common.provenance(next(model.parameters()).device)}
        common.write_json(out, {"recipe": asdict(model.config), **here, **about, **measured})
    print(f"wrote {out}")
