"""Recipes: their flags, their changes, and what is refused before a model is made."""

import json
import math
import re
from dataclasses import fields, replace
from typing import Literal

import pytest
import torch
from conftest import refuses

import train
from fope import POSITION_EMBEDDINGS, PositionEmbedding
from model import GPTConfig, make_pos
from recipe import OF_THE_DATA, RECIPES, Recipe, check_pos

SHAPE = dict(train_len=40, vocab_size=50, n_layer=1, n_head=2, head_dim=16, n_embd=32)
SCALED = {"kind": "yarn", "factor": 2.0, "original_len": 16}

# --- the keywords of embeddings


class Typed(PositionEmbedding):
    def __init__(
        self, *, mode: Literal["sum", "mean"] = "sum", widths: list[int] = (), scale=1.0, **kwargs
    ):
        super().__init__(**kwargs)
        self.kept = mode, widths, scale


def test_an_embedding_of_ones_own_takes_keywords_of_any_type(monkeypatch):
    monkeypatch.setitem(POSITION_EMBEDDINGS, "typed", Typed)
    args = ["--pos=typed", "--pos_args", "mode=mean", "widths=[1,2]", "scale=2.5"]
    recipe = Recipe(**SHAPE | train.parse_args(["--out=x", *args])[1])
    check_pos(recipe)
    assert make_pos(recipe).kept == ("mean", [1, 2], 2.5)


def test_truth_is_spelled_as_in_json_or_in_python():
    args = ["--pos_args", "cap=False", "floor=true", "sin_pad=None"]
    given = train.parse_args(["--out=x", *args])[1]
    assert given["pos_args"] == {"cap": False, "floor": True, "sin_pad": None}


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(pos_args={"gamma": 3}), "gamma"),
        (dict(pos_args={"cap": "no"}), "cap"),
        (dict(pos="rope", pos_args={"head_dim": 8}), "head_dim"),  # a model gives it by itself
        (dict(pos="alibi", rope_scaling=SCALED), "alibi"),
        (dict(rope_scaling={"factor": 2.0}), "original_len"),
        (dict(rope_scaling=SCALED | {"temperature": "off"}), "temperature"),
        (dict(pos_args={"sigma": -0.1}), "sigma"),
        (dict(pos_args={"variant": "original"}), "released or paper"),
        (dict(pos_args={"window": 0}), "window"),
        (dict(pos="hf.grouped.GroupedFoPE", pos_args={"n_table": 3}), "n_table"),
        (dict(pos_args={"sigma": math.nan}), "sigma"),
        (dict(seed=10**19), "seed"),
        (dict(train_len=6), "floor"),
        (dict(rope_scaling=SCALED | {"kind": "cubic"}), "yarn, ntk, slow, interpolate"),
        (dict(rope_scaling=SCALED | {"factor": 0.5}), "factor"),
    ],
)
def test_what_an_embedding_does_not_take_is_refused_with_a_sentence(changes, word):
    recipe = Recipe(**SHAPE | changes)
    refuses(lambda _: recipe.check(), [], word)


def test_a_word_in_the_place_of_a_number_is_refused():
    config = GPTConfig(pos="fope", pos_args={"sigma": "0,3"}, **SHAPE)
    refuses(lambda _: check_pos(config), [], "sigma", "0,3")


def test_what_an_embedding_takes_is_not_refused_and_draws_nothing():
    state = torch.get_rng_state()
    for pos_args in (
        {"sigma": 1},
        {"fourier_dim": None, "floor": 80},
        {"floor": False, "cap": False},
    ):
        config = GPTConfig(pos="fope", pos_args=pos_args, **SHAPE)
        for scaling in (None, SCALED, SCALED | {"factor": 4, "temperature": True}):
            check_pos(replace(config, rope_scaling=scaling))
    assert torch.equal(torch.get_rng_state(), state)


# --- flags


def flag_words(name, value):
    """A field's flag as it is typed, ["--pos_args", "sigma=0.4"]; [] for one without a value."""
    if value in (None, "", {}) or value is False:
        return []
    if isinstance(value, dict):
        pairs = [f"{k}={v if type(v) is str else json.dumps(v)}" for k, v in value.items()]
        return [f"--{name}", *pairs]
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def given_by(recipe):
    """The fields that train.py reads when every field of a recipe is given as a flag."""
    items = [(name, value) for name, value in vars(recipe).items() if name not in OF_THE_DATA]
    flags = [word for item in items for word in flag_words(*item)]
    return train.parse_args(["--out", "x", *flags])[1]


def test_help_shows_the_values_that_a_preset_has_in_the_end(capsys):
    with pytest.raises(SystemExit):
        train.main(["--preset", "180M", "--help"])
    doc, _, text = capsys.readouterr().out.partition("the recipe, with the values")
    assert doc.startswith(train.__doc__.strip())
    parts = re.split(r"\n  --(\w+)(?:, --no-\w+)? *", text)[1:]
    assert set(parts[::2]) == {f.name for f in fields(Recipe)} - set(OF_THE_DATA)
    for name, shown in zip(parts[::2], parts[1::2], strict=True):
        value = getattr(RECIPES["180M"].resolved(), name)
        none = value in (None, "", {}) or value is False
        assert none or " ".join(shown.split()).endswith(f"({value})"), shown


def test_flags_of_all_kinds_give_the_same_recipe_back():
    recipe = RECIPES["60M"].changed(
        pos_args={"sigma": 0.4, "fourier_dim": 128, "variant": "paper", "floor": False},
        rope_scaling={"kind": "yarn", "factor": 16.0, "original_len": 512, "temperature": True},
        init_from="a folder/run",
        task="passkey",
        task_share=1 / 3,
        qk_norm=True,
        compile=True,
        warmup_steps=0,
        eval_every=7,
        lr=1e-5 / 3,
        seed=2**63 - 1,
    )
    given = given_by(recipe)
    assert RECIPES["60M"].changed(**given) == recipe
    assert set(given) == {f.name for f in fields(Recipe)} - set(OF_THE_DATA)


# --- changes


def test_keywords_of_the_same_embedding_are_added_and_of_another_start_anew():
    recipe = RECIPES["180M"]
    more = recipe.changed(pos_args={"variant": "paper"})
    assert more.pos_args == {"sigma": 0.4, "variant": "paper"}
    assert recipe.changed(pos="fope", pos_args={"sigma": 0.1}).pos_args == {"sigma": 0.1}
    assert recipe.changed(seed=1) == replace(recipe, seed=1)
    scaled = more.changed(rope_scaling=SCALED, lr=1.0)
    assert scaled.rope_scaling == SCALED and scaled.pos_args == more.pos_args
    assert scaled.changed(pos_args={"cap": False}).rope_scaling == SCALED
    for changes in ({}, {"pos_args": {"own": 1}}, {"rope_scaling": SCALED}):
        other = scaled.changed(pos="rope_a", **changes)
        assert other.pos_args == changes.get("pos_args", {})
        assert other.rope_scaling == changes.get("rope_scaling") and other.lr == 1.0
    assert recipe.pos_args == {"sigma": 0.4} and recipe.rope_scaling is None  # left alone
    assert RECIPES["180M"] == recipe and RECIPES["60M"].pos_args == {}


def scaling_read(recipe, **scaling):
    return recipe.read_with(rope_scaling=scaling).rope_scaling


def test_scales_are_of_the_length_that_the_weights_were_first_trained_at():
    trained = Recipe(pos="rope", train_len=512)
    assert trained.continued(init_from="x").rope_scaling is None
    pi = {"kind": "interpolate", "factor": 2.0}
    assert scaling_read(trained, **pi) == pi | {"original_len": 512}
    yarn = {"kind": "yarn", "factor": 4.0, "original_len": 512}
    assert scaling_read(trained, factor=4.0) == yarn
    longer = trained.continued(init_from="x", train_len=2048, rope_scaling={"factor": 4.0})
    assert longer.rope_scaling == yarn and longer.train_len == 2048
    assert scaling_read(longer, factor=8.0) == yarn | {"factor": 8.0}
    warm = longer.continued(init_from="y", rope_scaling={"temperature": True})
    assert warm.rope_scaling == yarn | {"temperature": True}
    assert longer.continued(init_from="y").rope_scaling == yarn  # stays
    assert scaling_read(longer, **pi, original_len=64) == pi | {"original_len": 64}


def test_what_is_not_typed_of_a_scaling_is_as_it_was_trained():
    ntk = {"kind": "ntk", "factor": 4.0, "original_len": 512, "temperature": True}
    trained = Recipe(pos="rope", train_len=2048, rope_scaling=ntk)
    assert scaling_read(trained, factor=8.0) == ntk | {"factor": 8.0}
    assert (
        trained.continued(init_from="x", rope_scaling={"factor": 8.0}).rope_scaling["kind"] == "ntk"
    )
    assert trained.continued(init_from="x", pos="rope_a").rope_scaling is None


def test_a_continued_run_has_its_shape_from_its_start_and_all_else_from_the_preset():
    shape = dict(n_layer=2, theta=500.0, qk_norm=True, train_len=64, data="mine", task="x")
    trained = RECIPES["180M"].changed(pos="rope", **shape, lr=1.0, seed=3)
    new = trained.continued(init_from="run", pos="fope", tokens=7)
    changes = shape | dict(init_from="run", tokens=7)
    assert new == RECIPES["180M"].changed(**changes, pos_args={"cap": False})
    assert new.pos_args == {"sigma": 0.4, "cap": False}
