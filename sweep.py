r"""
Train and evaluate every combination of some flags of train.py, then print tables and draw a figure.

    python sweep.py --pos rope fope mine.Class --seed 0-2 --lr 1e-3 2e-3 --data data/mine \
        --out runs_out/lr
    python sweep.py --pos rope rope:theta=93.9 fope fope:pos_args.sigma=0 --data data/mine \
        --minutes 60 --out runs_out/floor

Every flag of train.py may have several values, and --pos_args.sigma 0 0.3 sweeps a keyword. --seed
takes ranges. What belongs to one embedding alone is written behind its name, after a colon. First
a short run of each embedding measures how long all of it will take. --dry_run stops there. Each run
has a folder in --out; a run whose settings are there already is not trained again. Ctrl-C saves all
that runs, and the same command continues.
"""

import ctypes
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import common
import train
from checkpoint import load_checkpoint, open_data, own_code
from common import ROOT, Refused, make_folder, positive_int, read_json, write_json
from recipe import MAY_CHANGE, RECIPES, Recipe, parse_lengths

# --- the grid


@dataclass
class Job:
    """One run: its flags of train.py as words, its recipe, what tells it apart, its folder."""

    words: list
    recipe: Recipe
    identity: dict
    folder: Path


def parse_grid(words):
    """{flag: [its values, each a list of words]}; --pos_args a=1 b=2 has one value of two words."""
    flags = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = [value] if equals else []
        elif not flags:
            raise Refused(f"{word} belongs to no flag")
        else:
            flags[name].append(word)
    grid = {"pos": [[Recipe.pos]], "seed": [["0"]]}
    for name, values in flags.items():
        if name == "seed":
            values = [seed for value in values for seed in in_range(value)]
        together = name in ("pos_args", "rope_scaling") or not values
        grid[name] = [values] if together else [[value] for value in values]
    return grid


def in_range(text):
    """ "0-2" -> ["0", "1", "2"]"""
    ends = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    return [str(n) for n in range(int(ends[1]), int(ends[2]) + 1)] if ends else [text]


def flag(name, words):
    """A flag of train.py: pos_args.sigma with ["0"] is --pos_args sigma=0."""
    name, _, key = name.partition(".")
    return [f"--{name}", f"{key}={words[0]}"] if key else [f"--{name}", *words]


def jobs_of(grid, out):
    """All combinations, seed by seed, each once."""
    jobs, names = [], [name for name in grid if name not in ("pos", "seed")]
    for name in {*MAY_CHANGE} - {"data"} & grid.keys():
        if len(grid[name]) > 1:
            raise Refused(f"--{name} can have one value: another one makes no other model")
    configs = {path.parent: read_json(path) for path in sorted(out.glob("*/config.json"))}
    stored = {folder: identity(c, c["data_sha256"]) for folder, c in configs.items()}
    for (seed,), (pos,) in itertools.product(grid["seed"], grid["pos"]):
        embedding, *own = pos.split(":")
        own = [setting.partition("=") for setting in own]
        own = [(name, [value] if value else []) for name, _, value in own]
        for values in itertools.product(*(grid[name] for name in names)):
            chosen = list(zip(names, values, strict=True))
            words = ["--pos", embedding, "--seed", seed]
            words += [word for setting in (*chosen, *own) for word in flag(*setting)]
            recipe, data = recipe_of(words)
            this = identity({"recipe": asdict(recipe), **own_code(recipe)}, data.sha256())
            shown = [*own, *((name, value) for name, value in chosen if len(grid[name]) > 1)]
            parts = [name.rpartition(".")[2] + "".join(value) for name, value in shown]
            name = "_".join([embedding, *parts, f"s{seed}"]).replace("/", "-")
            if this not in [job.identity for job in jobs]:
                jobs.append(Job(words, recipe, this, folder_of(out / name, this, stored)))
    return jobs


def recipe_of(words):
    """That of train.py with these flags, checked as train.py checks it, and its data."""
    _, given = train.parse_args([*words, "--out", "."])
    if given.get("init_from"):
        trained = load_checkpoint(given["init_from"])[0].config
        return open_data(trained.continued(**given), trained)
    return open_data(RECIPES[given.get("preset", "tiny")].changed(**given))


def identity(about, data_sha256):
    """
    All that tells trained models apart. about: a dict with the recipe, which an older version may
    have made, and with the checksum of an embedding or task of one's own.
    """
    recipe = Recipe(**about["recipe"])
    fields = {name: v for name, v in asdict(recipe).items() if name not in MAY_CHANGE}
    code = {f"the code of {name}": digits for name, digits in about.get("own_code", {}).items()}
    return fields | code | {"data": data_sha256 or recipe.data}


def folder_of(folder, this, stored):
    """
    That of the run with this identity, whatever it is called, or a new one. Refused where another
    run has its name. stored: {folder: identity} of the runs that are there.
    """
    if this in stored.values():
        return next(old for old, other in stored.items() if other == this)
    if other := stored.get(folder):
        name = next(name for name in this if this[name] != other.get(name))
        different = f"{name} {other.get(name)}, not {this[name]}"
        raise Refused(f"{folder} is a run with {different}; choose another --out")
    return folder


# --- what is done


def result_files(folder, recipe, evaluate):
    names = {"perplexity": "perplexity", "passkey": recipe.task or "passkey"}
    return [folder / f"{names[kind]}.json" for kind in evaluate]


def is_done(job, evaluate):
    """Whether all evaluations are there: of this recipe and these data, at the end of training."""
    for path in result_files(job.folder, job.recipe, evaluate):
        if not path.exists():
            return False
        result = read_json(path)
        stored, asked = Recipe(**result["recipe"]), job.recipe
        is_same = identity(result, result["trained_on"]) == job.identity
        read = [[r.lengths, r.read_tokens, r.trials] for r in (stored, asked)]
        if not is_same or read[0] != read[1] or result["step"] != asked.n_steps:
            return False
    return True


# --- how long it takes

TRIAL_STEPS, TRIALS = 20, 2  # of a short run
COSTS_NOTHING = {"seed", "lr", "tokens", "warmup_steps", "weight_decay", "init_std", "theta"}
COSTS_NOTHING |= {"init_from", "eval_every", "log_every", "save_every", "read_tokens", "trials"}


def trial_tokens(recipe):
    return TRIAL_STEPS * recipe.batch_size * recipe.train_len


def little(recipe):
    """As many tokens as a short run reads: one window of the longest, or more of shorter ones."""
    return max(8192, parse_lengths(recipe.lengths, recipe.train_len)[-1]) + 1


def cost_file(job, args):
    """Where the cost of jobs is noted that differ in what COSTS_NOTHING."""
    settings = {name: v for name, v in vars(job.recipe).items() if name not in COSTS_NOTHING}
    digits = hashlib.sha256(f"{settings} {args.device} {args.evaluate}".encode()).hexdigest()[:8]
    return args.out / "timing" / f"{job.recipe.pos}_{digits}.json"


def measure_costs(jobs, args):
    """
    Run what is not yet known of these jobs for TRIAL_STEPS, side by side as they will run. It has
    ten validations, as a whole run has.
    """
    new = {cost_file(job, args): job for job in jobs if not cost_file(job, args).exists()}
    commands = {}
    for path, job in new.items():
        words = [*job.words, "--tokens", trial_tokens(job.recipe)]
        words += ["--warmup_steps", 1, "--eval_every", TRIAL_STEPS // 10]
        words += ["--read_tokens", little(job.recipe), "--trials", TRIALS]
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
        commands[path.stem] = train_command(words, path.with_suffix(""), args)
    if new:
        print(f"measuring how long {len(new)} short runs take", flush=True)
    began = run_all(commands, args)
    for path, job in new.items():
        folder = path.with_suffix("")
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        rate = statistics.median(line["tokens_per_s"] for line in log[len(log) // 2 :])
        saved = (folder / "checkpoint.pt").stat().st_mtime
        in_steps = trial_tokens(job.recipe) / rate
        cost = {"rate": rate, "start": max(1.0, saved - began[path.stem] - in_steps)}
        files = result_files(folder, job.recipe, args.evaluate)
        for kind, file in zip(args.evaluate, files, strict=True):  # one after the other
            cost[kind], saved = file.stat().st_mtime - saved, file.stat().st_mtime
        shutil.rmtree(folder)
        write_json(path, cost)


def seconds(jobs, args, recipes):
    """How long jobs take, each with a recipe of other tokens, read_tokens and trials."""
    ends = [0.0] * args.at_once
    for job, recipe in zip(jobs, recipes, strict=True):  # each begins when another one ends
        cost = read_json(cost_file(job, args))
        times = {"perplexity": recipe.read_tokens / little(recipe)}
        times["passkey"] = recipe.trials / TRIALS
        reading = sum(cost[kind] * times[kind] for kind in args.evaluate)
        ends[ends.index(min(ends))] += cost["start"] + recipe.tokens / cost["rate"] + reading
    return max(ends)


def fit(jobs, args, grid, budget):
    """As a grid: the flags, but for those typed, with which these jobs take `budget` seconds."""

    least_tokens = 2 * max(little(job.recipe) for job in jobs)

    def flags(tokens):
        read = min(max(tokens // 40, least_tokens), 2**22 + 1)  # a fifth of the time
        trials = min(max(tokens // 127_000, 8), 1000)
        values = {"tokens": tokens, "read_tokens": read, "trials": trials}
        return {name: value for name, value in values.items() if name not in grid}

    def total(tokens):
        return seconds(jobs, args, [replace(job.recipe, **flags(tokens)) for job in jobs])

    low, high = max(trial_tokens(job.recipe) for job in jobs), 10**13
    if (least := total(low)) > budget:
        raise Refused(f"this takes {least / 60:.1f} minutes at the least, more than --minutes")
    while high - low > low // 100:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= budget else (low, middle)
    return {name: [[str(value)]] for name, value in flags(low).items()}


# --- the runs

LIBC = ctypes.CDLL(None)


def n_cores():
    """The cores that this process may use: fewer than there are where an affinity is set."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def train_command(words, folder, args):
    command = [ROOT / "train.py", *words, "--out", folder, "--resume", "--device", args.device]
    return [str(word) for word in (*command, "--evaluate", *args.evaluate)]


def start(command, log, environment):
    """A process of ours, whose output goes to its log."""
    with open(log, "a", encoding="utf-8") as f:
        print(f"$ {shlex.join(['python', *command])}", file=f, flush=True)
        # PR_SET_PDEATHSIG: where we are killed, it is told to stop
        stop_with_us = partial(LIBC.prctl, 1, signal.SIGTERM) if sys.platform == "linux" else None
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=f,
            stderr=f,
            env=environment,
            preexec_fn=stop_with_us,
            start_new_session=True,  # so that Ctrl-C reaches it through us alone
        )


def run_all(commands, args):
    """
    Run {name: command}, args.at_once at a time. Returns {name: when it began}. Refused at the end
    for what has failed.
    """
    logs, environment = make_folder(args.out / "logs"), dict(os.environ)
    if args.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(max(1, n_cores() // args.at_once))
    left, running, began, failed, told = list(commands), {}, {}, [], []
    stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    stops = {s for s in stops if signal.getsignal(s) is not signal.SIG_IGN}  # nohup ignores one
    before = {s: signal.signal(s, lambda *_: told.append(True)) for s in stops}
    try:
        while (left or running) and not told:
            while left and len(running) < args.at_once:
                name = left.pop(0)
                began[name] = time.time()
                running[name] = start(commands[name], logs / f"{name}.log", environment)
            time.sleep(0.2)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                how = f"{(time.time() - began[name]) / 60:.1f} min"
                if running.pop(name).returncode:
                    failed.append(name)
                    lines = (logs / f"{name}.log").read_text(errors="replace").strip().split("\n")
                    how = f"failed: {lines[-1][-300:]}"
                print(f"{len(began) - len(running)} of {len(commands)}: {name}, {how}", flush=True)
    finally:
        for process in running.values():
            process.terminate()  # train.py finishes its step and saves
        for process in running.values():
            process.wait()
        for s, handler in before.items():
            signal.signal(s, handler)
    if told:
        raise KeyboardInterrupt
    if failed:
        raise Refused(f"{len(failed)} of {len(commands)} failed; their logs are in {logs}")
    return began


def main(argv=None):
    begun = time.time()
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of all runs and the figure")
    kinds = dict(nargs="+", choices=["perplexity", "passkey"], default=["perplexity"])
    add("--evaluate", **kinds, help="evaluations of each run")
    add("--minutes", type=float, help="train and read as much as lets all of it end in that time")
    add("--at_once", type=positive_int, help="runs side by side: by default one a core, or a GPU")
    add("--dry_run", action="store_true", help="only say what would run, and how long it takes")
    common.add_device_flag(parser)
    args, words = parser.parse_known_args(argv)
    grid, decided = parse_grid(words), args.out / "sweep.json"
    if args.minutes is not None:
        if "tokens" in grid:
            raise Refused("--minutes says how many --tokens: give one of the two")
        plan = {"grid": grid, "minutes": args.minutes}
        if decided.exists():  # by the same command, which was stopped
            known = read_json(decided)
            if known["plan"] != json.loads(json.dumps(plan)):
                raise Refused(f"{args.out} holds a sweep of other flags; choose another --out")
            grid = known["flags"] | grid
    jobs = jobs_of(grid, args.out)
    args.at_once = args.at_once or (min(n_cores(), len(jobs)) if args.device == "cpu" else 1)
    left = [job for job in jobs if not is_done(job, args.evaluate)]
    print(f"{len(jobs)} runs in {args.out}, {len(jobs) - len(left)} of them done")

    # how long it takes
    if args.minutes is not None and "tokens" not in grid:
        measure_costs(jobs, args)
        budget = 0.95 * 60 * args.minutes - (time.time() - begun)
        flags = fit(jobs, args, grid, budget)
        if not args.dry_run:
            write_json(decided, {"plan": plan, "flags": flags})
        jobs = left = jobs_of(flags | grid, args.out)
        print(" ".join(word for name, (value,) in flags.items() for word in flag(name, value)))
    if any(job.recipe.n_steps > 2 * TRIAL_STEPS for job in left):
        measure_costs(left, args)
        recipes = [job.recipe for job in left]
        n_tokens, minutes = sum(r.tokens for r in recipes), seconds(left, args, recipes) / 60
        print(f"{len(left)} to run, {n_tokens:,} tokens, about {minutes:.1f} min", flush=True)
    if args.dry_run:
        for job in left:
            print(shlex.join(["python", *train_command(job.words, job.folder, args)]))
        return
    run_all({j.folder.name: train_command(j.words, j.folder, args) for j in left}, args)

    # imported when it is needed: it takes two seconds
    import figure
    from rows import read_rows, tables

    files = [path for job in jobs for path in result_files(job.folder, job.recipe, args.evaluate)]
    rows = read_rows(files)
    print(tables(rows))
    figure.save(rows, args.out / "figure.png")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
