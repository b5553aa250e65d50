"""
What does each position embedding cost? Speed and memory of training and evaluation, side by side.

    python experiments/bench.py                                      tiny, a CPU: minutes
    python experiments/bench.py --preset 60M --batch_size 64 --compile               one GPU
    python experiments/bench.py --llama --pos rope fope --batch_size 1             hf/: minutes

All embeddings take turns in one process, one training step or one evaluation each, on random
tokens, and many rounds of it. A ratio is taken within a round, since a machine's speed drifts; the
table, in Markdown, has medians over the rounds. Memory is the peak of a process of its own: on a
GPU what torch has allocated, on a CPU what is resident.
"""

import json
import multiprocessing
import re
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from shared import ROOT
from tqdm import tqdm, trange

import common
from evaluation import window_loss
from fope import POSITION_EMBEDDINGS
from model import GPT
from paper.tables import bench_table
from recipe import RECIPES
from train import accumulate_gradients, make_optimizer


class Workload:
    """One embedding's model, a batch to train it on and a long text to evaluate it on."""

    def __init__(self, args, pos, device):
        recipe = RECIPES[args.preset].changed(pos=pos, train_len=args.train_len)
        self.model = GPT(recipe).to(device)
        if args.compile:
            self.model.compile_parts()
        self.optimizer = make_optimizer(self.model, recipe)
        rng = np.random.default_rng(0)
        batch = rng.integers(50257, size=(args.batch_size, args.train_len + 1))
        self.batch = torch.from_numpy(batch).to(device)
        self.text = rng.integers(50257, size=args.eval_len + 1)
        self.device = device

    def step(self):
        accumulate_gradients(self.model, self.batch, 1)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def rate(self, what):
        """Tokens per second of one training step ("train") or one evaluation ("eval")."""
        start = time.perf_counter()
        if what == "train":
            self.step()
            tokens = self.batch[:, 1:].numel()
        else:
            tokens = len(self.text) - 1
            window_loss(self.model, self.text, tokens)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return tokens / (time.perf_counter() - start)


class LlamaWorkload(Workload):
    """A Llama with grouped keys and the embedding (hf/), a batch and 2000 tokens in its cache."""

    def __init__(self, args, pos, device):
        from transformers import LlamaConfig, LlamaForCausalLM

        from hf.swap import swap_position_embedding

        heads = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=64)
        sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=2, vocab_size=512)
        self.model = LlamaForCausalLM(LlamaConfig(**heads, **sizes)).to(device)
        swap_position_embedding(self.model, pos, args.train_len)
        self.batch = torch.randint(512, (args.batch_size, args.train_len + 1), device=device)
        text, self.device = torch.randint(512, (1, 2000), device=device), device
        with torch.no_grad():
            self.cache = self.model(text, use_cache=True).past_key_values

    def rate(self, what):
        """Tokens per second of a training step, without the optimizer, or of one token more."""
        start = time.perf_counter()
        with torch.set_grad_enabled(what == "train"):
            if what == "train":
                self.model(self.batch, labels=self.batch).loss.backward()
            else:
                self.model(self.batch[:1, :1], past_key_values=self.cache)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return (self.batch[:, 1:].numel() if what == "train" else 1) / (time.perf_counter() - start)


def peak_memory(args, pos, what, device):
    """In bytes, of one training step or one evaluation; to be called in a fresh process."""
    work = Workload(args, pos, device)
    for _ in range(2):  # the optimizer's state comes with the first step
        work.rate(what)
    if device.type == "mps":  # no peak is kept there, but what was once allocated mostly is
        return torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # elsewhere getrusage's peak begins with that of the parent process
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def measure_memory(args, device):
    """{embedding: {"train_bytes": its peak, "eval_bytes": the same}}."""
    memory = {pos: {} for pos in args.pos}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as fresh:
        for pos in tqdm(args.pos, "memory"):
            for what in ("train", "eval"):
                peak = fresh.submit(peak_memory, args, pos, what, device).result()
                memory[pos][f"{what}_bytes"] = peak
    return memory


def measure_speed(args, device):
    """{"train": [{embedding: tokens/s} of each round], "eval" or "decode": the same}."""
    work, second = (LlamaWorkload, "decode") if args.llama else (Workload, "eval")
    works = {pos: work(args, pos, device) for pos in args.pos}
    rounds = {"train": [], second: []}
    for what, n in (("train", args.rounds), (second, args.eval_rounds)):
        for work in works.values():
            work.rate(what)  # the first time compiles and fills caches
        for _ in trange(n, desc=what):
            rounds[what].append({pos: work.rate(what) for pos, work in works.items()})
    return rounds


def summarise(rounds, memory):
    """Medians over the rounds: of tokens/s, of their ratios to nope's and rope's in a round."""
    summary = {}
    for pos in memory:
        row = {what: statistics.median(r[pos] for r in rs) for what, rs in rounds.items()}
        for other in {"nope", "rope"} & memory.keys():
            ratios = {what: [r[pos] / r[other] for r in rs] for what, rs in rounds.items()}
            row[f"to_{other}"] = {what: statistics.median(rs) for what, rs in ratios.items()}
        summary[pos] = row | memory[pos]
    return summary


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
    add("--eval_rounds", type=positive, default=3, help="evaluations of each")
    add("--compile", action="store_true", help="as train.py --compile does")
    add(
        "--llama",
        action="store_true",
        help="in a Llama instead: training and decoding, speed alone",
    )
    common.add_device_flag(parser)
    add("--out", type=Path, help="the json file, if not results/bench_{preset}_{device}.json")
    args = parser.parse_args(argv)
    if args.out and args.out.exists() and "summary" not in common.read_json(args.out):
        raise common.Refused(f"--out {args.out} is there already and is no result of this script")
    device = common.init_distributed(args.device)
    common.make_folder((args.out or ROOT / "results" / "x").parent)  # now, not after the work
    # all embeddings compile the same lines; past this limit torch falls back silently
    torch._dynamo.config.recompile_limit = 1000

    memory = {pos: {} for pos in args.pos} if args.llama else measure_memory(args, device)
    rounds = measure_speed(args, device)
    sizes = ("preset", "train_len", "batch_size", "eval_len", "compile")
    result = {"kind": "bench", **{name: getattr(args, name) for name in sizes}}
    result |= {"command": common.command()} | common.provenance(device)
    result |= {"summary": summarise(rounds, memory), "rounds": rounds}
    if args.llama:
        result |= {"kind": "bench_llama", "preset": "llama"}
    table = json.dumps(result["summary"], indent=1) if args.llama else bench_table(result)
    print(f"\n{table}\n\n{result['hardware']}, {result['software']}")
    folder = ROOT / "results" / ("mechanism" if args.llama else "")
    out = args.out or folder / f"bench_{result['preset']}_{device.type}.json"
    common.write_json(out, result)
    print(f"wrote {out}")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
