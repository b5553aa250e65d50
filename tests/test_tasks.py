"""Tasks of one's own: several needles, a question that depends on them, the data's own text."""

import json

import numpy as np
import pytest
from conftest import refuses, run_training

import eval_passkey
import train
from data import Batches, TokenData
from recipe import RECIPES

MINE = """
import numpy as np
from tasks import Passkey


class MultiKey(Passkey):
    def trial(self, rng):
        colours, keys = rng.permutation(["red", "green", "blue"]), rng.integers(100, 1000, 3)
        needles = [f"The {colour} key is {key}." for colour, key in zip(colours, keys)]
        return needles, f"The {colours[0]} key is", f" {keys[0]}"


class InText(MultiKey):
    def filler(self, n, rng):
        return self.read(n, rng).tolist()
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of one's own, with a name that no other test has."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_the_first_of_several_needles_is_asked_and_all_are_there(mine, data_folder):
    data = TokenData(data_folder, "train")
    recipe = RECIPES["tiny_passkey"].changed(task=f"{mine}.MultiKey", train_len=300)
    task, order = Batches(data, recipe).task, set()
    for seed in range(30):
        tokens, n_answer, distance = task.sample(300, np.random.default_rng(seed))
        text = data.tokenizer().decode(tokens.tolist())
        lines, answer = text.split("\n"), text.rsplit(" ", 1)[1]
        hidden = [line for line in lines if line.endswith(".") and line.startswith("The ")]
        keys = {line.split()[1]: line.split()[-1] for line in hidden if " key is " in line}
        colour = lines[-1].split()[1]
        assert len(keys) == 3 and keys[colour] == answer + "."
        before = data.tokenizer().decode(tokens[: 300 - n_answer - distance].tolist())
        assert before.endswith(f"The {colour} key is {answer}.\n")
        order.add([*keys].index(colour))
    assert order == {0, 1, 2}


def test_a_task_of_ones_own_is_trained_and_asked_in_the_text_of_the_data(
    mine, data_folder, tmp_path
):
    flags = [f"--task={mine}.InText", "--task_share=1", "--train_len=256", "--stop_at=1"]
    run = run_training(data_folder, tmp_path / "run", *flags, "--trials=3", "--lengths=1x")
    eval_passkey.main([str(run)])
    result = json.loads((run / f"{mine}.InText.json").read_text())
    assert result["kind"] == result["recipe"]["task"] == f"{mine}.InText"
    eval_passkey.main([str(run), "--task", "passkey"])
    assert json.loads((run / "passkey.json").read_text())["kind"] == "passkey"
    data = TokenData(data_folder, "train")
    row = Batches(data, RECIPES["tiny"].changed(**result["recipe"])).sequence(0)
    words = data.tokenizer().decode(data.read(0, len(data)).tolist())
    line = next(
        line for line in data.tokenizer().decode(row.tolist()).split("\n")[1:] if len(line) > 40
    )
    assert line in words and "The grass is green" not in line


def test_an_unknown_task_is_a_sentence(mine, data_folder, checkpoint, tmp_path):
    where = ["--data", data_folder, "--out", tmp_path / "run", "--task_share", "1"]
    for name in ("passkeys", f"{mine}.Nothing", "nowhere.Task"):
        refuses(train.main, [*where, "--task", name], name)
        refuses(eval_passkey.main, [checkpoint, "--task", name], name)
    short = ["--train_len", "64", "--task", "passkey_anywhere"]
    refuses(train.main, [*where, *short], "--train_len 64", "16 tokens")
