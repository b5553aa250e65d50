"""Recipes: their flags, their changes, and what is refused before a model is made."""

import math
import re
from dataclasses import asdict, fields, replace

import pytest
import torch
from conftest import refuses

import train
from fope import FoPE
from model import GPTConfig
from recipe import OF_THE_DATA, RECIPES, Recipe, check_keywords, check_pos, flag_words, keywords_of

SHAPE = dict(train_len=40, vocab_size=50, n_layer=1, n_head=2, head_dim=16, n_embd=32)
SCALED = {"kind": "yarn", "factor": 2.0, "original_len": 16}

# --- the keywords of embeddings


class More(FoPE):
    def __init__(self, *, strength: float = 1.0, any_of=None, **kwargs):
        super().__init__(**kwargs)


def test_a_class_has_the_keywords_of_its_bases_and_without_annotation_takes_any_value():
    for good in ({"any_of": "x"}, {"any_of": None}, {"strength": 2, "sigma": 1, "freqs": None}):
        check_keywords("more", good, keywords_of(More))


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(pos_args={"gamma": 3}), "gamma"),
        (dict(pos_args={"cap": "False"}), "cap"),
        (dict(pos_args={"sigma": True}), "sigma"),
        (dict(pos_args={"fourier_dim": 3.5}), "fourier_dim"),
        (dict(pos="rope", pos_args={"head_dim": 8}), "head_dim"),  # a model gives it by itself
        (dict(pos="alibi", rope_scaling=SCALED), "--rope_scaling"),
        (dict(rope_scaling={"factor": 2.0}), "original_len"),
        (dict(rope_scaling=SCALED | {"factor": "2"}), "factor"),
        (dict(rope_scaling=SCALED | {"beta": 8}), "beta"),
        # what they themselves do not take
        (dict(pos_args={"sigma": -0.1}), "sigma"),
        (dict(pos_args={"fourier_dim": 8}), "fourier_dim"),
        (dict(pos_args={"variant": "original"}), "released or paper"),
        (dict(pos_args={"sigma": math.inf}), "sigma"),
        (dict(pos_args={"floor": -5}), "floor"),
        (dict(pos_args={"window": 0}), "window"),
        (dict(pos="hf.grouped.GroupedFoPE", pos_args={"n_table": 3}), "n_table"),
        (dict(pos="hf.grouped.GroupedFoPE", pos_args={"n_table": -1}), "n_table"),
        (dict(theta=math.inf), "theta"),
        (dict(seed=10**19), "seed"),
        (dict(rope_scaling=SCALED | {"factor": math.inf}), "factor"),
        (dict(train_len=6), "floor"),
        (dict(rope_scaling=SCALED | {"kind": "cubic"}), "yarn, ntk, slow, interpolate"),
        (dict(rope_scaling=SCALED | {"factor": 0.5}), "factor"),
    ],
)
def test_what_an_embedding_does_not_take_is_refused_with_a_sentence(changes, word):
    recipe = Recipe(**SHAPE | changes)
    refuses(lambda _: recipe.check(), [], word)


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


def given_by(recipe):
    """The fields that train.py reads when every field of a recipe is given as a flag."""
    return train.parse_args(["--out", "x", *recipe.as_flags()])[1]


@pytest.mark.parametrize("name", RECIPES)
def test_flags_give_the_same_recipe_back(name):
    recipe, given = RECIPES[name], given_by(RECIPES[name])
    assert RECIPES[given["preset"]].changed(**given) == recipe
    # and not since the preset has them already
    assert given == {k: v for k, v in asdict(recipe).items() if k in given}


@pytest.mark.parametrize("preset", ["tiny", "180M"])
def test_help_shows_the_values_that_a_preset_has_in_the_end(preset, capsys):
    with pytest.raises(SystemExit):
        train.main(["--preset", preset, "--help"])
    text = capsys.readouterr().out.partition("the recipe, with the values")[2]
    parts = re.split(r"\n  --(\w+)(?:, --no-\w+)? *", text)[1:]
    assert set(parts[::2]) == {f.name for f in fields(Recipe)} - set(OF_THE_DATA)
    for name, shown in zip(parts[::2], parts[1::2], strict=True):
        words = flag_words(name, getattr(RECIPES[preset].resolved(), name))[1:]
        assert " ".join(shown.split()).endswith(f"({' '.join(words)})") or not words, shown


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


def test_scales_are_of_the_length_that_the_weights_were_first_trained_at():
    trained = Recipe(pos="rope", train_len=512)
    assert trained.continued(init_from="x").rope_scaling is None
    pi = {"kind": "interpolate", "factor": 2.0}
    assert trained.scaling_of_trained(pi) == pi | {"original_len": 512}
    yarn = {"kind": "yarn", "factor": 4.0, "original_len": 512}
    assert trained.scaling_of_trained({"factor": 4.0}) == yarn
    longer = trained.continued(init_from="x", train_len=2048, rope_scaling={"factor": 4.0})
    assert longer.rope_scaling == yarn and longer.train_len == 2048
    assert longer.scaling_of_trained({"factor": 8.0}) == yarn | {"factor": 8.0}
    warm = longer.continued(init_from="y", rope_scaling={"factor": 4.0, "temperature": True})
    assert warm.rope_scaling == yarn | {"temperature": True}
    assert longer.continued(init_from="y").rope_scaling == yarn  # stays
    assert longer.scaling_of_trained(pi | {"original_len": 64}) == pi | {"original_len": 64}
