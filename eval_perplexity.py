"""
Loss and perplexity against length: does a model keep reading well past the length it was trained at?

    python eval_perplexity.py runs_out/fope                              1x, 2x, 4x, 8x, 16x the training length
    python eval_perplexity.py runs_out/fope --data data/c4 --lengths 512,8192
    python eval_perplexity.py runs_out/rope --yarn_scale 4               with frequencies lowered for 4 times the length

At every length L the same validation tokens are cut into non-overlapping windows of L, and the loss is the total negative
log-likelihood over all tokens scored: nats per token; perplexity is its exponential. A longer window gives most tokens
more context, so a model that can use it gets better with L, and one that cannot gets worse.
"""

import json
import math
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from model import autocast, join_processes, load_checkpoint, processes, sum_over_processes, with_pos, write_json
from prepare_data import ArgumentParser, TokenData, is_out_of_memory, one_sentence_errors

TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 8192}  # on a CPU what stays in its cache is read a third faster


@torch.no_grad()
def window_loss(model, tokens, length, progress=None):
    """
    Loss of `tokens` (a 1-D int64 array) read in non-overlapping windows of `length`: (length,) fp64, the mean over the
    windows of the loss in nats at each position of the window. Its mean is the loss per token: all windows are whole.

    Raises ValueError where the tokens do not fill one window (of `length` inputs and the target of the last).
    """
    n_windows = (len(tokens) - 1) // length
    if n_windows < 1:
        raise ValueError(f"{len(tokens):,} tokens are too few for one window of {length:,} and its last target")
    inputs = tokens[: n_windows * length].reshape(n_windows, length)
    targets = tokens[1 : n_windows * length + 1].reshape(n_windows, length)
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    total = torch.zeros(length, dtype=torch.float64, device=device)
    batch, (rank, n_processes) = max(1, TOKENS_PER_BATCH[device.type] // length), processes()
    for i in range(rank * batch, n_windows, n_processes * batch):
        rows = slice(i, i + batch)
        x, y = (torch.from_numpy(a[rows]).to(device) for a in (inputs, targets))
        with autocast(device):
            loss = model(x, y, reduction="none")
        total += loss.sum(dim=0, dtype=torch.float64)
        if progress is not None:
            progress.update(n_processes * x.numel())
    model.train(was_training)
    return (sum_over_processes(total) / n_windows).cpu().numpy()


# -----------------------------------------------------------------------------
# what both evaluations share: flags, checks, provenance of a result


def evaluation_parser(doc):
    parser = ArgumentParser(doc)
    parser.add_argument("checkpoint", help="the --out folder of a training run")
    parser.add_argument("--lengths", help="comma-separated, in tokens (default: 1x,2x,4x,8x,16x the training length)")
    parser.add_argument("--out", help="the json file (default: in results/, named after the checkpoint)")
    parser.add_argument("--label", help="the model's name in figures and tables (default: its position embedding)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add_pos_flags(parser)
    return parser


def add_pos_flags(parser):
    add = parser.add_argument
    add("--pos_args", nargs="*", default=[], metavar="K=V", help="keywords of the embedding, such as variant=paper sigma=0.4")
    add("--yarn_scale", type=float, help="read this many times the length that the frequencies were trained at, by YaRN")
    add("--pi_scale", type=float, help="the same, but by position interpolation")


def parse_pos_args(args, trained=None):
    """
    The keywords of a position embedding that the flags give, as a dict: ["sigma=0.4"] -> {"sigma": 0.4}. The scales lower
    frequencies that a model, whose config is `trained`, has learned at its training length.
    """
    keywords = {}
    for pair in args.pos_args:
        key, equals, text = pair.partition("=")
        if not equals or key in keywords:
            raise ValueError(f"--pos_args {pair!r} is not of the form keyword=value, each keyword once")
        try:
            keywords[key] = json.loads(text)
        except ValueError:
            keywords[key] = text
    for name in ("yarn_scale", "pi_scale"):
        if (scale := getattr(args, name)) is not None:
            keywords[name] = scale
        if name in keywords:
            if trained is None:
                raise ValueError(f"--{name} lowers the frequencies of a trained model: it needs --init_from")
            keywords.setdefault("original_len", trained.pos_args.get("original_len", trained.train_len))
    return keywords


def load_run(folder, device):
    """load_checkpoint for a run of train.py, which alone knows its data and tokenizer."""
    model, about, state = load_checkpoint(folder, device)
    if not {"data", "tokenizer", "training"} <= about.keys() or not {"step", "optimizer"} <= state.keys():
        raise ValueError(f"{folder} holds a model, but not one that train.py wrote: its data and tokenizer are unknown")
    return model, about, state


def load_for_evaluation(args):
    """The run to evaluate, with the position embedding changed as the flags say: (model, about, state)."""
    device = join_processes(args.device)
    model, about, state = load_run(args.checkpoint, "cpu")
    if changes := parse_pos_args(args, model.config):
        if not args.out:
            raise ValueError("a changed embedding needs --out: its result must not replace the trained one's")
        model, what = with_pos(model, pos_args=model.config.pos_args | changes)
        print(what)
    return model.to(device), about, state


def parse_lengths(text, train_len):
    if text is None:
        return [train_len * factor for factor in (1, 2, 4, 8, 16)]
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise ValueError(f"--lengths {text!r} is no comma-separated list of token counts such as 128,256")
    return sorted({int(n) for n in text.split(",")})


def git_commit():
    """
    The commit that the code is at, "-dirty" with uncommitted changes to anything but results/, where figures and numbers are
    written; "unknown" outside a git checkout.
    """

    def git(*args):
        return subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True)

    try:
        commit = git("rev-parse", "--short=12", "HEAD").stdout.strip()
        changed = git("diff", "--quiet", "HEAD", "--", ".", ":(exclude)results").returncode
        return commit + "-dirty" * bool(commit and changed) or "unknown"
    except OSError:
        return "unknown"


def provenance(device):
    """Where a result comes from: command, commit, hardware and software."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if (n_processes := processes()[1]) > 1:
        hardware = f"{n_processes} x {hardware}"
    return {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": git_commit(),
        "hardware": hardware,
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
    }


def read_log(folder):
    """The lines of a run's log.jsonl as dicts, up to one that is damaged or half-written; [] without a log."""
    path, lines = Path(folder) / "log.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            line = json.loads(line)
            if not all(isinstance(line[key], int | float) for key in ("step", "tokens", "loss")):
                break
        except (ValueError, KeyError, TypeError):
            break
        lines.append(line)
    return lines


def evaluate_lengths(args, kind, evaluate, model, about, **more):
    """
    Run evaluate(length) -> dict for every length, print the table, write the json. A length it refuses with a ValueError,
    or for which the memory does not suffice, is reported and skipped. Raises ValueError where no length is left, and for
    a model that gives no numbers.
    """
    out = Path(args.out or Path("results") / f"{Path(args.checkpoint).resolve().name}_{kind}.json")
    if out.is_dir() or out.name == "config.json":
        raise ValueError(f"--out {out} is no file for results")
    out.parent.mkdir(parents=True, exist_ok=True)  # now, not after the work
    done, skipped = {}, {}
    lengths = parse_lengths(args.lengths, model.config.train_len)
    for length in lengths:
        try:
            row = evaluate(length)
        except (ValueError, MemoryError, RuntimeError) as e:
            if not isinstance(e, ValueError) and not is_out_of_memory(e):
                raise
            skipped[length] = str(e) if isinstance(e, ValueError) else "out of memory"
            print(f"length {length:,} is skipped: {skipped[length]}", file=sys.stderr)
            continue
        show = {k: v for k, v in row.items() if isinstance(v, int | float)}
        if not all(map(math.isfinite, show.values())):
            raise ValueError(f"{args.checkpoint} has diverged: it gives no finite loss at length {length:,}")
        done[length] = row
        if len(done) == 1:
            print(f"{'length':>15}" + "".join(f"{name:>16}" for name in show))
        cells = "".join(f"{v:>16,}" if isinstance(v, int) else f"{v:>16.4f}" for v in show.values())
        print(f"{f'{length:,} ({length / model.config.train_len:g}x)':>15}{cells}", flush=True)
    if not done:
        raise ValueError("no length could be evaluated")
    config = model.config
    result = {
        "kind": kind,
        "label": args.label,
        **{name: getattr(config, name) for name in ("pos", "pos_args", "train_len", "seed")},
        "model": {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size", "init_std", "qk_norm")},
        "tokenizer": about["tokenizer"],
        "training": about["training"],
        **provenance(next(model.parameters()).device),
        **more,
        "lengths": done,
        "skipped": skipped,
    }
    if processes()[0] == 0:
        write_json(out, result)
    print(f"wrote {out}")


def main(argv=None):
    parser = evaluation_parser(__doc__)
    parser.add_argument("--data", help="data folder whose validation split is read (default: the one trained on)")
    parser.add_argument("--max_tokens", type=int, help="read only this many validation tokens")
    args = parser.parse_args(argv)
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ValueError("--max_tokens must be at least 1")
    model, about, state = load_for_evaluation(args)
    data = TokenData(args.data or about["data"], "val")
    if data.tokenizer_id() != about["tokenizer"]:
        raise ValueError(
            f"{args.checkpoint} was trained with the tokenizer {about['tokenizer']}, "
            f"{data.folder} holds tokens of {data.tokenizer_id()}: their losses cannot be compared"
        )
    n_tokens = min(len(data), args.max_tokens or len(data))
    # all lengths score the same tokens: as many as fill whole windows of the longest that fits
    fitting = [n for n in parse_lengths(args.lengths, model.config.train_len) if n < n_tokens]
    n_scored = (n_tokens - 1) // max(fitting, default=1) * max(fitting, default=1)
    tokens = data.read(0, n_scored + 1)
    by_position = {}

    def evaluate(length):
        if length not in fitting:
            raise ValueError(f"{data.folder} has {n_tokens:,} validation tokens to read, too few for one window")
        with tqdm(
            total=n_scored, unit="tok", unit_scale=True, desc=f"length {length}", leave=False, disable=processes()[0] > 0
        ) as bar:
            losses = window_loss(model, tokens, length, bar)
        if length == max(fitting):
            bins = np.array_split(losses, min(128, length))
            starts = np.cumsum([0] + [len(b) for b in bins[:-1]])
            by_position.update(start=starts.tolist(), loss=[round(float(b.mean()), 5) for b in bins])
        loss = float(losses.mean())
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "tokens": n_scored // length * length}

    curve = [[line["tokens"], round(line["loss"], 4), line.get("val_loss")] for line in read_log(args.checkpoint)]
    more = {"data": str(data.folder), "step": state["step"], "curve": curve}
    evaluate_lengths(args, "perplexity", evaluate, model, about, **more, loss_by_position=by_position)


if __name__ == "__main__":
    one_sentence_errors(main)()
