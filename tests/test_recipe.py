"""Recipes: their flags, their changes, and what is refused before a model is made."""

import argparse
import math
import re
from dataclasses import asdict, fields, replace

import pytest
import torch
from conftest import refuses

import train
from baselines import POSITION_EMBEDDINGS, rope_scaling
from common import Refused
from fope import FoPE, RoPE
from model import GPTConfig
from recipe import RECIPES, Recipe, check_pos, flag_words, keywords_of, name_of

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
    for name in ("fope", "fope_shared", "fope_relative"):
        assert found.pop(name) == FOPE
    assert found.pop("rope") == ROPE and found.pop("rope_a") == {"rounding": "str"} | ROPE
    assert set(found) == {"nope", "alibi", "kerple", "fire"} and not any(found.values())
    assert {k: name_of(kind) for k, kind in keywords_of(rope_scaling).items()} == SCALING


class Loose(RoPE):
    """Without annotations, as in a first try."""

    def __init__(self, *, factor=4.0, twice=False, steps=3, any_of=None, **kwargs):
        super().__init__(**kwargs)


def test_without_an_annotation_the_default_has_the_type(monkeypatch):
    types = {"factor": float, "twice": bool, "steps": int, "any_of": object}
    assert keywords_of(Loose) == types | {"freqs": list | None}
    monkeypatch.setitem(POSITION_EMBEDDINGS, "loose", Loose)
    config = GPTConfig(pos="loose", **SHAPE)
    for good in ({"factor": 2}, {"twice": True, "steps": 0}, {"any_of": "x"}, {"any_of": [1]}):
        check_pos(replace(config, pos_args=good))
    for bad in ({"factor": "2"}, {"twice": 1}, {"twice": "False"}, {"steps": 0.5}, {"steps": True}):
        message = refusal(lambda bad=bad: check_pos(replace(config, pos_args=bad)))
        assert message.startswith(f"{next(iter(bad))} of loose must be ")


class More(FoPE):
    def __init__(self, *, sigma: float = 1.0, strength: float = 1.0, **kwargs):
        super().__init__(sigma=sigma, **kwargs)


def test_a_class_has_the_keywords_of_its_bases():
    assert keywords_of(More) == {"strength": float, **keywords_of(FoPE)}


BIG = int("9" * 400)
NONSENSE = [
    ("fope", {"cap": "False"}, "cap of fope must be bool, not 'False'"),
    ("fope", {"floor": "False"}, "floor of fope must be bool or int, not 'False'"),
    ("fope", {"sigma": "a"}, "sigma of fope must be float, not 'a'"),
    ("fope", {"sigma": "0.3"}, "sigma of fope must be float, not '0.3'"),
    ("fope", {"sigma": [0.3]}, "sigma of fope must be float"),
    ("fope", {"sigma": None}, "sigma of fope must be float"),
    ("fope", {"sigma": True}, "sigma of fope must be float"),
    ("fope", {"sigma": BIG}, "sigma of fope must be float"),
    ("fope", {"sigma": math.inf}, "sigma of fope must be float"),
    ("fope", {"sigma": math.nan}, "sigma of fope must be float"),
    ("fope", {"sigma": -0.1}, "fope: sigma must not be negative"),
    ("fope", {"n_freq": 3.5}, "n_freq of fope must be int or None, not 3.5"),
    ("fope", {"n_freq": BIG}, "n_freq of fope must be int or None"),
    ("fope", {"n_freq": -BIG}, "n_freq of fope must be int or None"),
    ("fope", {"n_freq": 1}, "fope: n_freq is 1"),
    ("fope", {"floor": BIG}, "floor of fope must be bool or int"),
    ("fope", {"floor": -1}, "fope: floor must be"),
    ("fope", {"variant": "original"}, "fope: variant 'original' is none of released, paper"),
    # what a model gives to its embedding by itself
    ("fope", {"scale": 2}, "fope has no keyword scale; its keywords: sigma (float), n_freq"),
    (
        "rope",
        {"qk_factor": 2.0},
        "rope has no keyword qk_factor; its keywords: freqs (list or None)",
    ),
    ("rope", {"head_dim": 8}, "rope has no keyword head_dim"),
    ("rope", {"theta": 8.0}, "rope has no keyword theta"),
    ("rope", {"self": 1}, "rope has no keyword self"),
    ("rope", {"kwargs": 1}, "rope has no keyword kwargs"),
    ("rope", {"sigma": 1}, "rope has no keyword sigma"),
    ("rope_a", {"rounding": "half"}, "rope_a: rounding 'half' is none of nearest, up, down"),
]


@pytest.mark.parametrize("pos, pos_args, words", NONSENSE)
def test_what_an_embedding_does_not_take_is_refused_with_a_sentence(pos, pos_args, words):
    recipe = Recipe(pos=pos, pos_args=pos_args, **SHAPE)
    assert words in refusal(lambda: check_pos(recipe))
    assert words in refusal(recipe.check)


SCALED = {"kind": "yarn", "factor": 2.0, "original_len": 16}
ALL_BUT_ROPE = [
    (pos, SCALED, f"{pos} has no frequencies that --rope_scaling could lower")
    for pos in ("nope", "alibi", "kerple", "fire")
]


@pytest.mark.parametrize(
    "pos, scaling, words",
    [
        *ALL_BUT_ROPE,
        ("rope", {"kind": "yarn"}, "needs a factor, and original_len"),
        ("rope", {"factor": 2.0}, "needs a factor, and original_len"),
        ("rope", SCALED | {"kind": "ntk"}, "rope: kind 'ntk' is none of yarn, interpolate"),
        ("rope", SCALED | {"factor": "2"}, "factor of --rope_scaling must be float, not '2'"),
        ("rope", SCALED | {"factor": BIG}, "factor of --rope_scaling must be float"),
        ("rope", SCALED | {"factor": 0.5}, "rope: factor must be at least 1, not 0.5"),
        ("rope", SCALED | {"original_len": 0}, "rope: original_len must be at least 1"),
        ("fope", SCALED | {"original_len": 16.5}, "original_len of --rope_scaling must be int"),
        ("fope", SCALED | {"temperature": 1}, "temperature of --rope_scaling must be bool"),
        ("rope", SCALED | {"head_dim": 8}, "--rope_scaling has no keyword head_dim"),
        ("rope", SCALED | {"beta": 8}, "--rope_scaling has no keyword beta; its keywords: factor"),
    ],
)
def test_scalings_that_make_no_sense_are_refused_with_a_sentence(pos, scaling, words):
    recipe = Recipe(pos=pos, rope_scaling=scaling, **SHAPE)
    assert words in refusal(lambda: check_pos(recipe))
    assert words in refusal(recipe.check)


def test_what_an_embedding_takes_is_not_refused_and_draws_nothing():
    state = torch.get_rng_state()
    for pos_args in ({"sigma": 1}, {"n_freq": None, "floor": 80}, {"floor": False, "cap": False}):
        config = GPTConfig(pos="fope", pos_args=pos_args, **SHAPE)
        for scaling in (None, SCALED, SCALED | {"factor": 4, "temperature": True}):
            check_pos(replace(config, rope_scaling=scaling))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pos": "xpos"}, "unknown position embedding 'xpos'; known: nope, alibi, rope, fope, ker"),
        ({"task": "chess", "task_share": 0.5}, "unknown task 'chess'; known: passkey"),
        ({"task": "passkey"}, "--task and --task_share go together"),
        ({"task_share": 0.5}, "--task and --task_share go together"),
        ({"lr": math.nan}, "--lr must be at least 0 and at most 1,000"),
        ({"n_layer": 0}, "--n_layer must be at least 1"),
        ({"seed": 2**63}, "--seed must be at least 0"),
    ],
)
def test_values_that_no_run_can_have_are_refused_with_a_sentence(changes, words):
    assert words in refusal(Recipe(**SHAPE | changes).check)


def test_an_unknown_preset_or_embedding_is_refused_as_a_flag(tmp_path):
    refuses(train.main, ["--preset", "70B", "--out", tmp_path / "x"], "unknown preset '70B'")
    words = "unknown position embedding 'xpos'"
    refuses(train.main, ["--pos", "xpos", "--out", tmp_path / "x"], words)
    flags = ["--pos_args", "cap=False", "--out", tmp_path / "x"]  # json's word is false
    refuses(train.main, flags, "cap of fope must be bool, not 'False'")


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
    assert "preset" in given and len(without) <= 9


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


def test_only_what_is_given_is_a_change():
    args, given = train.parse_args(["--out", "x", "--pos", "rope", "--lr", "1e-3"])
    assert given == {"pos": "rope", "lr": 1e-3}
    assert isinstance(args, argparse.Namespace) and not {"pos", "lr", "tokens"} & vars(args).keys()
    assert (
        flag_words("pos_args", {}) == flag_words("task", "") == flag_words("compile", False) == []
    )
    assert flag_words("warmup_steps", 0) == ["--warmup_steps", "0"]


def help_of(capsys, *argv):
    """{flag: its help} of the recipe's flags, each on one line."""
    with pytest.raises(SystemExit):
        train.main([*argv, "--help"])
    text = capsys.readouterr().out
    heading = f"the recipe, with the values of --preset {argv[-1] if argv else 'tiny'}:"
    assert heading in text
    parts = re.split(r"\n  --(\w+)(?:, --no-\w+)? *", text.partition(heading)[2])[1:]
    return {k: " ".join(v.split()) for k, v in zip(parts[::2], parts[1::2], strict=True)}


def test_help_shows_the_values_that_a_preset_has_in_the_end(capsys):
    tiny, paper = help_of(capsys), help_of(capsys, "--preset", "60M")
    assert set(paper) == set(tiny) == {f.name for f in fields(Recipe)} - set(OF_THE_DATA)
    ends = dict(pos="fope", train_len=512, n_layer=8, n_head=8, n_embd=512, init_std=0.02)
    ends |= dict(preset="60M", tokens=10_000_000_000, batch_size=1024, grad_accum=16, lr=0.0006)
    ends |= dict(data="data/c4", eval_tokens=65536, save_every=1000, lengths="1x,2x,4x,8x,16x")
    ends |= dict(warmup_steps=10_000, eval_every=1907, trials=1000)  # 19,074 steps
    for name, value in ends.items():
        assert paper[name].endswith(f"({value})"), paper[name]
    for name, value in dict(warmup_steps=50, eval_every=100, lr=0.002, n_layer=4).items():
        assert tiny[name].endswith(f"({value})"), tiny[name]
    assert paper["init_from"].endswith("stay") and "known" not in paper["init_from"]
    wide = help_of(capsys, "--preset", "180M")
    assert wide["pos_args"].endswith("(sigma=0.4)") and "(" not in paper["pos_args"]
    shown = RECIPES["60M"].resolved()
    for name, text in paper.items():
        words = flag_words(name, getattr(shown, name))[1:]
        assert text.endswith(f"({' '.join(words)})") or not words, text


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
