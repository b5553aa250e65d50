"""Both evaluations against brute force and against models whose answers are known."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import need_gpt2, refuses, run_training, write_text

import eval_passkey
import eval_perplexity
import prepare_data
import train
from common import Refused
from data import TokenData, load_tokenizer, window_loss
from eval_passkey import task_accuracy, wilson_interval
from evaluation import scaled_to
from fope import POSITION_EMBEDDINGS, PositionError, RoPE
from model import GPT, GPTConfig
from recipe import Recipe
from tasks import FILLER, QUESTION, Passkey


@pytest.fixture(scope="module")
def task(data_folder):
    encoding = load_tokenizer("bpe:512", data_folder)
    task = Passkey(encoding.encode_ordinary)
    task.decode = encoding.decode
    return task


@pytest.fixture
def run(checkpoint, tmp_path):
    """A copy of the run, that results can be written into."""
    return shutil.copytree(checkpoint, tmp_path / "run")


def evaluate(script, *argv):
    script.main([str(a) for a in argv])


def read(path):
    return json.loads(path.read_text())


# --- perplexity


@pytest.mark.parametrize("length", [7, 100])
def test_window_loss_is_brute_force(length, pos_name):
    """One window and one token at a time: no window sees another, and only whole ones count."""
    shape = dict(n_layer=1, n_head=2, n_embd=16, vocab_size=128)
    model = GPT(GPTConfig(pos=pos_name, train_len=16, **shape))
    tokens = np.random.default_rng(0).integers(128, size=210)
    n_windows = 209 // length
    expected = np.zeros((n_windows, length))
    with torch.no_grad():
        for w in range(n_windows):
            window = torch.from_numpy(tokens[w * length : (w + 1) * length + 1])
            log_probs = F.log_softmax(model(window[None, :-1])[0], dim=-1)
            for t in range(length):
                expected[w, t] = -log_probs[t, window[t + 1]].item()
    assert window_loss(model, tokens, length) == pytest.approx(expected, rel=1e-4)
    # two pieces of text that follow each other
    pieces = np.stack((tokens[: length + 1], tokens[length : 2 * length + 1]))
    two = window_loss(model, tokens[: 2 * length + 1], length)
    assert window_loss(model, pieces, length) == pytest.approx(two, rel=1e-4)


def test_bits_per_byte_are_all_bits_over_the_bytes_of_the_text(checkpoint, data_folder, tmp_path):
    """
    The text is that of all targets, decoded by hand; the end of text has no bytes. All lengths read
    the same windows, spread over the split.
    """
    data, out = TokenData(data_folder, "val"), tmp_path / "r.json"
    tokens, encoding = data.read(0, len(data)).tolist(), data.tokenizer()
    # windows of 64 begin at the start and are spread up to the end
    starts = np.linspace(0, len(tokens) - 65, (len(tokens) - 1) // 64).astype(int)
    targets = [token for start in starts for token in tokens[start + 1 : start + 65]]
    text = [token for token in targets if token != encoding.eot_token]
    assert len(targets) - len(text) > 3
    n_bytes = sum(len(encoding.decode_single_token_bytes(token)) for token in text)
    evaluate(eval_perplexity, checkpoint, "--lengths", "32,64", "--out", out)
    for row in read(out)["lengths"].values():
        assert row["tokens"] == len(targets)
        bits = row["loss"] / math.log(2) * len(targets)
        assert row["bits_per_byte"] == pytest.approx(bits / n_bytes)


def test_perplexity_command(checkpoint, tmp_path):
    out = tmp_path / "r.json"
    evaluate(eval_perplexity, checkpoint, "--lengths", "32,48,96,100000", "--out", out)
    result = read(out)
    assert list(result["lengths"]) == ["32", "48", "96"]
    assert "too few" in result["skipped"]["100000"]
    assert len({row["tokens"] for row in result["lengths"].values()}) == 1
    for row in result["lengths"].values():
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert {"command", "commit", "hardware", "software", "trained_on"} <= set(result)
    trained = read(checkpoint / "config.json")["recipe"]
    assert result["recipe"] == trained | {"lengths": "32,48,96,100000"} and result["step"] == 20


def test_the_loss_is_kept_by_position_and_by_window(checkpoint, tmp_path):
    """Two windows of 200 positions in 128 bins of one or two; 12 windows of 32."""
    out = tmp_path / "r.json"
    few = ["--lengths", "32,200", "--max_tokens", "401", "--out", out]
    evaluate(eval_perplexity, checkpoint, *few)
    short, long = read(out)["lengths"].values()
    widths = [len(b) for b in np.array_split(np.arange(200), 128)]
    assert set(widths) == {1, 2} and len(long["by_window"]) == 2 and len(short["by_window"]) == 12
    assert np.average(long["by_position"], weights=widths) == pytest.approx(long["loss"], abs=1e-3)
    for row in (short, long):
        assert np.mean(row["by_window"]) == pytest.approx(row["loss"], abs=1e-3)


def test_what_is_asked_by_default_is_the_recipes(data_folder, tmp_path):
    flags = ["--lengths=64,8x,300", "--read_tokens=1000", "--trials=3", "--seed=5", "--stop_at=1"]
    run = run_training(data_folder, tmp_path / "run", *flags)
    evaluate(eval_perplexity, run)
    rows = read(run / "perplexity.json")["lengths"]
    tokens = {length: row["tokens"] for length, row in rows.items()}
    assert tokens == {"64": 768, "256": 768, "300": 900}
    evaluate(eval_passkey, run)
    result = read(run / "passkey.json")
    assert [(n, row["trials"]) for n, row in result["lengths"].items()] == [("256", 3), ("300", 3)]
    assert "too many for 64" in result["skipped"]["64"]
    assert result["trial_seed"] == 5 and result["kind"] == "passkey"


def test_frequencies_can_be_lowered_for_an_evaluation(data_folder, tmp_path):
    """
    Without a factor they are scaled to each length: at 32, the training length, nothing changes; at
    256 the factor is 8. The result says how it was read.
    """
    run = run_training(data_folder, tmp_path / "run", "--pos=rope", "--lengths=32,256")
    told, results = ["--rope_scaling", "kind=ntk"], []
    for number, flags in enumerate(([], told, [*told, "factor=8"])):
        out = tmp_path / f"{number}.json"
        evaluate(eval_perplexity, run, "--out", out, "--label=x", *flags)
        results.append(read(out))
    ntk = {"kind": "ntk", "original_len": 32}
    scalings = [result["recipe"]["rope_scaling"] for result in results]
    assert scalings == [None, ntk, ntk | {"factor": 8}] and results[1]["label"] == "x"
    plain, told_rows, fixed = (result["lengths"] for result in results)
    assert told_rows["256"]["factor"] == 8 and "factor" not in fixed["256"]
    assert told_rows["256"]["loss"] == fixed["256"]["loss"] != plain["256"]["loss"]
    assert told_rows["32"]["factor"] == 1
    assert plain["32"]["loss"] == told_rows["32"]["loss"] != fixed["32"]["loss"]
    for flag in ("factor=1", "kind=none"):
        argv = [run, "--out", tmp_path / "same.json", "--rope_scaling", flag]
        refuses(eval_perplexity.main, argv, "as it does without")
    refuses(train.main, ["--init_from", run, "--out", tmp_path / "new", *told], "factor")


def test_the_factor_is_of_the_length_at_which_the_frequencies_were_learned():
    """They were learned at 16, then the model was trained on at 32."""
    model = GPT(Recipe(pos="rope", train_len=32, rope_scaling={"original_len": 16}, **SMALL))
    scaled, factor = scaled_to(model, 64)
    assert factor == {"factor": 4.0} and scaled.config.rope_scaling["factor"] == 4.0
    assert scaled_to(model, 8)[1] == {"factor": 1.0}


class Short(RoPE):
    """As learned positions would, it cannot read more than twice its training length."""

    def make_tables(self, T):
        if 2 * self.train_len < T:
            raise PositionError(f"{T} positions, of which only some were learned")
        return super().make_tables(T)


def test_a_length_that_the_embedding_cannot_read_is_skipped(data_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(POSITION_EMBEDDINGS, "short", Short)
    run = run_training(data_folder, tmp_path / "run", "--pos=short", "--stop_at=1")
    evaluate(eval_perplexity, run, "--lengths=32,64,128")
    result = read(run / "perplexity.json")
    assert list(result["lengths"]) == ["32", "64"] and "only some" in result["skipped"]["128"]


def test_a_changed_embedding_does_not_take_the_place_of_the_trained_one(checkpoint):
    for main in (eval_perplexity.main, eval_passkey.main):
        refuses(main, [checkpoint, "--rope_scaling", "factor=2"], "--out")
    assert not list(checkpoint.glob("p*.json"))


def test_a_length_without_memory_is_skipped_and_a_diverged_model_refused(
    checkpoint, tmp_path, monkeypatch
):
    """A bug is no length that does not fit."""
    losses, out = np.ones((1, 32)), tmp_path / "r.json"

    def window_loss(model, tokens, length, show):
        if length > 32:
            raise RuntimeError(error)
        return losses

    monkeypatch.setattr(eval_perplexity, "window_loss", window_loss)
    argv, error = [checkpoint, "--lengths", "32,64", "--out", out], "a bug"
    with pytest.raises(RuntimeError, match="a bug"):
        evaluate(eval_perplexity, *argv)
    error = "CUDA out of memory. Tried to allocate 2.00 GiB"
    evaluate(eval_perplexity, *argv)
    result = read(out)
    assert list(result["lengths"]) == ["32"] and result["skipped"] == {"64": "out of memory"}
    for loss in (1000, math.nan):
        losses[:] = loss
        refuses(eval_perplexity.main, argv, "has diverged")
    assert read(out) == result


# --- passkey


YARN = """There is an important info hidden inside a lot of irrelevant text. Find it and memorize \
them. I will quiz you about the important information there.
{before}
The pass key is {key}. Remember it. {key} is the pass key.
{after}
What is the pass key? The pass key is {key}"""


@pytest.mark.parametrize("name", ["bpe:512", "byte", "gpt2"])
@pytest.mark.parametrize("length", [600, 801])
def test_prompt_is_yarns_and_has_exactly_the_length(name, length, data_folder):
    if name == "gpt2":
        need_gpt2()
    encoding = load_tokenizer(name, data_folder)
    drawn = np.random.default_rng(0).random()
    for depth in (0.0, 0.5, 0.999, drawn):
        rng = SimpleNamespace(integers=lambda low, high: 90817, random=lambda d=depth: d)
        tokens, n_answer, distance = Passkey(encoding.encode_ordinary).sample(length, rng)
        assert tokens.shape == (length,)
        lines = encoding.decode(tokens.tolist()).split("\n")
        assert lines == YARN.format(before=lines[1], after=lines[3], key=90817).split("\n")
        endless = " ".join([FILLER] * 100)
        assert endless.startswith(lines[1]) and endless.startswith(lines[3])
        filler = len(lines[1]) + len(lines[3])
        assert abs(len(lines[1]) / filler - depth) < 0.05
        assert encoding.decode(tokens[-n_answer:].tolist()).strip() == "90817"
        assert n_answer == 5 or name == "gpt2"
        hidden, asked = encoding.decode(tokens[: length - n_answer - distance].tolist()), lines[4]
        assert hidden.endswith("90817 is the pass key.\n") and asked.startswith("What is")


def test_keys_have_five_digits_and_lie_anywhere(task):
    keys, depths, rng = [], [], np.random.default_rng(0)
    with pytest.raises(Refused) as info:
        task.sample(1, rng)
    shortest = int(str(info.value).split()[3])  # "the prompt has 155 tokens"
    n_question = len(task.encode("\n" + QUESTION))
    for _ in range(500):
        tokens, n, distance = task.sample(shortest + 1000, rng)
        keys.append(int("".join(task.decode([t]) for t in tokens[-n:])))
        depths.append((distance - n_question) / 1000)  # of the filler, 1 at its start
    assert len(set(keys)) > 450 and 10000 <= min(keys) < 12000 and 99500 < max(keys) < 100000
    assert set(np.histogram(depths, bins=10, range=(0, 1))[0]) <= set(range(30, 75))


SMALL = dict(vocab_size=512, n_layer=1, n_head=2, n_embd=32)


class OwnAnswers:
    """
    Of three trials one asks for what the model itself answers, one for that with another last
    token, one for the key. The answers have five, four and three tokens.
    """

    def __init__(self, task, model):
        self.task, self.model, self.trials = task, model, []

    def sample(self, length, rng):
        tokens, n, distance = self.task.sample(length, rng)
        kind = len(self.trials) % 3
        if kind < 2:
            prompt = torch.from_numpy(tokens)[None, :-n]
            own = self.model.generate(prompt, n, temperature=0)
            tokens = torch.cat([prompt, *own], dim=1)[0].numpy()
            tokens[-1] = (tokens[-1] + kind) % self.model.config.vocab_size
        self.trials.append((torch.from_numpy(tokens)[None], n - kind))
        return tokens, n - kind, distance


def test_a_trial_is_measured_by_its_own_answer(task):
    """One forward pass a trial, by hand; to decode token by token agrees."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(pos="nope", **SMALL))
    for p in model.parameters():  # as if trained: an untrained model says one token over and over
        torch.nn.init.normal_(p, std=0.5)
    asked = OwnAnswers(task, model)
    got = task_accuracy(model, asked, 200, 7)
    assert task_accuracy(model, OwnAnswers(task, model), 200, 7, generate=True) == got
    right, share, nll = [], [], []
    for tokens, n in asked.trials:
        logits, answer = model(tokens[:, :-1])[0, -n:], tokens[0, -n:]
        hits = (logits.argmax(dim=-1) == answer).float()
        right.append(int(hits.min()))
        share.append(round(hits.mean().item(), 2))
        nll.append(F.cross_entropy(logits, answer).item())
    assert got["right"] == right and got["share_right"] == pytest.approx(share)
    assert len(set(share)) > 2 and got["accuracy"] == np.mean(right) > 0
    assert got["token_accuracy"] == pytest.approx(np.mean(share), abs=0.01)
    assert got["answer_nll"] == pytest.approx(np.mean(nll), rel=1e-4)


def test_wilson_interval():
    # Newcombe (1998), table I: 81 of 263, 0 of 20, 1 of 29
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)


# --- refusals


def test_a_result_takes_the_place_of_one_of_its_own_run_and_kind_alone(run, tmp_path):
    out, short = tmp_path / "r.json", ["--lengths", "256"]
    for lengths in ("32", "32,256", "32,256"):  # the second and the third replace the one before
        evaluate(eval_perplexity, run, "--lengths", lengths, "--out", out)
    for fewer in (short, ["--lengths", "32,256", "--max_tokens", "600"]):
        refuses(eval_perplexity.main, [run, *fewer, "--out", out], "holds more")
    evaluate(eval_passkey, run, *short, "--trials", "2")
    for fewer in (["--trials", "1"], ["--trials", "2", "--seed", "7"]):
        refuses(eval_passkey.main, [run, *short, *fewer], "another name")
    refuses(eval_passkey.main, [run, *short, "--out", out], "--out")
    changed = ["--rope_scaling", "factor=2"]
    refuses(eval_perplexity.main, [run, *short, *changed, "--out", out], "--out")


def test_text_that_may_have_been_trained_on_is_not_read_as_held_out(tmp_path):
    """The data folder of a run, prepared anew with another split."""
    source, data, run = write_text(tmp_path / "t"), tmp_path / "data", tmp_path / "run"
    prepare = ["--source", source, "--tokenizer", "byte", "--out", data]
    evaluate(prepare_data, *prepare)
    run_training(data, run, "--stop_at", "1")
    short = [run, "--lengths", "128", "--max_tokens", "500"]
    shutil.rmtree(data)
    evaluate(prepare_data, *prepare, "--val_frac", "0.5")
    refuses(eval_perplexity.main, short, "--data")
    # read with --data, it stands beside the result of the run's own text
    evaluate(eval_perplexity, *short, "--data", data)
    assert [path.name for path in run.glob("p*.json")] == ["perplexity_data.json"]


def test_another_tokenizer_is_refused(run, tmp_path):
    argv = ["--source", write_text(tmp_path / "t"), "--tokenizer", "byte", "--val_frac", "0.3"]
    evaluate(prepare_data, *argv, "--out", tmp_path / "d")
    words = "tokenizer bpe:512", "byte"
    refuses(eval_perplexity.main, [run, "--data", tmp_path / "d"], *words)
    (run / "tokenizer.tiktoken").write_text("IQ== 0\n")
    refuses(eval_passkey.main, [run], "is not the file that the tokens were made with")
