"""
A run on disk: a folder with checkpoint.pt (weights, optimizer, step, and what run it is),
config.json (a copy of the latter, for people), log.jsonl and the tokenizer.
"""

import json
import pickle
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch

import common
from common import Refused, file_errors, make_folder, write_atomically, write_json
from fope import FoPE
from model import GPT
from recipe import check_pos, stored_recipe


def save_checkpoint(folder, model, about=None, **state):
    """
    Write the model, whose config is a GPTConfig or a Recipe. about: what else is known of the run,
    as json: its data, code and machine. state: whatever else is to be loaded again.
    """
    folder = make_folder(folder)
    config = {"recipe": asdict(model.config), **(about or {})}
    state = {"config": config, "model": model.state_dict(), **state}
    write_atomically(folder / "checkpoint.pt", lambda f: torch.save(state, f))
    write_json(folder / "config.json", config)


def load_checkpoint(folder, device="cpu"):
    """
    What save_checkpoint wrote: (model, about, state). model.config is the Recipe. The state's
    tensors stay on disk until they are used; nothing in the file is executed. Refused for a folder
    without a checkpoint, one that is damaged, and one that this code cannot hold.
    """
    path = Path(folder) / "checkpoint.pt"
    if not path.exists():
        raise Refused(f"there is no checkpoint in {folder}: there is no file {path}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.save: a zip with a checksum of every tensor
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"bad checksum of {damaged}")
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        config, weights = state["config"], state["model"]
    except Exception as e:  # whatever a foreign or damaged file makes zipfile or torch raise
        reason = f": {e}".split("\n")[0]
        if isinstance(e, pickle.UnpicklingError):  # torch would advise to run it
            reason = ", since it holds more than tensors and numbers"
        raise Refused(f"{path} is damaged or was not written by this project{reason}") from None
    model = GPT(stored_recipe(config, path))
    if misfit := differences(model.state_dict(), weights):
        what = "does not fit this code, which may have changed since"
        raise Refused(f"{path} {what}: {misfit}; it is of commit {config.get('commit', 'unknown')}")
    model.load_state_dict(weights)
    about = {name: value for name, value in config.items() if name != "recipe"}
    if "training" in config:  # a run of 071ed41
        about = {name: (config["training"] | config)[name] for name in ("data_sha256", "n_windows")}
    return model.to(device), about, state


def differences(expected, given):
    """How two dicts of tensors differ in names and shapes, in words; "" where they do not."""
    shared = expected.keys() & given.keys()
    kinds = {
        "without": expected.keys() - given.keys(),
        "it has": given.keys() - expected.keys(),
        "of another shape": {name for name in shared if expected[name].shape != given[name].shape},
    }
    words = []
    for kind, names in kinds.items():
        shown = ", ".join(sorted(names)[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)
        words += [f"{kind} {shown}"] if names else []
    return "; ".join(words)


def load_run(folder, device="cpu"):
    """load_checkpoint for a run of train.py, which alone knows its data and tokenizer."""
    model, about, state = load_checkpoint(folder, device)
    if not {"step", "optimizer"} <= state.keys():
        what = "a model, but not one that train.py wrote: its data and tokenizer are unknown"
        raise Refused(f"{folder} holds {what}")
    for name, sha256 in common.code_hashes().items():
        if about.get("code", {}).get(name, sha256) != sha256:
            print(f"note: {name} has changed since {folder} was trained", file=sys.stderr)
    return model, about, state


def read_log(folder):
    """The lines of a run's log.jsonl as dicts, but for damaged ones; [] without a log."""
    path, lines = Path(folder) / "log.jsonl", []
    with file_errors():
        content = path.read_bytes() if path.exists() else b""
    for line in content.splitlines():
        try:
            line = json.loads(line)
            if all(isinstance(line[key], int | float) for key in ("step", "tokens", "loss")):
                lines.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    return lines


# --- another embedding for trained weights


def with_pos(model, config):
    """
    The same weights in a model of another config, which has another position embedding or training
    length. The new embedding inherits from the old one what it can; Refused where it cannot. Both
    models are on the CPU.
    """
    check_pos(config)
    new = GPT(config)
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
