"""Killed at any moment, out of disk, fed with damaged files, run by several processes."""

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
from conftest import (
    ROOT,
    TRAIN_FLAGS,
    log,
    run_training,
    same,
    untimed_log,
    weights,
    write_text,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prepare_data
import train
from checkpoint import load_checkpoint
from common import Refused
from data import TokenData, load_tokenizer

# --- killed


@pytest.fixture
def server(monkeypatch):
    """Starts processes by forking one that has imported torch, which saves a second for each."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bad_disk"])
    return context


def run_and_kill(server, main, argv, kill):
    """
    Start main(argv) in a process of its own; whether it was killed before it was over.

    kill: a function, to SIGKILL it from outside as soon as that returns true, or an integer, to
    let it die in that write.
    """
    argv = [str(a) for a in argv]
    in_a_write = isinstance(kill, int)
    process = server.Process(target=main, args=(argv, kill) if in_a_write else (argv,))
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
    argv = ["--data", data_folder, "--out", out, *TRAIN_FLAGS, *flags, "--resume"]
    # what a run writes first; the fifth is a second checkpoint
    writes = ["log.jsonl", "tokenizer.tiktoken", "checkpoint.pt", "config.json", "checkpoint.pt"]
    for number in range(20):
        if number % 2 == 0:
            n = number // 2 % 5
            assert run_and_kill(server, bad_disk.run_train, argv, n + 1), OVER
            halves = [path.name.split(".")[:2] for path in out.glob("*.tmp")]
            assert halves == [writes[n].split(".")], "not the half of that file alone"
        else:
            n, pause = logged(out) + rng.choice([0, 1, 2]), rng.uniform(0, 0.03)
            kill = lambda n=n, p=pause: logged(out) > n and not time.sleep(p)  # noqa: E731
            assert run_and_kill(server, bad_disk.run_train, argv, kill), OVER
    step = weights(out)["step"]
    assert 5 < step < 100
    train.main([str(a) for a in argv])
    states = weights(straight), weights(out)
    for state in states:  # the killed processes have another number of threads
        del state["config"]["hardware"]
    assert same(*states) and untimed_log(straight) == untimed_log(out)


@pytest.mark.slow
def test_preparing_killed_20_times_ends_with_the_same_shards(server, tmp_path):
    text = write_text(tmp_path / "text", n_documents=150)
    argv = ["--source", text, "--tokenizer", "bpe:300", "--val_frac", "0.2"]
    argv += ["--shard_tokens", "1500"]
    prepare_data.main([str(a) for a in [*argv, "--out", tmp_path / "straight"]])
    out, rng = tmp_path / "killed", random.Random(0)
    argv += ["--out", out]
    for number in range(20):
        if number % 2 == 0:
            n_writes = 1 + number // 2 % 3
            assert run_and_kill(server, bad_disk.run_prepare_data, argv, n_writes), OVER
            assert len(list(out.glob("*.tmp"))) == 1, "the half of a file is not there, or others"
        else:
            n = len(list(out.glob("*.bin"))) + rng.choice([0, 0, 1])
            kill = lambda n=n: len(list(out.glob("*.bin"))) > n  # noqa: E731
            assert run_and_kill(server, bad_disk.run_prepare_data, argv, kill), OVER
    assert not (out / "meta.json").exists()
    prepare_data.main([str(a) for a in argv])
    folders = tmp_path / "straight", out
    content = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    assert content[0] == content[1] and len(content[0]) > 20


# --- out of disk

LIMITED = """
import resource, sys
# no file may grow beyond this
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
import prepare_data, train
from common import one_sentence_errors
main = {"train": train.main, "prepare_data": prepare_data.main}[sys.argv[1]]
one_sentence_errors(main)(sys.argv[3:])
"""


def run_out_of_disk(script, limit, argv):
    """The command must end with exit code 1 and, as its last words, the sentence returned."""
    command = [sys.executable, "-c", LIMITED, script, str(limit), *map(str, argv)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
    return run.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_whole(data_folder, tmp_path):
    straight = run_training(data_folder, tmp_path / "straight")
    out = run_training(data_folder, tmp_path / "out", "--stop_at=10")
    before = (out / "checkpoint.pt").read_bytes()
    argv = ["--data", data_folder, "--out", out, *TRAIN_FLAGS, "--resume"]
    sentence = run_out_of_disk("train", 100_000, argv)
    assert "checkpoint.pt could not be written (File too large)" in sentence
    assert (out / "checkpoint.pt").read_bytes() == before and not list(out.glob("*.tmp"))
    run_training(data_folder, out, "--resume")
    assert same(weights(straight), weights(out))


@pytest.mark.slow
def test_a_full_disk_while_preparing(tmp_path):
    argv = ["--source", write_text(tmp_path / "text"), "--tokenizer", "byte"]
    sentence = run_out_of_disk("prepare_data", 20_000, [*argv, "--out", tmp_path / "out"])
    assert "train_000000.bin could not be written (File too large)" in sentence
    assert not list((tmp_path / "out").glob("*.bin*"))


# --- damaged files


@pytest.fixture(scope="module")
def pristine(data_folder, tmp_path_factory):
    """
    A data folder with several shards and a run, small enough to be read a thousand times, and what
    reading them gives.
    """
    data = tmp_path_factory.mktemp("pristine") / "data"
    text = write_text(tmp_path_factory.mktemp("text"), n_documents=12)
    flags = ["--val_frac", "0.3", "--shard_tokens", "2000", "--tokenizer", "bpe:300"]
    prepare_data.main(["--source", str(text), "--out", str(data), *flags])
    run = tmp_path_factory.mktemp("runs") / "run"
    flags = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--train_len=16", "--batch_size=2"]
    flags += ["--tokens=64", "--eval_tokens=64", "--log_every=1"]
    train.main(["--data", str(data), "--out", str(run), *flags])
    return {"data": (data, read_data), "run": (run, read_run)}


TEXT = "the 2026 words"


def read_data(folder):
    """All that a data folder says to training."""
    splits = [TokenData(folder, split) for split in ("train", "val")]
    tokens = [data.read(0, len(data)).tolist() for data in splits]
    train_data, encoded = splits[0], splits[0].tokenizer().encode_ordinary(TEXT)
    return tokens, train_data.tokenizer_id, encoded, train_data.meta["eot"]


def read_run(folder):
    """
    All that a run says to an evaluation, and to its own resume.
    """
    model, about, state = load_checkpoint(folder)
    encoding = load_tokenizer(model.config.tokenizer, folder)
    return model.config, about, state, encoding.encode_ordinary(TEXT)


def cut_off(content, data):
    return content[: data.draw(st.integers(0, len(content) - 1))]


def overwritten(content, data):
    at, noise = data.draw(st.integers(0, len(content) - 1)), data.draw(st.binary(min_size=1))
    return content[:at] + noise + content[at + len(noise) :]


def check_damage(pristine, data):
    """One file is harmed: reading it must end with a sentence or give what it gave before."""
    folder, read = pristine[data.draw(st.sampled_from(["data", "run"]))]
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    # a few bytes changed within the tokens of a shard, or by hand in a text, are not found
    harms = [cut_off, overwritten] if path.suffix in (".pt", ".tiktoken") else [cut_off]
    good, before = path.read_bytes(), read(folder)
    try:
        path.write_bytes(data.draw(st.sampled_from(harms))(good, data))
        try:
            after = read(folder)
        except Refused as e:
            assert "\n" not in str(e).strip() and str(e), repr(e)
        else:
            assert same(list(before), list(after)), f"a damaged {path.name} was believed"
    finally:
        path.write_bytes(good)


DAMAGE = dict(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@settings(max_examples=100, **DAMAGE)
@given(data=st.data())
def test_damaged_files_are_refused_with_a_sentence_or_change_nothing(pristine, data):
    check_damage(pristine, data)


@pytest.mark.slow
@settings(max_examples=500, **DAMAGE)
@given(data=st.data())
def test_500_damaged_files_are_refused_with_a_sentence_or_change_nothing(pristine, data):
    check_damage(pristine, data)


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
    flags = [
        "--train_len=256",
        "--task=passkey",
        "--task_share=0.5",
        "--grad_accum=4",
        "--log_every=1",
    ]
    flags += ["--tokens=10240"]
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


@pytest.mark.slow
def test_what_one_process_refuses_two_refuse(data_folder, tmp_path):
    argv = ["--data", data_folder, "--out", tmp_path / "x", *TRAIN_FLAGS, "--batch_size=3"]
    code, _, stderr = torchrun("train.py", *argv)
    assert code != 0 and "error: --batch_size 3" in stderr
