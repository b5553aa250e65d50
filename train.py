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

import math
import shlex
import time
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import common
from checkpoint import open_run
from common import Bar, Refused, positive_int
from data import Batches, TokenData, load_tokenizer, window_loss
from recipe import RECIPES, add_flags

SAVE_SECONDS = 300


def parse_args(argv):
    """The flags that say how to run, and the fields of the recipe that were given, a dict."""
    peek = common.ArgumentParser(None, add_help=False)
    peek.add_argument("--preset", default="tiny", choices=RECIPES)
    preset = peek.parse_known_args(argv)[0].preset
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--out", required=True, type=Path, help="folder of the run, such as runs_out/fope")
    add("--resume", action="store_true", help="continue the run in --out, or start it")
    known = dict(nargs="+", choices=["perplexity", "passkey"], default=[])
    add("--evaluate", **known, help="at the end, as eval_perplexity.py and eval_passkey.py do")
    add("--stop_at", type=positive_int, help="save and stop after this step, as Ctrl-C would")
    common.add_device_flag(parser)
    add_flags(parser, RECIPES[preset])
    args = parser.parse_args(argv)
    given = {name: vars(args).pop(name) for name in asdict(RECIPES[preset]) if name in args}
    return args, given


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


def micro_batches(recipe):
    """How many micro-batches of a step this process computes, one after the other."""
    n_micro = -(-recipe.grad_accum // common.world_size())  # rounded up
    if recipe.batch_size % (n_micro * common.world_size()):
        parts = f"{n_micro * common.world_size()} parts (--grad_accum, torchrun)"
        raise Refused(f"--batch_size {recipe.batch_size} cannot be divided into {parts}")
    return n_micro


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


def read_validation(recipe):
    """The validation tokens of the loss while training."""
    data = TokenData(recipe.data, "val")
    tokens = data.read(0, min(len(data), recipe.eval_tokens + 1))
    if len(tokens) <= recipe.train_len:
        what = f"--train_len {recipe.train_len:,} needs more than {len(tokens):,} validation tokens"
        raise Refused(f"{what} (--val_frac: {len(data):,}, --eval_tokens: {recipe.eval_tokens:,})")
    return tokens


def use_of_device(tokens_per_s, model, device):
    """For the log: tokens/s; MFU, the share of a known card's peak; the most GB of it so far."""
    use = {"tokens_per_s": round(tokens_per_s)}
    if device.type == "cuda":
        if peak := common.peak_flops(torch.cuda.get_device_name(device)):
            flops = tokens_per_s * model.flops_per_token() / common.world_size()
            use["mfu"] = round(flops / peak, 4)
        use["peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
    return use


def main(argv=None):
    args, given = parse_args(argv)
    device = common.init_distributed(args.device)
    with open_run(args.out, given, args.resume, device) as run:
        if args.evaluate:  # GPT-2's may not be there: to be said before hours of training
            load_tokenizer(run.recipe.tokenizer, run.recipe.data)
        train(run, device, args.stop_at)
    for name in args.evaluate if run.step == run.recipe.n_steps else []:
        import_module(f"eval_{name}").main([str(args.out), "--device", args.device])


def train(run, device, stop_at=None):
    """All steps of a run that are left, or those up to stop_at."""
    recipe, model, step = run.recipe, run.model, run.step
    n_steps, tokens_per_step = recipe.n_steps, recipe.batch_size * recipe.train_len
    batches, val_tokens = Batches(run.data, recipe), read_validation(recipe)
    n_micro = micro_batches(recipe)
    optimizer = make_optimizer(model, recipe)
    peaks = [group["lr"] for group in optimizer.param_groups]
    run.restore(optimizer)

    print(f"the recipe, as flags: {shlex.join(recipe.as_flags())}")
    n_params, n_input = model.num_params(), model.embed.weight.numel()
    print(f"{recipe.pos}: {n_params:,} parameters in blocks + head, {n_input:,} in the input table")
    sizes = f"{tokens_per_step:,} tokens from {batches.n_windows:,} windows"
    print(f"{n_steps:,} steps of {sizes}; on {common.world_size()} x {device.type}")

    if recipe.compile:
        model.compile_parts()
    if common.world_size() > 1:  # broadcast_buffers: all have drawn the same
        ids = [device] if device.type != "cpu" else None
        model = DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)

    look = dict(desc=recipe.pos, unit="tok", unit_scale=True, disable=common.rank() > 0)
    last_time, last_step, last_save = time.monotonic(), step, time.monotonic()
    batch, stop, shown = batches.batch(step, device), False, ""
    with Bar(total=n_steps * tokens_per_step, initial=step * tokens_per_step, **look) as bar:
        while step < min(stop_at or n_steps, n_steps) and not stop:
            # set the learning rates of this step
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = learning_rate(step, n_steps, recipe.warmup_steps, peak)

            # forward and backward; while a GPU is at it, the next batch
            loss = accumulate_gradients(model, batch, n_micro)
            batch = batches.batch(step + 1, device)

            # what all processes must agree on: the mean loss, and whether one was told to stop
            agreed = torch.stack((loss / common.world_size(), torch.full_like(loss, run.signum)))
            loss, signums = common.all_reduce_sum(agreed).tolist()  # waits for the device
            stop = signums > 0
            if not math.isfinite(loss):
                raise Refused(f"the loss of step {step + 1:,} is {loss}: try a smaller --lr")

            # clip the gradients and update the weights
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            bar.update(tokens_per_step)

            # log, now and then with the validation loss
            validate = step % recipe.eval_every == 0 or step == n_steps
            if validate or step % recipe.log_every == 0:
                seconds = max(time.monotonic() - last_time, 1e-9)
                rate = (step - last_step) * tokens_per_step / seconds
                line = {"step": step, "tokens": step * tokens_per_step, "loss": loss}
                line |= {"lr": group["lr"]} | use_of_device(rate, run.model, device)
                if validate:
                    val_loss = float(window_loss(run.model, val_tokens, recipe.train_len).mean())
                    line["val_loss"], shown = val_loss, f", val {val_loss:.3f}"
                run.write_log(line)
                bar.set_postfix_str(f"loss {loss:.3f}{shown}", refresh=False)
                last_time, last_step = time.monotonic(), step

            # save by steps, and by the clock where steps are slow
            due = step % recipe.save_every == 0 or time.monotonic() - last_save > SAVE_SECONDS
            if due or stop or step in (stop_at, n_steps):
                run.save(optimizer, step)
                last_time, last_step, last_save = time.monotonic(), step, time.monotonic()


if __name__ == "__main__":
    common.one_sentence_errors(main)()
