"""
Train a GPT with the position embedding of your choice: on a CPU, a GPU, or with torchrun on many.

    three minutes on a CPU, on text prepared with --tokenizer byte
        python train.py --data data/bytes --pos fope --out runs_out/fope
    the paper's recipe; with torchrun --nproc_per_node=4 in place of python on four GPUs
        python train.py --data data/c4 --preset 60M --pos fope --compile --out runs_out/fope_60M
    another run's weights, with another embedding or training length
        python train.py --init_from runs_out/rope_60M --pos fope --out runs_out/x

Writes to --out: log.jsonl, config.json, and checkpoint.pt with weights, optimizer and step. Ctrl-C
or SIGTERM finishes the step and saves; --resume --out FOLDER continues, on a CPU with bit-identical
weights. A kill or a crash costs the steps since the last checkpoint.
"""

import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace

import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import common
from checkpoint import load_run, read_log, save_checkpoint, with_pos
from common import Refused, positive_int
from data import Batches, TokenData
from evaluation import window_loss
from model import GPT
from recipe import MAY_CHANGE, RECIPES, add_flags, check_known, parse_lengths

SAVE_SECONDS = 300


def learning_rate(step, n_steps, warmup_steps, peak):
    """Linear warm-up, then a cosine to 10 % of the peak at the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, n_steps - 1 - warmup_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model, recipe):
    """Each group of parameters has a peak rate of its own, which learning_rate() follows."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=recipe.lr,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=recipe.weight_decay,
        fused=True,
    )


def describe_optimizer(optimizer, peaks):
    """Its class, and the settings of each group of parameters."""
    groups = [
        {"lr": peak} | {k: v for k, v in group.items() if k not in ("lr", "params") and v}
        for group, peak in zip(optimizer.param_groups, peaks, strict=True)
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


def load_optimizer(optimizer, saved, about, out):
    """Its saved state, which must be of this kind, its moments of the shapes of the parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    fits = saved_sizes == [len(group["params"]) for group in optimizer.param_groups]
    now = type(optimizer).__name__
    fits &= about.get("optimizer", {}).get("class", now) == now
    for i, state in saved["state"].items() if fits else ():
        moments = [m for m in state.values() if torch.is_tensor(m) and m.dim() > 0]
        fits &= all(m.shape == params[i].shape and m.dtype == params[i].dtype for m in moments)
    if not fits:
        raise Refused(f"the optimizer in {out} is of another kind or shape: cannot resume")
    optimizer.load_state_dict(saved)


class StopSignal:
    """
    While entered, Ctrl-C, SIGTERM and the SIGHUP of a lost connection only set `signum`: the loop
    finishes its step and saves.
    """

    signum = 0

    def __enter__(self):
        stops = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            stops.pop()
        self.before = {s: signal.signal(s, self.note) for s in stops}
        return self

    def note(self, signum, frame):
        self.signum = signum

    def __exit__(self, *_):
        for s, handler in self.before.items():
            signal.signal(s, handler)


# --- from flags to a run


def parse_args(argv):
    """The flags that say how to run, and the fields of the recipe that were given, a dict."""
    peek = common.ArgumentParser(None, add_help=False)
    peek.add_argument("--preset", default="tiny")
    preset = peek.parse_known_args(argv)[0].preset
    check_known("preset", preset, RECIPES)

    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--out", required=True, type=common.path, help="folder of the run, such as runs_out/fope")
    add("--resume", action="store_true", help="continue the run in --out, or start it")
    add("--stop_at", type=positive_int, help="save and stop after this step, as Ctrl-C would")
    common.add_device_flag(parser)
    add_flags(parser, RECIPES[preset])
    args = parser.parse_args(argv)
    given = {name: vars(args).pop(name) for name in asdict(RECIPES[preset]) if name in args}
    return args, given


def resumed_recipe(started, given, out):
    """The recipe that a run was started with, and the flags, which may change little of it."""
    if "rope_scaling" in given:
        given["rope_scaling"] = (started.rope_scaling or {}) | given["rope_scaling"]
    recipe = started.changed(**given)
    for name, was in asdict(started).items():
        now = getattr(recipe, name)
        if now != was and name not in MAY_CHANGE:
            raise Refused(f"{out} was started with --{name} {was}, not {now}: cannot resume")
    return recipe


def new_model(recipe, start):
    """A model drawn from the seed, or with the weights of `start`, its embedding exchanged."""
    if start:
        was = start.config
        print(f"from {was.pos} at {was.train_len} tokens {was.pos_args} {was.rope_scaling or ''}")
        scaling = recipe.rope_scaling or ""
        print(f"to   {recipe.pos} at {recipe.train_len} tokens {recipe.pos_args} {scaling}")
        return with_pos(start, recipe)
    model = GPT(recipe)
    if recipe.pos == "fope":
        tell_of_noise(model.blocks[0].attn.pos)
    return model


def tell_of_noise(pos):
    """Where head_dim/4 cuts FoPE's frequencies, some series have none of their own."""
    _, D, K = pos.cos_coef.shape
    if n_noise := K - int(pos.identity(D, K).sum()):
        what = f"{K - n_noise} have a frequency of their own, {n_noise} are of noise alone"
        print(f"note: of FoPE's {K} series {what}; --pos_args variant=paper keeps all frequencies")


def read_validation(recipe):
    """The validation tokens of the loss while training."""
    data = TokenData(recipe.data, "val")
    tokens = data.read(0, min(len(data), recipe.eval_tokens + 1))
    if len(tokens) <= recipe.train_len:
        needs = f"--train_len {recipe.train_len:,} needs more than {len(tokens):,} validation"
        has = f"{recipe.data} has {len(data):,} and --eval_tokens is {recipe.eval_tokens:,}"
        raise Refused(f"{needs} tokens; {has}")
    return tokens


def micro_batches(recipe):
    """How many micro-batches of a step this process computes, one after the other."""
    n_micro = -(-recipe.grad_accum // common.world_size())  # rounded up
    if recipe.batch_size % (n_micro * common.world_size()):
        parts = f"{n_micro * common.world_size()} micro-batches, as --grad_accum or torchrun asks"
        raise Refused(f"--batch_size {recipe.batch_size} cannot be divided into {parts}")
    return n_micro


def time_written(path):
    return path.stat().st_mtime_ns if path.exists() else None


def start_log(out, step, data):
    """Drop log lines after the checkpoint's step; copy the tokenizer beside the run."""
    lines = [json.dumps(line) + "\n" for line in read_log(out) if line["step"] <= step]
    common.write_atomically(out / "log.jsonl", lambda f: f.write("".join(lines).encode()))
    if (ranks := data.folder / "tokenizer.tiktoken").exists():  # to be read without its data
        common.write_atomically(out / ranks.name, lambda f: f.write(ranks.read_bytes()))


# --- training

# in bf16, dense, as the makers say; by a part of the card's name
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "4090": 165e12, "3090": 71e12}


def use_of_device(tokens_per_s, model, device, hardware):
    """For the log: tokens/s; MFU, the share of a known card's peak; the most GB of it so far."""
    use = {"tokens_per_s": round(tokens_per_s)}
    if peak := next((PEAK_FLOPS[card] for card in PEAK_FLOPS if card in hardware), None):
        use["mfu"] = round(tokens_per_s * model.flops_per_token() / peak / common.world_size(), 4)
    if device.type == "cuda":
        use["peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
    return use


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


def how_to_evaluate(recipe, out, rate):
    """A command, which reads what takes about a minute at this many tokens per second."""
    lengths = parse_lengths(recipe.lengths, recipe.train_len)
    if recipe.task_share == 1:
        command, flag, most = "eval_passkey.py", "--trials", recipe.trials
        n = max(10, 60 * rate / sum(lengths))
    else:
        command, flag, most = "eval_perplexity.py", "--max_tokens", recipe.read_tokens
        n = max(lengths[-1] + 1, 60 * rate / len(lengths))
    return f"{command} {shlex.quote(str(out))}" + (f" {flag} {n:.0f}" if n < most else "")


def save(out, model, about, optimizer, step):
    if not all(p.isfinite().all() for p in model.parameters()):
        what = f"the weights of step {step:,} are no longer finite and are not saved"
        raise Refused(f"{what}; try a smaller --lr")
    if common.rank() == 0:
        save_checkpoint(out, model, about, optimizer=optimizer.state_dict(), step=step)


def main(argv=None):
    args, given = parse_args(argv)
    out, device = args.out, common.init_distributed(args.device)

    # the recipe: that of the run in --out, or of one to start from, or a preset, with the flags
    model, start, about, state = None, None, {}, {"step": 0}
    written = time_written(out / "checkpoint.pt")
    if written:
        if not args.resume:
            raise Refused(f"{out} already holds a run; --resume it or choose another --out")
        model, about, state = load_run(out, device)
        recipe = resumed_recipe(model.config, given, out)
        if state["step"] == recipe.n_steps:
            print(f"{out} is done already: {recipe.n_steps:,} steps")
            return
    elif "init_from" in given:
        start, _, _ = load_run(given["init_from"])
        recipe = start.config.going_on(**given)
    elif args.resume and not given:
        raise Refused(f"there is no run in {out}; with the flags of one --resume would start it")
    else:
        recipe = RECIPES[given.get("preset", "tiny")].changed(**given)
    recipe = recipe.check().resolved()
    log, others = out / "log.jsonl", ["meta.json", "config.json", "tokenizer.tiktoken", "log.jsonl"]
    if log.exists() and (read_log(out) or not log.stat().st_size):
        others = others[:2]  # a run that was killed before its first checkpoint may go on
    for name in others if not written else ():
        if (out / name).exists() and (out / name).stat().st_size:
            raise Refused(f"--out {out} has a {name} and no checkpoint: it is no run's folder")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if recipe.compile and not shutil.which(compiler):
        raise Refused(f"--compile needs a C++ compiler, and there is no {compiler} here; see $CXX")
    n_steps, n_micro = recipe.n_steps, micro_batches(recipe)
    tokens_per_step = recipe.batch_size * recipe.train_len

    # its data
    data, val_tokens = TokenData(recipe.data, "train"), read_validation(recipe)
    tokens_are = dict(tokenizer=data.tokenizer_id(), vocab_size=data.meta["vocab_size"])
    if (model or start) and recipe.tokenizer != tokens_are["tokenizer"]:
        was = f"{out if model else recipe.init_from} has the tokenizer {recipe.tokenizer}"
        raise Refused(f"{was}, {recipe.data} has {tokens_are['tokenizer']}")
    recipe = replace(recipe, **tokens_are)
    batches = Batches(data, recipe)
    trained_on = dict(data_sha256=data.sha256(), n_windows=batches.n_windows)

    # the model and its optimizer, new or as they were saved
    if model:
        if any(about.get(name, now) != now for name, now in trained_on.items()):
            raise Refused(f"{recipe.data} has other data than {out} was started with")
        model.config = recipe
    else:
        model = new_model(recipe, start).to(device)
    optimizer = make_optimizer(model, recipe)
    peaks = [group["lr"] for group in optimizer.param_groups]
    if "optimizer" in state:
        load_optimizer(optimizer, state["optimizer"], about, out)
    started = {"code": common.code_hashes(), **common.provenance(device)}
    about = trained_on | started | about  # of the start, also when it is resumed
    if about["code"] != started["code"]:
        about["code_since"] = {"step": state["step"], **started["code"]}
    about["optimizer"] = describe_optimizer(optimizer, peaks)
    step, val_loss, stop, rate = state["step"], None, False, math.inf
    del state  # or its memory would stay

    # what will be done
    print(f"the recipe, {recipe.preset} with changes by flags:\n{recipe.describe()}")
    n_params, n_input = model.num_params(), model.embed.weight.numel()
    print(f"{recipe.pos}: {n_params:,} parameters in blocks + head, {n_input:,} in the input table")
    sizes = f"{tokens_per_step:,} tokens from {batches.n_windows:,} windows"
    print(f"{n_steps:,} steps of {sizes}; on {common.world_size()} x {device.type}")
    common.make_folder(out)

    raw_model = model
    if recipe.compile:
        model.compile_parts()
    if common.world_size() > 1:  # broadcast_buffers: all have drawn the same
        ids = [device] if device.type != "cpu" else None
        model = DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)

    bar = tqdm(
        total=n_steps * tokens_per_step,
        initial=step * tokens_per_step,
        desc=recipe.pos,
        unit="tok",
        unit_scale=True,
        disable=common.rank() > 0,
    )
    stop_at = min(n_steps, args.stop_at or n_steps)
    last_time, last_step, last_save = time.monotonic(), step, time.monotonic()
    first = common.rank() == 0
    with bar, common.lock(out) if first else nullcontext(), StopSignal() as stop_signal:
        if first:
            if time_written(out / "checkpoint.pt") != written:
                raise Refused(f"another command has written to {out} since this one was started")
            start_log(out, step, data)
        batch = batches.batch(step, device)
        while step < stop_at and not stop:
            # set the learning rates of this step
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = learning_rate(step, n_steps, recipe.warmup_steps, peak)

            # forward and backward; while a GPU is at it, the next batch
            loss = accumulate_gradients(model, batch, n_micro)
            batch = batches.batch(step + 1, device)

            # what all processes must agree on: the mean loss, and whether one was told to stop
            told = torch.full_like(loss, stop_signal.signum)
            agreed = common.all_reduce_sum(torch.stack((loss / common.world_size(), told)))
            loss, stop = agreed.tolist()  # waits for the device: no step runs on a loss of nan
            if not math.isfinite(loss):
                kept = f"a checkpoint in {out}, if there is one, is from before"
                raise Refused(f"the loss of step {step + 1:,} is {loss}; {kept}")

            # clip the gradients and update the weights
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            with suppress(BrokenPipeError):  # Ctrl-C ends a `| tee`, too
                bar.update(tokens_per_step)

            # log, now and then with the validation loss
            validate = step % recipe.eval_every == 0 or step == n_steps
            if validate or step % recipe.log_every == 0:
                seconds = max(time.monotonic() - last_time, 1e-9)
                rate = (step - last_step) * tokens_per_step / seconds
                lr = optimizer.param_groups[0]["lr"]
                line = {"step": step, "tokens": step * tokens_per_step, "loss": loss, "lr": lr}
                line |= use_of_device(rate, raw_model, device, started["hardware"])
                if validate:
                    val_loss = float(window_loss(raw_model, val_tokens, recipe.train_len).mean())
                    line["val_loss"] = val_loss
                if first:
                    with common.file_errors(), open(out / "log.jsonl", "a") as f:
                        f.write(json.dumps(line) + "\n")
                shown = {"val": f"{val_loss:.3f}"} if val_loss else {}
                shown |= {"mfu": f"{line['mfu']:.0%}"} if "mfu" in line else {}
                bar.set_postfix(loss=f"{loss:.3f}", **shown, lr=f"{lr:.1e}", refresh=False)
                last_time, last_step = time.monotonic(), step

            # save by steps, and by the clock where steps are slow
            due = step % recipe.save_every == 0 or time.monotonic() - last_save > SAVE_SECONDS
            if due and step < stop_at:
                save(out, raw_model, about, optimizer, step)
                last_save = time.monotonic()
        save(out, raw_model, about, optimizer, step)  # a second Ctrl-C cannot interrupt it

    if step == n_steps:
        print(f"done: {n_steps:,} steps; now: python {how_to_evaluate(recipe, out, rate)}")
        return
    how = f"python train.py --resume --out {shlex.quote(str(out))} continues"
    print(f"stopped at step {step:,} of {n_steps:,} and saved; {how}")
    if stop_signal.signum:
        sys.exit(128 + stop_signal.signum)


if __name__ == "__main__":
    common.one_sentence_errors(main)()
