"""The training loop: schedule, resume, stop, refusals, and the start from another run."""

import math
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import TRAIN_FLAGS, log, refuses, run_training, same, untimed_log, weights, write_text

import checkpoint as checkpoint_of_a_run
import common
import data
import model
import prepare_data
import train
from checkpoint import load_checkpoint
from fope import POSITION_EMBEDDINGS, RoPE, rope_freqs, rotation_tables
from recipe import RECIPES
from train import learning_rate

# --- schedule


def test_schedule():
    rates = [learning_rate(s, 100, 10, 1.0) for s in range(100)]
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert rates[10] == 1.0 and rates[99] == pytest.approx(0.1)
    assert rates[:9:-1] == sorted(rates[10:])
    assert all(np.isfinite(learning_rate(s, 3, 10_000, 1.0)) for s in range(3))


# --- runs


def test_resume_is_bit_exact(data_folder, pos_name, tmp_path):
    """20 steps at once, and 10 + 10: weights, optimizer and log must be the same to the bit."""
    flags = ["--pos", pos_name, "--log_every", "1", "--eval_every", "7"]
    at_once = run_training(data_folder, tmp_path / "a", *flags)
    run_training(data_folder, tmp_path / "b", *flags, "--stop_at", "10")
    assert weights(tmp_path / "b")["step"] == 10
    with open(tmp_path / "b" / "log.jsonl", "a") as f:  # what a killed run has logged and not saved
        f.write('{"step": 11, "tokens": 1408, "loss": 0}\n{"step": 12, "lo')
    resumed = run_training(data_folder, tmp_path / "b", *flags, "--resume")
    assert same(weights(at_once), weights(resumed))
    assert untimed_log(at_once) == untimed_log(resumed) and len(log(resumed)) == 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_finishes_the_step_and_saves(
    data_folder, checkpoint, tmp_path, monkeypatch, number
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
    train.main(["--resume", "--out", str(tmp_path)])  # no other flag is needed
    assert same(weights(tmp_path), weights(checkpoint))
    assert untimed_log(tmp_path) == untimed_log(checkpoint)


def test_a_finished_run_is_read_at_once(data_folder, tmp_path):
    """Also one that was stopped."""
    flags = ["--evaluate", "perplexity", "passkey", "--lengths=256", "--trials=2"]
    run = run_training(data_folder, tmp_path, *flags, "--stop_at=10")
    assert not list(run.glob("p*.json"))
    run_training(data_folder, tmp_path, *flags, "--resume")
    assert {path.stem for path in run.glob("p*.json")} == {"perplexity", "passkey"}


def test_a_run_is_resumed_with_moved_data_other_validation_and_other_code(
    data_folder, checkpoint, tmp_path, monkeypatch
):
    """None of them changes the weights."""
    run_training(data_folder, tmp_path / "run", "--stop_at", "7")
    moved = shutil.copytree(data_folder, tmp_path / "moved")
    monkeypatch.setattr(common, "git_commit", lambda: "another")
    flags = ["--resume", "--eval_every=3", "--eval_tokens=100"]
    resumed = run_training(moved, tmp_path / "run", *flags)
    assert same(weights(resumed)["model"], weights(checkpoint)["model"])
    # evaluations read the data where they are now
    assert load_checkpoint(resumed)[0].config.data == str(moved)
    assert [line["step"] for line in log(resumed) if "val_loss" in line][-3:] == [15, 18, 20]


def train_argv(data, out, *flags):
    return ["--data", data, "--out", out, *TRAIN_FLAGS, *flags]


def test_non_finite_loss_stops_and_keeps_the_last_good_checkpoint(
    data_folder, tmp_path, monkeypatch
):
    real, calls = model.GPT.forward, []

    def breaks(self, idx, targets=None, **kwargs):
        calls.append(1)
        loss = real(self, idx, targets, **kwargs)
        return loss * float("nan") if len(calls) == 8 else loss

    monkeypatch.setattr(model.GPT, "forward", breaks)
    argv = train_argv(data_folder, tmp_path, "--save_every=5", "--eval_every=100")
    refuses(train.main, argv, "step 8", "nan")
    state = weights(tmp_path)
    assert state["step"] == 5 and all(torch.isfinite(w).all() for w in state["model"].values())


def test_weights_that_are_not_finite_are_not_saved(data_folder, tmp_path, monkeypatch):
    run_training(data_folder, tmp_path, "--stop_at", "2")
    before = (tmp_path / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(train, "learning_rate", lambda *args, **kwargs: math.inf)
    argv = train_argv(data_folder, tmp_path, "--resume", "--stop_at=3")
    refuses(train.main, argv, "step 3")
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_two_commands_do_not_write_to_one_run(data_folder, tmp_path):
    with common.lock(tmp_path):
        refuses(train.main, train_argv(data_folder, tmp_path), str(tmp_path))


# --- refusals


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--lr", "nan"], ["--lr"]),
        (["--task=passkey"], ["--task_share"]),
        (["--pos", "xpos"], ["xpos", "nope"]),
        (["--pos", "no_file.Mine"], ["no_file"]),
        (["--rope_scaling", "factor=2"], ["--init_from"]),  # a trained model's alone
        # what does not fit together, what is not there
        (["--train_len", "600"], ["--train_len", "--eval_tokens", "--val_frac"]),
        (["--warmup_steps", "20"], ["--warmup_steps"]),
        (["--batch_size", "6", "--grad_accum", "4"], ["--batch_size", "--grad_accum"]),
        (["--device", "cuda:7"], ["--device", "cuda:7"]),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(data_folder, tmp_path, flags, words):
    refuses(train.main, train_argv(data_folder, tmp_path / "new", *flags), *words)
    assert not (tmp_path / "new").exists()


def test_a_start_from_another_shape_or_another_noise_is_refused(data_folder, checkpoint, tmp_path):
    argv = ["--data", data_folder, "--init_from", checkpoint, "--out", tmp_path / "x"]
    refuses(train.main, [*argv, "--tokens=1280", "--n_layer=3"], "--n_layer")
    refuses(train.main, [*argv, "--tokens=1280", "--pos_args", "sigma=0.9"], "sigma 0.9")


def test_a_run_does_not_go_into_a_folder_of_something_else(data_folder, tmp_path):
    """Its data, another program's model; and none is resumed that is not there."""
    before = sorted(data_folder.iterdir())
    refuses(train.main, train_argv(data_folder, data_folder), "--out")
    assert sorted(data_folder.iterdir()) == before
    (tmp_path / "config.json").write_text("a model of another program")
    refuses(train.main, train_argv(data_folder, tmp_path), "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    refuses(train.main, ["--resume", "--out", tmp_path / "none"], str(tmp_path / "none"))


def test_a_run_is_saved_by_the_clock_where_steps_are_slow(data_folder, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(train, "SAVE_SECONDS", 0.0)
    save = lambda *args, step, **kwargs: saved.append(step)  # noqa: E731
    monkeypatch.setattr(checkpoint_of_a_run, "save_checkpoint", save)
    run_training(data_folder, tmp_path, "--stop_at=4")
    assert saved == [1, 2, 3, 4]


MINE = """
from fope import RoPE


class Slower(RoPE):
    def __init__(self, *, factor: float = 4.0, **kwargs):
        super().__init__(**kwargs)
        self.freqs /= factor
"""


def test_an_embedding_of_ones_own_file(data_folder, tmp_path, monkeypatch, capsys):
    """mine.py beside the project, --pos mine.Slower, and no file of ours is changed."""
    (tmp_path / "mine_of_a_test.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--pos=mine_of_a_test.Slower", "--pos_args", "factor=2", "--stop_at=1"]
    run = run_training(data_folder, tmp_path / "run", *flags)
    freqs = load_checkpoint(run)[0].blocks[0].attn.pos.freqs
    assert torch.equal(freqs, rope_freqs(16) / 2)
    refuses(train.main, train_argv(data_folder, tmp_path / "x", flags[0], "--pos_args", "f=1"), "f")
    (tmp_path / "mine_of_a_test.py").write_text(MINE.replace("/=", "*="))
    capsys.readouterr()
    run_training(data_folder, run, *flags[:3], "--stop_at=2", "--resume")
    load_checkpoint(run)  # once more: the checksum stays that of the start
    assert capsys.readouterr().out.count("note: mine_of_a_test.Slower has changed") == 2


class Drawn(RoPE):
    """Randomised positions, as an embedding of one's own may have them."""

    def rotate(self, q, k):
        return super().rotate(q + 0.1 * torch.rand_like(q), k)


def test_an_embedding_that_draws_draws_the_same_again(data_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(POSITION_EMBEDDINGS, "drawn", Drawn)
    whole = run_training(data_folder, tmp_path / "a", "--pos=drawn", "--stop_at=3")
    torch.rand(5)
    half = run_training(data_folder, tmp_path / "b", "--pos=drawn", "--stop_at=2")
    run_training(data_folder, half, "--pos=drawn", "--stop_at=3", "--resume")
    a, b = (weights(run)["model"] for run in (whole, half))
    assert all(torch.equal(a[name], b[name]) for name in a)


class Learned(RoPE):
    def __init__(self, *, loses=False, **kwargs):
        super().__init__(**kwargs)
        self.log_freqs, self.loses = torch.nn.Parameter(self.freqs.log()), loses

    def make_tables(self, T):
        log_freqs = self.log_freqs.detach() if self.loses else self.log_freqs
        return rotation_tables(log_freqs.exp().cpu(), T)


def test_an_embedding_of_ones_own_learns_its_frequencies_or_is_refused(
    data_folder, tmp_path, monkeypatch
):
    """Its tables are not kept, neither from step to step nor from a validation."""
    monkeypatch.setitem(POSITION_EMBEDDINGS, "learned", Learned)
    flags = ["--pos=learned", "--eval_every=1", "--weight_decay=0"]
    run = run_training(data_folder, tmp_path / "run", *flags, "--stop_at=3")
    state = weights(run)
    assert not torch.allclose(state["model"]["blocks.0.attn.pos.log_freqs"].exp(), rope_freqs(16))
    losses = [line["val_loss"] for line in state["log"]]
    model, validation = load_checkpoint(run)[0], train.read_validation(RECIPES["tiny"].changed(
        data=str(data_folder), eval_tokens=512, train_len=32))  # fmt: skip
    assert data.window_loss(model, validation, 32).mean() == pytest.approx(losses[-1], rel=1e-5)
    argv = train_argv(data_folder, tmp_path / "x", "--pos=learned", "--pos_args", "loses=true")
    refuses(train.main, argv, "log_freqs gets no gradient")


def test_a_run_is_not_overwritten_and_not_resumed_with_other_flags(data_folder, checkpoint):
    before = (checkpoint / "checkpoint.pt").read_bytes()
    argv = train_argv(data_folder, checkpoint)
    refuses(train.main, argv, "--resume")
    refuses(train.main, [*argv, "--resume", "--lr", "0.1"], "lr = 0.002")
    refuses(train.main, [*argv, "--resume", "--theta", "500"], "theta = 10000.0")
    assert (checkpoint / "checkpoint.pt").read_bytes() == before


def test_resume_on_other_data_is_refused(data_folder, tmp_path):
    flags = ["--tokenizer", "byte", "--val_frac", "0.2", "--out"]
    same, changed, text = (tmp_path / name for name in ("same", "changed", "text"))
    prepare_data.main(["--source", str(write_text(text)), *flags, str(same)])
    for document in text.iterdir():
        document.write_text(document.read_text().replace("Document", "document"))
    prepare_data.main(["--source", str(text), *flags, str(changed)])
    run_training(same, tmp_path / "run", "--stop_at", "2")
    refuses(train.main, train_argv(changed, tmp_path / "run", "--resume"), str(changed))
    argv = train_argv(data_folder, tmp_path / "run", "--resume")
    refuses(train.main, argv, "byte", "bpe:512")
    run_training(same, tmp_path / "run", "--resume", "--stop_at", "3")


# --- starting from another run


def test_continual_pretraining(data_folder, tmp_path):
    """From trained weights, and what RoPE has learned of its frequencies stays where it is."""
    first = run_training(data_folder, tmp_path / "first", "--pos=rope")
    second = ["--data", data_folder, "--init_from", first, "--train_len=64", "--tokens=1280"]
    second += ["--pos=fope", "--batch_size=4", "--eval_tokens=512", "--out", tmp_path / "second"]
    train.main([str(a) for a in second])
    model, _, _ = load_checkpoint(tmp_path / "second")
    assert model.config.pos_args == {"cap": False} and model.config.init_from == str(first)
    assert model.config.n_embd == 32 and model.blocks[0].attn.pos.train_len == 64
    assert log(tmp_path / "second")[0]["val_loss"] < log(first)[-1]["val_loss"] + 0.5


def test_continual_pretraining_resumes_without_its_start(data_folder, tmp_path, capsys):
    first = run_training(data_folder, tmp_path / "first", "--stop_at=7")
    flags = ["--data", str(data_folder), "--init_from", str(first), "--tokens=2560"]
    flags += ["--batch_size=4", "--eval_tokens=512"]
    capsys.readouterr()
    train.main([*flags, "--out", str(tmp_path / "a")])
    told = capsys.readouterr().out
    assert f"{first} is at step 7 of 20" in told and f"reads again what {first} has read" in told
    train.main([*flags, "--out", str(tmp_path / "b"), "--stop_at=7"])
    (first / "checkpoint.pt").unlink()
    train.main([*flags, "--out", str(tmp_path / "b"), "--resume"])
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
