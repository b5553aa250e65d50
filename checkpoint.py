"""
A run on disk: a folder with checkpoint.pt (weights, optimizer, step, and what model it is and what
it was trained on), config.json (a copy of the latter), log.jsonl and the tokenizer.
"""

import json
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from common import write_atomically, write_json
from model import GPT, GPTConfig


def save_checkpoint(folder, model, metadata=None, **state):
    """Write the model, metadata (json: its data, tokenizer, flags) and any further state."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model": asdict(model.config), **(metadata or {})}
    state = {"config": config, "model": model.state_dict(), **state}
    write_atomically(folder / "checkpoint.pt", lambda f: torch.save(state, f))
    write_json(folder / "config.json", config)


def load_checkpoint(folder, device="cpu"):
    """
    Read what save_checkpoint wrote: (model, metadata, state). The state's tensors stay on disk
    until they are used; nothing in the file is executed.

    OSError or ValueError, each with one sentence, for a folder that is no checkpoint or is damaged.
    """
    path = Path(folder) / "checkpoint.pt"
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint in {folder}: there is no file {path}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.save: a zip with a checksum of every tensor
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"bad checksum of {damaged}")
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        metadata = state["config"]
        model = GPT(GPTConfig(**metadata.pop("model")))
        model.load_state_dict(state["model"])
    except Exception as e:  # whatever a foreign or damaged file makes zipfile or torch raise
        reason = str(e).strip().split("\n")[0]
        what = "is damaged or was not written by this project"
        raise ValueError(f"{path} {what}: {reason}") from None
    return model.to(device), metadata, state


def load_run(folder, device="cpu"):
    """load_checkpoint for a run of train.py, which alone knows its data and tokenizer."""
    model, metadata, state = load_checkpoint(folder, device)
    known = {"data", "tokenizer", "training"} <= metadata.keys()
    if not known or not {"step", "optimizer"} <= state.keys():
        what = "a model, but not one that train.py wrote: its data and tokenizer are unknown"
        raise ValueError(f"{folder} holds {what}")
    return model, metadata, state


def read_log(folder):
    """The lines of a run's log.jsonl as dicts, up to one that is damaged; [] without a log."""
    path, lines = Path(folder) / "log.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            line = json.loads(line)
            if not all(isinstance(line[key], int | float) for key in ("step", "tokens", "loss")):
                break
        except (ValueError, KeyError, TypeError):
            break
        lines.append(line)
    return lines


def with_pos(model, **changes):
    """
    The same weights in a model whose position embedding or training length is another. changes:
    fields of GPTConfig, such as pos, pos_args, rope_scaling and train_len. The new embedding
    inherits from the old one what it can. Both models are on the CPU.
    """
    new = GPT(replace(model.config, **changes))
    weights = {name: w for name, w in model.state_dict().items() if ".pos." not in name}
    new.load_state_dict(weights, strict=False)
    for old_block, new_block in zip(model.blocks, new.blocks, strict=True):
        new_block.attn.pos.inherit(old_block.attn.pos)
    return new
