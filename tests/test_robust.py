"""Killed at any moment, out of disk, run by several processes."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, TRAIN_FLAGS, log, run_training, same, untimed_log, weights

import train


def in_a_process(prepare, argv):
    """The exit code of train.main(argv) in a forked process, which calls prepare() first."""
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            train.main([str(a) for a in argv])
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
def test_training_killed_at_every_write_ends_with_the_same_weights(data_folder, tmp_path):
    """Half of the file is written then; the fourth and later writes are second checkpoints."""
    flags = ["--log_every=1", "--save_every=3"]
    straight = run_training(data_folder, tmp_path / "straight", *flags)
    out = tmp_path / "killed"
    argv = ["--data", data_folder, "--out", out, *TRAIN_FLAGS, *flags, "--resume"]
    for n in range(1, 7):
        left = [n]

        def die_in_a_write(descriptor, left=left):
            left[0] -= 1
            if not left[0]:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        prepare = lambda die=die_in_a_write: setattr(os, "fsync", die)  # noqa: E731
        assert in_a_process(prepare, argv) == -signal.SIGKILL and len(list(out.glob("*.tmp"))) == 1
    assert weights(out)["step"] == 12
    run_training(data_folder, out, *flags, "--resume")
    assert same(weights(straight), weights(out)) and untimed_log(straight) == untimed_log(out)
    assert not list(out.glob("*.tmp"))


def test_a_full_disk_leaves_the_last_checkpoint_whole(data_folder, checkpoint, tmp_path):
    out = run_training(data_folder, tmp_path / "out", "--stop_at=10")
    before = (out / "checkpoint.pt").read_bytes()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    argv = ["--data", data_folder, "--out", out, *TRAIN_FLAGS, "--resume"]
    assert in_a_process(limit, argv) == 1
    assert (out / "checkpoint.pt").read_bytes() == before and not list(out.glob("*.tmp"))
    run_training(data_folder, out, "--resume")
    assert same(weights(checkpoint), weights(out))


def run_command(*command):
    """(exit code, stdout, stderr) of a command in this checkout."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, command)]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
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
    for key in ("loss", "val_loss", "grad_norm"):
        ours, expected = ([line[key] for line in log(run)] for run in (two, one))
        assert ours == pytest.approx(expected, abs=1e-5 if "loss" in key else 1e-3)
    for script, more in (("perplexity", "max_tokens=3000"), ("passkey", "trials=9")):
        results = []
        for launch in (torchrun, run_command):
            out = tmp_path / f"{script}{len(results)}.json"
            argv = [one, "--lengths=256,512", f"--{more}", "--device=cpu", "--out", out]
            code, _, stderr = launch(f"eval_{script}.py", *argv)
            assert code == 0, stderr
            results.append(json.loads(out.read_text()))
        assert results[0]["hardware"].startswith("2 x ")
        for length, expected in results[1]["lengths"].items():
            assert results[0]["lengths"][length].keys() == expected.keys()
            for name, value in expected.items():
                assert results[0]["lengths"][length][name] == pytest.approx(value, abs=2e-4), name
