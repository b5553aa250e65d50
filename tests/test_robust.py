"""Killed at any moment, and run by several processes."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TRAIN_FLAGS, log, run_training, same, untimed_log, weights

import eval_passkey
import eval_perplexity


@pytest.mark.slow
def test_training_killed_at_every_write_ends_with_the_same_weights(data_folder, tmp_path):
    """Half of the file is written then; the fourth and later writes are second checkpoints."""
    flags = ["--log_every=1", "--save_every=3"]
    straight = run_training(data_folder, tmp_path / "straight", *flags)
    out, writes = tmp_path / "killed", itertools.count(1)
    for last in range(1, 7):

        def die_in_a_write(descriptor, last=last):
            if next(writes) == last:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        if (pid := os.fork()) == 0:
            try:
                os.fsync = die_in_a_write
                run_training(data_folder, out, *flags, "--resume")
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == -signal.SIGKILL and len(list(out.glob("*.tmp"))) == 1
    assert weights(out)["step"] == 12
    run_training(data_folder, out, *flags, "--resume")
    assert same(weights(straight), weights(out)) and untimed_log(straight) == untimed_log(out)
    assert not list(out.glob("*.tmp"))


def torchrun(*command):
    """What a command of this checkout prints, in two processes on this machine's CPU."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launch, *map(str, command)]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_two_processes_train_and_evaluate_as_one(data_folder, tmp_path):
    flags = ["--train_len=256", "--task=passkey", "--task_share=0.5", "--grad_accum=4"]
    flags += ["--log_every=1", "--tokens=10240", "--device=cpu"]
    one, two = run_training(data_folder, tmp_path / "one", *flags), tmp_path / "two"
    shown = torchrun("train.py", "--data", data_folder, "--out", two, *TRAIN_FLAGS, *flags)
    assert shown.count("step 10 of 10 is saved") == 1 and "on 2 x cpu" in shown
    for key in ("loss", "val_loss", "grad_norm"):
        ours, expected = ([line[key] for line in log(run)] for run in (two, one))
        assert ours == pytest.approx(expected, abs=1e-5 if "loss" in key else 1e-3)
    for script, more in ((eval_perplexity, "--max_tokens=3000"), (eval_passkey, "--trials=9")):
        argv = [str(one), "--lengths=256,512", more, "--device=cpu", "--out"]
        kind = Path(script.__file__).stem
        script.main([*argv, str(tmp_path / f"{kind}_one.json")])
        torchrun(script.__file__, *argv, tmp_path / f"{kind}_two.json")
        files = (tmp_path / f"{kind}_{n}.json" for n in ("one", "two"))
        alone, both = (json.loads(file.read_text()) for file in files)
        assert both["hardware"].startswith("2 x ")
        for length, expected in alone["lengths"].items():
            assert both["lengths"][length] == {
                name: pytest.approx(value, abs=2e-4) for name, value in expected.items()
            }
