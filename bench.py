"""
What does each position embedding cost? Speed and memory of training and evaluation, side by side.

    python bench.py                                                                  tiny, a CPU: minutes
    python bench.py --preset 60M --batch_size 64 --compile --out results/bench/h200.json    one GPU
    python bench.py --profile fope                                                   where the time of a training step goes
    python bench.py --show results/bench/h200.json --readme README.md                an earlier result as the README's table

All embeddings take turns in one process, several rounds of it, each with a fresh model on random tokens. A ratio is taken
within a round, since a machine's speed drifts; the table has medians over the rounds. "fope, rebuilt" makes its cosines and
sines anew in every layer at every step, as the authors' code does. Memory: on a GPU what torch has allocated at most, on a
CPU the peak resident size of a process that does nothing else. Model FLOPs: 6 N + 6 n_layer n_embd T a token in training,
N parameters without the input table, the second term causal attention.
"""

import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import fope
from eval_perplexity import provenance, window_loss
from model import GPT, SIZES, GPTConfig, autocast, join_processes, read_json, write_json
from plot import put_into_readme
from prepare_data import ArgumentParser, one_sentence_errors


class RebuiltFoPE(fope.FoPE):
    @torch.no_grad()
    def tables(self, T):
        return self.make_tables(T)


fope.POSITION_EMBEDDINGS["fope, rebuilt"] = RebuiltFoPE
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12}  # dense bf16, from the data sheets
WARM_UP_STEPS = 3


class Workload:
    """One embedding's model and what is timed with it: step() trains on one batch, evaluate() reads one long text."""

    def __init__(self, args, pos, device):
        self.model = GPT(GPTConfig.preset(args.preset, pos=pos, train_len=args.train_len)).to(device)
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

    def rate(self, function, times, tokens):
        """Tokens per second of function(), called `times` times; and the peak GPU memory in bytes, where there is one."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(times):
            function()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return times * tokens / seconds, torch.cuda.max_memory_allocated() if cuda else None


def measure(args, pos, device):
    """One embedding in one round: tokens/s and, on a GPU, bytes."""
    work = Workload(args, pos, device)
    for _ in range(WARM_UP_STEPS):
        work.step()
    train, train_bytes = work.rate(work.step, args.steps, work.batch[:, 1:].numel())
    work.optimizer = None
    work.evaluate()
    evaluation, eval_bytes = work.rate(work.evaluate, 1, args.eval_len)
    result = {"train": train, "eval": evaluation}
    return result | ({"train_bytes": train_bytes, "eval_bytes": eval_bytes} if train_bytes else {})


def peak_resident(job):
    """The peak resident bytes of this process after one training step or one evaluation."""
    args, pos, what = job
    work = Workload(args, pos, torch.device("cpu"))
    if what == "eval":
        work.optimizer = None
    getattr(work, {"train": "step", "eval": "evaluate"}[what])()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def summarise(rounds):
    """Medians over the rounds: of each embedding's numbers, and of their ratios to nope's and rope's in the same round."""
    summary = {}
    for pos, first in rounds[0].items():
        summary[pos] = {key: statistics.median(r[pos][key] for r in rounds) for key in first}
        for other in {"nope", "rope"} & rounds[0].keys():
            ratios = {key: statistics.median(r[pos][key] / r[other][key] for r in rounds) for key in first}
            summary[pos][f"to_{other}"] = ratios
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
            cells.append(f"{row[f'{what}_bytes'] / 1e9:.2f}" if f"{what}_bytes" in row else "-")
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
    add("--pos", nargs="+", choices=fope.POSITION_EMBEDDINGS, default=list(fope.POSITION_EMBEDDINGS), help="which embeddings")
    add("--preset", choices=SIZES, default="tiny", help="size of the model")
    add("--train_len", type=int, default=512, help="tokens per training sequence")
    add("--batch_size", type=int, default=4, help="sequences per training step")
    add("--eval_len", type=int, default=8192, help="tokens of the text that is read at once")
    add("--steps", type=int, default=3, help="timed training steps in a round")
    add("--rounds", type=int, default=5, help="how often all take their turn")
    add("--compile", action="store_true", help="torch.compile the blocks and the loss, as train.py --compile does")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--out", help="the json file (default: results/bench/ with preset and device in its name)")
    add("--profile", choices=fope.POSITION_EMBEDDINGS, metavar="POS", help="show torch's profile of a training step instead")
    add("--show", metavar="JSON", help="show an earlier result instead")
    add("--readme", help="put the table between this file's <!-- table bench --> lines")
    args = parser.parse_args(argv)
    for name in ("train_len", "batch_size", "eval_len", "steps", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    if args.show:
        result = read_json(args.show)
        if result.get("kind") != "bench":
            raise ValueError(f"{args.show} is no result of bench.py")
        show(result, args.readme)
        return
    device = join_processes(args.device)
    torch._dynamo.config.recompile_limit = 1000  # all embeddings compile the same lines; past it torch falls back silently
    if args.profile:
        work = Workload(args, args.profile, device)
        for _ in range(WARM_UP_STEPS):
            work.step()
        with torch.profiler.profile() as profile:
            work.rate(work.step, args.steps, 0)
        by_device = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=by_device, row_limit=25, max_name_column_width=60))
        return

    rounds = []
    for _ in tqdm(range(args.rounds), desc="rounds"):
        rounds.append({pos: measure(args, pos, device) for pos in tqdm(args.pos, leave=False)})
    if device.type == "cpu":
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for what in ("train", "eval"):
                jobs = [(args, pos, what) for pos in args.pos]
                for pos, resident in zip(args.pos, pool.imap(peak_resident, jobs, chunksize=1), strict=True):
                    for r in rounds:
                        r[pos][f"{what}_bytes"] = resident
    summary = summarise(rounds)

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
    out = Path(args.out or Path("results") / "bench" / f"{args.preset}_{device.type}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result)
    show(result, args.readme)
    print(f"wrote {out}")


if __name__ == "__main__":
    one_sentence_errors(main)()
