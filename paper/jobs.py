"""
The runner of jobs: commands side by side, each job with its log; what is finished is skipped, what
was cut off is resumed, and Ctrl-C saves all that runs.
"""

import os
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from tqdm import tqdm

from common import ROOT, Refused, make_folder, read_json
from recipe import MAY_CHANGE, Recipe, parse_lengths, recipe_fields


def n_cores():
    """The cores that this process may use: fewer than there are where an affinity is set."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@dataclass
class Job:
    """A model to train and evaluate, or only to evaluate: commands, one after the other."""

    name: str
    recipe: Recipe  # of the model
    commands: list  # of lists of words, a script of ours first
    results: dict  # {path: its recipe}; when all are there the job is done
    needs: str = ""  # the name of the job that must be done before
    trains: bool = True
    shown: bool = True

    def done(self):
        """
        Whether all results are there, and none asked less or at other lengths, as one typed by hand
        may have. Refused where one is of another model.
        """
        return all(path.exists() and answers(path, asked) for path, asked in self.results.items())


def answers(path, asked):
    """Whether a result is of a whole run of a recipe, asked as it asks. Refused if of another."""
    stored, n_steps = read_json(path), asked.n_steps
    result, asked = recipe_fields(stored), vars(asked.resolved())
    for name, was in result.items():
        of_the_data = name in ("tokenizer", "vocab_size")
        if not of_the_data and name not in MAY_CHANGE and was != asked.get(name):
            what = f"{path} is of a model with {name} {was}, not {asked.get(name)}"
            raise Refused(f"{what}; choose another --out or move it away")
    same = all(result.get(name) == asked[name] for name in ("read_tokens", "trials"))
    same &= stored.get("trial_seed", asked["seed"]) == asked["seed"]
    corpus = path.stem.partition("_")[2] if "data" in stored else ""  # perplexity_CORPUS.json
    same &= Path(stored.get("data", asked["data"])).name == (corpus or Path(asked["data"]).name)
    lengths = (parse_lengths(r["lengths"], asked["train_len"]) for r in (result, asked))
    trained = stored.get("step") == n_steps
    return trained and same and next(lengths) == next(lengths)


class Runner:
    """Runs the commands of jobs in threads, and knows the processes that this takes."""

    def __init__(self, args):
        self.logs, self.processes, self.lock = make_folder(args.out / "logs"), set(), Lock()
        self.stopping, self.jobs = False, {}
        self.environment = dict(os.environ)
        if args.device == "cpu":
            self.environment["OMP_NUM_THREADS"] = str(max(1, n_cores() // args.at_once))

    def run(self, job):
        """What went wrong, with the end of the log; "" if nothing did."""
        if job.needs in self.jobs and self.jobs[job.needs].result():
            return f"{job.needs} failed, which it needs"
        path = self.logs / f"{job.name.replace('/', '_').replace(' ', '_')}.log"
        with open(path, "wb") as log:
            for command in job.commands:
                # results name their command: paths as seen from the repository's root
                words = [str(word).removeprefix(f"{ROOT}/") for word in command]
                log.write(f"python {shlex.join(words)}\n".encode())
                log.flush()
                if code := self.call(words, log):
                    log.write(f"killed by signal {-code}\n".encode() if code < 0 else b"")
                    break
            else:
                return ""
        end = path.read_bytes()[-1000:].decode(errors="replace").replace("\r", "\n").strip()
        return f"the end of {path}:\n    " + "\n    ".join(end.split("\n")[-5:])

    def call(self, words, log):
        """The exit code of one command."""
        with self.lock:
            if self.stopping:
                return 1
            # a session of its own, so that Ctrl-C reaches it through stop() alone
            command, streams = [sys.executable, *words], dict(stdout=log, stderr=log)
            settings = dict(cwd=ROOT, env=self.environment, start_new_session=True)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **streams, **settings)
            self.processes.add(process)
        return process.wait()

    def stop(self):
        """Tell all processes: train.py finishes its step and saves."""
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(s, signal.SIG_IGN)  # a second Ctrl-C must not leave one behind
        with self.lock:
            self.stopping = True
            for process in self.processes:
                process.terminate()


def run_jobs(jobs, args):
    """All that is not done, args.at_once at a time; Refused at the end for what has failed."""
    by_name = {job.name: job for job in jobs}

    def depth(job):  # what is needed comes first, so that waiting for it blocks nothing
        return 1 + depth(by_name[job.needs]) if job.needs in by_name else 0

    left, runner, failed = [job for job in jobs if not job.done()], Runner(args), {}
    with ThreadPoolExecutor(args.at_once) as pool:
        try:
            for job in sorted(left, key=depth):
                runner.jobs[job.name] = pool.submit(runner.run, job)
            names = {future: name for name, future in runner.jobs.items()}
            bar = tqdm(as_completed(names), "jobs", len(jobs), initial=len(jobs) - len(left))
            for future in bar:
                if problem := future.result():
                    failed[names[future]] = problem
                    print(f"{names[future]} failed; {problem}", file=sys.stderr)
        except BaseException:
            runner.stop()
            pool.shutdown(cancel_futures=True)
            raise
    if failed:
        raise Refused(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}")
