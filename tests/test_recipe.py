"""Recipes: their flags, their changes, and what is refused before a model is made."""

import re
from dataclasses import asdict, fields, replace

import pytest
import torch

import train
from baselines import POSITION_EMBEDDINGS, rope_scaling
from common import Refused
from fope import FoPE
from model import GPTConfig
from recipe import RECIPES, Recipe, check_keywords, check_pos, flag_words, keywords_of, name_of

SHAPE = dict(train_len=40, vocab_size=50, n_layer=1, n_head=2, head_dim=16, n_embd=32)


def refusal(call):
    """The sentence of what call() refuses."""
    with pytest.raises(Refused) as info:
        call()
    assert "\n" not in str(info.value)
    return str(info.value)


# --- the keywords of embeddings

FOPE = {"sigma": "float", "n_freq": "int or None", "variant": "str", "floor": "bool or int"}
FOPE |= {"cap": "bool", "sin_pad": "float or None", "n_table": "int or None"}
ROPE = {"freqs": "list or None"}
FOPE |= ROPE
SCALING = {"factor": "float", "original_len": "int", "kind": "str", "temperature": "bool"}


def test_keywords_are_those_of_the_classes_with_their_types():
    found = {
        name: {k: name_of(kind) for k, kind in keywords_of(cls).items()}
        for name, cls in POSITION_EMBEDDINGS.items()
    }
    assert found.pop("fope") == FOPE
    assert found.pop("rope") == ROPE and found.pop("rope_a") == {"rounding": "str"} | ROPE
    assert found.pop("rope_taper") == ROPE
    assert set(found) == {"nope", "alibi", "kerple", "fire"} and not any(found.values())
    assert {k: name_of(kind) for k, kind in keywords_of(rope_scaling).items()} == SCALING


class More(FoPE):
    def __init__(self, *, strength: float = 1.0, any_of=None, **kwargs):
        super().__init__(**kwargs)


def test_a_class_has_the_keywords_of_its_bases_and_without_annotation_takes_any_value():
    assert keywords_of(More) == {"strength": float, "any_of": object, **keywords_of(FoPE)}
    for good in (2, "x", [1], None):
        check_keywords("more", {"any_of": good}, keywords_of(More))


@pytest.mark.parametrize(
    "pos, pos_args, words",
    [
        ("fope", {"cap": "False"}, "cap of fope must be bool"),
        ("fope", {"floor": "False"}, "floor of fope must be bool or int"),
        ("fope", {"sigma": "0.3"}, "sigma of fope must be float"),
        ("fope", {"sigma": None}, "sigma of fope must be float"),
        ("fope", {"sigma": True}, "sigma of fope must be float"),
        ("fope", {"sigma": -0.1}, "sigma"),
        ("fope", {"n_freq": 3.5}, "n_freq of fope must be int or None"),
        ("fope", {"n_freq": 1}, "n_freq"),
        ("fope", {"variant": "original"}, "released, paper"),
        # what a model gives to its embedding by itself
        ("rope", {"qk_factor": 2.0}, "qk_factor"),
        ("rope", {"head_dim": 8}, "head_dim"),
        ("rope", {"self": 1}, "self"),
        ("rope_a", {"rounding": "half"}, "nearest, up, down"),
    ],
)
def test_what_an_embedding_does_not_take_is_refused_with_a_sentence(pos, pos_args, words):
    recipe = Recipe(pos=pos, pos_args=pos_args, **SHAPE)
    assert words in refusal(recipe.check)


SCALED = {"kind": "yarn", "factor": 2.0, "original_len": 16}


@pytest.mark.parametrize(
    "pos, scaling, words",
    [
        *((pos, SCALED, "--rope_scaling") for pos in ("nope", "alibi", "kerple", "fire")),
        ("rope", {"kind": "yarn"}, "factor"),
        ("rope", {"factor": 2.0}, "original_len"),
        ("rope", SCALED | {"kind": "ntk"}, "yarn, interpolate"),
        ("rope", SCALED | {"factor": "2"}, "factor of --rope_scaling must be float"),
        ("rope", SCALED | {"factor": 0.5}, "factor"),
        ("fope", SCALED | {"original_len": 16.5}, "original_len of --rope_scaling must be int"),
        ("rope", SCALED | {"beta": 8}, "beta"),
    ],
)
def test_scalings_that_make_no_sense_are_refused_with_a_sentence(pos, scaling, words):
    assert words in refusal(Recipe(pos=pos, rope_scaling=scaling, **SHAPE).check)


def test_what_an_embedding_takes_is_not_refused_and_draws_nothing():
    state = torch.get_rng_state()
    for pos_args in ({"sigma": 1}, {"n_freq": None, "floor": 80}, {"floor": False, "cap": False}):
        config = GPTConfig(pos="fope", pos_args=pos_args, **SHAPE)
        for scaling in (None, SCALED, SCALED | {"factor": 4, "temperature": True}):
            check_pos(replace(config, rope_scaling=scaling))
    assert torch.equal(torch.get_rng_state(), state)


# --- flags

OF_THE_DATA = ("vocab_size", "tokenizer")  # no flags


def given_by(recipe):
    """The fields that train.py reads when every field of a recipe is given as a flag."""
    items = [(k, v) for k, v in asdict(recipe).items() if k not in OF_THE_DATA]
    words = [word for item in items for word in flag_words(*item)]
    return train.parse_args(["--out", "x", *words])[1]


@pytest.mark.parametrize("name", RECIPES)
def test_flags_give_the_same_recipe_back(name):
    recipe, given = RECIPES[name], given_by(RECIPES[name])
    assert RECIPES[given["preset"]].changed(**given) == recipe
    # and not since the preset has them already
    assert given == {k: v for k, v in asdict(recipe).items() if k in given}
    without = {name for name in vars(recipe) if not flag_words(name, getattr(recipe, name))}
    assert given.keys() == vars(recipe).keys() - without - set(OF_THE_DATA)


def help_of(capsys, *argv):
    """{flag: its help} of the recipe's flags, each on one line."""
    with pytest.raises(SystemExit):
        train.main([*argv, "--help"])
    text = capsys.readouterr().out.partition("the recipe, with the values")[2]
    parts = re.split(r"\n  --(\w+)(?:, --no-\w+)? *", text)[1:]
    return {k: " ".join(v.split()) for k, v in zip(parts[::2], parts[1::2], strict=True)}


def test_help_shows_the_values_that_a_preset_has_in_the_end(capsys):
    tiny, paper = help_of(capsys), help_of(capsys, "--preset", "60M")
    assert set(paper) == set(tiny) == {f.name for f in fields(Recipe)} - set(OF_THE_DATA)
    assert paper["warmup_steps"].endswith("(10000)") and tiny["warmup_steps"].endswith("(50)")
    for preset, shown in (("60M", paper), ("180M", help_of(capsys, "--preset", "180M"))):
        recipe = RECIPES[preset].resolved()
        for name, text in shown.items():
            words = flag_words(name, getattr(recipe, name))[1:]
            assert text.endswith(f"({' '.join(words)})") or not words, text


def test_flags_of_all_kinds_give_the_same_recipe_back():
    recipe = RECIPES["60M"].changed(
        pos_args={"sigma": 0.4, "n_freq": 64, "variant": "paper", "floor": False},
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
    for changes in ({}, {"pos_args": {"rounding": "up"}}, {"rope_scaling": SCALED}):
        other = scaled.changed(pos="rope_a", **changes)
        assert other.pos_args == changes.get("pos_args", {})
        assert other.rope_scaling == changes.get("rope_scaling") and other.lr == 1.0
    assert recipe.pos_args == {"sigma": 0.4} and recipe.rope_scaling is None  # left alone
    assert RECIPES["180M"] == recipe and RECIPES["60M"].pos_args == {}


def test_scales_are_of_the_length_that_the_weights_were_first_trained_at():
    trained = Recipe(pos="rope", train_len=512)
    assert trained.going_on(init_from="x").rope_scaling is None
    pi = {"kind": "interpolate", "factor": 2.0}
    assert trained.scaling_of_trained(pi) == pi | {"original_len": 512}
    yarn = {"kind": "yarn", "factor": 4.0, "original_len": 512}
    assert trained.scaling_of_trained({"factor": 4.0}) == yarn
    longer = trained.going_on(init_from="x", train_len=2048, rope_scaling={"factor": 4.0})
    assert longer.rope_scaling == yarn and longer.train_len == 2048
    assert longer.scaling_of_trained({"factor": 8.0}) == yarn | {"factor": 8.0}
    warm = longer.going_on(init_from="y", rope_scaling={"factor": 4.0, "temperature": True})
    assert warm.rope_scaling == yarn | {"temperature": True}
    assert longer.going_on(init_from="y").rope_scaling == yarn  # stays
    assert longer.scaling_of_trained(pi | {"original_len": 64}) == pi | {"original_len": 64}
