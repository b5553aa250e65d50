"""
The paper's other baselines.

    KERPLE, FIRE         a learned bias on the logits      (Chi et al., 2022; Li et al., 2024)
    RoPE-A               RoPE with frequencies that complete whole cycles in the training length
    tapered RoPE         RoPE with FoPE's floor, but not cut off: CoPE (Li et al., 2026)
    YaRN, NTK, ...       lower frequencies, with which a trained RoPE or FoPE reads further
                                                           (Peng et al., 2023; Chen et al., 2023)

The interface of an embedding is described in fope.py.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from fope import POSITION_EMBEDDINGS, SDPA_WITHOUT_CUDNN, PositionEmbedding, PositionError, RoPE

# --- learned biases

QUERIES_PER_BLOCK = 128


class LearnedBias(PositionEmbedding):
    """The base of embeddings that add a learned bias to the logits."""

    def bias(self, i, j):
        """The bias of queries at i (N,) and keys at j (T,): (n_head, N, T); ignored for j > i."""
        raise NotImplementedError

    def attend(self, q, k, v):
        """
        No fused kernel makes such a bias by itself. So it is made for one block of queries at a
        time, and again in the backward pass: never more than (n_head, QUERIES_PER_BLOCK, T) of it
        (of FIRE's hidden layer, 32 instead of n_head).
        """
        window = self.window or q.size(-2)
        y = []
        # largest block first, so that smaller ones reuse its memory
        for start in range(0, q.size(-2), QUERIES_PER_BLOCK)[::-1]:
            end, first_key = start + QUERIES_PER_BLOCK, max(0, start - window + 1)
            keys, values = k[..., first_key:end, :], v[..., first_key:end, :]
            block = q[..., start:end, :], keys, values, start, first_key
            y.append(checkpoint(self.attend_block, *block, use_reentrant=False))
        return torch.cat(y[::-1], dim=-2)

    def attend_block(self, q, k, v, start, first_key):
        i = torch.arange(start, start + q.size(-2), device=q.device)
        j = torch.arange(first_key, first_key + k.size(-2), device=q.device)
        hidden = j > i[:, None]
        if self.window:
            hidden |= i[:, None] - j >= self.window
        with torch.autocast(q.device.type, enabled=False):  # bf16 would round positions over 256
            bias = self.bias(i, j).masked_fill(hidden, -torch.inf).to(q.dtype)
        # (1, n_head, N, T): the fused CPU kernel wants 4 dimensions
        with sdpa_kernel(SDPA_WITHOUT_CUDNN):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])

    def scores(self, q, k):
        t = torch.arange(q.size(-2), device=q.device)
        return super().scores(q, k) + self.bias(t, t)


class KERPLE(LearnedBias):
    """
    KERPLE's logarithmic kernel: head h adds -r1 log(1 + r2 (i - j)), with r1, r2 > 0 of its own.

    Drawn uniformly, r1 from [0, 2] and r2 from [0, 1], as in the published code; the absolute
    value keeps them positive.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.r1 = nn.Parameter(2 * torch.rand(self.n_head))
        self.r2 = nn.Parameter(torch.rand(self.n_head))

    def bias(self, i, j):
        r1, r2 = (r.abs().view(-1, 1, 1) for r in (self.r1, self.r2))
        return -r1 * torch.log1p(r2 * (i[:, None] - j).clamp(min=0))


class FIRE(LearnedBias):
    """
    FIRE: the bias is f(psi(i - j) / psi(max(L, i))) with psi(x) = log(c x + 1): a function of the
    distance relative to the query's position (at least L), both on a log scale. f is an MLP
    1 -> 32 -> n_head; c and L are learned.

    L starts at a quarter of the training length (512 of 2048 in FIRE's paper). Adam moves every
    parameter by about the learning rate, so L is stored as a multiple of its start, near 1.
    c starts at 0.1.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        # no bias at the end: softmax ignores what all logits of a head share
        layers = nn.Linear(1, 32), nn.ReLU(inplace=True), nn.Linear(32, self.n_head, bias=False)
        self.mlp = nn.Sequential(*layers)
        self.c = nn.Parameter(torch.tensor(0.1))
        self.L_multiple = nn.Parameter(torch.tensor(1.0))
        # saved, since it stays that of the first training length when L is inherited
        self.register_buffer("L_start", torch.tensor(self.train_len / 4))

    def bias(self, i, j):
        def psi(x):
            return torch.log1p(self.c.abs() * x)

        L = self.L_multiple.abs() * self.L_start
        x = psi((i[:, None] - j).clamp(min=0)) / psi(torch.maximum(L, i))[:, None]  # (N, T)
        return self.mlp(x[..., None]).permute(2, 0, 1)


# --- other frequencies


class RoPEA(RoPE):
    """
    RoPE with aligned frequencies, the paper's RoPE-A: each moved to the nearest one that completes
    whole cycles in the training length, so that the rotation itself is periodic there. What
    completes less than half a cycle gets frequency zero. up: move each to the next faster one
    instead, as the authors' code does by default; then no pair stops.
    """

    def __init__(self, *, up=False, **kwargs):
        super().__init__(**kwargs)
        cycle = 2 * math.pi / self.train_len
        cycles = self.freqs / cycle
        self.freqs = (cycles.ceil() if up else cycles.round()) * cycle


class TaperedRoPE(RoPE):
    """
    RoPE with a tapered floor, as CoPE has it (Li et al., 2026, arXiv 2602.05258): the n frequencies
    under FoPE's floor are multiplied by (1 + cos(pi i / (n - 1))) / 2, i = 0 .. n - 1, which falls
    from 1 to 0. Their code tapers the last 20 of the 64 frequencies of a Llama.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        slow = self.freqs < 2 * math.pi / self.train_len
        self.freqs[slow] *= (1 + torch.linspace(0, math.pi, int(slow.sum())).cos()) / 2


# --- changes of trained frequencies


def yarn(freqs, factor, original_len, head_dim, theta=10000.0, beta_fast=32, beta_slow=1):
    """
    YaRN ("NTK by parts"): what turns more than beta_fast times in original_len stays, what turns
    less than beta_slow times is divided by factor, with a ramp between.

    The ramp is linear in the index m of w_m, between whole indices, as in YaRN's code and in those
    that followed it; the paper's formula is linear in the number of turns. freqs need not be
    RoPE's: m is computed from the frequency.
    """
    # beta 32 and 1 are the paper's; head_dim - 1 and 0.001 are its code's
    per_octave = head_dim / 2 / math.log2(theta)  # m grows by this much when w halves
    low = max(math.floor(-per_octave * math.log2(2 * math.pi * beta_fast / original_len)), 0)
    high = -per_octave * math.log2(2 * math.pi * beta_slow / original_len)
    high = min(math.ceil(high), head_dim - 1)
    ramp = ((-per_octave * torch.log2(freqs) - low) / max(high - low, 0.001)).clamp(0, 1)
    return freqs + ramp * (freqs / factor - freqs)


def ntk(freqs, factor, head_dim, theta=10000.0):
    """
    "NTK-aware" scaling, by a larger theta: theta' = theta factor^(d / (d - 2)), d = head_dim. The
    fastest frequency stays, the slowest is divided by the factor. freqs need not be RoPE's.
    """
    new_theta = theta * factor ** (head_dim / (head_dim - 2))
    return freqs ** (math.log(new_theta) / math.log(theta))


def slow_down(freqs, factor, original_len):
    """Only the frequencies that complete no cycle in original_len tokens are divided by factor."""
    return torch.where(freqs < 2 * math.pi / original_len, freqs / factor, freqs)


def interpolate(freqs, factor):
    """Position interpolation: every frequency is divided by factor."""
    return freqs / factor


def rope_scaling(
    *,
    factor: float = 1.0,
    original_len: int,
    kind: str = "yarn",
    temperature: bool = False,
    head_dim,
    theta,
):
    """
    Keywords that let RoPE or FoPE, trained at original_len, read `factor` times as far. The
    embedding stays what it was made for, FoPE's floor included, and turns more slowly: train_len
    is original_len, whatever the model is trained at now. model.make_pos calls this with
    GPTConfig.rope_scaling.

    kind: "yarn", "ntk", "slow" or "interpolate", the functions above, or "none". temperature:
    multiply q and k by 0.1 ln(factor) + 1, as YaRN's paper does; the FoPE authors' code leaves that
    out.
    """
    scales = {
        "yarn": partial(yarn, original_len=original_len, head_dim=head_dim, theta=theta),
        "ntk": partial(ntk, head_dim=head_dim, theta=theta),
        "slow": partial(slow_down, original_len=original_len),
        "interpolate": interpolate,
        "none": lambda freqs, factor: freqs,
    }
    if kind not in scales:
        raise PositionError(f"kind must be one of {', '.join(scales)}, not {kind}")
    if not 1 <= factor < math.inf:
        raise PositionError(f"factor must be a number from 1 on, not {factor}")
    if temperature not in (True, False):
        raise PositionError(f"temperature must be true or false, not {temperature}")
    qk_factor = 0.1 * math.log(factor) + 1 if temperature else 1.0
    scale = partial(scales[kind], factor=factor)
    return {"train_len": original_len, "scale": scale, "qk_factor": qk_factor}


POSITION_EMBEDDINGS |= {"kerple": KERPLE, "fire": FIRE, "rope_a": RoPEA, "rope_taper": TaperedRoPE}
