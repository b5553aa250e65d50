"""
Train a GPT with the position embedding of your choice: on a CPU, a GPU, or with torchrun on many.

    two minutes on a CPU, on text prepared with --tokenizer byte
        python train.py --data data/bytes --pos fope --out runs_out/fope
    the paper's recipe; with torchrun --nproc_per_node=4 in place of python on four GPUs
        python train.py --data data/c4 --preset 60M --pos fope --compile --out runs_out/fope_60M
    another run's weights, with another embedding or training length
        python train.py --data data/c4 --init_from runs_out/rope_60M --pos fope --out runs_out/x

Writes to --out: log.jsonl, config.json, and checkpoint.pt with weights, optimizer and step. Ctrl-C
or SIGTERM finishes the step and saves; the same command with --resume continues, on a CPU with
bit-identical weights. A kill or a crash costs the steps since the last checkpoint.
"""

import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import common
from checkpoint import load_run, read_log, save_checkpoint, with_pos
from common import number, positive_int, seed_int
from data import Batches, TokenData
from eval_passkey import PasskeyTask
from eval_perplexity import window_loss
from fope import POSITION_EMBEDDINGS
from model import GPT, SIZES, GPTConfig

# What --preset decides where no flag does.
PAPER = dict(train_len=512, tokens=10_000_000_000, batch_size=1024, grad_accum=16, lr=6e-4)
PAPER |= dict(passkey_frac=0.0, eval_tokens=65536, save_every=1000)
# A tiny model with a tiny budget learns more from many small steps.
TINY = PAPER | dict(train_len=128, tokens=512_000, batch_size=8, grad_accum=1, lr=2e-3)
TINY |= dict(eval_tokens=8192)
PASSKEY = dict(passkey_frac=1.0, tokens=1_024_000, batch_size=4, lr=7e-4, eval_tokens=4096)
# The paper's smallest model and length, as far as two hours go; a step takes seconds, and less in
# two micro-batches. init_std as model.py's INIT_STD, for a width of 256.
SMALL = PAPER | dict(tokens=7_000_000, batch_size=8, grad_accum=2, lr=1.5e-3)
SMALL |= dict(init_std=0.035, save_every=100)
RECIPES = {size: PAPER for size in SIZES} | {"tiny": TINY, "tiny_passkey": TINY | PASSKEY}
RECIPES["20M_cpu"] = SMALL
SHAPE = ("n_layer", "n_head", "head_dim", "n_embd", "theta", "init_std")  # flags of the model
SIZE_OF = {"tiny_passkey": "tiny", "20M_cpu": "20M"}  # the others are of the size they name


def learning_rate(step, n_steps, warmup_steps, peak):
    """Linear warm-up, then a cosine to 10 % of the peak at the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, n_steps - 1 - warmup_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


class StopSignal:
    """While entered, Ctrl-C and SIGTERM only set `signum`: the loop finishes its step and saves."""

    signum = 0

    def __enter__(self):
        self.before = {s: signal.signal(s, self.note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, signum, frame):
        self.signum = signum

    def __exit__(self, *_):
        for s, handler in self.before.items():
            signal.signal(s, handler)


# --- from flags to a run


def parse_args(argv):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    # data
    add("--data", required=True, help="folder that prepare_data.py wrote")
    add("--passkey_frac", type=number(float, 0, 1), help="share of sequences that are passkeys")
    # model
    add("--init_from", metavar="RUN", help="start from its weights, preset, --pos and --train_len")
    add("--preset", choices=RECIPES, help="size and recipe; tiny if there is no --init_from")
    add("--pos", choices=POSITION_EMBEDDINGS, help="fope if there is no --init_from")
    common.add_pos_flags(parser)
    add("--n_layer", type=positive_int, help="this and what follows: instead of the preset's")
    add("--n_head", type=positive_int)
    add("--head_dim", type=positive_int)
    add("--n_embd", type=positive_int)
    add("--theta", type=number(float, 1, 1e12), help="of RoPE's frequencies theta^(-2m/head_dim)")
    add("--init_std", type=number(float, 1e-6, 1), help="of the weights at the start")
    add("--qk_norm", action="store_true", help="normalise q and k before they are rotated")
    add("--train_len", type=positive_int, help="tokens per sequence")
    # optimization
    add("--tokens", type=positive_int, help="to train on, rounded up to whole steps")
    add("--batch_size", type=positive_int, help="sequences per optimizer step")
    add("--grad_accum", type=positive_int, help="micro-batches of a step, shared by processes")
    add("--lr", type=number(float, 0, 1000), help="peak learning rate")
    warmup = "5 %% of the steps, but the paper's 10,000 from its 10B tokens in 19,000 steps on"
    add("--warmup_steps", type=number(int, 0, 10**15), help=f"without it {warmup}")
    add("--weight_decay", type=number(float, 0, 1000), default=0.1, help="on every parameter")
    add("--seed", type=seed_int, default=0, help="of the weights and of the data order")
    # run
    add("--out", required=True, help="folder of the run, for example runs_out/fope")
    add("--resume", action="store_true", help="continue the run in --out")
    add("--stop_at", type=positive_int, help="save and stop after this step, as Ctrl-C would")
    add("--save_every", type=positive_int, help="steps between checkpoints")
    add("--eval_every", type=positive_int, help="steps between validation losses; else 10 in all")
    add("--eval_tokens", type=positive_int, help="validation tokens read for the loss")
    add("--log_every", type=positive_int, default=10, help="steps between lines of log.jsonl")
    common.add_device_flag(parser)
    add("--compile", action="store_true", help="torch.compile: slow to start, then faster")
    add("--deterministic", action="store_true", help="the same twice on CUDA; a CPU does anyway")
    args = parser.parse_args(argv)

    if args.init_from:
        take_over(args)
    args.pos, args.preset = args.pos or "fope", args.preset or "tiny"
    for name, value in RECIPES[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def take_over(args):
    """Give the flags that --init_from decides the values of that run; refuse what cannot change."""
    path = Path(args.init_from) / "config.json"  # all that a resumed run still needs of its start
    start = common.read_json(path)
    try:
        trained = start["training"] | start["model"]
        known = trained["preset"] in RECIPES and trained["pos"] in POSITION_EMBEDDINGS
    except (KeyError, TypeError):
        known = False
    if not known or not isinstance(trained.get("train_len"), int):
        raise ValueError(f"{path} is damaged or was not written by train.py")
    for name in ("preset", "pos", "train_len"):
        if getattr(args, name) is None:
            setattr(args, name, trained[name])
    for name in ("preset", *SHAPE, "qk_norm"):
        if (given := getattr(args, name)) and given != trained.get(name):
            was = f"--{name} is {trained.get(name)} in {args.init_from}"
            raise ValueError(f"{was}, it cannot become {given}")


def new_model(args, data):
    """A model drawn from the seed, or with --init_from another run's, its embedding exchanged."""
    chosen = {name: getattr(args, name) for name in ("pos", "train_len", "seed")}
    pos_args = common.parse_keywords("--pos_args", args.pos_args)
    size = SIZE_OF.get(args.preset, args.preset)
    if not args.init_from:
        given = {name: getattr(args, name) for name in SHAPE}
        chosen |= {name: value for name, value in given.items() if value is not None}
        chosen |= dict(qk_norm=args.qk_norm, vocab_size=data.meta["vocab_size"])
        scaling = common.parse_rope_scaling(args, trained=None)
        model = GPT(GPTConfig.preset(size, pos_args=pos_args, rope_scaling=scaling, **chosen))
        if args.pos == "fope":
            tell_of_noise(model.blocks[0].attn.pos)
        return model
    old, metadata, _ = load_run(args.init_from)
    if metadata["tokenizer"] != data.tokenizer_id():
        was = f"{args.init_from} has the tokenizer {metadata['tokenizer']}"
        raise ValueError(f"{was}, {args.data} has {data.tokenizer_id()}")
    was, scaling = old.config, common.parse_rope_scaling(args, old.config)
    if args.pos == was.pos:  # what was given to it stays
        pos_args, scaling = was.pos_args | pos_args, scaling or was.rope_scaling
    else:
        # RoPE's frequencies stay on the pairs that have learned them
        uncapped = {"cap": False} if args.pos == "fope" else {}
        pos_args = GPTConfig.preset(size, pos=args.pos).pos_args | uncapped | pos_args
    model = with_pos(old, pos_args=pos_args, rope_scaling=scaling, **chosen)
    print(f"from {was.pos} at {was.train_len} tokens {was.pos_args} {was.rope_scaling or ''}")
    print(f"to   {args.pos} at {args.train_len} tokens {pos_args} {scaling or ''}")
    return model


def tell_of_noise(pos):
    """Where head_dim/4 cuts FoPE's frequencies, some series have none of their own."""
    _, D, K = pos.cos_coef.shape
    if n_noise := K - int(pos.identity(D, K).sum()):
        what = f"{K - n_noise} have a frequency of their own, {n_noise} are of noise alone"
        print(f"note: of FoPE's {K} series {what}; --pos_args variant=paper keeps all frequencies")


def resumed_model(args, out, metadata, device):
    """(model, state) of the run in out, which must have been started with the same flags."""
    model, saved, state = load_run(out, device)
    # the first two change rounding alone, the next two nothing of the weights; data see below
    may_change = ("grad_accum", "compile", "eval_every", "eval_tokens", "data", "data_sha256")
    now = metadata["training"]
    for name, was in saved["training"].items():
        if was != now.get(name) and name not in may_change:
            what = f"--{name} {was}, not {now.get(name)}"
            raise ValueError(f"{out} was started with {what}: cannot resume")
    if saved["tokenizer"] != metadata["tokenizer"]:
        was = f"{out} was started with the tokenizer {saved['tokenizer']}"
        raise ValueError(f"{was}, not {metadata['tokenizer']}")
    other_data = saved["training"].get("data_sha256", now["data_sha256"]) != now["data_sha256"]
    if other_data or saved["n_windows"] != metadata["n_windows"]:
        raise ValueError(f"{args.data} has other data than {out} was started with")
    return model, state


def load_data(args):
    """The training data, its batches, and the validation tokens of the loss while training."""
    data, val_data = TokenData(args.data, "train"), TokenData(args.data, "val")
    val_tokens = val_data.read(0, min(len(val_data), args.eval_tokens + 1))
    if len(val_tokens) <= args.train_len:
        needs = f"--train_len {args.train_len:,} needs more than {len(val_tokens):,} validation"
        has = f"{args.data} has {len(val_data):,} and --eval_tokens is {args.eval_tokens:,}"
        raise ValueError(f"{needs} tokens; {has}")
    task = PasskeyTask(data.tokenizer()) if args.passkey_frac else None
    settings = args.train_len, args.batch_size, args.seed, args.passkey_frac, task
    batches = Batches(data, *settings)
    if task:
        batches.passkey(0)  # fail early if the prompt does not fit
    return data, batches, val_tokens


def plan_steps(args):
    """The number of steps; fills in --warmup_steps."""
    n_steps = math.ceil(args.tokens / (args.batch_size * args.train_len))
    if args.warmup_steps is None:
        long_run = args.tokens >= 10_000_000_000 and n_steps >= 19_000
        args.warmup_steps = 10_000 if long_run else max(1, n_steps // 20)
    if args.warmup_steps >= max(n_steps, 2):
        fewer = f"must be fewer than the {n_steps:,} steps of the run"
        raise ValueError(f"--warmup_steps {args.warmup_steps:,} {fewer}")
    return n_steps


def start_log(out, step, data):
    """Drop log lines after the checkpoint's step; copy the tokenizer beside the run."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line) + "\n" for line in read_log(out) if line["step"] <= step]
    common.write_atomically(out / "log.jsonl", lambda f: f.write("".join(lines).encode()))
    if (data.folder / "tokenizer.tiktoken").exists():
        shutil.copy(data.folder / "tokenizer.tiktoken", out)  # to be evaluated without its data


def micro_batches(args):
    """How many micro-batches of a step this process computes, one after the other."""
    n_micro = -(-args.grad_accum // common.world_size())  # rounded up
    if args.batch_size % (n_micro * common.world_size()):
        parts = f"{n_micro * common.world_size()} micro-batches, as --grad_accum or torchrun asks"
        raise ValueError(f"--batch_size {args.batch_size} cannot be divided into {parts}")
    return n_micro


# --- training


def accumulate_gradients(model, batch, n_micro):
    """Gradients of the mean loss of a batch (B, T + 1), in n_micro micro-batches; the loss."""
    loss = torch.zeros((), device=batch.device)
    for i, micro_batch in enumerate(batch.chunk(n_micro), start=1):
        # processes add up their gradients in the last one
        skip_sync = i < n_micro and common.world_size() > 1
        with model.no_sync() if skip_sync else nullcontext():
            with common.autocast(batch.device):
                micro_loss = model(micro_batch[:, :-1], micro_batch[:, 1:]) / n_micro
            micro_loss.backward()
        loss += micro_loss.detach()
    return loss


def train(args, model, optimizer, step, n_steps, batches, val_tokens, metadata):
    """The loop, from `step` to n_steps or --stop_at. Returns (step, the signal that ended it)."""
    out, device = Path(args.out), next(model.parameters()).device
    n_micro, tokens_per_step = micro_batches(args), args.batch_size * args.train_len
    eval_every = args.eval_every or max(1, n_steps // 10)
    if args.compile:
        model.compile_parts()
    raw_model = model
    if common.world_size() > 1:  # broadcast_buffers: all have drawn the same
        device_ids = [device] if device.type != "cpu" else None
        model = DistributedDataParallel(model, device_ids=device_ids, broadcast_buffers=False)

    def save():
        if not all(p.isfinite().all() for p in raw_model.parameters()):
            what = f"the weights of step {step:,} are no longer finite and are not saved"
            raise ValueError(f"{what}; try a smaller --lr")
        if common.rank() == 0:
            state = dict(optimizer=optimizer.state_dict(), step=step)
            save_checkpoint(out, raw_model, metadata, **state)

    settings = dict(desc=args.pos, unit="tok", unit_scale=True, disable=common.rank() > 0)
    bar = tqdm(total=n_steps * tokens_per_step, initial=step * tokens_per_step, **settings)
    val_loss, last_time, last_step, stop = None, time.time(), step, False
    stop_at = min(n_steps, args.stop_at or n_steps)
    with bar, StopSignal() as stop_signal:
        while step < stop_at and not stop:
            # set the learning rate of this step
            lr = learning_rate(step, n_steps, args.warmup_steps, args.lr)
            for group in optimizer.param_groups:
                group["lr"] = lr

            # forward and backward
            batch = batches.batch(step).to(device)
            loss = accumulate_gradients(model, batch, n_micro)

            # what all processes must agree on: the mean loss, and whether one was told to stop
            told = loss.new_tensor(stop_signal.signum)
            agreed = common.all_reduce_sum(torch.stack((loss / common.world_size(), told)))
            loss, stop = agreed.tolist()  # waits for the device: no step runs on a loss of nan
            if not math.isfinite(loss):
                kept = f"a checkpoint in {out}, if there is one, is from before"
                raise ValueError(f"the loss of step {step + 1:,} is {loss}; {kept}")

            # clip the gradients and update the weights
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            bar.update(tokens_per_step)

            # log, now and then with the validation loss
            validate = step % eval_every == 0 or step == n_steps
            if validate or step % args.log_every == 0:
                rate = (step - last_step) * tokens_per_step / (time.time() - last_time)
                line = {"step": step, "tokens": step * tokens_per_step, "loss": loss, "lr": lr}
                line["tokens_per_s"] = round(rate)
                if validate:
                    val_loss = float(window_loss(raw_model, val_tokens, args.train_len).mean())
                    line["val_loss"] = val_loss
                if common.rank() == 0:
                    with open(out / "log.jsonl", "a") as f:
                        f.write(json.dumps(line) + "\n")
                shown = f"{val_loss:.3f}" if val_loss else "-"
                bar.set_postfix(loss=f"{loss:.3f}", val=shown, lr=f"{lr:.1e}", refresh=False)
                last_time, last_step = time.time(), step

            # save
            if step % args.save_every == 0 and step < stop_at:
                save()
        save()  # still within StopSignal: a second Ctrl-C cannot interrupt it
    return step, stop_signal.signum


def main(argv=None):
    args = parse_args(argv)
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    out, device = Path(args.out), common.init_distributed(args.device)
    micro_batches(args)  # fail early if a step cannot be divided
    data, batches, val_tokens = load_data(args)
    n_steps = plan_steps(args)

    # what defines the run, and must not differ when it is resumed
    not_recorded = ("out", "resume", "stop_at", "device", "save_every", "log_every")
    not_recorded += ("deterministic",)
    recorded = {k: v for k, v in vars(args).items() if k not in not_recorded}
    metadata = {
        "data": args.data,
        "n_windows": batches.n_windows,
        "tokenizer": data.tokenizer_id(),
        "training": recorded | {"data_sha256": data.sha256()},
    }

    # the model and its optimizer, new or as they were saved
    if args.resume:
        model, state = resumed_model(args, out, metadata, device)
    elif (out / "checkpoint.pt").exists():
        raise ValueError(f"{out} already holds a run; --resume it or choose another --out")
    else:
        model, state = new_model(args, data).to(device), {"step": 0}
    settings = dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=args.weight_decay, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, **settings)
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
    del state  # or its memory would stay

    n_params, n_input = model.num_params(), model.embed.weight.numel()
    print(f"{args.pos}: {n_params:,} parameters in blocks + head, {n_input:,} in the input table")
    sizes = f"{args.batch_size * args.train_len:,} tokens from {batches.n_windows:,} windows"
    print(f"{n_steps:,} steps of {sizes}; on {common.world_size()} x {device.type}")
    if common.rank() == 0:
        start_log(out, step, data)
    step, stop_signal = train(args, model, optimizer, step, n_steps, batches, val_tokens, metadata)
    if step == n_steps:
        print(f"done: {n_steps:,} steps; now: python eval_perplexity.py {shlex.quote(str(out))}")
        return
    how = "the same command with --resume continues"
    print(f"stopped at step {step:,} of {n_steps:,} and saved; {how}")
    if stop_signal:
        sys.exit(128 + stop_signal)


if __name__ == "__main__":
    common.one_sentence_errors(main)()
