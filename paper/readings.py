"""
Two other readings of FoPE's equations (Eq. 11-13), for the figure "readings": embeddings that
train.py takes as --pos paper.readings.FoPEShared.
"""

import math

import torch
import torch.nn.functional as F

from fope import FoPE, RoPE


class FoPEShared(FoPE):
    """FoPE with one draw for cos and sin: pair k times sum_d coef[d, k] e^{i w_d t}."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.cos_coef.copy_(self.sin_coef)


class FoPERelative(FoPE):
    """
    Eq. 11 itself, a series on the logit and so a function of the distance: q.k becomes

        sum_m sum_d coef[h, d, m] Re[q_m conj(k_m) e^{i w_d (s - t)}]       query at s, key at t

    with the frequencies, identity and constant pairs of FoPE. FoPE turns q and k each, and its
    logit is a product of two series: the same noise twice, so sqrt(2) sigma is its match here.
    Every pair m is repeated for each d, which makes q and k wider: small, slow, to compare.
    """

    def make_tables(self, T):
        return RoPE.make_tables(self, T)  # (T, D)

    def rotate(self, q, k):
        coef = self.cos_coef.repeat_interleave(self.n_head // self.n_table, dim=0)
        coef = coef.transpose(1, 2)[:, None]  # (n_head, 1, K, D)
        return self.repeat(q, coef), self.repeat(k, torch.ones_like(coef))

    def repeat(self, x, coef):
        """x (B, n_head, T, head_dim) -> (B, n_head, T, 2 K D + the constant pairs)."""
        cos, sin = (table[:, None] for table in self.tables(x.size(-2)))  # (T, 1, D)
        K, (x1, x2) = coef.size(-2), x.float().chunk(2, dim=-1)
        y1, y2 = x1[..., :K, None], x2[..., :K, None]  # (B, n_head, T, K, 1)
        real, imaginary = coef * (y1 * cos - y2 * sin), coef * (y2 * cos + y1 * sin)
        factor = self.qk_factor * math.sqrt(1 + self.sin_pad**2)
        constant = factor * torch.cat((x1[..., K:], x2[..., K:]), dim=-1)
        return torch.cat((real.flatten(-2), imaginary.flatten(-2), constant), dim=-1).type_as(x)

    def attend(self, q, k, v):
        width = -(-q.size(-1) // 8) * 8  # fused kernels want one width, on CUDA a multiple of 8
        q, k, v = (F.pad(x, (0, width - x.size(-1))) for x in (q, k, v))
        scale = 1 / math.sqrt(self.head_dim)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return y[..., : self.head_dim]
