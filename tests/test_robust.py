"""Killed at any moment, out of disk, run by several processes."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import bad_disk
import pytest
import torch
from conftest import ROOT, TRAIN_FLAGS, log, run_training, same, untimed_log, weights

import train

# --- killed


@pytest.fixture
def server(monkeypatch):
    """Starts processes by forking one that has imported torch, which saves a second for each."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bad_disk"])
    return context


def run_and_kill(server, argv, kill):
    """
    Start train.main(argv) in a process of its own; whether it was killed before it was over.

    kill: a function, to SIGKILL it from outside as soon as that returns true, or an integer, to
    let it die in that write.
    """
    in_a_write = isinstance(kill, int)
    process = server.Process(target=bad_disk.train, args=(argv, kill if in_a_write else None))
    process.start()
    give_up = time.time() + 120
    while process.is_alive() and (in_a_write or not kill()) and time.time() < give_up:
        time.sleep(0.0005)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def logged(out):
    return (out / "log.jsonl").read_text().count("\n") if (out / "log.jsonl").exists() else 0


OVER = "it was over before it could be killed"


@pytest.mark.slow
def test_training_killed_20_times_ends_with_the_same_weights(server, data_folder, tmp_path):
    """
    Killed in a write, with half of the file written, and from outside: between steps, within one,
    before the first.
    """
    flags = ["--log_every=1", "--save_every=1", "--tokens=12800"]
    straight = run_training(data_folder, tmp_path / "straight", *flags)
    out, rng = tmp_path / "killed", random.Random(0)
    argv = ["--data", str(data_folder), "--out", str(out), *TRAIN_FLAGS, *flags, "--resume"]
    # what a run writes first; the fifth is a second checkpoint
    writes = ["log.jsonl", "tokenizer.tiktoken", "checkpoint.pt", "config.json", "checkpoint.pt"]
    for number in range(20):
        if number % 2 == 0:
            n = number // 2 % 5
            assert run_and_kill(server, argv, n + 1), OVER
            halves = [path.name.split(".")[:2] for path in out.glob("*.tmp")]
            assert halves == [writes[n].split(".")], "not the half of that file alone"
        else:
            n, pause = logged(out) + rng.choice([0, 1, 2]), rng.uniform(0, 0.03)
            kill = lambda n=n, p=pause: logged(out) > n and not time.sleep(p)  # noqa: E731
            assert run_and_kill(server, argv, kill), OVER
    step = weights(out)["step"]
    assert 5 < step < 100
    train.main(argv)
    states = weights(straight), weights(out)
    for state in states:  # the killed processes have another number of threads
        del state["config"]["hardware"]
    assert same(*states) and untimed_log(straight) == untimed_log(out)


# --- out of disk

LIMITED = """
import resource, sys
# no file may grow beyond this
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
import train
from common import one_sentence_errors
one_sentence_errors(train.main)(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_whole(data_folder, tmp_path):
    straight = run_training(data_folder, tmp_path / "straight")
    out = run_training(data_folder, tmp_path / "out", "--stop_at=10")
    before = (out / "checkpoint.pt").read_bytes()
    argv = ["--data", data_folder, "--out", out, *TRAIN_FLAGS, "--resume"]
    code, _, stderr = run_command("-c", LIMITED, *argv)
    assert code == 1 and "Traceback" not in stderr
    assert "checkpoint.pt could not be written" in stderr.splitlines()[-1]
    assert (out / "checkpoint.pt").read_bytes() == before and not list(out.glob("*.tmp"))
    run_training(data_folder, out, "--resume")
    assert same(weights(straight), weights(out))


# --- several processes


def run_command(*command):
    """(exit code, stdout, stderr) of a command in this checkout."""
    run = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    return run.returncode, run.stdout, run.stderr


def torchrun(*command):
    """Two processes on this machine's CPU."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return run_command(*launch, *command)


@pytest.mark.slow
def test_two_processes_train_and_evaluate_as_one(data_folder, tmp_path):
    flags = ["--train_len=256", "--task=passkey", "--task_share=0.5", "--grad_accum=4"]
    flags += ["--log_every=1", "--tokens=10240"]
    one, two = run_training(data_folder, tmp_path / "one", *flags), tmp_path / "two"
    argv = ["--data", data_folder, "--out", two, *TRAIN_FLAGS, *flags, "--device=cpu"]
    code, stdout, stderr = torchrun("train.py", *argv)
    assert code == 0, stderr
    assert stdout.count("step 10 of 10 is saved") == 1 and "on 2 x cpu" in stdout
    for key in ("loss", "val_loss"):
        ours, expected = ([line[key] for line in log(run)] for run in (two, one))
        assert ours == pytest.approx(expected, abs=1e-5)
    for name, weight in weights(one)["model"].items():
        torch.testing.assert_close(weight, weights(two)["model"][name], atol=1e-4, rtol=1e-3)
    for script, more in (
        ("eval_perplexity.py", ["--max_tokens=3000"]),
        ("eval_passkey.py", ["--trials=150"]),
    ):
        results = []
        for launch in (torchrun, run_command):
            out = tmp_path / f"{script}{len(results)}.json"
            argv = [one, "--lengths=256,512", *more, "--device=cpu", "--out", out]
            code, _, stderr = launch(script, *argv)
            assert code == 0, stderr
            results.append(json.loads(out.read_text()))
        assert results[0]["hardware"].startswith("2 x ")
        for length in ("256", "512"):
            ours, expected = (result["lengths"][length] for result in results)
            assert ours.keys() == expected.keys()
            for name, value in expected.items():
                rounded = isinstance(value, list)
                assert ours[name] == pytest.approx(value, abs=2e-4 if rounded else 1e-5), name
