"""
What does each position embedding cost? Speed and memory of training and evaluation, side by side.

    python experiments/bench.py                                      tiny, a CPU: minutes
    python experiments/bench.py --preset 60M --batch_size 64 --compile               one GPU
    python experiments/bench.py --profile fope        where the time of a training step goes
    python experiments/bench.py --show results/bench_60M_cuda.json         an earlier result

All embeddings take turns in one process, one training step or one evaluation each, on random
tokens, and many rounds of it. A ratio is taken within a round, since a machine's speed drifts; the
table, in Markdown, has medians over the rounds. "fope, rebuilt" makes its cosines and sines anew in
every layer at every step, as the authors' code does. Memory is the peak of a process of its own: on
a GPU what torch has allocated, on a CPU what is resident. Model FLOPs: 6 N + 6 n_layer n_embd T a
token in training, N parameters without the input table, the second term causal attention.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import (  # noqa: E402
    ArgumentParser,
    add_device_flag,
    autocast,
    init_distributed,
    one_sentence_errors,
    positive_int,
    provenance,
    read_json,
    write_json,
)
from eval_perplexity import window_loss  # noqa: E402
from fope import POSITION_EMBEDDINGS, FoPE  # noqa: E402
from model import GPT, SIZES, GPTConfig  # noqa: E402
from plot import bench_table  # noqa: E402


class RebuiltFoPE(FoPE):
    @torch.no_grad()
    def tables(self, T):
        return self.make_tables(T)


EMBEDDINGS = [*POSITION_EMBEDDINGS, "fope, rebuilt"]
# dense bf16, from the data sheets
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12}


class Workload:
    """
    One embedding's model and what is timed with it: step() trains on one batch, evaluate() reads
    one long text.
    """

    def __init__(self, args, pos, device):
        pos, _, rebuilt = pos.partition(", ")
        config = GPTConfig.preset(args.preset, pos=pos, train_len=args.train_len)
        self.model = GPT(config).to(device)
        if rebuilt:
            for block in self.model.blocks:
                block.attn.pos.__class__ = RebuiltFoPE
        if args.compile:
            self.model.compile_parts()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        rng = np.random.default_rng(0)
        batch = rng.integers(50257, size=(args.batch_size, args.train_len + 1))
        self.batch = torch.from_numpy(batch).to(device)
        self.text = rng.integers(50257, size=args.eval_len + 1)
        self.eval_len, self.device = args.eval_len, device

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
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        tokens = self.batch[:, 1:].numel() if what == "train" else self.eval_len
        return tokens / (time.perf_counter() - start)


# -----------------------------------------------------------------------------
# measuring


def peak_memory(args, pos, what, device):
    """
    The peak memory in bytes of one training step or one evaluation; to be called in a fresh
    process.
    """
    work = Workload(args, pos, device)
    if what == "eval":
        work.optimizer = None
    for _ in range(2):  # the optimizer's state comes with the first step
        work.rate(what)
    if device.type == "mps":  # no peak is kept there, but what was once allocated mostly is
        return torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's peak begins with that of the parent process
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_memory(args, device):
    """{(embedding, "train" or "eval"): its peak in bytes}."""
    memory = {}
    for pos, what in tqdm(
        [(pos, what) for what in ("train", "eval") for pos in args.pos], "memory"
    ):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            try:
                memory[pos, what] = fresh.submit(peak_memory, args, pos, what, device).result()
            except BrokenExecutor:  # killed, and what kills here is the system that runs out of it
                raise MemoryError from None
    return memory


def measure_speed(args, device):
    """[{"train": {embedding: tokens/s}, "eval": the same} of each round]."""
    works = {pos: Workload(args, pos, device) for pos in args.pos}
    rounds = [{} for _ in range(max(args.rounds, args.eval_rounds))]
    for what, n in (("train", args.rounds), ("eval", args.eval_rounds)):
        for work in works.values():
            work.rate(what)  # the first time compiles and fills caches
        for r in tqdm(rounds[:n], what):
            r[what] = {pos: work.rate(what) for pos, work in works.items()}
    return rounds


def profile(args, device):
    """torch's profile of a training step of --profile's embedding, as a table."""
    work = Workload(args, args.profile, device)
    for _ in range(2):  # the first compiles and fills caches
        work.step()
    with torch.profiler.profile() as profile:
        work.rate("train")
    by = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    return profile.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60)


# -----------------------------------------------------------------------------
# the result


def summarise(rounds, memory):
    """
    Medians over the rounds: of each embedding's tokens/s, and of their ratios to nope's and rope's
    in the same round.
    """
    summary = {}
    rates = {what: [r[what] for r in rounds if what in r] for what in ("train", "eval")}
    for pos in rounds[0]["train"]:
        row = {what: statistics.median(r[pos] for r in rs) for what, rs in rates.items()}
        for other in {"nope", "rope"} & rounds[0]["train"].keys():
            ratios = {what: [r[pos] / r[other] for r in rs] for what, rs in rates.items()}
            row[f"to_{other}"] = {what: statistics.median(rs) for what, rs in ratios.items()}
        memories = {f"{what}_bytes": memory[pos, what] for what in ("train", "eval")}
        summary[pos] = row | memories
    return summary


def describe(args, device, summary, rounds):
    """What is written to the json file."""
    config = GPTConfig.preset(args.preset, pos="nope")
    with torch.device("meta"):
        n_params = GPT(config).num_params()
    flops = 6 * n_params + 6 * config.n_layer * config.n_embd * args.train_len
    about = provenance(device)
    used = None
    if peak := next((peak for gpu, peak in PEAK_FLOPS.items() if gpu in about["hardware"]), None):
        used = {pos: row["train"] * flops / peak for pos, row in summary.items()}
    sizes = ("preset", "train_len", "batch_size", "eval_len", "compile")
    return {
        "kind": "bench",
        **{name: getattr(args, name) for name in sizes},
        **about,
        "model_flops_per_token": flops,
        "model_flops_used": used,
        "summary": summary,
        "rounds": rounds,
    }


def show(result):
    about = f"{result['hardware']}, {result['software']}"
    print(f"\n{bench_table(result)}\n\n{about}, median of {len(result['rounds'])} rounds")


# -----------------------------------------------------------------------------
# the command


def parse_args(argv):
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--pos", nargs="+", choices=EMBEDDINGS, default=EMBEDDINGS, help="which embeddings")
    add("--preset", choices=SIZES, default="tiny", help="size of the model")
    add("--train_len", type=positive_int, default=512, help="tokens per training sequence")
    add("--batch_size", type=positive_int, default=4, help="sequences per training step")
    add("--eval_len", type=positive_int, default=8192, help="tokens of a text, read at once")
    add("--rounds", type=positive_int, default=10, help="training steps of each")
    add("--eval_rounds", type=positive_int, default=3, help="evaluations of each")
    add("--compile", action="store_true", help="as train.py --compile does")
    add_device_flag(parser)
    add("--out", help="the json file, if not results/bench_{preset}_{device}.json")
    what = "show torch's profile of a training step instead"
    add("--profile", choices=EMBEDDINGS, metavar="POS", help=what)
    add("--show", metavar="JSON", help="show an earlier result instead")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    if args.show:
        result = read_json(args.show)
        if result.get("kind") != "bench":
            raise ValueError(f"{args.show} is no result of bench.py")
        show(result)
        return
    device = init_distributed(args.device)
    # all embeddings compile the same lines; past this limit torch falls back silently
    torch._dynamo.config.recompile_limit = 1000
    if args.profile:
        print(profile(args, device))
        return

    out = Path(args.out or ROOT / "results" / f"bench_{args.preset}_{device.type}.json")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder, not a file")
    out.parent.mkdir(parents=True, exist_ok=True)  # now, not after the work
    memory = measure_memory(args, device)
    rounds = measure_speed(args, device)
    result = describe(args, device, summarise(rounds, memory), rounds)
    write_json(out, result)
    show(result)
    print(f"wrote {out}")


if __name__ == "__main__":
    one_sentence_errors(main)()
