"""
The job runner of paper.py: commands side by side, each with its log and its progress; what is
finished is skipped, what was cut off is resumed, and Ctrl-C saves all that runs.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from common import read_json

ROOT = Path(__file__).parent


def n_cores():
    """The cores that this process may use: fewer than there are where an affinity is set."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@dataclass
class Job:
    """A model to train and evaluate, or only to evaluate: commands, one after the other."""

    name: str
    commands: list  # of lists of words, a script of ours first
    results: list  # paths; when all are there the job is done
    tokens: int  # that the model is trained on
    needs: str = ""  # the name of the job that must be done before
    preset: str = ""  # of the model; this and what follows is for paper.py
    trains: bool = True
    shown: bool = True

    def done(self):
        """Whether all results are there. ValueError where they are of another budget."""
        if not all(path.exists() for path in self.results):
            return False
        for path in self.results:
            if (tokens := read_json(path)["training"]["tokens"]) != self.tokens:
                what = f"{path} is of a model of {tokens:,} tokens, not {self.tokens:,}"
                raise ValueError(f"{what}; choose another --out or move it away")
        return True


class Running:
    """A job that runs: its present command, its log, and its bar on the screen."""

    def __init__(self, job, slot, args):
        self.job, self.slot, self.left, self.process = job, slot, list(job.commands), None
        self.log = args.out / "logs" / f"{job.name.replace('/', '_').replace(' ', '_')}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        settings = dict(bar_format="{desc} {percentage:3.0f}% |{bar:20}| {postfix}", leave=False)
        self.bar = tqdm(total=100, position=slot + 1, disable=not sys.stderr.isatty(), **settings)
        self.environment = dict(os.environ)
        if args.device == "cpu":
            self.environment["OMP_NUM_THREADS"] = str(max(1, n_cores() // args.at_once))

    def start_next(self):
        words = [str(word) for word in self.left.pop(0)]
        if words[0] == "train.py":
            run = Path(words[words.index("--out") + 1])
            words += ["--resume"] * (run / "checkpoint.pt").exists()
        # results name their command: paths as seen from the repository's root
        command = [sys.executable, *(word.removeprefix(f"{ROOT}/") for word in words)]
        self.bar.set_description_str(f"{self.job.name} {Path(command[1]).stem}")
        with open(self.log, "ab") as log:
            log.write(f"{shlex.join(command)}\n".encode())
            log.flush()
            # a session of its own, so that Ctrl-C reaches it through stop_all alone
            streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            settings = dict(cwd=ROOT, env=self.environment, start_new_session=True)
            self.process = subprocess.Popen(command, **streams, **settings)

    def poll(self):
        """None while it runs; then whether it was successful."""
        code = self.process.poll()
        if code is None:
            self.show()
            return None
        if code == 0 and self.left:
            self.start_next()
            return None
        self.bar.close()
        return code == 0

    def show(self):
        """What the command itself shows: the last percentage and numbers of its own bar."""
        if match := re.search(r"(\d+)%\|", line := self.end_of_log(1)):
            self.bar.n = int(match[1])
            self.bar.set_postfix_str(line.split("| ")[-1][:60], refresh=False)
            self.bar.refresh()

    def end_of_log(self, n_lines):
        with open(self.log, "rb") as log:
            log.seek(max(0, os.path.getsize(self.log) - 1000))
            text = log.read().decode(errors="replace").replace("\r", "\n").strip()
        return "\n    ".join(text.split("\n")[-n_lines:])


def stop_all(running):
    """Tell all at once, then wait: train.py finishes its step and saves."""
    for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(s, signal.SIG_IGN)  # a second Ctrl-C must not leave one behind
    started = [one.process for one in running if one.process]
    for process in started:
        process.terminate()
    for process in started:
        process.wait()


def run_jobs(jobs, args):
    """All that is not done, args.at_once at a time; ValueError at the end for what has failed."""
    finished, running, failed = {job.name for job in jobs if job.done()}, [], {}
    waiting = [job for job in jobs if job.name not in finished]
    settings = dict(initial=len(finished), desc="jobs", unit="job", mininterval=10)
    bar = tqdm(total=len(jobs), **settings)
    try:
        while True:
            # start what can start: what needs a failed job never can
            ready = [job for job in waiting if not job.needs or job.needs in finished]
            if not ready and not running:
                break
            free = [slot for slot in range(args.at_once) if slot not in [r.slot for r in running]]
            for job, slot in zip(ready, free, strict=False):
                waiting.remove(job)
                running.append(Running(job, slot, args))
                running[-1].start_next()

            # see what has ended
            for one in list(running):
                if (successful := one.poll()) is None:
                    continue
                running.remove(one)
                bar.update()
                if successful:
                    finished.add(one.job.name)
                else:
                    failed[one.job.name] = f"the end of {one.log}:\n    {one.end_of_log(5)}"
                    print(f"{one.job.name} failed; {failed[one.job.name]}", file=sys.stderr)
            time.sleep(0.2)
    except BaseException:
        stop_all(running)
        raise
    finally:
        bar.close()
    if failed:
        name, end = next(iter(failed.items()))
        raise ValueError(f"{len(failed)} of {len(jobs)} jobs failed; of {name} {end}")
