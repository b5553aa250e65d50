"""
The paper's figures and tables, which paper/figures.py lists: train, evaluate, draw.

    python -m paper --list
    python -m paper figure1                                    tiny models on a CPU, one seed
    python -m paper figure1 --seeds 1-10                       ten others, with intervals
    python -m paper figure6a --size 20M --tokens 1000000000 --device cuda
    python -m paper enough --pos mine.Class --seeds 1-5        another embedding beside those known
    python -m paper rates --size 20M_passkey --device cuda --at_once 5      passkeys, on one GPU
    python -m paper --primary --results results                what carries the report's claims

Models, logs and results go to runs_out/SIZE, which all figures share. What is finished is skipped,
what was cut off is resumed; Ctrl-C saves all that runs. Models of the sizes tiny and 20M_cpu run
side by side on the CPU, one a core, whatever --device says; on a GPU --at_once says how many do. At
tiny size text and passkeys have a model each (the presets tiny and tiny_passkey of train.py); from
20M on both are asked of one model, as in the paper.
"""

import argparse
import itertools
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import common
from common import ROOT, Refused, positive_int
from paper import plot, tables
from paper.figures import DATA, FIGURES, ON_CPU, PRIMARY, SIZES, Model, Read
from paper.jobs import Job, n_cores, run_jobs
from paper.results import check_result, compare, identity, is_task, load_results
from recipe import RECIPES, flag_words, parse_lengths
from tasks import TASKS

RESULTS = ROOT / "results"

# --- from a figure to jobs


def recipe_of(kind, args):
    """What the models of this kind, text or a task, change."""
    recipe = SIZES[args.size].recipe(kind)
    return replace(recipe, tokens=args.tokens) if args.tokens else recipe


def data_of(figure, kind, args):
    """The name of the data folder that models of this kind are trained on."""
    is_text = kind == "text" or SIZES[args.size].one_for_both
    return (is_text and figure.trained_on) or Path(recipe_of(kind, args).data).name


def data_folder(name, args):
    return (args.out if args.size in ON_CPU else ROOT) / "data" / name


def run_folder(figure, kind, name, seed, args):
    data, usual = data_of(figure, kind, args), Path(recipe_of(kind, args).data).name
    folder = "text" if SIZES[args.size].one_for_both else kind
    return args.out / (folder if data == usual else data) / f"{name}_s{seed}"


def changes_of(figure, model, kind, seed, args):
    """All that a model changes of its preset, or of the run it goes on from; its recipe."""
    base = recipe_of(kind, args)
    preset = RECIPES[base.preset]
    changes = {k: v for k, v in vars(base).items() if v != getattr(preset, k)}
    changes |= model.changes_to(base) | dict(seed=seed)
    changes["data"] = str(data_folder(data_of(figure, kind, args), args))
    if not model.init_from:
        return changes, base.changed(**changes)
    start = next(m for m in figure.models if m.name == model.init_from)
    _, start = changes_of(figure, start, kind, seed, args)
    init_from = run_folder(figure, kind, model.init_from, seed, args)
    changes |= dict(
        init_from=str(init_from).removeprefix(f"{ROOT}/"),  # as results say it
        train_len=2 * base.train_len,
        lengths=",".join(map(str, parse_lengths(base.lengths, base.train_len))),
        batch_size=SIZES[args.size].continued_batch,
        tokens=int(base.tokens * figure.share),
    )
    return changes, start.continued(**changes)


def train_command(changes, recipe, run, args):
    command = ["train.py", "--out", run, "--resume", "--device", args.device]
    command += [] if "init_from" in changes else ["--preset", recipe.preset]
    command += [word for name, value in changes.items() for word in flag_words(name, value)]
    return command + ["--compile"] * (args.device != "cpu")


def job_of(figure, model, kind, seed, args):
    """A model to train, then to read on each corpus or to ask a task."""
    changes, recipe = changes_of(figure, model, kind, seed, args)
    run, needs = run_folder(figure, kind, model.name, seed, args), ""
    name, commands = str(run.relative_to(args.out)), [train_command(changes, recipe, run, args)]
    if model.init_from:
        start = run_folder(figure, kind, model.init_from, seed, args)
        needs = str(start.relative_to(args.out))
    if kind != "text" and "text" in figure.kinds and SIZES[args.size].one_for_both:
        name, needs, commands = f"{name} {kind}", name, []  # the text model is asked, too
    script, results = "perplexity" if kind == "text" else "passkey", {}
    reads = [r for r in model.reads if r.kind in ("", kind)] or [Read("", model.label, {})]
    for corpus, read in itertools.product(figure.corpora if kind == "text" else ("",), reads):
        file = script if kind == "text" else kind
        file = f"{file}_{corpus}.json" if corpus else f"{file}.json"
        result = run / (f"{read.name}.{file}" if read.name else file)
        n = SIZES[args.size].read_tokens.get(corpus, recipe.read_tokens)
        results[result] = recipe.read_with(**read.changes, read_tokens=n)
        command = [f"eval_{script}.py", run, "--out", result, "--device", args.device]
        command += ["--data", data_folder(corpus, args)] if corpus else []
        command += ["--max_tokens", n] if n != recipe.read_tokens else []
        command += ["--task", kind] if kind not in ("text", "passkey") else []
        command += ["--label", read.label] if read.label else []
        command += [
            word for name, value in read.changes.items() for word in flag_words(name, value)
        ]
        commands.append(command)
    return Job(name, recipe, commands, results, needs, shown=model.shown)


def jobs_of(figure, args):
    """Seed by seed, so that what is stopped early has whole seeds."""
    all_kinds = figure.kinds if SIZES[args.size].one_for_both else ()
    return [
        job_of(figure, model, kind, seed, args)
        for seed in args.seeds
        for kind in figure.kinds
        for model in figure.models
        if kind == (args.kind or kind) and kind in (all_kinds or model.kinds or figure.kinds)
    ]


def some_seeds(text):
    """A type for argparse: "5" is the first five seeds, "1-10" those from 1 to 10."""
    found = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})", text)
    first, last = found.groups() if found else (None, 0)
    seeds = range(int(first), int(last) + 1) if first else range(int(last))
    if not 1 <= len(seeds) <= 99:
        raise argparse.ArgumentTypeError("must be 1 to 99 seeds, such as 5 or 1-10")
    return seeds


# --- the command


def prepare_data(figure, args):
    """Make the data of what runs on a CPU; of the others' say what is missing."""
    trained_on = {data_of(figure, kind, args): kind for kind in figure.kinds}
    for name in sorted({*trained_on, *figure.corpora} - {""}):  # books before c4
        folder = data_folder(name, args)
        if (folder / "meta.json").exists():
            continue
        if args.size not in ON_CPU:
            raise Refused(
                f"there is no data/{name} yet; python prepare_data.py --help shows how to make it"
            )
        tokenizer = data_folder("books", args)  # that of the models which read it
        if name in trained_on:
            tokenizer = recipe_of(trained_on[name], args).tokenizer
        flags = [*DATA[name].split(), "--tokenizer", tokenizer, "--out", folder]
        command = [sys.executable, "prepare_data.py", *map(str, flags)]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise Refused(f"the data of {name} could not be prepared")


def gather(name, figure, jobs, args):
    """One file of results, the figure and the table of jobs that are done; what it has written."""
    suffix = "" if args.size == "tiny" else f"_{args.size}"
    path = common.make_folder(args.results or args.out) / f"{name}{suffix}.json"
    done = [common.read_json(result) for job in jobs if job.shown for result in job.results]
    before = common.read_json(path, kind=list) if path.exists() else []
    for one in before:
        check_result(one, path)
    new = set(map(identity, done))  # beside those of other seeds, or from another machine
    gathered = done + [one for one in before if identity(one) not in new]
    if not gathered:
        raise Refused(f"nothing of {name} is done in {args.out}")
    others = () if args.tokens else (*figure.beside, *[name] * bool(args.pos))
    beside = [RESULTS / f"{other}{suffix}.json" for other in others]
    results = load_results([other for other in beside if other.exists()], gathered)
    common.write_json(path, gathered)
    curves = {
        kind: {label: rs for label, rs in by_label.items() if label in figure.curves} or by_label
        for kind, by_label in results.items()
        if not is_task(kind) or kind in figure.kinds
    }
    as_told = args.size == "tiny" and not (args.tokens or args.pos) and len(args.seeds) > 1
    message = figure.message if as_told else ""
    drawn = plot.draw(curves, path.with_suffix(""), message=message, answers=figure.answers)
    print(tables.markdown_table(results, to=figure.to))
    return f"the figure: {drawn}, the results: {path}"


def compare_named(folder):
    """Test what was named beforehand, with the results in a folder."""
    for name, (seeds, named) in PRIMARY.items():
        beside = {figure: FIGURES[figure].beside for figure, *_ in named}
        try:
            rows = compare(named, seeds, folder, beside)
        except Refused as e:  # the other comparisons can be tested all the same
            print(f"{name}: {e}", file=sys.stderr)
            continue
        common.write_json(folder / f"{name}.json", rows)
        print(tables.primary_table(rows))


def stop_on_signals():
    """SIGTERM, and the SIGHUP of a lost connection unless it is ignored (nohup), as Ctrl-C."""
    for s in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(s) is signal.SIG_DFL:
            signal.signal(s, signal.default_int_handler)


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("figure", nargs="?", choices=FIGURES, metavar="FIGURE", help="a name that --list shows")
    add("--list", action="store_true", help="show the names of all figures and tables")
    add("--pos", nargs="+", help="only these models of the figure, or other embeddings, by name")
    add("--size", choices=SIZES, default="tiny", help="size of the models")
    add(
        "--tokens", type=positive_int, help="training tokens of each model; by default the recipe's"
    )
    add("--seeds", type=some_seeds, default="1", help="5 for the seeds 0 to 4, or 1-10")
    add("--kind", choices=("text", *TASKS), help="only models of text, or of this task")
    add("--out", type=Path, help="folder of models and logs; by default runs_out/SIZE")
    add("--results", type=Path, help="folder of the figure and its json; by default --out")
    add("--gather", action="store_true", help="train nothing, draw what is there")
    common.add_device_flag(parser)
    add("--at_once", type=positive_int, help="models side by side; by default one on a GPU")
    add("--primary", action="store_true", help="test what was named beforehand, with --results")
    args = parser.parse_args(argv)
    if args.primary:
        compare_named(args.results or RESULTS)
        return
    if args.list or not args.figure:
        for name, figure in FIGURES.items():
            print(f"{name:18} {figure.title} ({len(figure.models)} models a seed and kind)")
        return
    name, figure = args.figure, FIGURES[args.figure]
    if args.pos:
        by_name = {model.name: model for model in figure.models}
        models = [by_name.get(pos) or Model(pos, dict(pos=pos)) for pos in args.pos]
        figure = replace(figure, models=tuple(models))
    if args.size in ON_CPU:
        args.device = "cpu"  # one model a core there beats one at a time on a GPU
    if args.kind and SIZES[args.size].one_for_both:
        raise Refused(f"at --size {args.size} one model is asked for both: leave --kind out")
    n_tokens = f"_{args.tokens}" if args.tokens else ""
    args.out = (args.out or ROOT / "runs_out" / f"{args.size}{n_tokens}").resolve()
    args.at_once = args.at_once or (n_cores() if args.size in ON_CPU else 1)

    # the data, then the models
    start = time.time()
    stop_on_signals()
    try:
        jobs = jobs_of(figure, args)
        if args.gather:
            jobs = [job for job in jobs if job.done()]
        else:
            prepare_data(figure, args)
            run_jobs(jobs, args)
    except KeyboardInterrupt:
        print("stopped, all that ran is saved; the same command continues", file=sys.stderr)
        sys.exit(130)
    written = gather(name, figure, jobs, args)
    minutes, seconds = divmod(round(time.time() - start), 60)
    print(f"\n{written} ({minutes} min {seconds} s)")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
