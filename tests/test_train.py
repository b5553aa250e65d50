"""The training loop: schedule, resume, stop, refusals, and the start from another run."""

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

import model
import prepare_data
import train
from checkpoint import load_checkpoint
from fope import above_floor, rope_freqs
from train import learning_rate

# --- schedule and recipes


def test_schedule():
    rates = [learning_rate(s, 100, 10, 1.0) for s in range(100)]
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert rates[10] == 1.0 and rates[99] == pytest.approx(0.1)
    assert rates[:9:-1] == sorted(rates[10:])
    assert all(np.isfinite(learning_rate(s, 3, 10_000, 1.0)) for s in range(3))


def parsed(*flags):
    return train.parse_args(["--data", "x", "--out", "y", *flags])


@pytest.mark.parametrize("preset", ["20M", "60M", "180M", "1.2B"])
def test_defaults_are_the_papers_from_20M_up(preset):
    args = parsed("--preset", preset)
    assert (args.train_len, args.tokens, args.batch_size, args.lr) == (512, 10**10, 1024, 6e-4)
    assert (args.weight_decay, args.passkey_frac) == (0.1, 0.0)
    assert train.plan_steps(args) == 19074 and args.warmup_steps == 10_000
    args = parsed("--preset", preset, "--tokens=100_000_000_000")
    assert train.plan_steps(args) == 190735 and args.warmup_steps == 10_000
    args = parsed("--preset", preset, "--train_len=2048")  # fewer than 10,000 steps
    assert train.plan_steps(args) == 4769 and args.warmup_steps == 238


def test_tiny_recipes_and_their_models():
    """Text and passkeys have one shape of model."""
    vocabulary = SimpleNamespace(meta={"vocab_size": 257})
    text = dict(train_len=128, tokens=512_000, batch_size=8, lr=2e-3, passkey_frac=0.0)
    passkey = text | dict(tokens=1_024_000, batch_size=4, lr=7e-4, passkey_frac=1.0)
    for preset, recipe in (("tiny", text), ("tiny_passkey", passkey)):
        args = parsed("--preset", preset)
        assert {name: getattr(args, name) for name in recipe} == recipe
        config = train.new_model(args, vocabulary).config
        shape = config.n_layer, config.n_head, config.head_dim, config.n_embd
        assert shape == (4, 4, 64, 128)
        assert config.init_std == 0.05 and config.train_len == 128
    flags = ["--n_head=2", "--tokens=5000", "--passkey_frac=0.5", "--eval_tokens=600"]
    args = parsed("--preset=tiny", *flags)
    assert (args.n_head, args.tokens, args.passkey_frac, args.eval_tokens) == (2, 5000, 0.5, 600)
    # why a head_dim of 64: frequencies above the floor
    assert [len(above_floor(rope_freqs(d), 128)) for d in (32, 64)] == [6, 11]


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
    vocabulary = SimpleNamespace(meta={"vocab_size": 257})
    train.new_model(parsed("--n_head=1", "--head_dim=64", "--n_layer=1", *flags), vocabulary)
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


def test_resume_drops_log_lines_after_the_checkpoint(data_folder, tmp_path):
    run_training(data_folder, tmp_path, "--log_every", "1", "--stop_at", "5")
    with open(tmp_path / "log.jsonl", "a") as f:  # a killed run, the last line half written
        f.write('{"step": 6, "tokens": 768, "loss": 0}\n{"step": 7, "lo')
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
    assert config["training"]["grad_accum"] == 2
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
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler, and there is none here")
    # the last of three slices is shorter
    monkeypatch.setattr(model, "LOGITS_PER_SLICE", 50 * 512)
    compiled = run_training(data_folder, tmp_path / "c", "--compile")
    expected = log(checkpoint)[-1]["val_loss"]
    assert log(compiled)[-1]["val_loss"] == pytest.approx(expected, abs=1e-3)


# --- refusals


@pytest.mark.parametrize(
    "flags, words",
    [
        # numbers out of range, unknown names
        (["--tokens", "0"], ("argument --tokens: must be at least 1",)),
        (["--n_embd", "2000000000000000000"], ("argument --n_embd: must be at least 1",)),
        (["--seed", "99999999999999999999"], ("argument --seed: must be at least 0",)),
        (["--passkey_frac", "1.5"], ("argument --passkey_frac: must be at least 0",)),
        (["--lr", "nan"], ("argument --lr: must be at least 0 and at most 1,000",)),
        (["--theta", "0.5"], ("argument --theta: must be at least 1",)),
        (["--init_std", "0"], ("argument --init_std: must be at least 1e-06",)),
        (["--yarn_scale", "0.5"], ("argument --yarn_scale: must be at least 1",)),
        (["--pi_scale", "inf"], ("argument --pi_scale: must be at least 1",)),
        (["--preset", "2M"], ("invalid choice: '2M'", "tiny_passkey", "1.2B")),
        (["--tokns", "5"], ("unrecognized arguments: --tokns 5",)),
        # the embedding
        (["--pos_args", "variant=original"], ("released, paper",)),
        (["--pos_args", "gamma=3"], ("does not take {'gamma': 3}",)),
        (["--pos_args", "gamma"], ("keyword=value",)),
        (["--pos_args", "sigma=0.1", "sigma=0.2"], ("each once",)),
        (["--pos_args", "floor=-1"], ("floor must be true, false or",)),
        (["--pos_args", "n_freq=3.5"], ("does not take {'n_freq': 3.5}",)),
        (["--pos_args", "yarn_scale=2"], ("does not take {'yarn_scale': 2}",)),
        # scales need a trained model
        (["--yarn_scale", "2"], ("--init_from",)),
        (["--pi_scale", "2"], ("--init_from",)),
        (["--yarn_temperature"], ("goes with --yarn_scale",)),
        # what does not fit together
        (["--train_len", "100000"], ("needs more than", "--eval_tokens is")),
        (["--warmup_steps", "20"], ("fewer than the 20 steps",)),
        (["--batch_size", "6", "--grad_accum", "4"], ("cannot be divided into 4 micro-batches",)),
        (["--passkey_frac", "0.5", "--train_len", "32"], ("does not fit 32",)),
        # what is not there
        (["--device", "meta"], ("--device must be cpu", "not meta")),
        (["--device", "cuda:7"], ("--device", "cuda:7")),
        (["--resume"], ("there is no file",)),
        (["--data", "nowhere"], ("no data folder nowhere",)),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(data_folder, tmp_path, flags, words):
    refuses(train.main, train_argv(data_folder, tmp_path / "new", *flags), *words)
    assert not (tmp_path / "new").exists()


def test_unknown_embedding_lists_the_known_ones():
    argv = ["--data", "x", "--out", "y", "--pos", "xpos"]
    refuses(train.main, argv, "nope", "alibi", "rope", "fope", "kerple", "fire", "rope_a")


def test_a_run_is_not_overwritten_and_not_resumed_with_other_flags(data_folder, checkpoint):
    before = (checkpoint / "checkpoint.pt").read_bytes()
    argv = train_argv(data_folder, checkpoint)
    refuses(train.main, argv, "already holds a run", "--resume")
    refuses(train.main, [*argv, "--resume", "--lr", "0.1"], "--lr 0.002, not 0.1")
    refuses(train.main, [*argv, "--resume", "--theta", "500"], "--theta None, not 500")
    assert (checkpoint / "checkpoint.pt").read_bytes() == before


def test_resume_on_other_data_is_refused(tmp_path):
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
    run_training(same, tmp_path / "run", "--resume", "--stop_at", "3")


# --- starting from another run


YARN = {"kind": "yarn", "factor": 2.0, "original_len": 32}


@pytest.mark.parametrize(
    "pos, flags, scaling",
    [
        ("rope", ["--yarn_scale=2"], YARN),
        ("rope", ["--yarn_scale=2", "--yarn_temperature"], YARN | {"temperature": True}),
        ("rope", ["--pos=fope"], None),
        ("fope", [], None),
        ("fope", ["--yarn_scale=2"], YARN),
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
    assert ("'kind': 'yarn', 'factor': 2.0, 'original_len': 32" in printed) == bool(scaling)
    model, metadata, _ = load_checkpoint(tmp_path / "second")
    config = model.config
    # what RoPE has learned of its frequencies stays where it is
    pos_args = {"cap": False} if new_pos != pos else {}
    assert (config.pos, config.pos_args, config.rope_scaling) == (new_pos, pos_args, scaling)
    assert config.train_len == 64 and config.n_embd == 32
    assert model.blocks[0].attn.pos.train_len == (32 if scaling else 64)
    assert metadata["training"]["init_from"] == str(first)
    assert metadata["training"]["preset"] == "tiny"
    start = log(first)[-1]["val_loss"]
    # it did start from trained weights
    assert log(tmp_path / "second")[0]["val_loss"] < start + 0.5


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
    monkeypatch.setitem(model.FOPE_SIGMA, "tiny", 0.4)
    rope = run_training(data_folder, tmp_path / "rope", "--pos=rope", "--stop_at=1")
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
        (["--yarn_scale", "0"], "at least 1"),
        (["--yarn_scale", "2", "--pi_scale", "2"], "give one of them"),
        (["--yarn_temperature"], "goes with --yarn_scale"),
        (["--pos", "alibi", "--yarn_scale", "2"], "does not take"),
        (["--init_from", "nowhere"], "no file nowhere"),
    ],
)
def test_bad_starts_are_refused(data_folder, checkpoint, tmp_path, flags, words):
    argv = ["--data", data_folder, "--init_from", checkpoint, "--out", tmp_path / "x"]
    refuses(train.main, [*argv, "--tokens=1280", *flags], words)


@pytest.mark.parametrize(
    "part, changes",
    [("training", {"preset": ["tiny"]}), ("model", {"train_len": "32", "pos": "rope"})],
)
def test_a_damaged_start_is_refused(data_folder, checkpoint, tmp_path, part, changes):
    config = json.loads((checkpoint / "config.json").read_text())
    config[part] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["--data", data_folder, "--init_from", tmp_path, "--out", tmp_path / "x"]
    refuses(train.main, argv, "config.json is damaged or was not written by train.py")
