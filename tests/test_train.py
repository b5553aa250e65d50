"""The training loop: data order, schedule, resume, stop."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TRAIN_FLAGS, refuses, run_training, write_text

import model
import prepare_data
import train
from eval_passkey import PasskeyTask
from model import load_checkpoint
from prepare_data import TokenData
from train import Batches, learning_rate, parse_pos_args


def weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def same(a, b):
    """Whether two nested states are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# --- data order


def test_every_window_is_visited_once_per_epoch(data_folder):
    data = TokenData(data_folder, "train")
    batches = Batches(data, train_len=50, batch_size=1, seed=0)
    n = batches.n_windows
    assert n == (len(data) - 1) // 50
    starts = {tuple(data.read(i * 50, 51)): i for i in range(n)}
    epochs = [[starts[tuple(batches.sequence(e * n + i))] for i in range(n)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(n))
    assert epochs[0] != epochs[1] != list(range(n))


def test_passkeys_are_evenly_mixed_in_and_leave_the_text_order_alone(data_folder):
    data = TokenData(data_folder, "train")
    task = PasskeyTask(data.tokenizer())
    mixed = Batches(data, 256, 4, seed=1, passkey_frac=0.3, task=task)
    plain = Batches(data, 256, 4, seed=1)
    question = data.tokenizer().decode(task.question)
    kinds, text = [], []
    for i in range(100):
        tokens = mixed.sequence(i)
        assert len(tokens) == 257
        kinds.append(question in data.tokenizer().decode(tokens.tolist()))
        if kinds[-1]:
            assert tokens[-1] == data.meta["eot"]
        else:
            text.append(tokens)
    assert sum(kinds) == 30 and all(2 <= sum(kinds[i : i + 10]) <= 4 for i in range(0, 100, 10))
    assert all(np.array_equal(a, plain.sequence(i)) for i, a in enumerate(text))
    assert not np.array_equal(mixed.passkey(0), mixed.passkey(1))


def test_schedule():
    rates = [learning_rate(s, 100, 10, 1.0) for s in range(100)]
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert rates[10] == 1.0 and rates[99] == pytest.approx(0.1) and rates[:9:-1] == sorted(rates[10:])
    assert all(np.isfinite(learning_rate(s, 3, 10_000, 1.0)) for s in range(3))


def test_defaults_are_the_papers_from_20M_up(data_folder, tmp_path):
    for preset in ("20M", "60M", "180M", "1.2B"):
        args = train.parse_args(["--data", "x", "--out", "y", "--preset", preset])
        assert (args.train_len, args.tokens, args.batch_size, args.lr) == (512, 10**10, 1024, 6e-4)
        assert args.weight_decay == 0.1


# --- runs


def test_training_learns_and_logs(checkpoint):
    lines = log(checkpoint)
    assert lines[-1]["step"] == 20 and lines[-1]["tokens"] == 2560
    assert lines[-1]["val_loss"] < lines[0]["val_loss"] < np.log(512) + 0.1
    assert {"step", "tokens", "loss", "val_loss", "lr", "tokens_per_s"} <= set(lines[-1])
    assert {p.name for p in checkpoint.iterdir()} == {"checkpoint.pt", "config.json", "log.jsonl", "tokenizer.tiktoken"}


def test_resume_is_bit_exact(data_folder, pos_name, tmp_path):
    """20 steps at once, and 10 + 10: weights, optimizer and log must be the same to the bit."""
    flags = ["--pos", pos_name, "--log_every", "1"]
    at_once = run_training(data_folder, tmp_path / "a", *flags)
    run_training(data_folder, tmp_path / "b", *flags, "--stop_at", "10")
    assert weights(tmp_path / "b")["step"] == 10
    resumed = run_training(data_folder, tmp_path / "b", *flags, "--resume")
    assert same(weights(at_once), weights(resumed))
    untimed = [[{k: v for k, v in line.items() if k != "tokens_per_s"} for line in log(f)] for f in (at_once, resumed)]
    assert untimed[0] == untimed[1] and len(untimed[0]) == 20


def test_resume_drops_log_lines_after_the_checkpoint(data_folder, tmp_path):
    run_training(data_folder, tmp_path, "--log_every", "1", "--stop_at", "5")
    with open(tmp_path / "log.jsonl", "a") as f:
        f.write('{"step": 6, "loss": 0}\n{"step": 7, "lo')  # a killed run, the last line half written
    run_training(data_folder, tmp_path, "--log_every", "1", "--resume")
    assert [line["step"] for line in log(tmp_path)] == list(range(1, 21))


def test_same_seed_same_run(data_folder, checkpoint, tmp_path):
    state = torch.get_rng_state()
    torch.manual_seed(123)  # nothing may come from the global generator
    assert same(weights(checkpoint), weights(run_training(data_folder, tmp_path / "again")))
    torch.set_rng_state(state)
    other = weights(run_training(data_folder, tmp_path / "other", "--seed", "1"))
    assert not same(weights(checkpoint)["model"], other["model"])


def test_validation_does_not_change_training(data_folder, tmp_path):
    a = run_training(data_folder, tmp_path / "a", "--eval_every", "3")
    b = run_training(data_folder, tmp_path / "b", "--eval_every", "20")
    assert same(weights(a)["model"], weights(b)["model"])


def test_gradient_accumulation_is_the_whole_batch(data_folder, tmp_path):
    whole = weights(run_training(data_folder, tmp_path / "a", "--stop_at", "2"))["model"]
    parts = weights(run_training(data_folder, tmp_path / "b", "--stop_at", "2", "--grad_accum", "4"))["model"]
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(data_folder, tmp_path, number):
    out = tmp_path / "run"
    command = [sys.executable, "train.py", "--data", str(data_folder), "--out", str(out), *TRAIN_FLAGS]
    command += ["--eval_tokens", "512", "--tokens", "99999999", "--log_every", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for _ in range(600):
        if (out / "log.jsonl").exists() and (out / "log.jsonl").read_text().count("\n") >= 3:
            break
        time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    step = weights(out)["step"]
    assert step >= 3 and f"stopped at step {step:,}" in output and "--resume" in output


def test_a_run_is_resumed_with_another_grad_accum_and_says_so(data_folder, tmp_path):
    run_training(data_folder, tmp_path, "--stop_at", "2")
    run_training(data_folder, tmp_path, "--resume", "--grad_accum", "2")
    assert json.loads((tmp_path / "config.json").read_text())["training"]["grad_accum"] == 2
    finished = weights(tmp_path)
    run_training(data_folder, tmp_path, "--resume", "--grad_accum", "2")  # nothing is left to do, and nothing changes
    assert same(weights(tmp_path), finished) and finished["step"] == 20


def test_a_signal_while_saving_does_not_cost_the_checkpoint(data_folder, tmp_path, monkeypatch):
    def save(*args, real=train.save_checkpoint, **kwargs):
        signal.raise_signal(signal.SIGINT)
        real(*args, **kwargs)

    monkeypatch.setattr(train, "save_checkpoint", save)
    with pytest.raises(SystemExit, match="130"):
        run_training(data_folder, tmp_path, "--stop_at", "2")
    assert weights(tmp_path)["step"] == 2


def test_non_finite_loss_stops_and_keeps_the_last_good_checkpoint(data_folder, tmp_path, monkeypatch):
    real, calls = train.GPT.forward, []

    def breaks(self, idx, targets=None, **kwargs):
        calls.append(1)
        loss = real(self, idx, targets, **kwargs)
        return loss * float("nan") if len(calls) == 8 else loss

    monkeypatch.setattr(train.GPT, "forward", breaks)
    argv = ["--data", data_folder, "--out", tmp_path, *TRAIN_FLAGS, "--eval_tokens=512", "--save_every=5", "--eval_every=100"]
    refuses(train.main, argv, "step 8", "nan")
    state = weights(tmp_path)
    assert state["step"] == 5 and all(torch.isfinite(w).all() for w in state["model"].values())


def test_weights_that_are_not_finite_are_not_saved(data_folder, tmp_path, monkeypatch):
    run_training(data_folder, tmp_path, "--stop_at", "2")
    before = (tmp_path / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(train, "learning_rate", lambda *args: math.inf)
    argv = ["--data", data_folder, "--out", tmp_path, *TRAIN_FLAGS, "--eval_tokens=512", "--resume", "--stop_at=3"]
    refuses(train.main, argv, "the weights of step 3 are no longer finite")
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_resume_on_other_data_is_refused(tmp_path):
    flags = ["--tokenizer", "byte", "--val_frac", "0.2", "--out", str(tmp_path / "data")]
    for n_documents in (40, 20):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        text = write_text(tmp_path / f"text{n_documents}", n_documents)
        prepare_data.main(["--source", str(text), *flags])
        if n_documents == 40:
            run_training(tmp_path / "data", tmp_path / "run", "--stop_at", "2")
    argv = ["--data", tmp_path / "data", "--out", tmp_path / "run", *TRAIN_FLAGS, "--eval_tokens=512", "--resume"]
    refuses(train.main, argv, "other data than")


def test_a_crash_while_saving_leaves_the_old_checkpoint(data_folder, tmp_path, monkeypatch):
    run_training(data_folder, tmp_path, "--stop_at", "5")
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def disk_full(state, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    argv = ["--data", data_folder, "--out", tmp_path, *TRAIN_FLAGS, "--eval_tokens=512", "--resume"]
    refuses(train.main, argv, "No space left on device")
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_compiled_run_gives_the_same_loss(data_folder, checkpoint, tmp_path, monkeypatch):
    """Also of its loss, which is computed in slices here."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler, and there is none here")
    monkeypatch.setattr(model, "LOGITS_PER_SLICE", 50 * 512)  # the last of three slices is shorter
    compiled = run_training(data_folder, tmp_path / "c", "--compile")
    assert log(compiled)[-1]["val_loss"] == pytest.approx(log(checkpoint)[-1]["val_loss"], abs=1e-3)


# --- refusals


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--pos_args", "variant=original"], ("released, paper",)),
        (["--pos_args", "gamma=3"], ("does not take",)),
        (["--pos_args", "gamma"], ("keyword=value",)),
        (["--n_head", "3"], ("not divisible",)),
        (["--train_len", "100000"], ("needs more than", "--eval_tokens is")),
        (["--warmup_steps", "20"], ("fewer than the 20 steps",)),
        (["--pos_args", "floor=False"], ("floor must be true or false",)),
        (["--n_embd", "2000000000000000000"], ("--n_embd",)),
        (["--seed", "99999999999999999999"], ("--seed",)),
        (["--device", "meta"], ("cpu or cuda, not meta",)),
        (["--batch_size", "6", "--grad_accum", "4"], ("not divisible",)),
        (["--tokens", "0"], ("--tokens",)),
        (["--passkey_frac", "1.5"], ("--passkey_frac",)),
        (["--passkey_frac", "0.5", "--train_len", "32"], ("does not fit 32",)),
        (["--lr", "nan"], ("--lr",)),
        (["--init_std", "0"], ("--init_std",)),
        (["--device", "cuda:7"], ("--device cuda:7",)),
        (["--resume"], ("there is no file",)),
        (["--data", "nowhere"], ("no data folder nowhere",)),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(data_folder, tmp_path, flags, words):
    refuses(train.main, ["--data", data_folder, "--out", tmp_path / "new", *TRAIN_FLAGS, *flags], *words)


def test_unknown_embedding_lists_the_known_ones(tmp_path, capsys):
    with pytest.raises(SystemExit) as info:
        train.main(["--data", "x", "--out", "y", "--pos", "xpos"])
    message = capsys.readouterr().err
    assert info.value.code == 1 and all(name in message for name in ("nope", "alibi", "rope", "fope"))


def test_a_run_is_not_overwritten_and_not_resumed_with_other_flags(data_folder, checkpoint):
    before = (checkpoint / "checkpoint.pt").read_bytes()
    argv = ["--data", data_folder, "--out", checkpoint, *TRAIN_FLAGS, "--eval_tokens=512"]
    refuses(train.main, argv, "already holds a run", "--resume")
    refuses(train.main, [*argv, "--resume", "--lr", "0.1"], "--lr 0.002, not 0.1")
    assert (checkpoint / "checkpoint.pt").read_bytes() == before


def test_pos_args():
    args = SimpleNamespace(pos_args=["sigma=0.4", "n_freq=64", "variant=paper"], yarn_scale=None, pi_scale=None)
    assert parse_pos_args(args) == {"sigma": 0.4, "n_freq": 64, "variant": "paper"}


# --- starting from another run


@pytest.mark.parametrize(
    "pos, flags, expected",
    [
        ("rope", ["--yarn_scale=2"], {"yarn_scale": 2.0, "original_len": 32}),
        ("rope", ["--pos=fope"], {}),
        ("fope", [], {}),
        ("fope", ["--yarn_scale=2"], {"yarn_scale": 2.0, "original_len": 32}),
        ("fire", [], {}),
    ],
)
def test_continual_pretraining(data_folder, tmp_path, capsys, pos, flags, expected):
    first = run_training(data_folder, tmp_path / "first", f"--pos={pos}")
    capsys.readouterr()
    second = ["--data", data_folder, "--init_from", first, "--train_len=64", "--tokens=1280", "--batch_size=4"]
    second += ["--eval_tokens=512"]
    train.main([str(a) for a in [*second, *flags, "--out", tmp_path / "second"]])
    printed = capsys.readouterr().out
    assert "train_len=32" in printed and "train_len=64" in printed
    assert ("yarn_scale=2, original_len=32" in printed) == bool(expected)
    model, about, _ = load_checkpoint(tmp_path / "second")
    assert model.config.train_len == 64 and model.config.pos_args == expected and model.config.n_embd == 32
    assert about["training"]["init_from"] == str(first) and about["training"]["preset"] == "tiny"
    start = log(first)[-1]["val_loss"]
    assert log(tmp_path / "second")[0]["val_loss"] < start + 0.5  # it did start from trained weights


def test_the_start_of_the_weights_can_be_another(data_folder, tmp_path):
    weights = [
        load_checkpoint(run_training(data_folder, tmp_path / flag, flag, "--stop_at=1", "--lr=0"))[0].blocks[0].attn.qkv.weight
        for flag in ("--init_std=0.05", "--init_std=0.02")
    ]
    torch.testing.assert_close(weights[1], 0.4 * weights[0])  # 0.05 is the preset's


def test_continual_pretraining_with_fope_has_the_presets_sigma(data_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(model.FOPE_SIGMA, "tiny", 0.4)
    flags = ["--data", data_folder, "--tokens=128", "--batch_size=4", "--eval_tokens=512"]
    rope = run_training(data_folder, tmp_path / "rope", "--pos=rope", "--stop_at=1")
    train.main([str(a) for a in (*flags, "--init_from", rope, "--pos=fope", "--out", tmp_path / "fope")])
    assert load_checkpoint(tmp_path / "fope")[0].config.pos_args == {"sigma": 0.4}


def test_continual_pretraining_resumes_without_its_start(data_folder, tmp_path):
    first = run_training(data_folder, tmp_path / "first")
    flags = ["--data", str(data_folder), "--init_from", str(first), "--tokens=2560", "--batch_size=4", "--eval_tokens=512"]
    train.main([*flags, "--out", str(tmp_path / "a")])
    train.main([*flags, "--out", str(tmp_path / "b"), "--stop_at=7"])
    (first / "checkpoint.pt").unlink()
    train.main([*flags, "--out", str(tmp_path / "b"), "--resume"])
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--n_layer", "3"], "cannot become 3"),
        (["--preset", "20M"], "--preset is tiny"),
        (["--qk_norm"], "--qk_norm is False"),
        (["--init_std", "0.02"], "--init_std is 0.05"),
        (["--yarn_scale", "0"], "at least 1"),
        (["--pos", "alibi", "--yarn_scale", "2"], "does not take"),
        (["--init_from", "nowhere"], "no file nowhere"),
    ],
)
def test_bad_starts_are_refused(data_folder, checkpoint, tmp_path, flags, words):
    argv = ["--data", data_folder, "--init_from", checkpoint, "--out", tmp_path / "x", "--tokens=1280", *flags]
    refuses(train.main, argv, words)


@pytest.mark.parametrize("part, changes", [("training", {"preset": ["tiny"]}), ("model", {"train_len": "32", "pos": "rope"})])
def test_a_damaged_start_is_refused(data_folder, checkpoint, tmp_path, part, changes):
    config = json.loads((checkpoint / "config.json").read_text())
    config[part] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["--data", data_folder, "--init_from", tmp_path, "--out", tmp_path / "x"]
    refuses(train.main, argv, "config.json is damaged or was not written by train.py")


@pytest.mark.parametrize("flags", [["--yarn_scale=2"], ["--pos_args", "yarn_scale=2"]])
def test_scales_need_a_trained_model(data_folder, tmp_path, flags):
    refuses(train.main, ["--data", data_folder, "--out", tmp_path / "x", *TRAIN_FLAGS, *flags], "--init_from")
