"""
Train a GPT with the position embedding of your choice: on a CPU, a GPU, or with torchrun on many.

    This takes three minutes on a CPU, on text that was prepared with --tokenizer byte:
        python train.py --data data/bytes --pos fope --out runs_out/fope
    This is the paper's recipe. On four GPUs type torchrun --nproc_per_node=4 in place of python:
        python train.py --data data/c4 --preset 60M --pos fope --compile --out runs_out/fope_60M
    This starts from the weights of another run, with another embedding or training length:
        python train.py --init_from runs_out/rope_60M --pos fope --tokens 500000000 --out runs_out/x
    This trains on passkeys instead of text:
        python train.py --preset tiny_passkey --task passkey_anywhere --out runs_out/keys

The folder --out gets log.jsonl, config.json, and checkpoint.pt with weights, optimizer and step.
Ctrl-C, SIGTERM and Slurm's SIGUSR1 save the run and end it: on a CPU after this step, on a GPU when
the next line is logged. `train.py --resume --out FOLDER` continues. On a CPU the weights are then
equal, bit for bit, to those of a run that was never stopped; on a GPU they are close. A kill or a
crash loses the steps since the last checkpoint: there is one every five minutes, and every
--save_every steps.
"""

import math
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import common
from checkpoint import (
    data_fingerprint,
    holds_a_run,
    load_checkpoint,
    note_what_was_read,
    open_data,
    open_run,
    own_code,
    resumed,
    with_pos,
)
from common import Bar, Refused, positive_int
from data import Batches, TokenData, window_loss
from model import GPT
from recipe import RECIPES, add_flags

SAVE_SECONDS = 300

# --- the command line


def parse_args(argv):
    """The flags that say how to run, and a dict of the recipe's fields that were given as flags."""
    preset_parser = common.ArgumentParser(None, add_help=False)
    preset_parser.add_argument("--preset", default="tiny", choices=RECIPES)
    preset = preset_parser.parse_known_args(argv)[0].preset
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--out", required=True, type=Path, help="folder of the run, such as runs_out/fope")
    add("--resume", action="store_true", help="continue the run in --out, or start it")
    kinds = dict(nargs="+", choices=["perplexity", "passkey"], default=[])
    add("--evaluate", **kinds, help="at the end, by eval_perplexity.py and eval_passkey.py")
    add("--stop_at", type=positive_int, help="step after which to save and stop, as Ctrl-C would")
    common.add_device_flag(parser)
    add_flags(parser, RECIPES[preset])
    args = parser.parse_args(argv)
    given = {name: vars(args).pop(name) for name in asdict(RECIPES[preset]) if name in args}
    return args, given


# --- a new model, or a stored one


def make_model(run, given, resume, device):
    """
    Returns (model, optimizer, training data, step). The model is the one that was saved in the
    run's folder, or has the weights of another run, or is new. step is the number of steps that it
    has been trained. given: the fields of the recipe that were given as flags. Sets run.about and
    run.log, which are saved with the model.
    """
    saved = None
    if holds_a_run(run.folder, given, resume):  # as it was saved
        model, run.about, saved = load_checkpoint(run.folder)
        recipe, data = resumed(run, model.config, given)
    elif given.get("init_from"):  # with the weights of another run
        trained, about, state = load_checkpoint(given["init_from"])
        recipe, data = open_data(trained.config.continued(**given), trained.config)
        note_what_was_read(given["init_from"], trained.config, about, state, data, recipe)
        model = with_pos(trained, recipe)
    else:  # new
        recipe, data = open_data(RECIPES[given.get("preset", "tiny")].changed(**given))
        model = GPT(recipe)
    model.config = recipe
    optimizer = make_optimizer(model.to(device), recipe)
    if saved is None:
        run.about = data_fingerprint(data, recipe) | own_code(recipe) | common.provenance(device)
        return model, optimizer, data, 0
    optimizer.load_state_dict(saved["optimizer"])
    run.log = saved["log"]
    return model, optimizer, data, saved["step"]


def make_optimizer(model, recipe):
    """AdamW with the paper's numbers. The loop sets the learning rate."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=recipe.lr,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=recipe.weight_decay,
        fused=True,
    )


# --- a step


def learning_rate(step, n_steps, warmup_steps, peak):
    """Linear warm-up, then a cosine to 10 % of the peak at the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, n_steps - 1 - warmup_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def count_micro_batches(recipe):
    """How many micro-batches of a step this process computes, one after the other."""
    n_micro = -(-recipe.grad_accum // common.world_size())  # rounded up
    if recipe.batch_size % (n_micro * common.world_size()):
        parts = f"{n_micro * common.world_size()} parts (--grad_accum, torchrun)"
        raise Refused(f"--batch_size {recipe.batch_size} cannot be divided into {parts}")
    return n_micro


def accumulate_gradients(model, batch, n_micro):
    """
    Compute the gradients of the mean loss of a batch (B, T + 1) of token ids, in n_micro
    micro-batches. Returns that loss, a scalar on the device. Refused where a parameter gets none.
    """
    loss = torch.zeros((), device=batch.device)
    for i, micro_batch in enumerate(batch.chunk(n_micro), start=1):
        # of DDP: the processes add up their gradients in the last micro-batch
        model.require_backward_grad_sync = i == n_micro
        with common.autocast(batch.device):
            micro_loss = model(micro_batch[:, :-1], micro_batch[:, 1:]) / n_micro
        micro_loss.backward()
        loss += micro_loss.detach()
    for name, p in model.named_parameters():
        if p.requires_grad and p.grad is None:
            raise Refused(f"{name} gets no gradient, so it would learn nothing")
    return loss


# --- the loop


def read_validation(recipe):
    """The validation tokens whose loss is measured while training, (S + 1,) int64."""
    data = TokenData(recipe.data, "val")
    tokens = data.read(0, min(len(data), recipe.eval_tokens + 1))
    if len(tokens) <= recipe.train_len:
        needs = f"--train_len {recipe.train_len:,} needs more validation tokens than"
        raise Refused(f"{needs} {len(tokens):,} (--val_frac, --eval_tokens)")
    return tokens


def throughput(tokens_per_s, model, device):
    """For the log: tokens/s; MFU, the share of a known card's peak; its peak memory in GB."""
    measured = {"tokens_per_s": round(tokens_per_s)}
    if device.type == "cuda":
        if peak := common.peak_flops(torch.cuda.get_device_name(device)):
            flops = tokens_per_s * model.flops_per_token() / common.world_size()
            measured["mfu"] = round(flops / peak, 4)
        measured["peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
    return measured


def train(run, raw_model, optimizer, data, step, device, stop_at=None):
    """Train from `step` to the recipe's last step, or to stop_at. Returns the step it ends at."""
    recipe = raw_model.config
    n_steps, tokens_per_step = recipe.n_steps, recipe.batch_size * recipe.train_len
    batches, val_tokens = Batches(data, recipe), read_validation(recipe)
    n_micro = count_micro_batches(recipe)
    run.start_log(data)

    n_params, n_input = raw_model.num_params(), raw_model.embed.weight.numel()
    print(f"{recipe.pos}: {n_params:,} parameters in blocks + head, {n_input:,} in the input table")
    sizes = f"{tokens_per_step:,} tokens from {batches.n_windows:,} windows"
    print(f"{n_steps:,} steps of {sizes}; on {common.world_size()} x {device.type}")

    model = raw_model
    if recipe.compile:
        raw_model.compile_parts()
    if common.world_size() > 1:  # broadcast_buffers=False: all processes have drawn the same
        ids = [device] if device.type != "cpu" else None
        model = DistributedDataParallel(raw_model, device_ids=ids, broadcast_buffers=False)

    bar = Bar(
        desc=recipe.pos,
        total=n_steps * tokens_per_step,
        initial=step * tokens_per_step,
        unit="tok",
        unit_scale=True,
        disable=common.rank() > 0,
    )
    last_time, last_step, last_save = time.monotonic(), step, time.monotonic()
    batch, stop, val_loss = batches.batch(step, device), False, None
    with bar:
        while step < min(stop_at or n_steps, n_steps) and not stop:
            # set the learning rate of this step
            lr = learning_rate(step, n_steps, recipe.warmup_steps, recipe.lr)
            for group in optimizer.param_groups:
                group["lr"] = lr
            # an embedding of one's own may draw numbers: a resumed run draws the same ones
            torch.manual_seed(hash((recipe.seed, step, common.rank())))

            # forward and backward; while a GPU computes, the next batch is made
            loss = accumulate_gradients(model, batch, n_micro)
            batch = batches.batch(step + 1, device)

            # over all processes: the mean loss, and whether one of them was told to stop
            told_to_stop = torch.full_like(loss, run.signum)
            agreed = torch.stack((loss / common.world_size(), told_to_stop))
            agreed = common.all_reduce_sum(agreed)

            # clip the gradients and update the weights
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            bar.update(tokens_per_step)

            # to read the loss is to wait for the device: on a GPU only where there is a log
            validate = step % recipe.eval_every == 0 or step == n_steps
            log = validate or step % recipe.log_every == 0
            if log or device.type == "cpu":
                loss, signums = agreed.tolist()
                stop = signums > 0
                if not math.isfinite(loss):
                    raise Refused(f"the loss of step {step:,} is {loss}: try a smaller --lr")
            if log:
                tokens = step * tokens_per_step
                seconds = max(time.monotonic() - last_time, 1e-9)
                tokens_per_s = (step - last_step) * tokens_per_step / seconds
                line = {"step": step, "tokens": tokens, "loss": loss, "lr": lr}
                line["grad_norm"] = grad_norm.item()  # before the clipping
                line |= throughput(tokens_per_s, raw_model, device)
                if validate:
                    losses = window_loss(raw_model, val_tokens, recipe.train_len)
                    line["val_loss"] = val_loss = float(losses.mean())
                run.write_log(line)
                bar.set_postfix(loss=loss, val=val_loss, refresh=False)
                last_time, last_step = time.monotonic(), step

            # save by steps, and by the clock where steps are slow
            due = step % recipe.save_every == 0 or time.monotonic() - last_save > SAVE_SECONDS
            if due or stop or step in (stop_at, n_steps):
                run.save(raw_model, optimizer, step)
                last_time, last_step, last_save = time.monotonic(), step, time.monotonic()
    return step


def main(argv=None):
    args, given = parse_args(argv)
    device = common.init_distributed(args.device)
    with open_run(args.out) as run:
        model, optimizer, data, step = make_model(run, given, args.resume, device)
        step = train(run, model, optimizer, data, step, device, args.stop_at)
    print(f"step {step:,} of {model.config.n_steps:,} is saved in {args.out}")
    if run.signum:
        sys.exit(128 + run.signum)
    if step == model.config.n_steps:
        for name in args.evaluate:
            import_module(f"eval_{name}").main([str(args.out), "--device", args.device])


if __name__ == "__main__":
    common.one_sentence_errors(main)()
