"""
What does each position embedding cost? Speed and memory of training and evaluation, side by side.

    python bench.py                                                                  tiny, a CPU: minutes
    python bench.py --preset 60M --batch_size 64 --compile --out results/bench/h200.json    one GPU
    python bench.py --profile fope                                                   where the time of a training step goes
    python bench.py --show results/bench/h200.json --readme README.md                an earlier result as the README's table

All embeddings take turns in one process, one training step or one evaluation each, on random tokens, and many rounds of it. A
ratio is taken within a round, since a machine's speed drifts; the table has medians over the rounds. "fope, rebuilt" makes its
cosines and sines anew in every layer at every step, as the authors' code does; "kerple, flex", on CUDA alone, is KERPLE by
FlexAttention instead of blocks of queries. Memory is the peak of a process of its own: on a GPU what torch has allocated, on a
CPU what is resident. Model FLOPs: 6 N + 6 n_layer n_embd T a token in training, N parameters without the input table, the
second term causal attention.
"""

import multiprocessing
import re
import resource
import statistics
import sys
import time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from eval_perplexity import provenance, window_loss
from fope import POSITION_EMBEDDINGS, FoPE
from model import GPT, SIZES, GPTConfig, autocast, join_processes, read_json, write_json
from plot import put_into_readme
from prepare_data import ArgumentParser, one_sentence_errors


class RebuiltFoPE(FoPE):
    @torch.no_grad()
    def tables(self, T):
        return self.make_tables(T)


EMBEDDINGS = [*POSITION_EMBEDDINGS, "fope, rebuilt", "kerple, flex"]
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12}  # dense bf16, from the data sheets


class Workload:
    """One embedding's model and what is timed with it: step() trains on one batch, evaluate() reads one long text."""

    def __init__(self, args, pos, device):
        pos_args = {"flex": True} if pos == "kerple, flex" else {}
        config = GPTConfig.preset(args.preset, pos=pos.split(",")[0], pos_args=pos_args, train_len=args.train_len)
        self.model = GPT(config).to(device)
        if pos == "fope, rebuilt":
            for block in self.model.blocks:
                block.attn.pos.__class__ = RebuiltFoPE
        if args.compile:
            self.model.compile_parts()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        rng = np.random.default_rng(0)
        self.batch = torch.from_numpy(rng.integers(50257, size=(args.batch_size, args.train_len + 1))).to(device)
        self.text, self.eval_len, self.device = rng.integers(50257, size=args.eval_len + 1), args.eval_len, device

    def step(self):
        with autocast(self.device):
            loss = self.model(self.batch[:, :-1], self.batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self):
        window_loss(self.model, self.text, self.eval_len)

    def rate(self, what):
        """Tokens per second of one training step ("train") or one evaluation ("eval")."""
        start = time.perf_counter()
        (self.step if what == "train" else self.evaluate)()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        tokens = self.batch[:, 1:].numel() if what == "train" else self.eval_len
        return tokens / (time.perf_counter() - start)


def peak_memory(job):
    """The peak memory in bytes of one training step or one evaluation; to be called in a fresh process."""
    args, pos, what, device = job
    work = Workload(args, pos, device)
    if what == "eval":
        work.optimizer = None
    for _ in range(2):  # the optimizer's state comes with the first step
        work.rate(what)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")  # where there is one: getrusage's peak begins with that of the parent process
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def summarise(rounds, memory):
    """Medians over the rounds: of each embedding's tokens/s, and of their ratios to nope's and rope's in the same round."""
    summary = {}
    for pos in rounds[0]["train"]:
        rates = {what: [r[what] for r in rounds if what in r] for what in ("train", "eval")}
        row = {what: statistics.median(rate[pos] for rate in rates[what]) for what in rates}
        for other in {"nope", "rope"} & rounds[0]["train"].keys():
            row[f"to_{other}"] = {what: statistics.median(rate[pos] / rate[other] for rate in rates[what]) for what in rates}
        summary[pos] = {**row, "train_bytes": memory[pos, "train"], "eval_bytes": memory[pos, "eval"]}
    return summary


def table(result):
    """A result as a Markdown table."""
    summary = result["summary"]
    references = [name for name in ("nope", "rope") if name in summary]
    ratios = "".join(f" to {name} |" for name in references)
    mfu = result["model_flops_used"]
    lines = [
        f"| {result['preset']}, T = {result['train_len']}, batch {result['batch_size']} | training, tokens/s |{ratios} GB |"
        + (" FLOPs used |" if mfu else "")
        + f" reading {result['eval_len']}, tokens/s |{ratios} GB |"
    ]
    lines.append("|---" + "|--:" * (lines[0].count("|") - 2) + "|")
    for pos, row in summary.items():
        cells = [pos]
        for what in ("train", "eval"):
            cells += [f"{row[what]:,.0f}", *(f"{row[f'to_{name}'][what]:.2f}" for name in references)]
            cells.append(f"{row[f'{what}_bytes'] / 1e9:.2f}")
            if mfu and what == "train":
                cells.append(f"{100 * mfu[pos]:.0f} %")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def show(result, readme):
    print(f"\n{table(result)}\n\n{result['hardware']}, {result['software']}, median of {len(result['rounds'])} rounds")
    if readme:
        put_into_readme(readme, "bench", table(result))


def main(argv=None):
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--pos", nargs="+", choices=EMBEDDINGS, help="which embeddings (default: all that run on the device)")
    add("--preset", choices=SIZES, default="tiny", help="size of the model")
    add("--train_len", type=int, default=512, help="tokens per training sequence")
    add("--batch_size", type=int, default=4, help="sequences per training step")
    add("--eval_len", type=int, default=8192, help="tokens of the text that is read at once")
    add("--rounds", type=int, default=10, help="training steps of each")
    add("--eval_rounds", type=int, default=3, help="evaluations of each")
    add("--compile", action="store_true", help="torch.compile the blocks and the loss, as train.py --compile does")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--out", help="the json file (default: results/bench/ with preset and device in its name)")
    add("--profile", choices=EMBEDDINGS, metavar="POS", help="show torch's profile of a training step instead")
    add("--show", metavar="JSON", help="show an earlier result instead")
    add("--readme", help="put the table between this file's <!-- table bench --> lines")
    args = parser.parse_args(argv)
    for name in ("train_len", "batch_size", "eval_len", "rounds", "eval_rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    if args.show:
        result = read_json(args.show)
        if result.get("kind") != "bench":
            raise ValueError(f"{args.show} is no result of bench.py")
        show(result, args.readme)
        return
    device = join_processes(args.device)
    args.pos = args.pos or [pos for pos in EMBEDDINGS if pos != "kerple, flex" or device.type == "cuda"]
    if "kerple, flex" in [*args.pos, args.profile] and device.type != "cuda":
        raise ValueError("kerple, flex is for CUDA alone: elsewhere FlexAttention has no backward pass")
    torch._dynamo.config.recompile_limit = 1000  # all embeddings compile the same lines; past it torch falls back silently
    if args.profile:
        work = Workload(args, args.profile, device)
        work.step(), work.step()  # the first compiles and fills caches
        with torch.profiler.profile() as profile:
            work.rate("train")
        by_device = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=by_device, row_limit=25, max_name_column_width=60))
        return

    out = Path(args.out or Path("results") / "bench" / f"{args.preset}_{device.type}.json")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder, not a file")
    out.parent.mkdir(parents=True, exist_ok=True)  # now, not after the work
    jobs = [(args, pos, what, device) for what in ("train", "eval") for pos in args.pos]
    memory = {}
    for job in tqdm(jobs, "memory"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            try:
                memory[job[1:3]] = fresh.submit(peak_memory, job).result()
            except BrokenExecutor:
                raise MemoryError from None  # killed, and what kills here is the system that runs out of it

    works = {pos: Workload(args, pos, device) for pos in args.pos}
    rounds = [{} for _ in range(max(args.rounds, args.eval_rounds))]
    for what, n in (("train", args.rounds), ("eval", args.eval_rounds)):
        for work in works.values():
            work.rate(what)  # the first time compiles and fills caches
        for r in tqdm(rounds[:n], what):
            r[what] = {pos: work.rate(what) for pos, work in works.items()}
    summary = summarise(rounds, memory)

    config = GPTConfig.preset(args.preset)
    with torch.device("meta"):
        n_params = GPT(GPTConfig.preset(args.preset, pos="nope")).num_params()
    flops = 6 * n_params + 6 * config.n_layer * config.n_embd * args.train_len
    about = provenance(device)
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in about["hardware"]), None)
    sizes = {name: getattr(args, name) for name in ("preset", "train_len", "batch_size", "eval_len", "compile")}
    result = {
        "kind": "bench",
        **sizes,
        **about,
        "model_flops_per_token": flops,
        "model_flops_used": {pos: row["train"] * flops / peak for pos, row in summary.items()} if peak else None,
        "summary": summary,
        "rounds": rounds,
    }
    write_json(out, result)
    show(result, args.readme)
    print(f"wrote {out}")


if __name__ == "__main__":
    one_sentence_errors(main)()
