"""Models by name: a Llama with its tokenizer, and a Llama that can be called as our GPT."""

from pathlib import Path
from textwrap import shorten

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint import load_run
from common import Refused
from data import load_tokenizer
from hf.export import to_fast_tokenizer, to_llama
from hf.swap import check_llama
from model import linear_cross_entropy
from recipe import Recipe


def first_line(what, call):
    """call(), whose error (of files, names, networks, fields) becomes one sentence."""
    try:
        return call()
    except Refused:
        raise
    except Exception as e:
        raise Refused(f"{what}: {type(e).__name__}: {shorten(str(e), 240)}") from None


def load_model(name, device="cpu"):
    """(Llama, tokenizer, the tokenizer's name) of a run, a folder or a name on the hub."""
    on_hub = name.count("/") == 1 and not Path(name).parent.is_dir()  # USER/MODEL
    if not on_hub and not Path(name).is_dir():
        raise Refused(f"there is no folder {name}")
    if (Path(name) / "checkpoint.pt").exists():
        model, _, _ = load_run(name)
        encoding = load_tokenizer(model.config.tokenizer, name)
        return to_llama(model, encoding).to(device), to_fast_tokenizer(encoding), encoding.name
    read, read_tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained
    model = first_line(f"no model {name}", lambda: read(name, dtype=torch.float32))
    check_llama(model)
    tokenizer = first_line(f"no tokenizer {name}", lambda: read_tokenizer(name))
    if len(tokenizer) > model.config.vocab_size:
        sizes = f"{len(tokenizer):,} tokens, its model {model.config.vocab_size:,}"
        raise Refused(f"the tokenizer of {name} has {sizes}: resize_token_embeddings adds them")
    return model.to(device).eval(), tokenizer, name


class AsGPT(nn.Module):
    """A Llama that is called as a GPT of model.py is, for the evaluations there."""

    def __init__(self, llama):
        super().__init__()
        self.llama, theirs = llama, llama.config
        swap = getattr(theirs, "swap", None)
        swap = swap or dict(pos="rope", train_len=theirs.max_position_embeddings)
        shape = dict(n_layer=theirs.num_hidden_layers, n_head=theirs.num_attention_heads)
        shape |= dict(head_dim=theirs.head_dim, n_embd=theirs.hidden_size)
        theta = theirs.rope_parameters["rope_theta"]
        self.config = Recipe(vocab_size=theirs.vocab_size, theta=theta, **shape, **swap)

    def forward(self, idx, targets=None, *, positions=slice(None), reduction="mean"):
        x = self.llama.model(idx, use_cache=False).last_hidden_state
        weight = self.llama.lm_head.weight
        if targets is None:
            return x[:, positions] @ weight.T
        return linear_cross_entropy(x, weight, targets, self.config.vocab_size, reduction)
