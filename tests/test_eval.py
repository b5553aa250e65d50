"""Both evaluations, and the figures, against brute force and against models whose answers are known."""

import json
import math
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import need_gpt2, refuses, write_text

import eval_passkey
import eval_perplexity
import plot
import prepare_data
from eval_passkey import FILLER, PasskeyTask, passkey_accuracy, wilson_interval
from eval_perplexity import window_loss
from model import GPT, GPTConfig, load_checkpoint, save_checkpoint
from prepare_data import load_tokenizer


@pytest.fixture(scope="module")
def task(data_folder):
    return PasskeyTask(load_tokenizer("bpe:512", data_folder))


# --- perplexity


@pytest.mark.parametrize("length", [7, 16, 100])
def test_window_loss_is_brute_force(length, pos_name):
    """One window at a time, one token at a time; no window sees another, and only whole windows count."""
    model = GPT(GPTConfig(pos=pos_name, train_len=16, vocab_size=128, n_layer=1, n_head=2, n_embd=16))
    tokens = np.random.default_rng(0).integers(128, size=210)
    expected = np.zeros(length)
    n_windows = 209 // length
    with torch.no_grad():
        for w in range(n_windows):
            window = torch.from_numpy(tokens[w * length : (w + 1) * length + 1])
            log_probs = F.log_softmax(model(window[None, :-1])[0], dim=-1)
            for t in range(length):
                expected[t] -= log_probs[t, window[t + 1]].item() / n_windows
    assert window_loss(model, tokens, length) == pytest.approx(expected, rel=1e-4)


def test_perplexity_of_a_model_that_knows_nothing_is_the_vocabulary():
    model = GPT(GPTConfig(pos="rope", train_len=16, vocab_size=128, n_layer=1, n_head=2, n_embd=16))
    torch.nn.init.zeros_(model.head.weight)
    loss = window_loss(model, np.arange(101) % 128, 10)
    assert math.exp(loss.mean()) == pytest.approx(128)


def test_evaluation_leaves_mode_and_random_state_alone(task):
    model = GPT(GPTConfig(pos="rope", train_len=16, vocab_size=512, n_layer=1, n_head=2, n_embd=16))
    state = torch.get_rng_state()
    for training in (True, False):
        model.train(training)
        window_loss(model, np.arange(101) % 128, 10)
        first, second = (passkey_accuracy(model, task, 700, 2) for _ in range(2))
        assert model.training == training and torch.equal(torch.get_rng_state(), state) and first == second


def test_perplexity_command(checkpoint, tmp_path, capsys):
    out = tmp_path / "r.json"
    eval_perplexity.main([str(checkpoint), "--lengths", "32,64,96,100000", "--out", str(out)])
    result = json.loads(out.read_text())
    assert list(result["lengths"]) == ["32", "64", "96"] and "too few" in result["skipped"]["100000"]
    tokens = {row["tokens"] for row in result["lengths"].values()}
    assert len(tokens) <= 2 and max(tokens) - min(tokens) < 64  # the same tokens, up to a window that does not divide
    for row in result["lengths"].values():
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert result["training"]["tokens"] == 2560 and result["curve"][-1][0] == 2560
    assert {"command", "commit", "hardware", "software", "seed", "pos", "train_len"} <= set(result)
    captured = capsys.readouterr()
    assert "length 100,000 is skipped" in captured.err and "64 (2x)" in captured.out


def test_a_result_says_whether_the_code_was_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(eval_perplexity, "__file__", str(tmp_path / "eval_perplexity.py"))
    assert eval_perplexity.git_commit() == "unknown"
    (tmp_path / "results").mkdir()
    for path in (code := tmp_path / "model.py", result := tmp_path / "results/x.json"):
        path.write_text("1")
    for args in ("init -q", "add .", "-c user.name=a -c user.email=a commit -qm one"):
        subprocess.run(["git", *args.split()], cwd=tmp_path, check=True)
    commit = eval_perplexity.git_commit()
    assert len(commit) == 12
    result.write_text("2")
    assert eval_perplexity.git_commit() == commit
    code.write_text("2")
    assert eval_perplexity.git_commit() == f"{commit}-dirty"


def test_frequencies_can_be_lowered_for_an_evaluation(checkpoint, tmp_path, capsys):
    """YaRN and interpolation change what the model reads far out, and the result says which it was."""
    out, losses = tmp_path / "r.json", []
    for flags, pos_args in (
        ([], {}),
        (["--yarn_scale", "4"], {"yarn_scale": 4.0, "original_len": 32}),
        (["--pi_scale", "4", "--label", "stretched"], {"pi_scale": 4.0, "original_len": 32}),
        (["--pos_args", "yarn_scale=1"], {"yarn_scale": 1, "original_len": 32}),
    ):
        eval_perplexity.main([str(checkpoint), "--lengths", "32,256", "--out", str(out), *flags])
        result = json.loads(out.read_text())
        assert result["pos_args"] == pos_args and result["label"] == ("stretched" if "--label" in flags else None)
        losses.append(result["lengths"]["256"]["loss"])
    assert "FoPE(train_len=32" in capsys.readouterr().out
    assert losses[3] == losses[0] and len(set(losses)) == 3
    before = out.read_bytes()
    for flags, words in (
        (["--yarn_scale", "0.5"], "yarn_scale must be a number of at least 1"),
        (["--pi_scale", "inf"], "at most a billion"),
        (["--pi_scale", "2", "--yarn_scale", "2"], "give one of them"),
        (["--pos_args", "sigma=0.9"], "it cannot become 0.9"),  # a trained FoPE keeps its coefficients
        (["--pos_args", "floor=False"], "floor must be true or false"),
        (["--pos_args", "variant=paper", "variant=released"], "each keyword once"),
    ):
        for main in (eval_perplexity.main, eval_passkey.main):
            refuses(main, [checkpoint, "--out", out, *flags], words)
    refuses(eval_perplexity.main, [checkpoint, "--yarn_scale", "2"], "needs --out")
    assert out.read_bytes() == before


def test_a_length_without_memory_is_skipped_and_a_diverged_model_refused(checkpoint, tmp_path, monkeypatch, capsys):
    def window_loss(model, tokens, length, bar):
        if length > 32:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return losses

    monkeypatch.setattr(eval_perplexity, "window_loss", window_loss)
    argv, losses = [checkpoint, "--lengths", "32,64", "--out", tmp_path / "r.json"], np.ones((3, 32))
    eval_perplexity.main([str(a) for a in argv])
    result = json.loads((tmp_path / "r.json").read_text())
    assert list(result["lengths"]) == ["32"] and result["skipped"] == {"64": "out of memory"}
    for loss in (1000, math.nan):
        losses[:] = loss
        refuses(eval_perplexity.main, argv, "has diverged")
    assert json.loads((tmp_path / "r.json").read_text()) == result
    refuses(eval_perplexity.main, [checkpoint, "--out", tmp_path], "no file for results")


def test_default_lengths_are_1_to_16_times(checkpoint, tmp_path):
    eval_perplexity.main([str(checkpoint), "--out", str(tmp_path / "r.json")])
    assert list(json.loads((tmp_path / "r.json").read_text())["lengths"]) == ["32", "64", "128", "256", "512"]


# --- passkey


YARN = """There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you \
about the important information there.
{before}
The pass key is {key}. Remember it. {key} is the pass key.
{after}
What is the pass key? The pass key is {key}"""


@pytest.mark.parametrize("name", ["bpe:512", "byte", "gpt2"])
@pytest.mark.parametrize("length", [600, 801, 2048])
def test_prompt_is_yarns_and_has_exactly_the_length(name, length, data_folder):
    if name == "gpt2":
        need_gpt2()
    encoding = load_tokenizer(name, data_folder)
    rng = np.random.default_rng(0)
    for depth in (0.0, 0.5, 0.999, None):
        tokens, n_answer, depth = PasskeyTask(encoding).sample(length, rng, key=90817, depth=depth)
        assert tokens.shape == (length,)
        lines = encoding.decode(tokens.tolist()).split("\n")
        assert lines == YARN.format(before=lines[1], after=lines[3], key=90817).split("\n")
        endless = " ".join([FILLER] * 100)
        assert endless.startswith(lines[1]) and endless.startswith(lines[3])
        filler = len(lines[1]) + len(lines[3])
        assert abs(len(lines[1]) / filler - depth) < 0.05
        assert encoding.decode(tokens[-n_answer:].tolist()).strip() == "90817"
        assert n_answer == 5 or name == "gpt2"


def test_prompt_that_does_not_fit_is_refused(task):
    with pytest.raises(ValueError, match="does not fit 60"):
        task.sample(60, np.random.default_rng(0))
    shortest = 1 + next(n for n in range(60, 999) if fits(task, n))
    assert task.sample(shortest, np.random.default_rng(0))[0].shape == (shortest,)


def fits(task, n):
    try:
        return task.sample(n, np.random.default_rng(0)) is not None
    except ValueError:
        return False


class Oracle(torch.nn.Module):
    """Predicts the next token of each known sequence (right), or the token after that (wrong)."""

    def __init__(self, sequences, n_vocab, shift=0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.sequences, self.n_vocab, self.shift = sequences, n_vocab, shift

    def forward(self, idx, positions=slice(None)):
        rows = [next(s for s in self.sequences if torch.equal(s[: len(x)], x)) for x in idx]
        following = torch.stack([r.roll(-1)[: idx.size(1)] for r in rows]) + self.shift
        return 10.0 * F.one_hot(following % self.n_vocab, self.n_vocab).float()[:, positions]

    generate = GPT.generate


@pytest.mark.parametrize("generate", [False, True])
def test_a_model_that_knows_the_key_scores_1_and_one_that_does_not_0(task, generate):
    rng = np.random.default_rng((0, 200))
    sequences = [torch.from_numpy(task.sample(200, rng)[0]) for _ in range(20)]
    knows = passkey_accuracy(Oracle(sequences, 512), task, 200, 20, generate=generate)
    assert knows["accuracy"] == knows["token_accuracy"] == 1.0 and knows["answer_nll"] < 0.1
    assert sum(knows["trials_by_depth"]) == 20 and set(knows["accuracy_by_depth"]) <= {1.0, None}
    if not generate:  # a wrong first token leads the oracle off the sequences it knows
        wrong = passkey_accuracy(Oracle(sequences, 512, shift=1), task, 200, 20)
        assert wrong["accuracy"] == wrong["token_accuracy"] == 0.0 and wrong["answer_nll"] > 9


class OwnAnswers:
    """Of three trials one asks for what the model itself answers, one for that with another last token, one for the key."""

    def __init__(self, task, model):
        self.task, self.model, self.count = task, model, 0

    def sample(self, length, rng):
        tokens, n, depth = self.task.sample(length, rng)
        if self.count % 3 < 2:
            tokens = self.model.generate(torch.from_numpy(tokens)[None, :-n], n, temperature=0)[0].numpy()
            tokens[-1] = (tokens[-1] + self.count % 3) % self.model.config.vocab_size
        self.count += 1
        return tokens, n, depth


@pytest.mark.parametrize("name", ["bpe:512", "byte"])
def test_one_pass_agrees_with_generation(name, pos_name, data_folder):
    encoding = load_tokenizer(name, data_folder)
    task = PasskeyTask(encoding)
    length = next(n for n in range(60, 999) if fits(task, n)) + 20
    torch.manual_seed(0)
    model = GPT(GPTConfig(pos=pos_name, train_len=length, vocab_size=encoding.n_vocab, n_layer=1, n_head=2, n_embd=32))
    for p in model.parameters():  # as if trained: an untrained model says one token over and over
        torch.nn.init.normal_(p, std=0.5)
    once, decoded = (passkey_accuracy(model, OwnAnswers(task, model), length, 12, generate=g) for g in (False, True))
    assert once == decoded
    assert once["accuracy"] == 4 / 12 and (4 + 4 * 0.8) / 12 <= once["token_accuracy"] + 1e-9 < 1


def test_passkey_command(checkpoint, tmp_path, capsys):
    out = tmp_path / "r.json"
    flags = ["--lengths", "64,256,300", "--trials", "5"]
    eval_passkey.main([str(checkpoint), *flags, "--out", str(out)])
    result = json.loads(out.read_text())
    assert list(result["lengths"]) == ["256", "300"] and "does not fit 64" in result["skipped"]["64"]
    assert result["training"]["passkey_frac"] == 0 and result["lengths"]["256"]["trials"] == 5
    eval_passkey.main([str(checkpoint), *flags, "--out", str(tmp_path / "again.json")])
    assert json.loads((tmp_path / "again.json").read_text())["lengths"] == result["lengths"]


def test_wilson_interval():
    # Newcombe (1998), table I: 81 of 263, 0 of 20, 1 of 29
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)


# --- refusals


@pytest.mark.parametrize("main", [eval_perplexity.main, eval_passkey.main])
@pytest.mark.parametrize(
    "argv, words",
    [
        (["nowhere"], ("there is no file",)),
        (["CHECKPOINT", "--lengths", "128,x"], ("--lengths",)),
        (["CHECKPOINT", "--lengths", "0"], ("--lengths",)),
        (["CHECKPOINT", "--lengths", "9000000"], ("no length could be evaluated",)),
        (["CHECKPOINT", "--lengths", "1000000000"], ("--lengths",)),
        (["CHECKPOINT", "--device", "gpu"], ("cpu or cuda, not gpu",)),
        (["CHECKPOINT", "--device", "meta"], ("cpu or cuda, not meta",)),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(main, argv, words, checkpoint, tmp_path, request):
    if main is eval_passkey.main and "9000000" in argv:
        argv = ["CHECKPOINT", "--lengths", "9"]
    argv = [checkpoint if a == "CHECKPOINT" else a for a in argv]
    refuses(main, [*argv, "--out", tmp_path / "r.json"], *words)
    assert not (tmp_path / "r.json").exists()


def test_another_tokenizer_is_refused(checkpoint, data_folder, tmp_path):

    argv = [
        "--source",
        str(write_text(tmp_path / "t")),
        "--tokenizer",
        "byte",
        "--val_frac",
        "0.3",
        "--out",
        str(tmp_path / "d"),
    ]
    prepare_data.main(argv)
    refuses(eval_perplexity.main, [checkpoint, "--data", tmp_path / "d"], "tokenizer bpe:512", "byte")
    untold = tmp_path / "untold"
    save_checkpoint(untold, load_checkpoint(checkpoint)[0])  # from a notebook, say
    refuses(eval_passkey.main, [untold], "not one that train.py wrote")
    moved = shutil.copytree(checkpoint, tmp_path / "moved")
    (moved / "tokenizer.tiktoken").unlink()
    refuses(eval_passkey.main, [moved], "tokenizer.tiktoken")


# --- figures


def result_file(folder, kind, pos, seed, value):
    row = {"perplexity": 40 * value, "loss": 3.0, "tokens": 10}
    if kind == "passkey":
        row = {
            "accuracy": value,
            "token_accuracy": value,
            "accuracy_by_depth": [value, None] * 5,
            "trials_by_depth": [3, 0] * 5,
        }
    result = {"kind": kind, "pos": pos, "pos_args": {}, "train_len": 128, "seed": seed, "lengths": {128: row, 256: row}}
    if kind == "perplexity":
        result["curve"] = [[1000, 5.0, None], [2000, 4.0, 4.1]]
    path = folder / f"{kind}_{pos}_{seed}.json"
    path.write_text(json.dumps(result))
    return path


def test_every_line_of_a_figure_has_a_style_of_its_own():
    labels = ["RoPE", "FoPE", "RoPE + QK-norm", *(f"{name}, YaRN x{s}" for s in (4, 16) for name in ("RoPE", "FoPE", "RoPE-A"))]
    labels += ["RoPE to FoPE", "FoPE (sigma=0.1, variant=paper)", "FoPE (sigma=0.2, variant=paper)"]
    style = plot.styles(labels)
    assert len({tuple(line.items()) for line in style.values()}) == len(labels)
    assert style["FoPE, YaRN x4"] == style["RoPE, YaRN x4"] | {"ls": "--"}


def test_figures_and_table_come_from_the_json_files(tmp_path, capsys):
    files = [
        result_file(tmp_path, kind, pos, seed, value)
        for kind in ("perplexity", "passkey")
        for pos, values in {"fope": (0.5, 0.7), "rope": (0.25, 0.25), "nope": (0.0, 0.1), "mine": (0.9, 1.0)}.items()
        for seed, value in enumerate(values)
    ]
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table fig -->\nold\n<!-- end fig -->\nafter\n")
    argv = [*map(str, files), "--out", str(tmp_path / "fig"), "--readme", str(readme)]
    plot.main(argv)
    table = capsys.readouterr().out
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert [r[0] for r in rows[2:6]] == ["NoPE", "RoPE", "FoPE", "mine"]
    assert rows[4] == ["FoPE", "2", "24.00 ± 5.66", "24.00 ± 5.66"]  # of 20 and 28, std with n - 1
    assert ["FoPE", "2", "60 ± 14", "60 ± 14"] in rows
    assert readme.read_text() == f"before\n<!-- table fig -->\n{table}<!-- end fig -->\nafter\n"
    for name in ("length", "depth", "training"):
        image = matplotlib.image.imread(tmp_path / "fig" / f"{name}.png")
        assert image.shape[0] > 300 and image[..., :3].std() > 0.05
        assert "<svg" in (tmp_path / "fig" / f"{name}.svg").read_text()
    first = (tmp_path / "fig" / "length.svg").read_bytes()
    plot.main(argv)
    assert (tmp_path / "fig" / "length.svg").read_bytes() == first


def test_labels_and_loss(tmp_path, capsys):
    files = [result_file(tmp_path, "perplexity", pos, 0, 1.0) for pos in ("rope", "fope", "kerple")]
    for path, changes in zip(
        files,
        (
            {"pos_args": {"yarn_scale": 4.0, "original_len": 128}},
            {"label": "FoPE, CF alone", "pos_args": {"sigma": 0}},
            {"model": {"qk_norm": True}},
        ),
        strict=True,
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    plot.main([*map(str, files), "--out", str(tmp_path / "fig"), "--loss"])
    table = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:5]] == [
        "RoPE (yarn_scale=4.0)", "FoPE, CF alone", "KERPLE + QK-norm",
    ]  # fmt: skip
    assert "loss in nats per token" in table and "| 3.00 |" in table and (tmp_path / "fig" / "length.png").exists()


def test_foreign_results_are_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    refuses(plot.main, [tmp_path / "x.json"], "no result of")
    a, b = result_file(tmp_path, "perplexity", "rope", 0, 1.0), result_file(tmp_path, "perplexity", "rope", 1, 1.0)
    b.write_text(b.read_text().replace('"train_len": 128', '"train_len": 64'))
    refuses(plot.main, [a, b, "--out", tmp_path], "several training lengths")
    text = a.read_text()
    refuses(plot.main, [a, a, "--out", tmp_path], "a second result of RoPE with seed 0")
    for old, new, words in (
        ('"tokens": 10}', '"tokens": 10, "loss": "a"}', "no result of"),
        ('"128": {', '"128": 3, "129": {', "no result of"),
        ('"train_len": 128', '"train_len": 0', "no result of"),
        ('"seed": 0', '"seed": 0, "label": "_x"', "the label _x"),
    ):
        b.write_text(text.replace(old, new))
        assert b.read_text() != text
        refuses(plot.main, [b, "--out", tmp_path], words)
    b.write_text(text.replace('"seed": 0', '"seed": 1, "tokenizer": "byte"'))
    refuses(plot.main, [a, b, "--out", tmp_path], "per byte and losses per token")
    b.write_text(text.replace('"seed": 0', '"seed": 1').replace('"128": {', '"64": {').replace('"256": {', '"32": {'))
    refuses(plot.main, [a, b, "--out", tmp_path], "no length in common")
