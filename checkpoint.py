"""
A run on disk: a folder with checkpoint.pt (weights, optimizer, step, log, and what run it is), for
people config.json and log.jsonl, which repeat what it says, and the tokenizer.
"""

import json
import os
import shlex
import signal
import sys
import zipfile
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch

import common
from common import Refused, make_folder, write_atomically, write_json
from data import TokenData
from fope import FoPE
from model import GPT
from recipe import MAY_CHANGE, RECIPES, Recipe, check_pos


def save_checkpoint(folder, model, about=None, **state):
    """
    Write the model, whose config is a GPTConfig or a Recipe. about: what else is known of the run,
    as json: its data, commit and machine. state: whatever else is to be loaded again.
    """
    folder = make_folder(folder)
    config = {"recipe": asdict(model.config), **(about or {})}
    state = {"config": config, "model": model.state_dict(), **state}
    write_atomically(folder / "checkpoint.pt", lambda f: torch.save(state, f))
    write_json(folder / "config.json", config)


def load_checkpoint(folder, device="cpu"):
    """
    What save_checkpoint wrote: (model, about, state). model.config is the Recipe. The state's
    tensors stay on disk until they are used. Nothing in the file is executed; an embedding of one's
    own is imported. Refused where there is none, it is damaged, or this code cannot hold it.
    """
    path = Path(folder) / "checkpoint.pt"
    if not path.exists():
        raise Refused(f"there is no checkpoint in {folder}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.save: a zip with a checksum of every tensor
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"bad checksum of {damaged}")
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        about, weights = dict(state["config"]), state["model"]
        recipe = about.pop("recipe")
    except Exception as e:  # whatever a foreign or damaged file makes zipfile or torch raise
        reason = str(e).split("\n")[0]
        raise Refused(f"{path} is damaged or was not written by this project: {reason}") from None
    try:
        recipe = Recipe(**recipe)
        check_pos(recipe)
        model = GPT(recipe, draw=False)
        model.load_state_dict(weights)
    except Refused as e:
        raise Refused(f"{path}: {e}") from None
    except (TypeError, RuntimeError) as e:
        what = f"does not fit this code, which may have changed since {about.get('commit')}"
        raise Refused(f"{path} {what}: {' '.join(str(e).split())}") from None
    return model.to(device), about, state


# --- a run of train.py


@contextmanager
def open_run(folder, given, resume, device):
    """
    The Run in a folder. Within it no other process writes there, and Ctrl-C, SIGTERM and the SIGHUP
    of a lost connection only set run.signum. At the end it says what to type next.
    """
    make_folder(folder)
    with common.lock(folder) if common.rank() == 0 else nullcontext():
        run = Run(Path(folder), given, resume, device)

        def note(signum, frame):
            run.signum = signum

        stops = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            stops.pop()
        before = {s: signal.signal(s, note) for s in stops}
        try:
            yield run
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)
    run.end()


class Run:
    """
    A run of train.py: its recipe; data, that of training; model, on the device; step.

    given: the fields of the recipe that were given as flags. Refused where they do not fit what the
    folder holds, and where it holds something else.
    """

    def __init__(self, folder, given, resume, device):
        self.folder, self.step, self.log, self.signum, self.saved = folder, 0, [], 0, None
        if not (folder / "checkpoint.pt").exists():
            self.begin(given, resume, device)
        elif resume:
            self.go_on(given, device)
        else:
            raise Refused(f"{folder} already holds a run; --resume it or choose another --out")

    def begin(self, given, resume, device):
        """With new weights, or with those of another run, its embedding exchanged."""
        for name in ("meta.json", "progress.json", "config.json"):  # of data, of another's model
            if (self.folder / name).exists():
                raise Refused(f"{self.folder} has a {name} and no run; choose another --out")
        if resume and not given:
            raise Refused(f"there is no run in {self.folder}; with its flags --resume starts it")
        if start := given.get("init_from"):
            start, _, _ = load_checkpoint(start)
            recipe = start.config.going_on(**given)
        else:
            recipe = RECIPES[given.get("preset", "tiny")].changed(**given)
        self.read_data(recipe, start)
        self.about = self.what_is_read() | common.provenance(device)
        self.model = with_pos(start, self.recipe) if start else GPT(self.recipe)
        self.model.to(device)

    def go_on(self, given, device):
        """As it was saved, but for what a resumed run may change."""
        self.model, self.about, self.saved = load_checkpoint(self.folder, device)
        self.step, self.log = self.saved["step"], self.saved["log"]
        started = self.model.config
        if "rope_scaling" in given:
            given["rope_scaling"] = (started.rope_scaling or {}) | given["rope_scaling"]
        recipe = started.changed(**given)
        for name, was in asdict(started).items():
            now = getattr(recipe, name)
            if now != was and name not in MAY_CHANGE:
                raise Refused(f"{self.folder} was started with --{name} {was}, not {now}")
        self.read_data(recipe, self.model)
        if self.about | self.what_is_read() != self.about:
            raise Refused(f"{recipe.data} has other data than {self.folder} was started with")
        self.model.config = self.recipe
        if (was := self.about["commit"]) != (now := common.git_commit()):
            print(f"note: {self.folder} was started at commit {was}, this is {now}")

    def read_data(self, recipe, trained):
        """The data, which say what the tokens are; of trained weights they must be the same."""
        recipe = recipe.check().resolved()
        if recipe.rope_scaling and "factor" not in recipe.rope_scaling:
            raise Refused("--rope_scaling needs a factor in training; in an evaluation it need not")
        self.data = TokenData(recipe.data, "train")
        tokens = dict(tokenizer=self.data.tokenizer_id, vocab_size=self.data.meta["vocab_size"])
        if trained and recipe.tokenizer != tokens["tokenizer"]:
            both = f"the weights are of {recipe.tokenizer}, the data of {tokens['tokenizer']}"
            raise Refused(f"{recipe.data} has another tokenizer: {both}")
        self.recipe = replace(recipe, **tokens)

    def what_is_read(self):
        """What must stay the same for a step's batch to stay the same."""
        n_windows = (len(self.data) - 1) // self.recipe.train_len
        return {"data_sha256": self.data.sha256(), "n_windows": n_windows}

    def restore(self, optimizer):
        """Give it the state that was saved, if any, and log.jsonl its lines up to that step."""
        if self.saved:
            optimizer.load_state_dict(self.saved["optimizer"])
            self.saved = None  # or its memory would stay
        if common.rank() == 0:
            log = "".join(json.dumps(line) + "\n" for line in self.log).encode()
            write_atomically(self.folder / "log.jsonl", lambda f: f.write(log))
            if (tokenizer := self.data.folder / "tokenizer.tiktoken").exists():
                ranks = tokenizer.read_bytes()  # to be read without its data
                write_atomically(self.folder / tokenizer.name, lambda f: f.write(ranks))

    def write_log(self, line):
        self.log.append(line)
        if common.rank() == 0:
            with open(self.folder / "log.jsonl", "a") as f:
                f.write(json.dumps(line) + "\n")

    def save(self, optimizer, step):
        self.step = step
        if not all(p.isfinite().all() for p in self.model.parameters()):
            raise Refused(f"the weights of step {step:,} are not finite; try a smaller --lr")
        if common.rank() == 0:
            state = dict(optimizer=optimizer.state_dict(), step=step, log=self.log)
            save_checkpoint(self.folder, self.model, self.about, **state)

    def end(self):
        """Say what to type next."""
        next_one, n_steps = ["train.py", "--resume", "--out"], self.recipe.n_steps
        if self.step == n_steps:
            next_one = ["eval_passkey.py" if self.recipe.task_share == 1 else "eval_perplexity.py"]
        next_one[0] = os.path.relpath(common.ROOT / next_one[0])  # from where it is printed
        words = shlex.join(["python", *next_one, str(self.folder)])
        print(f"step {self.step:,} of {n_steps:,} is saved; now: {words}")
        if self.signum:
            sys.exit(128 + self.signum)


# --- another embedding for trained weights


def with_pos(model, config):
    """
    The same weights in a model of another config, which has another position embedding or training
    length. The new embedding inherits from the old one what it can; Refused where it cannot. Both
    models are on the CPU.
    """
    check_pos(config)
    new = GPT(config, draw=False)
    weights = {name: w for name, w in model.state_dict().items() if ".pos." not in name}
    new.load_state_dict(weights, strict=False)
    for old_block, new_block in zip(model.blocks, new.blocks, strict=True):
        inherit(new_block.attn.pos, old_block.attn.pos)
    return new


def inherit(new, old):
    """
    Give the embedding `new` what `old`, with which the weights were trained, has learned or drawn.

    For FoPE these are the coefficients of every frequency that both have. A longer training length
    lowers the floor, and more frequencies pass it. Each of these gets a row of noise in the old
    series and, where K grows, a series of its own: noise, and weight 1 at d = k. Refused where the
    coefficients of both cannot stand beside each other.
    """
    if type(new) is type(old) and not isinstance(new, FoPE):
        new.load_state_dict(old.state_dict())
    if not isinstance(new, FoPE) or not isinstance(old, FoPE):
        return  # nothing was drawn for it: its own draws stay
    D, K = new.cos_coef.shape[1:]
    old_D, old_K = old.cos_coef.shape[1:]
    now, was = (f"{p.n_table} tables, sigma {p.sigma}, {p.variant}" for p in (new, old))
    same = now == was or ((old_D, old_K) != (D, K) and new.n_table == old.n_table)
    if not same or type(new) is not type(old):
        raise Refused(f"FoPE's coefficients were drawn with {was}: they cannot go on with {now}")
    # the rows (frequencies) that both have: first the kept ones, then the random ones
    n, n_random = min(new.n_kept, old.n_kept), min(D - new.n_kept, old_D - old.n_kept)
    rows, old_rows = ([*range(n), *range(p.n_kept, p.n_kept + n_random)] for p in (new, old))
    new.freqs[rows] = old.freqs[old_rows]
    # the columns (series): weight 1 at d = k for new ones, the old coefficients for old ones
    both_K = min(K, old_K)
    added = range(both_K, K)
    for name in ("cos_coef", "sin_coef"):
        coef, old_coef = getattr(new, name), getattr(old, name)
        coef -= new.identity(D, K)
        coef[:, added, added] += 1.0
        coef[:, rows, :both_K] = old_coef[:, old_rows, :both_K]
    new.forget_tables()
