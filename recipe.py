"""
What a run is: one dataclass, Recipe, and one table of named recipes, RECIPES.

A Recipe holds what defines a run, but for the constants of train.make_optimizer: the model, its
data, how the model is trained, and how it is evaluated. Each field but two, which the data decide,
is a flag of train.py, and --preset names a recipe of the table. A run stores its whole recipe,
which --resume and the evaluations read.

    recipe = RECIPES["tiny"].changed(pos="rope", seed=1)
    model = GPT(recipe)
"""

import argparse
import json
import math
import re
from dataclasses import dataclass, fields, replace
from typing import get_args

import torch

from common import Refused
from fope import POSITION_EMBEDDINGS, PositionError
from model import GPTConfig, embedding_class, make_pos, option
from tasks import TASKS, task_class


@dataclass
class Recipe(GPTConfig):
    """A GPTConfig, and all else that defines a run. The defaults are those of the paper's 60M."""

    preset: str = option("60M", "recipe to start from; all other flags override it")
    # what it reads
    data: str = option("data/c4", "folder that prepare_data.py wrote")
    tokenizer: str = option("gpt2", "tokenizer of the data")
    task: str = option("", "task whose sequences are mixed into the text, by --task_share")
    task_share: float = option(0.0, "share of the training sequences that are taken from --task")
    init_from: str = option("", "folder of a run, whose weights and shape this one starts with")
    # how it is trained, by AdamW
    tokens: int = option(10_000_000_000, "training tokens, rounded up to whole steps")
    batch_size: int = option(1024, "sequences in an optimizer step")
    grad_accum: int = option(16, "parts of a batch; GPUs divide the parts among them")
    lr: float = option(6e-4, "peak learning rate")
    warmup_steps: int | None = option(
        None, "steps of warm-up; by default 5 % of all steps, and 10,000 for the paper's 10B tokens"
    )
    weight_decay: float = option(0.1, "weight decay of every parameter")
    compile: bool = option(False, "use torch.compile: minutes at the start, then faster steps")
    # what is written on the way
    eval_tokens: int = option(65_536, "validation tokens whose loss is measured while training")
    eval_every: int | None = option(None, "steps between validation losses; by default 10 losses")
    log_every: int = option(10, "steps between lines of log.jsonl")
    save_every: int = option(1000, "steps between checkpoints")
    # how the trained model is evaluated
    lengths: str = option(
        "1x,2x,4x,8x,16x", "lengths to evaluate, each a multiple of train_len (2x) or tokens (128)"
    )
    read_tokens: int = option(2**22 + 1, "validation tokens to evaluate at each length")
    trials: int = option(1000, "passkey prompts at each length")

    @property
    def n_steps(self):
        return math.ceil(self.tokens / (self.batch_size * self.train_len))

    def changed(self, **changes):
        """
        A recipe with these fields changed. pos_args are added to those of the embedding; where the
        embedding itself changes, the old one's are dropped.
        """
        if changes.get("pos", self.pos) == self.pos:
            changes["pos_args"] = self.pos_args | changes.get("pos_args", {})
        else:
            changes = {"pos_args": {}, "rope_scaling": None} | changes
        return replace(self, **changes)

    def read_with(self, **changes):
        """
        The recipe with which the trained weights of this one are read, with these fields changed. A
        rope_scaling is added to that which they were trained with. It is of the length at which the
        frequencies were learned.
        """
        if changes.get("rope_scaling"):
            trained = {"kind": "yarn", "original_len": self.train_len} | (self.rope_scaling or {})
            changes["rope_scaling"] = trained | changes["rope_scaling"]
        return self.changed(**changes)

    def continued(self, **changes):
        """
        The recipe of a run that starts from the trained weights of this one. It keeps the shape
        and, unless they are changed, the embedding, the training length, the data and the task. All
        other fields are the preset's.
        """
        for name in ("preset", *FIXED):
            if name in changes and changes[name] != (old := getattr(self, name)):
                raise Refused(f"--{name} is {old} in {changes['init_from']}, it cannot change")
        preset, pos = RECIPES[self.preset], changes.get("pos", self.pos)
        if pos != self.pos:
            pos_args = preset.changed(pos=pos).pos_args
            if pos == "fope":  # frequencies stay on the pairs that have learned them
                pos_args = pos_args | {"cap": False}
            changes["pos_args"] = pos_args | changes.get("pos_args", {})
        anew = {f.name: getattr(preset, f.name) for f in fields(self) if f.name not in KEPT}
        return self.read_with(**anew | changes)

    def resolved(self):
        """The recipe with numbers for the steps of warm-up and between validation losses."""
        n_steps, warmup_steps = self.n_steps, self.warmup_steps
        if warmup_steps is None:
            as_long_as_the_papers = self.tokens >= 10_000_000_000 and n_steps >= 19_000
            warmup_steps = 10_000 if as_long_as_the_papers else max(1, n_steps // 20)
        eval_every = self.eval_every or max(1, n_steps // 10)
        return replace(self, warmup_steps=warmup_steps, eval_every=eval_every)

    def check(self):
        """Returns the recipe. Refused where a run cannot have its values."""
        for name, value in vars(self).items():
            is_number = type(value) in (int, float)
            may_be_zero = name in MAY_BE_ZERO or getattr(Recipe, name, None) == 0
            if is_number and not (0 < value < 2**63 or (value == 0 and may_be_zero)):
                raise Refused(f"--{name} cannot be {value}")
        if not self.task_share <= 1 or bool(self.task) != bool(self.task_share):
            raise Refused("give both --task and --task_share, or neither; the share is at most 1")
        if (self.warmup_steps or 0) >= max(self.n_steps, 2):
            raise Refused(f"--warmup_steps must be fewer than the {self.n_steps:,} steps")
        parse_lengths(self.lengths, self.train_len)
        if self.task:
            task_class(self.task)
        check_pos(self)
        return self


OF_THE_DATA = ("vocab_size", "tokenizer")  # no flags: the data say them
# --init_from keeps these, unless others are typed; and all else that makes the model
UNLESS_TYPED = ("pos", "pos_args", "rope_scaling", "train_len", "data", "task", "task_share")
FIXED = {"tokenizer", *(f.name for f in fields(GPTConfig))} - {*UNLESS_TYPED, "seed"}
KEPT = {*FIXED, *UNLESS_TYPED}
# A resumed run may change these: they do not change its weights, but for rounding.
MAY_CHANGE = ("data", "grad_accum", "compile", "eval_tokens", "eval_every", "log_every")
MAY_CHANGE += ("save_every", "lengths", "read_tokens", "trials")
MAY_BE_ZERO = ("lr", "warmup_steps", "weight_decay")  # and what is so by default

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
    # for tests: next to no training
    "quick": replace(TINY, tokens=30_000, read_tokens=16_400),
    "quick_passkey": replace(TINY_PASSKEY, tokens=30_000, trials=8),
    # The names count the parameters of blocks and output head, not of the input embedding. The 20M
    # is ours, shaped like the 60M; the others are the paper's (Table 3). sigma is for FoPE.
    "20M": Recipe(n_head=4, n_embd=256, grad_accum=8),
    "60M": Recipe(),
    "180M": Recipe(head_dim=128, n_embd=1024, pos_args={"sigma": 0.4}),
    "1.2B": Recipe(n_layer=16, n_head=16, head_dim=128, n_embd=2048, pos_args={"sigma": 0.6}),
    # A 20M model, trained for two hours on two cores. There two parts of a batch are faster than
    # one.
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
# passkeys alone, by a 20M model with a vocabulary that it can learn in minutes on a GPU
RECIPES["20M_passkey"] = replace(
    TINY_PASSKEY,
    n_layer=8,
    n_embd=256,
    init_std=0.035,
    tokens=4000 * 16 * 512,
    batch_size=16,
    trials=200,
)
RECIPES = {name: replace(recipe, preset=name) for name, recipe in RECIPES.items()}

# --- checks


def parse_lengths(text, train_len):
    """Recipe.lengths or --lengths, "1x,2x" or "128,256" -> [128, 256], in tokens and in order."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}x?", part) for part in parts):
        raise Refused(f"--lengths {text!r} is no list of tokens or multiples such as 128,256 or 2x")
    return sorted({int(p[:-1]) * train_len if p.endswith("x") else int(p) for p in parts})


def check_pos(config):
    """Refuse a GPTConfig whose embedding is unknown or does not take its keywords."""
    try:
        embedding_class(config.pos)
    except (PositionError, ModuleNotFoundError) as e:
        names = ", ".join(POSITION_EMBEDDINGS)
        raise Refused(
            f"unknown position embedding {config.pos!r} ({e}); known: {names}, or FILE.CLASS"
        ) from None
    if config.rope_scaling and "original_len" not in config.rope_scaling:
        raise Refused("--rope_scaling needs original_len, which --init_from knows")
    try:
        with torch.random.fork_rng(devices=[]):
            make_pos(config)
    except (PositionError, TypeError) as e:
        has_words = any(isinstance(value, str) for value in config.pos_args.values())  # sigma=0,3
        if isinstance(e, TypeError) and "keyword argument" not in str(e) and not has_words:
            raise
        raise Refused(f"position embedding {config.pos} with {config.pos_args}: {e}") from None


# --- as flags


def add_flags(parser, recipe):
    """A flag for each field; --help shows the recipe's values. Only what is typed is parsed."""
    group = parser.add_argument_group(f"the recipe, with the values of --preset {recipe.preset}")
    names = {"preset": RECIPES, "pos": POSITION_EMBEDDINGS, "task": TASKS}
    resolved = recipe.resolved()
    for f in fields(Recipe):
        if f.name in OF_THE_DATA:
            continue
        text = f.metadata["help"]
        if f.name in names:
            text += f": {', '.join(names[f.name])}"
        value = getattr(resolved, f.name)
        if value not in (None, "", {}) and value is not False:
            text += f" ({value})"
        kind = (get_args(f.type) or (f.type,))[0]
        options = dict(help=text.replace("%", "%%"), default=argparse.SUPPRESS)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif kind is dict:
            options |= dict(nargs="*", metavar="K=V", action=Keywords)
        else:
            options |= dict(type=kind, metavar=kind.__name__.upper())
        group.add_argument(f"--{f.name}", **options)


class Keywords(argparse.Action):
    """["sigma=0.4", "variant=paper"] of a flag -> {"sigma": 0.4, "variant": "paper"}."""

    def __call__(self, parser, namespace, pairs, flag=None):
        given = {}
        for pair in pairs:
            key, equals, text = pair.partition("=")
            if not equals:
                raise Refused(f"{flag} {pair!r} is not of the form keyword=value")
            try:
                given[key] = json.loads(text)
            except ValueError:  # a word, or a value as Python spells it
                given[key] = {"True": True, "False": False, "None": None}.get(text, text)
        setattr(namespace, self.dest, getattr(namespace, self.dest, {}) | given)
