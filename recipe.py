"""
What a run is: one dataclass, and one table of them by name.

A Recipe holds all that defines a run: the model, its data, how it is trained, what it is asked
afterwards. RECIPES has those that --preset names. Each field is a flag of train.py. A run stores
its recipe whole, where --resume and the evaluations read it; a figure in paper/ is a list of
changes to one.

    recipe = RECIPES["tiny"].changed(pos="rope", seed=1)
    model = GPT(recipe)
"""

import argparse
import inspect
import json
import math
import re
from dataclasses import dataclass, fields, replace
from typing import get_args

import torch

from baselines import rope_scaling
from common import Refused
from data import TASKS
from fope import POSITION_EMBEDDINGS, RoPE
from model import GPTConfig, embedding_class, make_pos, option


@dataclass
class Recipe(GPTConfig):
    """A GPTConfig, and all else that defines a run. The defaults are the paper's, at 60M."""

    preset: str = option("60M", "a named recipe, which all other flags change")
    # what it reads
    data: str = option("data/c4", "folder that prepare_data.py wrote")
    tokenizer: str = option("gpt2", "that of the data")
    task: str = option("", "mixed into the text")
    task_share: float = option(0.0, "of the training sequences that are the task's")
    init_from: str = option("", "start from the weights of this run, of its sizes")
    # how it is trained, by AdamW
    tokens: int = option(10_000_000_000, "to train on, rounded up to whole steps")
    batch_size: int = option(1024, "sequences per optimizer step")
    grad_accum: int = option(16, "micro-batches of a step, shared by processes")
    lr: float = option(6e-4, "peak learning rate")
    warmup_steps: int | None = option(None, "else 5 % of the steps, at 10B the paper's 10,000")
    weight_decay: float = option(0.1, "on every parameter")
    compile: bool = option(False, "torch.compile: slow to start, then faster")
    # what is written on the way
    eval_tokens: int = option(65_536, "validation tokens of the loss while training")
    eval_every: int | None = option(None, "steps between validation losses, else 10 in all")
    log_every: int = option(10, "steps between lines of log.jsonl")
    save_every: int = option(1000, "steps between checkpoints")
    # what the trained model is asked
    lengths: str = option("1x,2x,4x,8x,16x", "of train_len, or in tokens as 128,256")
    read_tokens: int = option(2**22 + 1, "validation tokens that are read at each length")
    trials: int = option(1000, "passkey prompts at each length")

    @property
    def n_steps(self):
        return math.ceil(self.tokens / (self.batch_size * self.train_len))

    def changed(self, **changes):
        """With these fields. Keywords are added to the embedding's; another embedding has none."""
        if changes.get("pos", self.pos) == self.pos:
            changes["pos_args"] = self.pos_args | changes.get("pos_args", {})
        else:
            changes = {"pos_args": {}, "rope_scaling": None} | changes
        return replace(self, **changes)

    def going_on(self, **changes):
        """
        The recipe of a run that starts from the weights of this one, which has been trained: its
        shape and, unless changed, its embedding, training length and data; for all else its preset.
        """
        for name in ("preset", *FIXED):
            if name in changes and changes[name] != (was := getattr(self, name)):
                raise Refused(f"--{name} is {was} in {changes['init_from']}, it cannot change")
        pos, stays = changes.get("pos", self.pos), [*FIXED, "train_len", "data"]
        if pos == self.pos:
            stays += ["pos_args", "rope_scaling"]
        elif pos == "fope":  # frequencies stay on the pairs that have learned them
            changes["pos_args"] = {"cap": False} | changes.get("pos_args", {})
        if changes.get("rope_scaling"):
            changes["rope_scaling"] = self.scaling_of_trained(changes["rope_scaling"])
        start = RECIPES[self.preset].changed(pos=pos)
        start = replace(start, **{name: getattr(self, name) for name in stays})
        return start.changed(**changes)

    def read_with(self, **changes):
        """The recipe of an evaluation of this run's model, with these fields changed."""
        if changes.get("rope_scaling"):
            changes["rope_scaling"] = self.scaling_of_trained(changes["rope_scaling"])
        return self.changed(**changes)

    def scaling_of_trained(self, rope_scaling):
        """rope_scaling with the length that the frequencies were learned at, if it has none."""
        first = (self.rope_scaling or {}).get("original_len", self.train_len)
        return {"kind": "yarn", "original_len": first} | rope_scaling

    def resolved(self):
        """With a number of steps for the warm-up and between evaluations."""
        n_steps, warmup_steps = self.n_steps, self.warmup_steps
        if warmup_steps is None:
            as_long_as_the_papers = self.tokens >= 10_000_000_000 and n_steps >= 19_000
            warmup_steps = 10_000 if as_long_as_the_papers else max(1, n_steps // 20)
        eval_every = self.eval_every or max(1, n_steps // 10)
        return replace(self, warmup_steps=warmup_steps, eval_every=eval_every)

    def check(self):
        """Itself, if a run can have these values; else Refused."""
        for name, value in vars(self).items():
            may_be = type(value) not in (int, float) or (value == 0 and name in MAY_BE_ZERO)
            if not (may_be or value > 0):
                raise Refused(f"--{name} cannot be {value}")
        if not self.task_share <= 1 or bool(self.task) != bool(self.task_share):
            raise Refused("--task and --task_share go together, the share at most 1")
        if (self.warmup_steps or 0) >= max(self.n_steps, 2):
            raise Refused(f"--warmup_steps must be fewer than the {self.n_steps:,} steps")
        parse_lengths(self.lengths, self.train_len)
        check_pos(self)
        return self

    def as_flags(self):
        """The words that give it to train.py."""
        items = [(name, value) for name, value in vars(self).items() if name not in OF_THE_DATA]
        return [word for item in items for word in flag_words(*item)]


OF_THE_DATA = ("vocab_size", "tokenizer")  # no flags: the data say them
FIXED = (*OF_THE_DATA, "n_layer", "n_head", "head_dim", "n_embd", "theta", "init_std", "qk_norm")
# A resumed run may change these: they move it, or change rounding, or nothing of its weights.
MAY_CHANGE = ("data", "grad_accum", "compile", "eval_tokens", "eval_every", "log_every")
MAY_CHANGE += ("save_every", "lengths", "read_tokens", "trials")
MAY_BE_ZERO = ("seed", "task_share", "lr", "warmup_steps", "weight_decay")

# --- the table

# For a CPU, 1.3M in the blocks, at the paper's training length. n_head * head_dim is twice n_embd:
# FoPE keeps 16 of the 32 frequencies of a head of 64, and ALiBi needs four slopes. init_std is
# GPT-2's 0.02 at a width of 768, times sqrt(768 / 128): narrow models start to learn sooner. And
# with a tiny budget a model learns more from many small steps.
TINY = Recipe(
    n_layer=4,
    n_head=4,
    n_embd=128,
    init_std=0.05,
    data="data/bytes",
    tokenizer="byte",
    tokens=1_024_000,
    batch_size=2,
    grad_accum=1,
    lr=2e-3,
    eval_tokens=8192,
    read_tokens=163_841,
    trials=50,
)
TINY_PASSKEY = replace(
    TINY,
    data="data/bpe",
    tokenizer="bpe:2048",
    task="passkey",
    task_share=1.0,
    tokens=4_096_000,
    lr=3.5e-4,
)
RECIPES = {
    "tiny": TINY,
    "tiny_passkey": TINY_PASSKEY,
    # the same path with next to no training
    "quick": replace(TINY, tokens=30_000, read_tokens=16_400),
    "quick_passkey": replace(TINY_PASSKEY, tokens=30_000, trials=8),
    # The paper's (Table 3), whose sizes are those of blocks and output head: the input table comes
    # on top. sigma is FoPE's.
    "20M": Recipe(n_head=4, n_embd=256),
    "60M": Recipe(),
    "180M": Recipe(head_dim=128, n_embd=1024, pos_args={"sigma": 0.4}),
    "1.2B": Recipe(n_layer=16, n_head=16, head_dim=128, n_embd=2048, pos_args={"sigma": 0.6}),
    # The paper's smallest model and length, as far as two hours on two cores go: a step takes
    # seconds, and less in two micro-batches.
    "20M_cpu": Recipe(
        n_head=4,
        n_embd=256,
        init_std=0.035,
        data="data/books",
        tokenizer="bpe:4096",
        tokens=7_000_000,
        batch_size=8,
        grad_accum=2,
        lr=1.5e-3,
        save_every=100,
        read_tokens=2**18 + 1,
        trials=50,
    ),
}
RECIPES = {name: replace(recipe, preset=name) for name, recipe in RECIPES.items()}

# --- checks

# what model.make_pos gives to an embedding by itself
GIVEN = ("self", "head_dim", "n_head", "train_len", "theta", "scale", "qk_factor")


def is_a(value, kind):
    """Whether a value has a type. True is no number, 2 is a float."""
    kinds = get_args(kind) or (kind,)
    return object in kinds or type(value) in kinds or (type(value) is int and float in kinds)


def keywords_of(function):
    """{name: its annotation} of the keywords that one may set; a class has its bases' too."""
    types, calls = {}, [function]
    if isinstance(function, type):
        calls = [vars(cls)["__init__"] for cls in function.__mro__ if "__init__" in vars(cls)]
    for call in calls:
        for name, p in inspect.signature(call, eval_str=True).parameters.items():
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name not in GIVEN:
                types.setdefault(name, object if p.annotation is p.empty else p.annotation)
    return types


def parse_lengths(text, train_len):
    """Recipe.lengths or --lengths, "1x,2x" or "128,256" -> [128, 256], in tokens and in order."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}x?", part) for part in parts):
        raise Refused(f"--lengths {text!r} is no list of tokens or multiples such as 128,256 or 2x")
    return sorted({int(p[:-1]) * train_len if p.endswith("x") else int(p) for p in parts})


def check_keywords(what, given, types):
    """Refuse keywords that are not known or not of their type."""
    takes = ", ".join(f"{name} ({inspect.formatannotation(t)})" for name, t in types.items())
    for name, value in given.items():
        if name not in types or not is_a(value, types[name]):
            raise Refused(f"{what} does not take {name}={value!r}; it takes {takes or 'nothing'}")


def check_pos(config):
    """Refuse a GPTConfig whose embedding is unknown or does not take its keywords."""
    try:
        cls = embedding_class(config.pos)
    except (KeyError, ModuleNotFoundError, AttributeError) as e:
        known = f"known: {', '.join(POSITION_EMBEDDINGS)}, or FILE.CLASS"
        raise Refused(f"unknown position embedding {config.pos!r} ({e}); {known}") from None
    check_keywords(config.pos, config.pos_args, keywords_of(cls))
    if config.rope_scaling:
        if not issubclass(cls, RoPE):
            raise Refused(f"{config.pos} has no frequencies that --rope_scaling could lower")
        check_keywords("--rope_scaling", config.rope_scaling, keywords_of(rope_scaling))
        if "original_len" not in config.rope_scaling:
            raise Refused("--rope_scaling needs original_len, which --init_from knows")
    try:
        with torch.random.fork_rng(devices=[]):
            make_pos(config)
    except AssertionError as e:  # how embeddings say what they do not take
        raise Refused(f"position embedding {config.pos}: {e}") from None


# --- as flags


def add_flags(parser, recipe):
    """A flag for each field; --help shows the recipe's values. What is not given stays away."""
    group = parser.add_argument_group(f"the recipe, with the values of --preset {recipe.preset}")
    known = {"preset": RECIPES, "pos": POSITION_EMBEDDINGS, "task": TASKS}
    shown = recipe.resolved()
    for f in fields(Recipe):
        if f.name in OF_THE_DATA:
            continue
        text = f.metadata["help"]
        if f.name in known:
            text += f": {', '.join(known[f.name])}"
        if words := flag_words(f.name, getattr(shown, f.name))[1:]:
            text += f" ({' '.join(words)})"
        kind = (get_args(f.type) or (f.type,))[0]
        how = dict(help=text.replace("%", "%%"), default=argparse.SUPPRESS)
        if kind is bool:
            how["action"] = argparse.BooleanOptionalAction
        elif kind is dict:
            how |= dict(nargs="*", metavar="K=V", action=Keywords)
        else:
            how |= dict(type=kind, metavar=kind.__name__.upper())
        if f.name in ("preset", "task"):
            how["choices"] = known[f.name]
        group.add_argument(f"--{f.name}", **how)


class Keywords(argparse.Action):
    """["sigma=0.4", "variant=paper"] of a flag -> {"sigma": 0.4, "variant": "paper"}."""

    def __call__(self, parser, namespace, pairs, flag=None):
        given = {}
        for pair in pairs:
            key, equals, text = pair.partition("=")
            if not equals:
                raise Refused(f"{flag} {pair!r} is not of the form keyword=value")
            try:
                given[key] = json.loads(text, parse_constant=str)  # NaN is no number here
            except ValueError:
                given[key] = text
        setattr(namespace, self.dest, getattr(namespace, self.dest, {}) | given)


def flag_words(name, value):
    """A field's flag as it is typed, ["--pos_args", "sigma=0.4"]; [] for one without a value."""
    if value in (None, "", {}) or value is False:
        return []
    if isinstance(value, dict):
        pairs = [f"{k}={v if type(v) is str else json.dumps(v)}" for k, v in value.items()]
        return [f"--{name}", *pairs]
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]
