"""
What a run is: one dataclass, and one table of them by name.

A Recipe holds all that defines a run: the model, its data, how it is trained, what it is asked
afterwards. RECIPES has those that --preset names. Each field is a flag of train.py and the comment
behind it is the flag's help. A run prints its recipe and stores it whole in config.json, where
--resume and the evaluations read it; a figure in paper/ is a list of changes to one.

    recipe = RECIPES["tiny"].changed(pos="rope", seed=1)
    model = GPT(recipe)
"""

import argparse
import inspect
import json
import math
import re
import textwrap
from dataclasses import asdict, dataclass, fields, replace
from typing import get_args

import torch

from baselines import rope_scaling
from common import Refused
from data import TASKS
from fope import POSITION_EMBEDDINGS, RoPE
from model import GPTConfig, make_pos


@dataclass
class Recipe(GPTConfig):
    """A GPTConfig, and all else that defines a run. The defaults are the paper's, at 60M."""

    preset: str = "60M"  # a named recipe, which all other flags change
    # what it reads
    data: str = "data/c4"  # folder that prepare_data.py wrote
    tokenizer: str = "gpt2"  # that of the data
    task: str = ""  # mixed into the text
    task_share: float = 0.0  # of the training sequences that are the task's
    init_from: str = ""  # start from the weights of this run; its sizes, --pos, --train_len stay
    # how it is trained, by AdamW
    tokens: int = 10_000_000_000  # to train on, rounded up to whole steps
    batch_size: int = 1024  # sequences per optimizer step
    grad_accum: int = 16  # micro-batches of a step, shared by processes
    lr: float = 6e-4  # peak learning rate
    warmup_steps: int | None = None  # else 5 % of the steps, from 10B tokens on the paper's 10,000
    weight_decay: float = 0.1  # on every parameter
    compile: bool = False  # torch.compile: slow to start, then faster
    # what is written on the way
    eval_tokens: int = 65_536  # validation tokens of the loss while training
    eval_every: int | None = None  # steps between validation losses, else 10 in all
    log_every: int = 10  # steps between lines of log.jsonl
    save_every: int = 1000  # steps between checkpoints
    # what the trained model is asked
    lengths: str = "1x,2x,4x,8x,16x"  # of train_len, or in tokens as 128,256
    read_tokens: int = 2**22 + 1  # validation tokens that eval_perplexity.py reads at each length
    trials: int = 1000  # prompts that eval_passkey.py asks at each length

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
        check_known("preset", self.preset, RECIPES)
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

    def scaling_of_trained(self, rope_scaling):
        """rope_scaling with the length that the frequencies were learned at, if it has none."""
        first = (self.rope_scaling or {}).get("original_len", self.train_len)
        return {"kind": "yarn", "original_len": first} | rope_scaling

    def resolved(self):
        """With a number of steps for the warm-up and between evaluations. Refused if too many."""
        n_steps, warmup_steps = self.n_steps, self.warmup_steps
        if warmup_steps is None:
            as_long_as_the_papers = self.tokens >= 10_000_000_000 and n_steps >= 19_000
            warmup_steps = 10_000 if as_long_as_the_papers else max(1, n_steps // 20)
        if warmup_steps >= max(n_steps, 2):
            fewer = f"must be fewer than the {n_steps:,} steps of the run"
            raise Refused(f"--warmup_steps {warmup_steps:,} {fewer}")
        eval_every = self.eval_every or max(1, n_steps // 10)
        return replace(self, warmup_steps=warmup_steps, eval_every=eval_every)

    def check(self):
        """Itself, if a run can have these values; else Refused."""
        for f in fields(self):
            value, (low, high) = getattr(self, f.name), LIMITS.get(f.name, (1, 10**15))
            if not is_a(value, f.type):
                raise Refused(f"--{f.name} must be {name_of(f.type)}, not {value!r}")
            if type(value) in (int, float) and not low <= value <= high:
                raise Refused(f"--{f.name} must be at least {low:,} and at most {high:,}")
        check_known("task", self.task, {**TASKS, "": None})
        if bool(self.task) != bool(self.task_share):
            raise Refused("--task and --task_share go together")
        parse_lengths(self.lengths, self.train_len)
        check_pos(self)
        return self

    def describe(self):
        """The values of all fields that have one, as lines."""
        words = [" ".join(flag_words(*item))[2:] for item in asdict(self).items()]
        lines = textwrap.wrap(", ".join(filter(None, words)), width=98, break_on_hyphens=False)
        return "\n".join(f"  {line}" for line in lines)


FIXED = ("n_layer", "n_head", "head_dim", "n_embd", "theta", "init_std", "qk_norm")
FIXED += ("vocab_size", "tokenizer")  # of trained weights; the data says what the last two are
# A resumed run may change these: they move it, or change rounding, or nothing of its weights.
MAY_CHANGE = ("data", "grad_accum", "compile", "eval_tokens", "eval_every", "log_every")
MAY_CHANGE += ("save_every", "lengths", "read_tokens", "trials")
LIMITS = {
    "seed": (0, 2**63 - 1),
    "theta": (2, 10**12),
    "init_std": (1e-6, 1),
    "task_share": (0, 1),
    "lr": (0, 1000),
    "warmup_steps": (0, 10**15),
    "weight_decay": (0, 1000),
    "trials": (1, 10**6),
    "batch_size": (1, 10**6),
    **dict.fromkeys(("n_layer", "n_head"), (1, 1000)),
    **dict.fromkeys(("head_dim", "n_embd"), (1, 10**5)),
}

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


def name_of(kind):
    return " or ".join(k.__name__.replace("NoneType", "None") for k in get_args(kind) or (kind,))


def keywords_of(function):
    """{name: type} of its keywords, from annotations or defaults; a class has its bases' too."""
    types, calls = {}, [function]
    if isinstance(function, type):
        calls = [vars(cls)["__init__"] for cls in function.__mro__ if "__init__" in vars(cls)]
    for call in calls:
        for p in inspect.signature(call, eval_str=True).parameters.values():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.name in GIVEN:
                continue
            by_default = object if p.default is p.empty or p.default is None else type(p.default)
            types.setdefault(p.name, by_default if p.annotation is p.empty else p.annotation)
    return types


def parse_lengths(text, train_len):
    """Recipe.lengths or --lengths, "1x,2x" or "128,256" -> [128, 256], in tokens and in order."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}x?", part) for part in parts):
        raise Refused(f"--lengths {text!r} is no list of tokens or multiples such as 128,256 or 2x")
    return sorted({int(p[:-1]) * train_len if p.endswith("x") else int(p) for p in parts})


def check_known(what, name, known):
    if name not in known:
        raise Refused(f"unknown {what} {name!r}; known: {', '.join(filter(None, known))}")


def check_keywords(what, given, types):
    """Refuse keywords that are not known or not of their type."""
    takes = ", ".join(f"{name} ({name_of(kind)})" for name, kind in types.items()) or "none"
    for name, value in given.items():
        if name not in types:
            raise Refused(f"{what} has no keyword {name}; its keywords: {takes}")
        numbers = value if isinstance(value, list) else [value] if is_a(value, float) else []
        small = all(is_a(x, float) and abs(x) < 2**63 for x in numbers)  # and not nan
        if not small or not is_a(value, types[name]):
            raise Refused(f"{name} of {what} must be {name_of(types[name])}, not {value!r}")


def check_pos(config):
    """Refuse a GPTConfig whose embedding is unknown or does not take its keywords."""
    check_known("position embedding", config.pos, POSITION_EMBEDDINGS)
    cls = POSITION_EMBEDDINGS[config.pos]
    check_keywords(config.pos, config.pos_args, keywords_of(cls))
    if config.rope_scaling:
        if not issubclass(cls, RoPE):
            raise Refused(f"{config.pos} has no frequencies that --rope_scaling could lower")
        check_keywords("--rope_scaling", config.rope_scaling, keywords_of(rope_scaling))
        if not {"factor", "original_len"} <= config.rope_scaling.keys():
            needs = "--rope_scaling needs a factor, and original_len, the length of a trained model"
            raise Refused(f"{needs} (which --init_from knows)")
    try:
        with torch.random.fork_rng(devices=[]):
            make_pos(config)
    except AssertionError as e:  # how embeddings say what they do not take
        raise Refused(f"position embedding {config.pos}: {e}") from None


# --- as flags, and as json


def add_flags(parser, recipe):
    """A flag for each field; --help shows the recipe's values. What is not given stays away."""
    comments = {}  # the comment behind a field is its help
    for cls in (GPTConfig, Recipe):
        comments |= re.findall(r"^    (\w+): [^#\n]*  # (.*)$", inspect.getsource(cls), re.M)
    group = parser.add_argument_group(f"the recipe, with the values of --preset {recipe.preset}")
    choices = {"preset": RECIPES, "pos": POSITION_EMBEDDINGS, "task": TASKS}
    shown = recipe.resolved()
    for f in fields(Recipe):
        if f.name in ("vocab_size", "tokenizer"):  # the data's
            continue
        text = comments.get(f.name, "")
        if f.name in choices:
            text += f": {', '.join(choices[f.name])}"
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
        group.add_argument(f"--{f.name}", **how)


class Keywords(argparse.Action):
    """["sigma=0.4", "variant=paper"] of a flag -> {"sigma": 0.4, "variant": "paper"}."""

    def __call__(self, parser, namespace, pairs, flag=None):
        given = {}
        for pair in pairs:
            key, equals, text = pair.partition("=")
            if not equals or key in given:
                raise Refused(f"{flag} {pair!r} is not of the form keyword=value, each once")
            try:
                given[key] = json.loads(text, parse_constant=str)  # NaN is no number here
            except ValueError:
                given[key] = text
        setattr(namespace, self.dest, getattr(namespace, self.dest, {}) | given)


def flag_words(name, value):
    """A field's flag as it is typed, ["--pos_args", "sigma=0.4"]; [] for one without a value."""
    if isinstance(value, dict):
        value = [f"{k}={v if type(v) is str else json.dumps(v)}" for k, v in value.items()]
    elif value in (None, ""):
        value = []
    elif type(value) is not bool:
        value = [str(value)]
    if value is False or value == []:
        return []
    return [f"--{name}", *([] if value is True else value)]


def stored_recipe(stored, path):
    """The Recipe in a checkpoint, checked; `path` is for the message."""
    try:
        if not {"recipe", "model"} & stored.keys():
            raise TypeError("it has no recipe")
        return Recipe(**recipe_fields(stored)).check()
    except (TypeError, AttributeError) as e:  # another project's, or fields of another commit
        raise Refused(f"{path} is damaged or was not written by this project: {e}") from None
    except Refused as e:
        raise Refused(f"{path}: {e}") from None


def recipe_fields(stored):
    """The fields of a recipe in a config.json or a result, those of before recipe.py included."""
    if "recipe" in stored:
        return dict(stored["recipe"])
    # until commit 071ed41: the flags, and apart from them the model, in results its embedding, too
    old = {name: value for name, value in stored.get("training", {}).items() if value is not None}
    share = old.get("passkey_frac", 0.0)
    old |= {"task_share": share, "task": "passkey" if share else ""} | stored.get("model", {})
    for name in ("pos", "pos_args", "rope_scaling", "train_len", "seed", "tokenizer"):
        if name in stored:
            old[name] = stored[name]
    return {f.name: old[f.name] for f in fields(Recipe) if f.name in old}
