"""
What does each position embedding cost? Training and reading, measured on whatever device there is.

    python experiments/bench.py                                      tiny, a CPU: minutes
    python experiments/bench.py --preset 60M --batch_size 64 --compile               one GPU

All embeddings take turns in one process, one training step or one long text each, on random tokens,
and many rounds of it. A ratio is taken within a round, since a machine's speed drifts; the table,
in Markdown, has medians over the rounds. MFU is the share of the card's peak, where we know that.
Memory is the peak of one embedding alone: on a GPU what torch has allocated, on a CPU what is
resident. The last column is the kernel that torch chooses for attention.
"""

import gc
import multiprocessing
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from shared import ROOT
from torch.nn.attention import SDPBackend

import common
from common import Bar
from data import window_loss
from fope import POSITION_EMBEDDINGS
from model import GPT
from recipe import RECIPES
from rows import markdown


class Workload:
    """One embedding's model and what it does: "train" and "compiled" are a step, "eval" a text."""

    def __init__(self, args, pos, what, device):
        recipe = RECIPES[args.preset].changed(pos=pos, train_len=args.train_len)
        self.model, self.what, self.device = GPT(recipe).to(device), what, device
        if what == "compiled":
            self.model.compile_parts()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=recipe.lr,
            betas=(0.9, 0.95),
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        rng = np.random.default_rng(0)
        batch = rng.integers(50257, size=(args.batch_size, args.train_len + 1))
        self.batch = torch.from_numpy(batch).to(device)
        self.text = rng.integers(50257, size=args.eval_len + 1)

    def run(self):
        """One step or one text. Returns how many tokens it had."""
        if self.what == "eval":
            return window_loss(self.model, self.text, len(self.text) - 1).size
        with common.autocast(self.device):
            loss = self.model(self.batch[:, :-1], self.batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.batch[:, 1:].numel()

    def rate(self):
        """Tokens per second of one run."""
        start = time.perf_counter()
        tokens = self.run()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return tokens / (time.perf_counter() - start)


def attention_kernels(run):
    """The names of the kernels that torch chooses for attention within run()."""
    names, attend = set(), F.scaled_dot_product_attention

    def note(*args, **how):
        names.add(SDPBackend(torch._fused_sdp_choice(*args, **how)).name.lower())
        return attend(*args, **how)

    with patch.object(F, "scaled_dot_product_attention", note):
        run()
    return ", ".join(sorted(names))


def alone(args, pos, what, device):
    """Which kernels one embedding runs, the peak of memory, FLOP per token; in another process."""
    if device.type == "cuda":
        gc.collect()  # or the last one's weights might still be there
        torch.cuda.reset_peak_memory_stats()
    work = Workload(args, pos, what, device)
    kernels = attention_kernels(work.run) if what != "compiled" else "as in train"
    work.run()  # the optimizer's state came with the first step
    if device.type == "mps":  # no peak is kept there, but what was once allocated mostly is
        peak = torch.mps.driver_allocated_memory()
    elif device.type != "cpu":
        peak = torch.accelerator.max_memory_allocated()
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flops = work.model.flops_per_token()
    if what == "eval":  # a longer text, and no backward pass
        work.model.config.train_len = args.eval_len
        flops = work.model.flops_per_token() / 3
    return {f"{what}_kernels": kernels, f"{what}_bytes": peak, f"{what}_flops": flops}


def measure_alone(args, whats, device):
    """{embedding: what it needs for each of whats}."""
    spawn, measured = multiprocessing.get_context("spawn"), {pos: {} for pos in args.pos}
    n = None if device.type == "cuda" else 1  # elsewhere a process cannot reset its peak
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=n) as other:
        for pos, what in Bar([(pos, what) for pos in args.pos for what in whats], "memory"):
            measured[pos] |= other.submit(alone, args, pos, what, device).result()
    return measured


def measure_speed(args, whats, device):
    """{what: [{embedding: tokens/s} of each round]}"""
    rounds = {}
    for what in whats:
        works = {pos: Workload(args, pos, what, device) for pos in args.pos}
        for work in works.values():
            work.rate()  # the first time compiles and fills caches
        n = args.rounds if what in ("train", "compiled") else args.eval_rounds
        rounds[what] = [{p: work.rate() for p, work in works.items()} for _ in Bar(range(n), what)]
    return rounds


def summarise(rounds, measured):
    """Medians over the rounds: of tokens/s, of their ratios to nope's and rope's in a round."""
    summary = {}
    for pos in measured:
        row = {what: statistics.median(r[pos] for r in rs) for what, rs in rounds.items()}
        for other in {"nope", "rope"} & measured.keys():
            ratios = {what: [r[pos] / r[other] for r in rs] for what, rs in rounds.items()}
            row[f"to_{other}"] = {what: statistics.median(rs) for what, rs in ratios.items()}
        summary[pos] = row | measured[pos]
    return summary


def bench_table(result):
    """A row for each thing that an embedding does."""
    rows, peak = [], common.peak_flops(result["hardware"])
    references = [name for name in ("nope", "rope") if name in result["summary"]]
    step = result["batch_size"] * result["train_len"]
    works = {"train": step, "compiled": step, "eval": result["eval_len"]}
    for pos, row in result["summary"].items():
        for what in (what for what in works if what in row):
            cells = [f"{pos}, {what}", f"{1000 * works[what] / row[what]:,.1f}"]
            cells += [f"{row[what]:,.0f}", *(f"{row[f'to_{r}'][what]:.2f}" for r in references)]
            has_mfu = peak and f"{what}_flops" in row
            cells += [f"{row[what] * row[f'{what}_flops'] / peak:.1%}" if has_mfu else "-"]
            cells += [f"{row[f'{what}_bytes'] / 1e9:.2f}"]
            rows.append([*cells, row.get(f"{what}_kernels", "-")])
    title = f"{result['preset']}, T = {result['train_len']}, batch {result['batch_size']}"
    ratios = [f"to {name}" for name in references]
    return markdown([title, "ms", "tokens/s", *ratios, "MFU", "GB", "attention"], rows)


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add, positive = parser.add_argument, common.positive_int
    names = list(POSITION_EMBEDDINGS)
    add("--pos", nargs="+", choices=names, default=names, help="which embeddings")
    add("--preset", choices=RECIPES, default="tiny", help="size of the model")
    add("--train_len", type=positive, default=512, help="tokens per training sequence")
    add("--batch_size", type=positive, default=4, help="sequences per training step")
    add("--eval_len", type=positive, default=8192, help="tokens of a text, read at once")
    add("--rounds", type=positive, default=10, help="training steps of each")
    add("--eval_rounds", type=positive, default=3, help="texts of each")
    add("--compile", action="store_true", help="a compiled step, too")
    common.add_device_flag(parser)
    add("--out", type=Path, help="the json file, if not results/bench_{preset}_{device}.json")
    args = parser.parse_args(argv)
    device = common.init_distributed(args.device)
    out = args.out or ROOT / "results" / f"bench_{args.preset}_{device.type}.json"
    common.make_folder(out.parent)  # now, not after the work
    # all embeddings compile the same lines; past this limit torch falls back silently
    torch._dynamo.config.recompile_limit = 1000

    whats = ["train"] + ["compiled"] * args.compile + ["eval"]
    measured = measure_alone(args, whats, device)
    rounds = measure_speed(args, whats, device)
    result = {"kind": "bench", "preset": args.preset}
    result |= {name: getattr(args, name) for name in ("train_len", "batch_size", "eval_len")}
    result |= {"command": common.command()} | common.provenance(device)
    result |= {"summary": summarise(rounds, measured), "rounds": rounds}
    print(f"\n{bench_table(result)}\n\n{result['hardware']}, {result['software']}")
    common.write_json(out, result)
    print(f"wrote {out}")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
