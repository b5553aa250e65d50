"""
The runner of jobs: commands side by side, each job with its log; what is finished is skipped, what
was cut off is resumed, and Ctrl-C saves all that runs.

    python -m paper.jobs runs_out/tiny "COMMANDS"           as runs/demo.sh calls it

Each line of COMMANDS is a job, such as python train.py ..., and ends with the folder of its run.
"""

import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from common import ROOT, ArgumentParser, Refused, make_folder, one_sentence_errors, read_json
from paper.results import check_result
from recipe import MAY_CHANGE, Recipe, parse_lengths

LIBC = ctypes.CDLL(None)


def n_cores():
    """The cores that this process may use: fewer than there are where an affinity is set."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@dataclass
class Job:
    """A model to train and evaluate, or only to evaluate: commands, one after the other."""

    name: str
    recipe: Recipe | None  # of the model
    commands: list  # of lists of words, a script of ours first
    results: dict  # {path: its recipe}; when all are there the job is done
    needs: str = ""  # the name of the job that must be done before
    shown: bool = True

    def done(self):
        """
        Whether all results are there, and none asked less or at other lengths, as one typed by hand
        may have. Refused where one is of another model.
        """
        there = all(path.exists() and answers(path, asked) for path, asked in self.results.items())
        return bool(self.results) and there


def answers(path, asked):
    """Whether a result is of a whole run of a recipe, asked as it asks. Refused if of another."""
    stored, n_steps = read_json(path), asked.n_steps
    check_result(stored, path)
    result, asked = vars(Recipe(**stored["recipe"])), vars(asked.resolved())
    for name, was in result.items():
        if name not in (*MAY_CHANGE, "tokenizer", "vocab_size") and was != asked.get(name):
            raise Refused(
                f"{path} is of a model with {name} {was}, not {asked.get(name)}; "
                "choose another --out or move it away"
            )
    corpus = path.stem.partition("_")[2] if "data" in stored else ""  # perplexity_CORPUS.json
    lengths = [parse_lengths(r["lengths"], asked["train_len"]) for r in (result, asked)]
    return (
        stored.get("step") == n_steps
        and lengths[0] == lengths[1]
        and all(result[name] == asked[name] for name in ("read_tokens", "trials"))
        and stored.get("trial_seed", asked["seed"]) == asked["seed"]
        and Path(stored.get("data", asked["data"])).name == (corpus or Path(asked["data"]).name)
    )


def start(job, log, environment):
    """The process of the first command of a job, which writes to its log."""
    # results name their command: paths as seen from the repository's root
    command = [str(word).removeprefix(f"{ROOT}/") for word in job.commands[0]]
    with open(log, "a", encoding="utf-8") as f:
        f.write(f"python {shlex.join(command)}\n")
    with open(log, "ab") as f:
        stop_with_us = None
        if sys.platform == "linux":  # where we are killed, it is told to stop
            stop_with_us = lambda: LIBC.prctl(1, signal.SIGTERM)  # noqa: E731  PR_SET_PDEATHSIG
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=f,
            stderr=f,
            cwd=ROOT,
            env=environment,
            preexec_fn=stop_with_us,
            start_new_session=True,  # so that Ctrl-C reaches it through us alone
        )


def end_of(log):
    """The last lines of a log. A progress bar, which rewrites its line, is many of them."""
    with open(log, "rb") as f:
        f.seek(max(0, log.stat().st_size - 1000))
        return f.read().decode(errors="replace").replace("\r", "\n").strip().split("\n")


def how_far(log):
    """Where the progress bar of the last command in a log stands, such as "45 %"."""
    for line in reversed(end_of(log)):
        if found := re.search(r"(\d+)%\|", line):
            return f"{found[1]} %"
        if line.startswith("python "):
            break
    return "0 %"


def run_jobs(jobs, args):
    """All that is not done, args.at_once at a time; Refused at the end for what has failed."""
    logs, environment = make_folder(args.out / "logs"), dict(os.environ)
    if args.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(max(1, n_cores() // args.at_once))
    left, running, failed, told = [job for job in jobs if not job.done()], {}, [], []
    log_of = {job.name: logs / f"{re.sub('[/ ]', '_', job.name)}.log" for job in jobs}
    stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    stops = {s for s in stops if signal.getsignal(s) is not signal.SIG_IGN}  # nohup ignores one
    before = {s: signal.signal(s, lambda *_: told.append(True)) for s in stops}
    try:
        while (left or running) and not told:
            unfinished = {job.name for job in left} | running.keys()
            for job in left[:]:
                if job.needs in failed:
                    left.remove(job)
                    failed.append(job.name)
                elif job.needs not in unfinished and len(running) < args.at_once:
                    left.remove(job)
                    running[job.name] = job, start(job, log_of[job.name], environment)
            time.sleep(0.2)
            for name, (job, process) in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                if process.returncode:
                    failed.append(name)
                    why = [f"\n{name} failed ({process.returncode}); the end of {log_of[name]}:"]
                    print("\n    ".join(why + end_of(log_of[name])[-5:]), file=sys.stderr)
                elif process.returncode == 0 and job.commands[1:]:
                    left.insert(0, replace(job, commands=job.commands[1:]))
            show(f"{len(jobs) - len(left) - len(running)} of {len(jobs)} done", running, log_of)
    finally:
        for _, process in running.values():
            process.terminate()  # train.py finishes its step and saves
        for _, process in running.values():
            process.wait()
        for s, handler in before.items():
            signal.signal(s, handler)
        print(end="\n" * sys.stderr.isatty(), file=sys.stderr)
    if told:
        raise KeyboardInterrupt
    if failed:
        raise Refused(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}")


def show(line, names, log_of):
    """On a terminal one line, rewritten again and again, says how far each job is."""
    if sys.stderr.isatty():
        line = "   ".join([line, *(f"{name} {how_far(log_of[name])}" for name in names)])
        line = line[: shutil.get_terminal_size().columns - 1]
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def main(argv=None):
    parser = ArgumentParser(__doc__)
    parser.add_argument("out", type=Path, help="logs/ in it gets the logs")
    parser.add_argument("commands")
    args = parser.parse_args(argv)
    args.device, args.at_once, jobs = "cpu", n_cores(), []
    for line in args.commands.splitlines():
        _, *words = shlex.split(line)  # without python
        jobs.append(Job("/".join(Path(words[-1]).parts[-2:]), None, [words], {}))
    run_jobs(jobs, args)


if __name__ == "__main__":
    one_sentence_errors(main)()
