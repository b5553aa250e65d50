"""
A run on disk, and the checks that a run, its data and its weights fit each other.

A run is a folder with checkpoint.pt, which holds the weights, the optimizer, the step, the log and
the recipe. For people to read there are copies: log.jsonl has the log, and config.json has the
recipe, the commit, the machine and the data. A copy of the tokenizer lies beside them.
"""

import ast
import hashlib
import json
import signal
import zipfile
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

import torch

import common
from common import Refused, make_folder, write_atomically, write_json
from data import TokenData
from fope import FoPE
from model import GPT
from recipe import MAY_CHANGE, Recipe, check_pos


def save_checkpoint(folder, model, about=None, **state):
    """
    Write the model, whose config is a GPTConfig or a Recipe. about: a dict of what else is known of
    the run, its data, commit and machine. state: whatever else is to be loaded again.
    """
    folder = make_folder(folder)
    config = {"recipe": asdict(model.config), **own_code(model.config), **(about or {})}
    state = {"config": config, "model": model.state_dict(), **state}
    write_atomically(folder / "checkpoint.pt", lambda f: torch.save(state, f))
    write_json(folder / "config.json", config)


def load_checkpoint(folder, device="cpu"):
    """
    What save_checkpoint wrote: (model, about, state). model.config is the Recipe. The state's
    tensors stay on disk until they are used. No code inside checkpoint.pt is executed. But if the
    recipe names an embedding in a Python file of your own, that Python file is imported. Raises
    Refused if there is no checkpoint, if its bytes have changed, or if its embedding is unknown.
    """
    path = Path(folder) / "checkpoint.pt"
    if not path.exists():
        raise Refused(f"there is no checkpoint in {folder}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.save writes one, with checksums
            damaged = archive.testzip()
    except zipfile.BadZipFile as e:  # half of a copy, for example
        damaged = e
    if damaged:
        raise Refused(f"{path} is damaged: {damaged}")
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    about = dict(state["config"])
    recipe = Recipe(**about.pop("recipe"))
    check_pos(recipe)
    if "own_code" in about and about | own_code(recipe) != about:
        print(f"note: {', '.join(about['own_code'])} has changed since {folder} was trained")
    model = GPT(recipe, draw=False)
    model.load_state_dict(state["model"])
    return model.to(device), about, state


def own_code(config):
    """
    {"own_code": {name: checksum}} of the embedding or task mine.Class: of its file without imports,
    comments, and classes that it does not inherit from, so that others may be written there.
    """
    found = {}
    for name in (config.pos, getattr(config, "task", "")):
        module, _, in_module = name.rpartition(".")
        if module:
            with suppress(ModuleNotFoundError):  # a text can be read without the task
                file = import_module(module)
                needed = {cls.__name__ for cls in getattr(file, in_module, object).__mro__}
                code = ast.parse(Path(file.__file__).read_bytes())
                code.body = [
                    part
                    for part in code.body
                    if not isinstance(part, ast.ClassDef | ast.Import | ast.ImportFrom)
                    or getattr(part, "name", "") in needed
                ]
                found[name] = hashlib.sha256(ast.unparse(code).encode()).hexdigest()[:16]
    return {"own_code": found} if found else {}


def note_what_was_read(folder, trained, about, state, data, recipe):
    """Say what one may not expect of a run that starts from the weights of another."""
    if (step := state.get("step", trained.n_steps)) < trained.n_steps:
        print(f"note: {folder} is at step {step:,} of {trained.n_steps:,}: --resume finishes it")
    if recipe.seed == trained.seed and about | data_fingerprint(data, recipe) == about:
        print(f"note: it reads again what {folder} has read; --seed gives another order")


# --- the folder of a run while train.py writes to it

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # USR1 is Slurm's warning


@contextmanager
def open_run(folder):
    """
    A Run, to whose folder no other train.py can write. A signal that asks to stop, among them the
    SIGHUP of a lost connection, only sets run.signum.
    """
    make_folder(folder)
    with common.lock(folder) if common.rank() == 0 else nullcontext():
        run = Run(folder)

        def note(signum, frame):
            run.signum = signum

        # nohup ignores SIGHUP, and so do we then
        stops = [s for s in STOPS if s == signal.SIGINT or signal.getsignal(s) != signal.SIG_IGN]
        handlers = {s: signal.signal(s, note) for s in stops}
        try:
            yield run
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)


class Run:
    """
    The folder of a run. about: a dict of the data that the run reads, and of the commit and machine
    that it began with. log: its lines. signum: the number of a signal that asks to stop, or 0.
    """

    def __init__(self, folder):
        self.folder, self.about, self.log, self.signum = Path(folder), {}, [], 0

    def start_log(self, data):
        """
        Write log.jsonl, in which a killed run may have left more than was saved; and a copy of the
        data's tokenizer, so that the run can be read without its data.
        """
        if common.rank() > 0:
            return
        lines = "".join(json.dumps(line) + "\n" for line in self.log).encode()
        write_atomically(self.folder / "log.jsonl", lambda f: f.write(lines))
        if (tokenizer := data.folder / "tokenizer.tiktoken").exists():
            ranks = tokenizer.read_bytes()
            write_atomically(self.folder / tokenizer.name, lambda f: f.write(ranks))

    def write_log(self, line):
        self.log.append(line)
        if common.rank() == 0:
            with open(self.folder / "log.jsonl", "a") as f:
                f.write(json.dumps(line) + "\n")

    def save(self, model, optimizer, step):
        if not all(p.isfinite().all() for p in model.parameters()):
            raise Refused(f"the weights of step {step:,} are not finite; try a smaller --lr")
        if common.rank() == 0:
            state = dict(optimizer=optimizer.state_dict(), step=step, log=self.log)
            save_checkpoint(self.folder, model, self.about, **state)


# --- what a run can go on with


def holds_a_run(folder, given, resume):
    """
    Whether a folder holds a run. Raises Refused if there is one that is not to be resumed, or none
    and in its place data or another program's model, or none to resume and in `given` no flag of
    train.py with which to start one.
    """
    found = (folder / "checkpoint.pt").exists()
    if found and not resume:
        raise Refused(f"{folder} already holds a run; --resume it or choose another --out")
    for name in ("meta.json", "config.json"):
        if not found and (folder / name).exists():
            raise Refused(f"{folder} has a {name} and no run; choose another --out")
    if resume and not found and not given:
        raise Refused(f"there is no run in {folder}; to start one, type its flags, too")
    return found


def open_data(recipe, trained=None):
    """
    The recipe with the tokenizer and the vocabulary of its data, and these TokenData. trained: the
    recipe of weights that exist. Raises Refused if they were trained with another tokenizer.
    """
    recipe = recipe.check().resolved()
    if recipe.rope_scaling and "factor" not in recipe.rope_scaling:
        raise Refused("--rope_scaling needs a factor in training, for example factor=16")
    data = TokenData(recipe.data, "train")
    if trained and trained.tokenizer != data.tokenizer_id:
        which = f"the weights are of {trained.tokenizer}, the data of {data.tokenizer_id}"
        raise Refused(f"{recipe.data} has another tokenizer: {which}")
    recipe = replace(recipe, tokenizer=data.tokenizer_id, vocab_size=data.meta["vocab_size"])
    return recipe, data


def data_fingerprint(data, recipe):
    """The checksum of the data and the number of windows. If both are equal, so are all batches."""
    n_windows = (len(data) - 1) // recipe.train_len
    return {"data_sha256": data.sha256(), "n_windows": n_windows}


def resumed(run, started, given):
    """
    (recipe, data) of a run that goes on. started: its recipe. given: the flags that were typed.
    Raises Refused if one of these settings may not change, and on other data. Where the code has
    changed since, it says so.
    """
    recipe = started.read_with(**given)
    for name, old in asdict(started).items():
        new = getattr(recipe, name)
        if new != old and name not in MAY_CHANGE:
            raise Refused(f"{run.folder} was started with {name} = {old!r}, not {new!r}")
    recipe, data = open_data(recipe, started)
    if run.about | data_fingerprint(data, recipe) != run.about:
        raise Refused(f"{recipe.data} has other data than {run.folder} was started with")
    if (then := run.about["commit"]) != (now := common.git_commit()):
        print(f"note: {run.folder} was started at commit {then}, now it is {now}")
    return recipe, data


# --- another embedding for trained weights


def with_pos(model, config):
    """
    The same weights in a model of another config, which has another position embedding or training
    length. The new embedding inherits from the old one what it can. Both models are on the CPU.
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

    For FoPE these are its coefficients, a row for each frequency and a column for each pair that
    turns. A longer training length lowers the floor, and more frequencies pass it. Rows and columns
    that `old` does not have stay as `new` has drawn them. So with K below D a pair can get a second
    frequency of its own. The authors' code does the same when it goes on with longer texts
    (olmo/checkpoint.py, len_extra_fourier_expand). Raises Refused if the two differ in the class,
    the number of heads, sigma, the variant, sin_pad or the frequencies.
    """
    if type(new) is type(old):
        state, drawn = old.state_dict(), ("freqs", "sin_coef", "cos_coef")
        if isinstance(new, FoPE):  # what else a class of one's own has
            state = new.state_dict() | {k: v for k, v in state.items() if k not in drawn}
        new.load_state_dict(state)
    if not isinstance(new, FoPE) or not isinstance(old, FoPE):
        return  # `old` has drawn nothing, so `new` keeps what it has drawn
    drawn, old_drawn = (
        f"{type(pos).__name__} with {len(pos.cos_coef)} heads, sigma {pos.sigma}, "
        f"sin_pad {pos.sin_pad:g}, {pos.variant}"
        for pos in (new, old)
    )
    if drawn != old_drawn:
        raise Refused(f"the model was trained as {old_drawn}; it cannot be {drawn}")
    (_, D, K), (_, old_D, old_K) = new.cos_coef.shape, old.cos_coef.shape
    n_both, both_K = min(D, old_D), min(K, old_K)
    if not torch.allclose(new.freqs[:n_both], old.freqs[:n_both].to(new.freqs)):
        raise Refused(
            "the model was trained with other frequencies: its theta or fourier_dim differs"
        )
    new.freqs[:n_both] = old.freqs[:n_both]
    new.cos_coef[:, :n_both, :both_K] = old.cos_coef[:, :n_both, :both_K]
    new.sin_coef[:, :n_both, :both_K] = old.sin_coef[:, :n_both, :both_K]
    new.forget_tables()
