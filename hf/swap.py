"""
NoPE, ALiBi, RoPE or FoPE in a Llama of the transformers library.

    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM-1.7B")
    swap_position_embedding(model, "fope", train_len=4096)
    model.save_pretrained(FOLDER)               # with coefficients and choice
    model = load(FOLDER)                        # or any Auto class, once hf.swap is imported

The model's own rotation is replaced by one that does nothing, so that queries, keys and the cache
arrive unturned in an attention function of ours, which turns them and calls the library's.
"""

import copy
from types import SimpleNamespace

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from checkpoint import inherit
from common import Refused
from fope import ALiBi, FoPE, RoPE, apply_rotation
from model import GPTConfig, make_pos
from recipe import check_pos

# --- attention


def token_positions(mask, T, S):
    """
    Indices of the last T queries and of all S keys: slices where nothing is padded, without a mask.
    With one, (B, 1, T, S) and true where query sees key, a token's position is the number of
    tokens before it, so that padding counts for nothing: (B, T), (B, S).
    """
    if mask is None:  # a cache of fixed size has room behind the T keys of its first call
        return slice(S - T, S) if T == 1 else slice(T), slice(S)
    queries = mask[:, 0].sum(dim=-1) - 1
    keys = queries if T == S else mask[:, 0, -1].cumsum(dim=-1) - 1
    return queries.clamp(min=0), keys.clamp(min=0)


def rows(table, index):
    """Rows of a table (length, pairs) or (n_head, length, pairs), for x (B, heads, T, head_dim)."""
    heads = table.view(-1, *table.shape[-2:])
    return table[..., index, :] if type(index) is slice else heads[:, index].transpose(0, 1)


def attention(layer, q, k, v, mask, **kwargs):
    """
    What AttentionInterface calls: q (B, n_head, T, head_dim), k and v (B, n_kv_head, S, head_dim)
    with the S - T cached positions first. Returns (B, T, n_head, head_dim), None.
    """
    q, k, pos, S = layer.q_norm(q), layer.k_norm(k), layer.pos.embedding, k.size(-2)
    queries, keys = token_positions(mask, q.size(-2), S)
    if isinstance(pos, FoPE):  # its coefficients are per query head
        k, v = (repeat_kv(x, layer.num_key_value_groups) for x in (k, v))
        layer = SimpleNamespace(is_causal=True)  # for the library: nothing left to repeat
    if isinstance(pos, RoPE):
        cos, sin = pos.tables(1 << (S - 1).bit_length())  # a power of two: seldom new ones
        q = apply_rotation(q, rows(cos, queries), rows(sin, queries))
        k = apply_rotation(k, rows(cos, keys), rows(sin, keys))
    if isinstance(pos, ALiBi):
        j = torch.arange(S, device=k.device) if mask is None else keys[:, None]
        q, k, v = pos.with_bias(q, k, v, j)
        kwargs["scaling"] = 1.0
    y, _ = sdpa_attention_forward(layer, q, k, v, mask, **kwargs)
    return y[..., : pos.head_dim], None


EMBEDDINGS, OURS = ("nope", "alibi", "rope", "fope"), "swapped"  # in the library's registries
transformers.AttentionInterface.register(OURS, attention)
transformers.AttentionMaskInterface.register(OURS, sdpa_mask)  # without it padding would be ignored


class LayerPosition(nn.Module):
    """A layer's embedding. Its frequencies and coefficients stay in fp32, whatever the model is."""

    def __init__(self, config):
        super().__init__()
        with torch.device("cpu"):  # not "meta", where from_pretrained makes a model
            self.embedding = make_pos(config)
        # saved, too: from_pretrained leaves what is not without content
        self.embedding._non_persistent_buffers_set -= {"freqs", "slopes"}

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda t: t.to(fn(t).device), recurse)


class NoRotation(nn.Module):
    """In the place of the library's rotary embedding: cos 1, sin 0."""

    def forward(self, x, position_ids):
        return x.new_ones(1, 1, 1), x.new_zeros(1, 1, 1)


# --- models


class SwappedConfig(LlamaConfig):
    """A Llama's, and what was swapped. Its own name, so that Auto classes make no plain Llama."""

    model_type = "swapped_llama"
    swap: dict | None = None  # GPTConfig's pos, pos_args, rope_scaling, train_len, qk_norm


class SwappedLlama(LlamaForCausalLM):
    config_class = SwappedConfig
    _keep_in_fp32_modules_strict = ("pos.embedding",)

    def __init__(self, config):
        super().__init__(config)
        install(self)

    def set_attn_implementation(self, name):
        if name != OURS:
            raise Refused(f"with attention {name!r} a swapped model would have no positions")
        super().set_attn_implementation(name)


transformers.AutoConfig.register(SwappedConfig.model_type, SwappedConfig)
transformers.AutoModelForCausalLM.register(SwappedConfig, SwappedLlama)
load = SwappedLlama.from_pretrained


def our_config(config, swap):
    """The GPTConfig of the embedding that `swap` names, in heads of the Llama's shape."""
    shape = dict(n_head=config.num_attention_heads, head_dim=config.head_dim)
    return GPTConfig(theta=config.rope_parameters["rope_theta"], **shape, **swap)


def install(model):
    """Put what model.config.swap says into the layers."""
    if not model.config.swap:
        raise Refused("this is no swapped model: swap_position_embedding makes one")
    ours = our_config(model.config, model.config.swap)
    for layer in (block.self_attn for block in model.model.layers):
        new, weight = LayerPosition(ours), layer.q_proj.weight
        if hasattr(layer, "pos"):
            inherit(new.embedding, layer.pos.embedding.cpu())
        layer.pos = new if weight.is_meta else new.to(weight.device)
        for name in () if hasattr(layer, "q_norm") else ("q_norm", "k_norm"):
            norm = nn.LayerNorm(ours.head_dim, eps=1e-6, bias=False)
            layer.register_module(name, norm if ours.qk_norm else nn.Identity())
    model.model.rotary_emb = NoRotation()
    model.set_attn_implementation(OURS)


def swap_position_embedding(model, pos, train_len, *, rope_scaling=None, seed=0, **pos_args):
    """
    Exchange the position embedding of a Llama (LlamaForCausalLM) in place, and return it.
    pos: "nope", "alibi", "rope" or "fope"; pos_args are its further keywords, such as sigma=0.3.
    train_len: the length in tokens that the model is fine-tuned at, which sets FoPE's floor.
    rope_scaling: keywords of baselines.rope_scaling, for YaRN or interpolation. seed: of FoPE's
    noise. Every frequency above the floor stays on the pair that has learned it (cap=False).
    Refused for another architecture, scaled RoPE, and what the embedding does not take.
    """
    if type(model) not in (LlamaForCausalLM, SwappedLlama):
        raise Refused(f"{type(model).__name__} is no LlamaForCausalLM: nothing can be exchanged")
    if (kind := model.config.rope_parameters["rope_type"]) != "default":
        raise Refused(f"the model's RoPE is scaled ({kind}): only plain RoPE can be exchanged")
    if pos not in EMBEDDINGS:
        raise Refused(f"unknown position embedding {pos!r}; known here: {', '.join(EMBEDDINGS)}")
    if type(train_len) is not int or train_len < 1:
        raise Refused(f"train_len must be a number of tokens, not {train_len!r}")
    old = getattr(model.config, "swap", None) or {"pos": "", "qk_norm": False}
    if old["pos"] == pos:  # what was given to it stays
        pos_args, rope_scaling = old["pos_args"] | pos_args, rope_scaling or old["rope_scaling"]
    elif pos == "fope":
        pos_args = {"cap": False} | pos_args
    swap = old | dict(pos=pos, pos_args=pos_args, rope_scaling=rope_scaling, train_len=train_len)
    check_pos(our_config(model.config, swap))  # before anything has changed
    if old["pos"]:
        old = copy.deepcopy(model.model.layers[0].self_attn.pos.embedding).cpu()
        inherit(make_pos(our_config(model.config, swap)), old)
    longest = max(model.config.max_position_embeddings, train_len)  # for other tools
    model.config.__class__, model.__class__ = SwappedConfig, SwappedLlama
    model.config.update(dict(swap=swap, max_position_embeddings=longest))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        install(model)
    return model
