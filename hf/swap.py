"""
NoPE, ALiBi, RoPE or FoPE in a Llama of the transformers library.

    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM-1.7B")
    swap_position_embedding(model, "fope", train_len=4096)
    model.save_pretrained(FOLDER)               # with coefficients and choice
    model = load(FOLDER)

Once hf.swap is imported, AutoModel and AutoModelForCausalLM read it, too.

In the place of the library's attention is one that turns queries and keys by an embedding of ours,
at the positions that the model is given, before the keys enter the cache.
"""

import copy
from typing import ClassVar

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from checkpoint import inherit
from common import Refused
from fope import ALiBi, FoPE, RoPE, apply_rotation, causal_attention, fourier_tables
from model import GPTConfig, make_pos
from recipe import check_pos

EMBEDDINGS = ("nope", "alibi", "rope", "fope")
torch.backends.cuda.enable_cudnn_sdp(False)  # NaN gradients with a mask: pytorch issue 196678

# --- attention


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

    def forward(self, q, k, v, positions):
        """
        q (B, n_head, T, head_dim), k and v (B, n_kv_head, T, head_dim) of tokens at positions
        (B or 1, T), as they enter cache and attention. No table: how far a text goes is not known.
        """
        pos = self.embedding
        if isinstance(pos, ALiBi):  # two more columns, and q has its scale
            return pos.with_bias(q, k, v, positions[:, None])
        if not isinstance(pos, RoPE):
            return q, k, v
        freqs = pos.scaled_freqs().to(pos.freqs.device)
        angles = positions[:, None, :, None].float() * freqs  # (B, 1, T, D)
        if angles.device.type == "mps":  # which has no fp64
            angles = angles.cpu()
        cos, sin = angles.cos(), angles.sin()
        if isinstance(pos, FoPE):  # two (B, n_table, T, head_dim/2)
            coefs = pos.cos_coef.to(cos.device), pos.sin_coef.to(cos.device)
            cos, sin = fourier_tables(cos, sin, *coefs, pos.head_dim // 2, pos.sin_pad)
        cos, sin = (table[:, :, None].to(q.device) * pos.qk_factor for table in (cos, sin))
        q, k = (x.unflatten(1, (cos.size(1), -1)) for x in (q, k))  # heads that share a table
        q, k = apply_rotation(q, cos, sin), apply_rotation(k, cos, sin)
        return q.flatten(1, 2), k.flatten(1, 2), v


class Attention(llama.LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, **how):
        """The library's arguments, but that position_embeddings are positions, (B or 1, T)."""
        projections = self.q_proj, self.k_proj, self.v_proj
        heads = (proj(hidden_states).unflatten(-1, (-1, self.head_dim)) for proj in projections)
        q, k, v = (x.transpose(1, 2) for x in heads)
        q, k, v = self.pos(self.q_norm(q), self.k_norm(k), v, position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        pos = self.pos.embedding
        how["scaling"] = 1.0 if isinstance(pos, ALiBi) else self.scaling
        if pos.window:
            if past_key_values is not None or attention_mask is not None:
                raise Refused("a window is for whole texts, without padding and without a cache")
            k, v = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (k, v))
            y = causal_attention(q, k, v, pos.window, how["scaling"]).transpose(1, 2)
            return self.o_proj(y[..., : self.head_dim].flatten(2)), None
        which = self.config._attn_implementation, llama.eager_attention_forward
        attend = transformers.AttentionInterface().get_interface(*which)
        how["dropout"] = self.attention_dropout if self.training else 0.0
        y, weights = attend(self, q, k, v, attention_mask, **how)  # (B, T, n_head, ..)
        return self.o_proj(y[..., : self.head_dim].flatten(2)), weights


class Positions(nn.Module):
    """In the place of the library's rotary embedding: hands the positions on to the layers."""

    def forward(self, x, position_ids):
        return position_ids


def count_positions(model, args, kwargs):
    """
    A hook before LlamaModel.forward. The library counts the padding before a text as positions,
    which moves nothing where logits know only distances. FoPE's know more: there a token's position
    is the number of tokens before it, where no position_ids are given.
    """
    names = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds")
    given = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs
    mask, past = given["attention_mask"], given["past_key_values"]
    fope = isinstance(model.layers[0].self_attn.pos.embedding, FoPE)
    if fope and mask is not None and given["position_ids"] is None:
        if not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            raise Refused("FoPE needs position_ids beside a mask that is not (batch, tokens)")
        idx = given["inputs_embeds"] if given["input_ids"] is None else given["input_ids"]
        new = torch.arange(idx.size(1), device=mask.device)
        new = new if past is None else new + past.get_seq_length()
        given["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, new]
    return (), given


# --- models

# Saved as the type of RoPE, so that a program that does not know us stops at an unknown type,
# where it would read the model with plain RoPE. The type that was learned is "learned_type".
SWAPPED = "read_by_hf_swap"
ROPE_INIT_FUNCTIONS[SWAPPED] = lambda config, device=None, **kwargs: (torch.ones(1), 1.0)


class SwappedConfig(LlamaConfig):
    """A Llama's, and what was swapped. Its own name, so that Auto classes make no plain Llama."""

    model_type = "swapped_llama"
    swap: dict | None = None  # GPTConfig's pos, pos_args, rope_scaling, train_len, qk_norm
    auto_map: ClassVar = {}  # TRL reads it, and then takes the Auto class

    def _validate_read_by_hf_swap_rope_parameters(self, *args, **kwargs):
        """The library wants a function of this name for SWAPPED."""


class Swapped:
    """What a swapped model has, whatever its head."""

    config_class = SwappedConfig
    _keep_in_fp32_modules_strict = ("pos.embedding",)

    def __init__(self, config):
        super().__init__(config)
        if not config.swap:
            raise Refused("this is no swapped model: swap_position_embedding makes one")
        if not isinstance(self.base_model.rotary_emb, Positions):  # AutoModel has made it so
            install(self, new_positions(self, config.swap))


class SwappedModel(Swapped, llama.LlamaModel):
    """Without a head."""


class SwappedLlama(Swapped, LlamaForCausalLM):
    """With a head for the next token: what swap_position_embedding makes."""

    def _get_static_cache_init_shape(self):
        """The library would make a cache of the config's shape; ALiBi's keys are wider."""


transformers.AutoConfig.register(SwappedConfig.model_type, SwappedConfig)
transformers.AutoModel.register(SwappedConfig, SwappedModel)
transformers.AutoModelForCausalLM.register(SwappedConfig, SwappedLlama)
load = SwappedLlama.from_pretrained


def learned_type(config):
    """The library's name of the RoPE that a model was trained with: "default", "llama3", ..."""
    return config.rope_parameters.get("learned_type", config.rope_parameters["rope_type"])


def our_config(config, swap):
    """The GPTConfig of the embedding that `swap` names, in heads of the Llama's shape."""
    shape = dict(n_head=config.num_attention_heads, head_dim=config.head_dim)
    if (kind := learned_type(config)) != "default" and swap["pos"] in ("rope", "fope"):
        # scaled frequencies are what the model has learned: they stay, and FoPE's floor cuts them
        plain = copy.deepcopy(config)
        plain.rope_parameters = config.rope_parameters | {"rope_type": kind}
        with torch.device("cpu"):
            freqs, _ = ROPE_INIT_FUNCTIONS[kind](plain)
        swap = swap | {"pos_args": swap["pos_args"] | {"freqs": freqs.tolist()}}
    if swap["pos"] == "fope":
        swap = swap | {"pos": "hf.grouped.GroupedFoPE"}
    return GPTConfig(theta=config.rope_parameters["rope_theta"], **shape, **swap)


def new_positions(model, swap):
    """A LayerPosition for each layer, with what the old one has drawn. Refused where it cannot."""
    config, new = our_config(model.config, swap), []
    with torch.device("cpu"):
        check_pos(config)
    for block in model.base_model.layers:
        new.append(LayerPosition(config))
        if hasattr(block.self_attn, "pos"):
            inherit(new[-1].embedding, copy.deepcopy(block.self_attn.pos.embedding).cpu())
    return new


def install(model, positions):
    """Put a LayerPosition and our attention into each layer."""
    rope = {"rope_type": SWAPPED, "learned_type": learned_type(model.config)}
    model.config.rope_parameters = model.config.rope_parameters | rope
    for block, pos in zip(model.base_model.layers, positions, strict=True):
        layer, config, weight = block.self_attn, model.config, block.self_attn.q_proj.weight
        layer.__class__, layer.pos = Attention, pos if weight.is_meta else pos.to(weight.device)
        for name in () if hasattr(layer, "q_norm") else ("q_norm", "k_norm"):
            norm = nn.LayerNorm(config.head_dim, eps=1e-6, bias=False)
            layer.register_module(name, norm if config.swap["qk_norm"] else nn.Identity())
    if not isinstance(model.base_model.rotary_emb, Positions):
        model.base_model.rotary_emb = Positions()
        model.base_model.register_forward_pre_hook(count_positions, with_kwargs=True)


def swap_position_embedding(model, pos, train_len, *, rope_scaling=None, seed=0, **pos_args):
    """
    Exchange the position embedding of a Llama (LlamaForCausalLM) in place, and return it.
    pos: "nope", "alibi", "rope" or "fope"; pos_args are its further keywords, such as sigma=0.3.
    train_len: the longest text in tokens that the model has learned, before or by the fine-tuning;
    it sets FoPE's floor.
    rope_scaling: keywords of baselines.rope_scaling, for YaRN or interpolation. seed: of FoPE's
    noise. Every frequency above the floor stays on the pair that has learned it (cap=False), and
    the queries of a key head share its table (n_table). Refused for another architecture, for
    RoPE that depends on the text's length, and for what the embedding does not take.
    """
    if (name := type(model).__name__) not in ("LlamaForCausalLM", "SwappedLlama"):
        raise Refused(f"{name} is no LlamaForCausalLM; hf/README.md says what others would take")
    config = model.config
    if (kind := learned_type(config)) not in ("default", "linear", "llama3"):
        raise Refused(f"the model's RoPE is scaled in a way that is not known here: {kind}")
    if kind != "default" and rope_scaling:
        raise Refused(f"the model's RoPE is scaled ({kind}): rope_scaling would be the second")
    if rope_scaling and not {"factor", "original_len"} <= rope_scaling.keys():
        raise Refused("rope_scaling needs a factor and original_len, the length that was learned")
    if pos not in EMBEDDINGS:
        raise Refused(f"unknown position embedding {pos!r}; known here: {', '.join(EMBEDDINGS)}")
    old = getattr(config, "swap", None) or {"pos": "", "qk_norm": False}
    if old["pos"] == pos:  # what was given to it stays
        pos_args, rope_scaling = old["pos_args"] | pos_args, rope_scaling or old["rope_scaling"]
    elif pos == "fope":
        pos_args = {"cap": False, "n_table": config.num_key_value_heads} | pos_args
    swap = old | dict(pos=pos, pos_args=pos_args, rope_scaling=rope_scaling, train_len=train_len)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        positions = new_positions(model, swap)  # nothing has changed yet
    longest = max(config.max_position_embeddings, train_len)  # for other tools
    config.__class__, model.__class__ = SwappedConfig, SwappedLlama
    config.update(dict(swap=swap, max_position_embeddings=longest))
    install(model, positions)
    return model
