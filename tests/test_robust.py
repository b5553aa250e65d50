"""Killed at any moment, out of disk, fed with damaged files, run by several processes: nothing lost, nothing believed."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import bad_disk
import pytest
import torch
from conftest import ROOT, TRAIN_FLAGS, run_training, write_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_train import log, same, weights

import prepare_data
import train
from eval_perplexity import load_run, read_log
from prepare_data import TokenData, load_tokenizer

# --- killed


@pytest.fixture
def server(monkeypatch):
    """Starts processes by forking one that has imported torch already, which saves a second for each."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bad_disk"])
    return context


def run_and_kill(server, main, argv, kill):
    """
    Start main(argv) in a process of its own; whether it was killed before it was over.

    kill: a function, to SIGKILL it from outside as soon as that returns true, or an integer, to let it die in that write.
    """
    argv = [str(a) for a in argv]
    process = server.Process(target=main, args=(argv, kill) if isinstance(kill, int) else (argv,))
    process.start()
    give_up = time.time() + 120
    while process.is_alive() and (isinstance(kill, int) or not kill()) and time.time() < give_up:
        time.sleep(0.0005)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def untimed(folder):
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in log(folder)]


def test_training_killed_20_times_ends_with_the_same_weights(server, data_folder, tmp_path):
    """Killed in a write, with half of the file written, and from outside: between steps, within one, before the first."""
    flags = ["--log_every=1", "--save_every=1", "--tokens=12800"]
    straight = run_training(data_folder, tmp_path / "straight", *flags)
    out, rng = tmp_path / "killed", random.Random(0)
    argv = ["--data", data_folder, "--out", out, *TRAIN_FLAGS, "--eval_tokens=512", *flags]
    for number in range(20):
        resume = ["--resume"] if (out / "checkpoint.pt").exists() else []
        n_lines = len(read_log(out)) + rng.choice([0, 1, 2])
        pause = rng.uniform(0, 0.03)
        kill = [1 + number // 2 % 3, lambda n=n_lines, p=pause: len(read_log(out)) > n and not time.sleep(p)][number % 2]
        assert run_and_kill(server, bad_disk.run_train, [*argv, *resume], kill), "it was over before it could be killed"
        assert number % 2 or list(out.glob("*.tmp")), "the half of a file is not there"
    step = weights(out)["step"]
    assert 5 < step < 100
    train.main([str(a) for a in [*argv, "--resume"]])
    assert same(weights(straight), weights(out)) and untimed(straight) == untimed(out)


def test_preparing_killed_20_times_ends_with_the_same_shards(server, tmp_path):
    text = write_text(tmp_path / "text", n_documents=150)
    argv = ["--source", text, "--tokenizer", "bpe:300", "--val_frac", "0.2", "--shard_tokens", "1500", "--workers", "2"]
    prepare_data.main([str(a) for a in [*argv, "--out", tmp_path / "straight"]])
    out, rng = tmp_path / "killed", random.Random(0)
    for number in range(20):
        n_shards = len(list(out.glob("*.bin"))) + rng.choice([0, 0, 1])
        kill = [1 + number // 2 % 3, lambda n=n_shards: len(list(out.glob("*.bin"))) > n][number % 2]
        assert run_and_kill(server, bad_disk.run_prepare_data, [*argv, "--out", out], kill), "over before it could be killed"
        assert number % 2 or list(out.glob("*.tmp")), "the half of a file is not there"
    assert not (out / "meta.json").exists()
    prepare_data.main([str(a) for a in [*argv, "--out", out]])
    content = [{p.name: p.read_bytes() for p in f.iterdir()} for f in (tmp_path / "straight", out)]
    assert content[0] == content[1] and len(content[0]) > 20


# --- out of disk

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))  # no file may grow beyond this
import prepare_data, train
prepare_data.one_sentence_errors({"train": train, "prepare_data": prepare_data}[sys.argv[1]].main)(sys.argv[3:])
"""


def run_out_of_disk(script, limit, argv):
    """The command must end with exit code 1 and, as its last words, the sentence returned."""
    command = [sys.executable, "-c", LIMITED, script, str(limit), *map(str, argv)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
    return run.stderr.strip().splitlines()[-1]


def test_a_full_disk_leaves_the_last_checkpoint_whole(data_folder, tmp_path):
    straight = run_training(data_folder, tmp_path / "straight")
    out = run_training(data_folder, tmp_path / "out", "--stop_at=10")
    before = (out / "checkpoint.pt").read_bytes()
    argv = ["--data", data_folder, "--out", out, *TRAIN_FLAGS, "--eval_tokens=512", "--resume"]
    sentence = run_out_of_disk("train", 100_000, argv)
    assert "checkpoint.pt could not be written (File too large)" in sentence
    assert (out / "checkpoint.pt").read_bytes() == before and not list(out.glob("*.tmp"))
    run_training(data_folder, out, "--resume")
    assert same(weights(straight), weights(out))


def test_a_full_disk_while_preparing(tmp_path):
    argv = ["--source", write_text(tmp_path / "text"), "--tokenizer", "byte", "--out", tmp_path / "out"]
    sentence = run_out_of_disk("prepare_data", 20_000, argv)
    assert "train_000000.bin could not be written (File too large)" in sentence
    assert not list((tmp_path / "out").glob("*.bin*"))


# --- damaged files


@pytest.fixture(scope="module")
def pristine(data_folder, tmp_path_factory):
    """A data folder with several shards and a run, small enough to be read a thousand times, and what reading them gives."""
    data = tmp_path_factory.mktemp("pristine") / "data"
    text = write_text(tmp_path_factory.mktemp("text"), n_documents=12)
    flags = ["--val_frac", "0.3", "--shard_tokens", "2000"]
    prepare_data.main(["--source", str(text), "--tokenizer", "bpe:300", "--out", str(data), *flags])
    run = tmp_path_factory.mktemp("runs") / "run"
    sizes = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--train_len=16", "--batch_size=2", "--tokens=64", "--eval_tokens=64"]
    train.main(["--data", str(data), "--out", str(run), *sizes, "--log_every=1"])
    return {"data": (data, read_data), "run": (run, read_run)}


def read_data(folder):
    """All that a data folder says to training."""
    splits = [TokenData(folder, split) for split in ("train", "val")]
    tokens = [data.read(0, len(data)).tolist() for data in splits]
    return tokens, splits[0].tokenizer_id(), splits[0].tokenizer().encode_ordinary("the 2026 words"), splits[0].meta["eot"]


def read_run(folder):
    """All that a run says to an evaluation, and to its own resume, but for its log: of that, the lines that are whole."""
    model, about, state = load_run(folder, "cpu")
    assert all({"step", "tokens", "loss"} <= line.keys() for line in read_log(folder))
    encoding = load_tokenizer(about["tokenizer"], folder)
    return model.config, about, state, encoding.encode_ordinary("the 2026 words")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


def with_value_changed(content, path, value):
    """The JSON text with the value at a random place, chosen by the numbers in path, replaced."""
    whole = node = json.loads(content)
    for depth, number in enumerate(path):
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = keys[number % len(keys)]
        if depth == len(path) - 1 or not isinstance(node[key], dict | list) or not node[key]:
            node[key] = value
            break
        node = node[key]
    return json.dumps(whole).encode()


def harmed(content, name, data):
    kinds = ["truncate", "flip", "noise"] + ["change"] * 2 * name.endswith(".json")
    kind = data.draw(st.sampled_from(kinds))
    if kind == "change":
        path = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=4))
        return with_value_changed(content, path, data.draw(JSON_VALUES))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "truncate":
        return content[:at]
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ (1 << data.draw(st.integers(0, 7)))]) + content[at + 1 :]
    noise = data.draw(st.binary(min_size=1, max_size=16))
    return content[:at] + noise + content[at + len(noise) :]


@settings(max_examples=1000, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_are_refused_with_a_sentence_or_change_nothing(pristine, data):
    folder, read = pristine[data.draw(st.sampled_from(["data", "run"]))]
    path = data.draw(st.sampled_from(sorted(p for p in folder.iterdir() if p.name != "progress.json")))
    good, before = path.read_bytes(), read(folder)
    try:
        path.write_bytes(harmed(good, path.name, data))
        try:
            after = read(folder)
        except (ValueError, OSError) as e:
            assert "\n" not in str(e).strip() and str(e), repr(e)
        else:
            assert same(list(before), list(after)), f"a damaged {path.name} was believed"
    finally:
        path.write_bytes(good)


# --- several processes


def torchrun(*command):
    """Two processes on this machine's CPU."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = subprocess.run(
        [*launch, *map(str, command)], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return run.returncode, run.stdout, run.stderr


def test_two_processes_train_and_evaluate_as_one(data_folder, tmp_path):
    flags = ["--train_len=256", "--passkey_frac=0.5", "--grad_accum=4", "--log_every=1", "--tokens=10240"]
    one = run_training(data_folder, tmp_path / "one", *flags)
    two = tmp_path / "two"
    argv = ["--data", data_folder, "--out", two, *TRAIN_FLAGS, "--eval_tokens=512", *flags]
    code, stdout, stderr = torchrun("train.py", *argv)
    assert code == 0, stderr
    assert stdout.count("done: 10 steps") == 1 and "on 2 x cpu" in stdout
    for key in ("loss", "val_loss"):
        assert [line[key] for line in log(two)] == pytest.approx([line[key] for line in log(one)], abs=1e-5)
    for name, weight in weights(one)["model"].items():
        torch.testing.assert_close(weight, weights(two)["model"][name], atol=1e-4, rtol=1e-3)
    for script, more in (("eval_perplexity.py", ["--max_tokens=3000"]), ("eval_passkey.py", ["--trials=150"])):
        results = []
        for launch in (torchrun, lambda *c: (subprocess.run([sys.executable, *map(str, c)], cwd=ROOT).returncode, "", "")):
            out = tmp_path / f"{len(results)}.json"
            code, stdout, stderr = launch(script, one, "--lengths=256,512", *more, "--device=cpu", "--out", out)
            assert code == 0, stderr
            results.append(json.loads(out.read_text()))
        assert results[0]["hardware"].startswith("2 x ")
        for length in ("256", "512"):
            assert results[0]["lengths"][length] == pytest.approx(results[1]["lengths"][length], abs=1e-5)


def test_what_one_process_refuses_two_refuse(data_folder, tmp_path):
    argv = ["--data", data_folder, "--out", tmp_path / "x", *TRAIN_FLAGS, "--batch_size=3"]
    code, _, stderr = torchrun("train.py", *argv)
    assert code != 0 and "error: --batch_size 3 cannot be divided into 1 parts on 2 processes" in stderr


# --- determinism


def test_deterministic_changes_nothing_on_a_cpu(data_folder, checkpoint, tmp_path):
    try:
        again = run_training(data_folder, tmp_path / "again", "--deterministic")
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(weights(checkpoint)["model"], weights(again)["model"])
    shutil.rmtree(again)
