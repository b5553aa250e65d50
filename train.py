"""
Train a GPT with the position embedding of your choice, on a CPU, a GPU, or with torchrun on several.

    python train.py --data data/sotu --pos fope --preset tiny --passkey_frac 0.3 --out runs_out/fope      minutes on a CPU
    python train.py --data data/c4 --pos fope --preset 60M --compile --out runs_out/fope_60M              the paper's recipe
    python train.py --data data/c4 --init_from runs_out/rope_60M --yarn_scale 2 --train_len 1024 --out runs_out/yarn_60M
                                     another run's weights, with another position embedding or training length
    torchrun --nproc_per_node=4 train.py --data data/c4 --preset 60M --compile --out runs_out/fope_60M        four GPUs

Writes to --out: log.jsonl, config.json, and checkpoint.pt with weights, optimizer and step. Ctrl-C or SIGTERM finishes the
step and saves; the same command with --resume continues, on a CPU with bit-identical weights. Killed at any other moment,
it loses the steps since the last checkpoint.
"""

import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from eval_passkey import PasskeyTask
from eval_perplexity import add_pos_flags, load_run, parse_pos_args, read_log, window_loss
from fope import POSITION_EMBEDDINGS
from model import (
    GPT,
    SIZES,
    GPTConfig,
    autocast,
    join_processes,
    processes,
    read_json,
    save_checkpoint,
    sum_over_processes,
    with_pos,
)
from prepare_data import ArgumentParser, TokenData, one_sentence_errors

# What --preset decides where no flag does. The paper: 10B tokens in steps of 1024 sequences of 512, learning rate 6e-4.
# A tiny model with a tiny budget learns more from many small steps.
PAPER_RECIPE = dict(train_len=512, tokens=10_000_000_000, batch_size=1024, grad_accum=16, lr=6e-4)
RECIPES = {size: PAPER_RECIPE for size in SIZES} | {
    "tiny": dict(train_len=128, tokens=1_000_000, batch_size=8, grad_accum=1, lr=2e-3)
}


class Batches:
    """
    The training sequences as a pure function of their number, so that any step can be made again, by any process.

    Text is cut into windows of train_len; each is visited once per epoch, in an order that the seed and the epoch give.
    A share passkey_frac of the sequences, evenly spread, are passkey documents of the training length instead.
    """

    def __init__(self, data, train_len, batch_size, seed, passkey_frac=0.0, task=None):
        self.data, self.train_len, self.batch_size, self.seed = data, train_len, batch_size, seed
        self.passkey_frac, self.task = passkey_frac, task
        self.n_windows = (len(data) - 1) // train_len
        if self.n_windows < 1:
            raise ValueError(f"{data.folder} has {len(data):,} training tokens, too few for one window of {train_len:,}")
        self.epoch, self.order = None, None

    def text(self, i):
        """The i-th text window of training: train_len + 1 tokens, the last one the target of the one before."""
        epoch, position = divmod(i, self.n_windows)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng((self.seed, 0, epoch)).permutation(self.n_windows)
        return self.data.read(int(self.order[position]) * self.train_len, self.train_len + 1)

    def passkey(self, i):
        """The i-th passkey document: train_len tokens and the end of text."""
        tokens, _, _ = self.task.sample(self.train_len, np.random.default_rng((self.seed, 1, i)))
        return np.append(tokens, self.data.meta["eot"])

    def sequence(self, i):
        n_passkeys = math.floor(i * self.passkey_frac)  # among the i sequences before this one
        is_passkey = math.floor((i + 1) * self.passkey_frac) > n_passkeys
        return self.passkey(n_passkeys) if is_passkey else self.text(i - n_passkeys)

    def batch(self, step, rank=0, n_processes=1):
        """The sequences of one optimizer step, or a process's share: (batch_size / n_processes, train_len + 1) int64."""
        n = self.batch_size // n_processes
        first = step * self.batch_size + rank * n
        return torch.from_numpy(np.stack([self.sequence(i) for i in range(first, first + n)]))


def learning_rate(step, n_steps, warmup_steps, peak):
    """Linear warm-up, then a cosine to 10 % of the peak at the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, n_steps - 1 - warmup_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def parse_args(argv):
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    # data
    add("--data", required=True, help="folder that prepare_data.py wrote")
    add("--passkey_frac", type=float, default=0.0, help="share of the sequences that are passkey documents")
    # model
    add("--init_from", metavar="RUN", help="start from the weights of this run, and from its preset, --pos and --train_len")
    add("--preset", choices=SIZES, help="size of the model (default: tiny)")
    add("--pos", choices=POSITION_EMBEDDINGS, help="position embedding (default: fope)")
    add_pos_flags(parser)
    add("--n_layer", type=int, help="instead of the preset's")
    add("--n_head", type=int, help="instead of the preset's")
    add("--n_embd", type=int, help="instead of the preset's")
    add("--init_std", type=float, help="standard deviation of the weights at the start, instead of the preset's")
    add("--qk_norm", action="store_true", help="normalise queries and keys before they are rotated")
    add("--train_len", type=int, help="tokens per sequence (default: 128 for tiny, else 512)")
    # optimization
    add("--tokens", type=int, help="training tokens, rounded up to whole steps (default: 1M for tiny, else the paper's 10B)")
    add("--batch_size", type=int, help="sequences per optimizer step (default: 8 for tiny, else 1024)")
    add("--grad_accum", type=int, help="parts of a step, to fit memory; torchrun's processes share them (tiny: 1, else 16)")
    add("--lr", type=float, help="peak learning rate (default: 2e-3 for tiny, else 6e-4)")
    add("--warmup_steps", type=int, help="default: 5 %% of the steps, from 10B tokens on the paper's 10,000 (at most half)")
    add("--weight_decay", type=float, default=0.1, help="on every parameter, as in the paper")
    add("--seed", type=int, default=0, help="of the weights and of the data order")
    # run
    add("--out", required=True, help="folder of the run, for example runs_out/fope")
    add("--resume", action="store_true", help="continue the run in --out")
    add("--stop_at", type=int, help="save and stop after this step, as Ctrl-C would")
    add("--save_every", type=int, default=1000, help="steps between checkpoints")
    add("--eval_every", type=int, help="steps between validation losses (default: 10 in a run)")
    add("--eval_tokens", type=int, default=65536, help="validation tokens read for the loss at the training length")
    add("--log_every", type=int, default=10, help="steps between lines of log.jsonl")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--compile", action="store_true", help="torch.compile the blocks and the loss: slow to start, then faster")
    add("--deterministic", action="store_true", help="on CUDA only algorithms that give the same twice; a CPU does anyway")
    args = parser.parse_args(argv)

    if args.init_from:
        start = read_json(Path(args.init_from) / "config.json")
        trained = {k: v for part in ("training", "model") if isinstance(start.get(part), dict) for k, v in start[part].items()}
        known = trained.get("preset") in [*SIZES] and trained.get("pos") in [*POSITION_EMBEDDINGS]
        if not known or not isinstance(trained.get("train_len"), int):
            raise ValueError(f"{args.init_from}/config.json is damaged or was not written by train.py")
        for name in ("preset", "pos", "train_len"):
            if getattr(args, name) is None:
                setattr(args, name, trained.get(name))
        for name in ("preset", "n_layer", "n_head", "n_embd", "init_std", "qk_norm"):
            if getattr(args, name) and getattr(args, name) != trained.get(name):
                raise ValueError(f"--{name} is {trained.get(name)} in {args.init_from}, it cannot become {getattr(args, name)}")
    args.pos, args.preset = args.pos or "fope", args.preset or "tiny"
    for name, value in RECIPES.get(args.preset, {}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    counts = ("n_layer", "n_head", "n_embd", "train_len", "tokens", "batch_size", "grad_accum", "stop_at")
    for name in (*counts, "save_every", "eval_every", "eval_tokens", "log_every"):
        most = 10**6 if name in ("n_layer", "n_head", "n_embd") else 10**15
        if getattr(args, name) is not None and not 1 <= getattr(args, name) <= most:
            raise ValueError(f"--{name} must be at least 1 and at most {most:,}")
    ranges = dict(passkey_frac=(0, 1), init_std=(1e-6, 1), lr=(0, 1000), weight_decay=(0, 1000), seed=(0, 2**63 - 1))
    for name, (low, high) in ranges.items():
        if getattr(args, name) is not None and not low <= getattr(args, name) <= high:
            raise ValueError(f"--{name} must be between {low} and {high}")
    if args.batch_size % args.grad_accum:
        raise ValueError(f"--batch_size {args.batch_size} is not divisible by --grad_accum {args.grad_accum}")
    return args


def new_model(args, data):
    """The model that a run starts with: drawn from the seed, or with --init_from another run's, its embedding exchanged."""
    settings = {k: getattr(args, k) for k in ("pos", "train_len", "seed")}
    if not args.init_from:
        settings |= {k: getattr(args, k) for k in ("n_layer", "n_head", "n_embd", "init_std") if getattr(args, k) is not None}
        settings |= dict(pos_args=parse_pos_args(args), qk_norm=args.qk_norm, vocab_size=data.meta["vocab_size"])
        return GPT(GPTConfig.preset(args.preset, **settings))
    old, about, _ = load_run(args.init_from, "cpu")
    if about["tokenizer"] != data.tokenizer_id():
        raise ValueError(f"{args.init_from} has the tokenizer {about['tokenizer']}, {args.data} has {data.tokenizer_id()}")
    same = args.pos == old.config.pos
    pos_args = old.config.pos_args if same else GPTConfig.preset(args.preset, pos=args.pos).pos_args
    model, what = with_pos(old, pos_args=pos_args | parse_pos_args(args, old.config), **settings)
    print(what)
    return model


def main(argv=None):
    args = parse_args(argv)
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    out, device = Path(args.out), join_processes(args.device)
    rank, n_processes = processes()
    n_parts = max(1, args.grad_accum // n_processes)
    if args.batch_size % (n_parts * n_processes):
        raise ValueError(f"--batch_size {args.batch_size} cannot be divided into {n_parts} parts on {n_processes} processes")

    # data
    data = TokenData(args.data, "train")
    val_data = TokenData(args.data, "val")
    val_tokens = val_data.read(0, min(len(val_data), args.eval_tokens + 1))
    if len(val_tokens) <= args.train_len:
        raise ValueError(
            f"--train_len {args.train_len:,} needs more than {len(val_tokens):,} validation tokens; {args.data} has "
            f"{len(val_data):,} and --eval_tokens is {args.eval_tokens:,}"
        )
    task = PasskeyTask(data.tokenizer()) if args.passkey_frac else None
    batches = Batches(data, args.train_len, args.batch_size, args.seed, args.passkey_frac, task)
    if task:
        batches.passkey(0)  # a training length that the prompt does not fit is an error now, not later

    # schedule
    tokens_per_step = args.batch_size * args.train_len
    n_steps = math.ceil(args.tokens / tokens_per_step)
    if args.warmup_steps is None:
        args.warmup_steps = min(10_000, n_steps // 2) if args.tokens >= 10_000_000_000 else max(1, n_steps // 20)
    if not 0 <= args.warmup_steps < max(n_steps, 2):
        raise ValueError(f"--warmup_steps {args.warmup_steps:,} must be fewer than the {n_steps:,} steps of the run")
    eval_every = args.eval_every or max(1, n_steps // 10)

    # what defines the run: a resumed run must not differ in it, but for what changes the rounding alone
    not_recorded = ("out", "resume", "stop_at", "device", "save_every", "log_every", "deterministic")
    training = {k: v for k, v in vars(args).items() if k not in not_recorded}
    about = {"data": args.data, "n_windows": batches.n_windows, "tokenizer": data.tokenizer_id(), "training": training}

    # model and optimizer
    if args.resume:
        model, saved, state = load_run(out, device)
        for name, value in training.items():
            if saved["training"].get(name) != value and name not in ("grad_accum", "compile"):
                raise ValueError(f"{out} was started with --{name} {saved['training'].get(name)}, not {value}: cannot resume")
        if saved["tokenizer"] != about["tokenizer"]:
            raise ValueError(f"{out} was started with the tokenizer {saved['tokenizer']}, not {about['tokenizer']}")
        if saved.get("n_windows", batches.n_windows) != batches.n_windows:
            raise ValueError(f"{args.data} has other data than {out} was started with: {batches.n_windows:,} windows")
    elif (out / "checkpoint.pt").exists():
        raise ValueError(f"{out} already holds a run; continue it with --resume or choose another --out")
    else:
        model, state = new_model(args, data).to(device), None
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=args.weight_decay, fused=True
    )
    step = 0
    if state:
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        del state
    if args.compile:
        model.compile_parts()
    ddp, no_sync = model, nullcontext
    if n_processes > 1:
        device_ids = [device] if device.type == "cuda" else None
        ddp = DistributedDataParallel(model, device_ids=device_ids, broadcast_buffers=False)  # all have drawn the same
        no_sync = ddp.no_sync
    print(f"{args.pos}: {model.num_params():,} parameters in blocks + head, {model.embed.weight.numel():,} in the input table")
    print(
        f"{n_steps:,} steps of {tokens_per_step:,} tokens from {batches.n_windows:,} windows; on {n_processes} x {device.type}"
    )

    # the log: a run that was killed may have logged steps that its checkpoint does not have
    log_path = out / "log.jsonl"
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        old_lines = [line for line in read_log(out) if line["step"] <= step] if step else []
        log_path.write_text("".join(json.dumps(line) + "\n" for line in old_lines))
        tokenizer_path = data.folder / "tokenizer.tiktoken"
        if tokenizer_path.exists():
            shutil.copy(tokenizer_path, out)  # so that the checkpoint can be evaluated without its data

    def save():
        if not all(p.isfinite().all() for p in model.parameters()):
            raise ValueError(f"the weights of step {step:,} are no longer finite and are not saved; try a smaller --lr")
        if rank == 0:
            save_checkpoint(out, model, about, optimizer=optimizer.state_dict(), step=step)

    def load(step):
        batch = batches.batch(step, rank, n_processes)
        return batch.pin_memory() if device.type == "cuda" else batch

    stop_signal = None

    def on_signal(number, frame):
        nonlocal stop_signal
        stop_signal = number

    previous_handlers = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    bar = tqdm(total=n_steps * tokens_per_step, unit="tok", unit_scale=True, desc=args.pos, disable=rank > 0)
    bar.update(step * tokens_per_step)
    loader = ThreadPoolExecutor(1)  # the next batch is read while this one is computed
    next_batch = loader.submit(load, step)
    last_time, last_step, val_loss, stop = time.time(), step, None, False
    while step < min(n_steps, args.stop_at or n_steps) and not stop:
        lr = learning_rate(step, n_steps, args.warmup_steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch, next_batch = next_batch.result(), loader.submit(load, step + 1)
        loss = torch.zeros((), device=device)
        for i, part in enumerate(batch.to(device, non_blocking=True).chunk(n_parts), start=1):
            with no_sync() if i < n_parts else nullcontext():  # gradients meet in the last part
                with autocast(device):
                    part_loss = ddp(part[:, :-1], part[:, 1:]) / n_parts
                part_loss.backward()
            loss += part_loss.detach()
        # what all processes must agree on: the mean loss, and whether one of them was told to stop
        agreed = sum_over_processes(torch.stack((loss / n_processes, loss.new_tensor(stop_signal or 0))))
        loss, stop = agreed.tolist()
        if not math.isfinite(loss):
            bar.close()
            raise ValueError(f"the loss of step {step + 1:,} is {loss}; a checkpoint in {out}, if there is one, is from before")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1

        bar.update(tokens_per_step)
        if step % args.log_every == 0 or step % eval_every == 0 or step == n_steps:
            rate = (step - last_step) * tokens_per_step / (time.time() - last_time)
            line = {"step": step, "tokens": step * tokens_per_step, "loss": loss, "lr": lr, "tokens_per_s": round(rate)}
            if step % eval_every == 0 or step == n_steps:
                val_loss = line["val_loss"] = float(window_loss(model, val_tokens, args.train_len).mean())
            if rank == 0:
                with open(log_path, "a") as f:
                    f.write(json.dumps(line) + "\n")
            bar.set_postfix(loss=f"{loss:.3f}", val=f"{val_loss:.3f}" if val_loss else "-", lr=f"{lr:.1e}", refresh=False)
            last_time, last_step = time.time(), step
        if step % args.save_every == 0 and step < n_steps:
            save()
    bar.close()
    save()
    for s, handler in previous_handlers.items():  # only now: a second Ctrl-C must not cost what the first one saves
        signal.signal(s, handler)
    if step < n_steps:
        print(f"stopped at step {step:,} of {n_steps:,} and saved; the same command with --resume continues")
        if stop_signal is not None:
            sys.exit(128 + stop_signal)
    else:
        print(f"done: {n_steps:,} steps; now: python eval_perplexity.py {shlex.quote(str(out))}")


if __name__ == "__main__":
    one_sentence_errors(main)()
