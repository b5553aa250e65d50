"""
The paper's figures and tables, which figures.py lists: train, evaluate, draw.

    python paper.py --list
    python paper.py figure1                                    tiny models on a CPU, one seed
    python paper.py figure1 --seeds 5 --passkey_seeds 10       with intervals
    python paper.py figure6a --size 20M --tokens 1000000000 --device cuda
    python paper.py figure1 --size 60M --dry-run               what it will take
    python paper.py --primary --results results                what carries the report's claims

Models, logs and results go to runs_out/SIZE, which all figures share. What is finished is skipped,
what was cut off is resumed; Ctrl-C saves all that runs. Models of the sizes tiny and 20M_cpu run
side by side on the CPU, one a core, whatever --device says. At tiny size text and passkeys have a
model each (the presets tiny and tiny_passkey of train.py); from 20M on both are asked of one model,
as in the paper.
"""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import common
import plot
import tables
from common import number, positive_int
from eval_perplexity import window_loss
from figures import DATA, EVALUATIONS, FIGURES, ON_CPU, PRIMARY, SETTINGS, TINY, TOKENIZERS
from fope import above_floor, rope_freqs
from jobs import ROOT, Job, n_cores, run_jobs
from model import GPT, GPTConfig
from train import RECIPES, SIZE_OF, accumulate_gradients

# --- from a figure to jobs


def data_folder(name, args):
    return (args.out if args.size in ON_CPU else ROOT) / "data" / name


def one_for_both(args):
    """Whether one model, trained on text, answers for passkeys, too."""
    return len({setting.preset for setting in SETTINGS[args.size].values()}) == 1


def training_data(figure, kind, args):
    """The data folder that models of this kind are trained on."""
    is_text = kind == "text" or one_for_both(args)
    return (is_text and figure.trained_on) or SETTINGS[args.size][kind].data


def run_folder(figure, kind, name, seed, args):
    data, setting = training_data(figure, kind, args), SETTINGS[args.size][kind]
    usual = "text" if one_for_both(args) else kind
    return args.out / (usual if data == setting.data else data) / f"{name}_s{seed}"


def recipe_config(preset, **more):
    """Size and train_len of one of train.py's presets, as a GPTConfig."""
    size = SIZE_OF.get(preset, preset)
    return GPTConfig.preset(size, train_len=RECIPES[preset]["train_len"], **more)


def trained_tokens(figure, model, setting, args):
    tokens = args.tokens or setting.tokens or RECIPES[setting.preset]["tokens"]
    continued = model.init_from and not model.eval_flags
    return int(tokens * figure.share) if continued else tokens


def model_flags(model, config):
    """
    The flags of a model for train.py, with what depends on its size: {D2}, {D4}, {D8} times the
    number of frequencies above the floor; {D2_sigma} and so on, and {fs_sigma} for the series
    alone, with which the tables have as much noise as FoPE's (its docstring says how much a weight
    has, and a table adds up D of them); {len2}, twice the training length.
    """
    head_dim, n_head = config.head_dim, config.n_head
    n_kept = len(above_floor(rope_freqs(head_dim, config.theta), config.train_len))
    K = min(n_kept, head_dim // 4)

    def table_noise(D, K):
        return math.sqrt(D / (K * (D + n_head)))

    fopes = config.pos_args.get("sigma", 0.3) * table_noise(n_kept, K)
    sizes = {f"D{n}": n * n_kept for n in (2, 4, 8)} | {"len2": 2 * config.train_len}
    sizes["fs_sigma"] = round(fopes / table_noise(head_dim // 2, head_dim // 2), 4)
    sizes |= {f"D{n}_sigma": round(fopes / table_noise(n * n_kept, K), 4) for n in (2, 4, 8)}
    return model.flags.format(**sizes)


def train_command(figure, model, kind, seed, args):
    setting = SETTINGS[args.size][kind]
    run = run_folder(figure, kind, model.name, seed, args)
    data = training_data(figure, kind, args)
    command = ["train.py", "--data", data_folder(data, args), "--out", run]
    command += ["--seed", seed, "--device", args.device]
    command += ["--tokens", trained_tokens(figure, model, setting, args)]
    config = recipe_config(setting.preset)
    if model.init_from:
        start = run_folder(figure, kind, model.init_from, seed, args)
        command += ["--init_from", start, "--train_len", 2 * config.train_len]
        command += ["--batch_size", setting.continued_batch]
    else:
        command += ["--preset", setting.preset]
    command += model_flags(model, config).split()
    command += model.tiny_flags.split() if args.size in TINY else []
    return command + ["--compile"] * (args.device != "cpu")


def eval_commands(figure, model, kind, seed, args):
    """[(words of the command, the result it writes), ...]: on each corpus of the figure."""
    script, amount = EVALUATIONS[kind]
    setting = SETTINGS[args.size][kind]
    train_len = RECIPES[setting.preset]["train_len"]
    lengths = ",".join(str(train_len * multiple) for multiple in (1, 2, 4, 8, 16))
    evaluated = model.init_from if model.eval_flags else model.name
    run = run_folder(figure, kind, evaluated, seed, args)
    commands = []
    for corpus in figure.corpora if kind == "text" else ("",):
        tags = [script, model.name if model.eval_flags else "", corpus]
        result = run / f"{'_'.join(tag for tag in tags if tag)}.json"
        command = [f"eval_{script}.py", run, "--out", result, "--device", args.device]
        n = setting.amounts.get(corpus, setting.amount)
        command += ["--lengths", lengths, amount, n, *model.eval_flags.split()]
        command += ["--data", data_folder(corpus, args)] if corpus else []
        command += ["--seed", seed] if kind == "passkey" else []  # each seed its own prompts
        command += ["--label", model.label] if model.label else []
        commands.append((command, result))
    return commands


def make_job(figure, model, kind, seed, args):
    run, needs = run_folder(figure, kind, model.name, seed, args), ""
    name = str(run.relative_to(args.out))
    if model.init_from:
        start = run_folder(figure, kind, model.init_from, seed, args)
        needs = str(start.relative_to(args.out))
    trains = not model.eval_flags
    if kind == "passkey" and one_for_both(args):  # the text model is evaluated once more
        name, needs, trains = f"{name} {kind}", name, False
    commands = [train_command(figure, model, kind, seed, args)] if trains else []
    evaluations = eval_commands(figure, model, kind, seed, args)
    commands += [command for command, _ in evaluations]
    results = [result for _, result in evaluations]
    setting = SETTINGS[args.size][kind]
    tokens = trained_tokens(figure, model, setting, args)
    return Job(name, commands, results, tokens, needs, setting.preset, trains, model.shown)


def jobs_of(figure, args):
    seeds = {"text": args.seeds, "passkey": args.passkey_seeds or args.seeds}
    lines = [
        (model, kind, seed)
        for seed in range(max(seeds[kind] for kind in figure.kinds))
        for kind in figure.kinds
        for model in figure.models
        if seed < seeds[kind]
    ]
    return [make_job(figure, *line, args) for line in lines]


# --- the command


def prepare_data(figure, args):
    """Make the data of what runs on a CPU; of the others' say what is missing."""
    names = {training_data(figure, kind, args) for kind in figure.kinds} | set(figure.corpora)
    for name in sorted(names - {""}):  # books before c4, which takes their tokenizer
        folder = data_folder(name, args)
        if (folder / "meta.json").exists():
            continue
        if args.size not in ON_CPU:
            how = "python prepare_data.py --help shows how to make it"
            raise ValueError(f"there is no data/{name} yet; {how}")
        tokenizer, books = TOKENIZERS.get(args.size, "byte"), data_folder("books", args)
        words = dict(tokenizer=tokenizer, books=books)
        flags = [word.format(**words) for word in DATA[name].split()]
        command = [sys.executable, "prepare_data.py", *flags, "--out", str(folder)]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise ValueError(f"the data of {name} could not be prepared")


def speeds(preset, args):
    """(training, evaluation) tokens per second here, from a few steps, and the parameters."""
    recipe, vocab_sizes = RECIPES[preset], {"tiny": 257, "tiny_passkey": 2048, "20M_cpu": 4096}
    vocab_size, train_len = vocab_sizes.get(preset, 50257), recipe["train_len"]
    device = common.init_distributed(args.device)
    model = GPT(recipe_config(preset, vocab_size=vocab_size)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    micro_batch = recipe["batch_size"] // recipe["grad_accum"]
    if args.device == "cpu":
        micro_batch = min(micro_batch, 8)  # more would take minutes
    else:
        model.compile_parts()
    batch = torch.randint(vocab_size, (micro_batch, train_len + 1)).to(args.device)
    text = torch.randint(vocab_size, (16 * train_len + 1,)).numpy()

    def seconds(call):
        start = time.time()
        call()
        return time.time() - start

    def step():
        loss = accumulate_gradients(model, batch, 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the device

    train_rate = micro_batch * train_len / min([seconds(step) for _ in range(4)][1:])
    eval_rate = 16 * train_len / seconds(lambda: window_loss(model, text, 4 * train_len))
    return train_rate, eval_rate, sum(p.numel() for p in model.parameters())


def dry_run(name, figure, args):
    """Say what is left to do, what it will take, and how long."""
    jobs = jobs_of(figure, args)
    left, hours, disk = [job for job in jobs if not job.done()], 0.0, 0
    if args.device == "cpu":
        torch.set_num_threads(max(1, n_cores() // args.at_once))
    measured = {preset: speeds(preset, args) for preset in sorted({job.preset for job in left})}
    for preset, (train_rate, eval_rate, _) in measured.items():
        print(f"{preset}: {train_rate:,.0f} tokens/s in training, {eval_rate:,.0f} in evaluation")
    for job in left:
        train_rate, eval_rate, params = measured[job.preset]
        is_passkey = "eval_passkey.py" in job.commands[-1]
        setting = SETTINGS[args.size]["passkey" if is_passkey else "text"]
        lengths = 31 * RECIPES[job.preset]["train_len"] if is_passkey else 5  # 1 + 2 + .. + 16
        corpora = ("",) if is_passkey else figure.corpora
        amount = sum(setting.amounts.get(corpus, setting.amount) for corpus in corpora)
        hours += amount * lengths / eval_rate / 3600
        if job.trains:
            hours += job.tokens / train_rate / 3600
            disk += 12 * params  # weights and two moments in fp32
    tokens, models = sum(job.tokens for job in left if job.trains), sum(j.trains for j in left)
    print(f"{name}: {len(left)} of {len(jobs)} jobs to do; {models} models of {tokens:,} tokens")
    print(f"in all, {disk / 1e9:.2f} GB of disk, {hours / args.at_once:.2g} hours on this machine")


def stop_on_signals():
    """SIGTERM, and the SIGHUP of a lost connection unless it is ignored (nohup), as Ctrl-C."""
    for s in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(s) is signal.SIG_DFL:
            signal.signal(s, signal.default_int_handler)


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("figure", nargs="?", choices=FIGURES, metavar="FIGURE", help="a name that --list shows")
    add("--list", action="store_true", help="the figures and tables")
    add("--size", choices=SETTINGS, default="tiny", help="of the models")
    add("--tokens", type=positive_int, help="of each model, instead of the preset's")
    add("--seeds", type=number(int, 1, 99), default=1, help="models of each kind")
    add("--passkey_seeds", type=number(int, 1, 99), help="passkey models, if not as many")
    add("--out", type=Path, help="folder of models and logs, if not runs_out/SIZE")
    add("--results", type=Path, help="folder of the figure and its json, if not --out")
    add("--dry-run", action="store_true", help="say what would be done, and how long it takes")
    common.add_device_flag(parser)
    add("--primary", action="store_true", help="compare what was named beforehand, in --results")
    args = parser.parse_args(argv)
    if args.primary:
        folder = args.results or ROOT / "results"
        rows = tables.compare(PRIMARY, folder)
        common.write_json(folder / "primary.json", rows)
        print(tables.primary_table(rows))
        return
    if args.list or not args.figure:
        for name, figure in FIGURES.items():
            print(f"{name:18} {figure.title} ({len(figure.models)} models a seed and kind)")
        return
    name, figure = args.figure, FIGURES[args.figure]
    if figure.tiny_only and args.size not in TINY:
        raise ValueError(f"{name} is made for tiny models: it goes with --size tiny alone")
    if args.size in ON_CPU:
        args.device = "cpu"  # one model a core there beats one at a time on a GPU
    n_tokens = f"_{args.tokens}" if args.tokens else ""
    args.out = (args.out or ROOT / "runs_out" / f"{args.size}{n_tokens}").resolve()
    args.at_once = n_cores() if args.size in ON_CPU else 1
    if args.dry_run:
        dry_run(name, figure, args)
        return

    # the data, then the models
    start = time.time()
    stop_on_signals()
    try:
        prepare_data(figure, args)
        jobs = jobs_of(figure, args)
        run_jobs(jobs, args)
    except KeyboardInterrupt:
        print("stopped, all that ran is saved; the same command continues", file=sys.stderr)
        sys.exit(130)

    # one file of results, the figure, the table
    suffix = "" if args.size in TINY else f"_{args.size}"
    gathered = [common.read_json(path) for job in jobs if job.shown for path in job.results]
    result = (args.results or args.out) / f"{name}{suffix}.json"
    result.parent.mkdir(parents=True, exist_ok=True)
    common.write_json(result, gathered)
    if name.startswith("rates"):  # a table alone
        print(tables.rates_table(gathered))
        return
    results = tables.load_results([result])
    drawn = plot.draw(results, result.with_suffix(""), figure.measure, figure.depth, figure.ratio)
    print(tables.markdown_table(results, figure.measure))
    minutes, seconds = divmod(round(time.time() - start), 60)
    print(f"\nthe figure: {', '.join(drawn)}, the results: {result} ({minutes} min {seconds} s)")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
