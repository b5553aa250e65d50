"""
Position embeddings: everything a token knows about where it is.

    NoPE    nothing but the causal mask
    ALiBi   a penalty on distance, added to the attention logits             (Press et al., 2022)
    RoPE    each pair of query/key dimensions turns at one frequency         (Su et al., 2021)
    FoPE    each pair turns by a Fourier series, slow frequencies removed    (Hua et al., ICML 2025, arXiv 2412.17739)

An embedding is one nn.Module with three methods. q, k, v are (B, n_head, T, head_dim), position t is index t:

    rotate(q, k)     what it does to queries and keys
    attend(q, k, v)  fused causal attention over rotated q and k, with the embedding's bias on the logits, in O(T) memory
    scores(q, k)     the explicit (B, n_head, T, T) logits of unrotated q and k, before mask and softmax: slow, to be read

To add an embedding: write one class, add one line to POSITION_EMBEDDINGS at the end of this file.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

# -----------------------------------------------------------------------------
# the rotation, as pure functions


def rope_freqs(head_dim, theta=10000.0):
    """RoPE's frequencies w_m = theta^(-2m/head_dim), m = 0 .. head_dim/2 - 1, in radians per token: (head_dim/2,) fp32."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)


def rotation_tables(freqs, T):
    """cos(t w_m) and sin(t w_m) of positions t = 0 .. T-1: two (T, len(freqs)) tables, fp32."""
    angles = torch.outer(torch.arange(T, device=freqs.device).float(), freqs)
    return angles.cos(), angles.sin()


def apply_rotation(x, cos, sin):
    """
    Rotate each pair of dimensions (i, i + head_dim/2) of x (..., T, head_dim) by the angle whose cos and sin are given.

    cos and sin are (T, head_dim/2) or (n_head, T, head_dim/2). Computed in fp32, returned in the dtype of x. With
    x1 + i x2 as one complex number this is the multiplication by cos + i sin, RoPE's e^{i w_m t}.
    """
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


# -----------------------------------------------------------------------------
# the embeddings


class NoPE(nn.Module):
    """No position embedding: order is known through the causal mask alone. The base of all others."""

    def __init__(self, *, head_dim, n_head, train_len, theta=10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, since dimensions turn in pairs; it is {head_dim}")
        self.head_dim, self.n_head, self.train_len, self.theta = head_dim, n_head, train_len, theta

    def rotate(self, q, k):
        return q, k

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def scores(self, q, k):
        q, k = self.rotate(q, k)
        return q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)


def alibi_slopes(n_head):
    """
    ALiBi's slopes m_h = 2^(-8h/n_head), h = 1 .. n_head: (n_head,) fp32.

    Where n_head is no power of two, the slopes of the next lower power p come first, then every other one of 2p, as in
    the published code.
    """
    p = 2 ** int(math.log2(n_head))
    slopes = [2 ** (-8 * h / p) for h in range(1, p + 1)]
    slopes += [2 ** (-8 * h / (2 * p)) for h in range(1, 2 * p, 2)]
    return torch.tensor(slopes[:n_head])


class ALiBi(NoPE):
    """Attention with Linear Biases: head h adds -m_h (i - j) to the logit of query i and key j."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("slopes", alibi_slopes(self.n_head), persistent=False)

    def attend(self, q, k, v):
        """
        The bias without a mask. Softmax ignores what is constant in a row, so -m(i - j) is the same as +m j: one number
        per key, which two more columns of q and k bring into the dot product. j is split into 256 floor(j/256) and
        j mod 256 because bf16 holds integers exactly only up to 256, and both parts exactly up to j = 65535.
        """
        B, H, T, D = q.shape
        j = torch.arange(T, device=q.device)
        key_columns = torch.stack((j // 256 * 256, j % 256), dim=-1).to(q.dtype).expand(B, H, T, 2)
        query_columns = self.slopes.to(q.dtype).view(1, H, 1, 1).expand(B, H, T, 2)
        q = torch.cat((q / math.sqrt(D), query_columns), dim=-1)
        k = torch.cat((k, key_columns), dim=-1)
        v = F.pad(v, (0, 2))  # the fused CPU kernel wants q, k and v of one width
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)[..., :D]

    def scores(self, q, k):
        t = torch.arange(q.size(-2), device=q.device)
        return super().scores(q, k) - self.slopes.view(-1, 1, 1) * (t[:, None] - t[None, :])


class RoPE(NoPE):
    """Rotary position embedding: pair m of the query (key) at position t turns by the angle t w_m."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("freqs", rope_freqs(self.head_dim, self.theta), persistent=False)
        self._source = self._cos_sin = None

    def make_tables(self, T):
        """cos and sin of positions 0 .. T-1: two tensors that broadcast to (n_head, T, head_dim/2)."""
        return rotation_tables(self.freqs, T)

    @torch.no_grad()
    def tables(self, T):
        """make_tables(T), built once for the longest T so far: what does not train need not be computed at every step."""
        # Loading, moving or writing a buffer makes the tables stale. A compiled graph cannot read tensor versions, and
        # need not: between its steps nothing changes the buffers.
        if not torch.compiler.is_compiling():
            source = [(b.data_ptr(), b._version) for b in self.buffers()]
            if source != self._source:
                self._source, self._cos_sin = source, None
        if self._cos_sin is None or self._cos_sin[0].size(-2) < T:
            self._cos_sin = self.make_tables(T)
        cos, sin = self._cos_sin
        return cos[..., :T, :], sin[..., :T, :]

    def rotate(self, q, k):
        cos, sin = self.tables(q.size(-2))
        return apply_rotation(q, cos, sin), apply_rotation(k, cos, sin)


class FoPE(RoPE):
    """
    Fourier Position Embedding (section 4 of the paper; the README lists where its sources disagree).

    CF, the floor: a frequency under 2 pi / train_len never completes a cycle in training, so attention never learns what
    it does there. Those dimensions get frequency zero: they no longer turn with position. The floor belongs to the
    TRAINING length and stays where it is when a longer text is read.

    FS, the series: linear layers and activations mix frequencies into each dimension. So each of the K dimensions above
    the floor turns by a Fourier series over a set of D frequencies, its own with weight 1 and all with small random ones:

        cos_table[h, t, k] = sum_d cos(t w_d) cos_coef[h, d, k]          and the same with sin

    freqs (D,): the RoPE frequencies above the floor, largest first, and up to n_freq further ones, uniform in [0, pi].
    cos_coef, sin_coef (n_head, D, K): drawn once from torch's global generator, never trained, saved with the model.

    variant="released" is the authors' code, from which the paper's numbers come; "paper" is the equations to the letter:

                              "released"                                      "paper"
        outputs K             min(frequencies above the floor, head_dim/4)    all frequencies above the floor
        noise of the coef.    xavier normal, gain sigma (std 0.02 at 60M)     N(0, sigma^2)
        weight 1 sits at      d = k; where the cap bites, every 2nd or 3rd    d = k
        dims below the floor  cos 1, sin 1                                    cos 1, sin 0

    With sin 1 those dimensions are turned by 45 degrees and stretched by sqrt(2), q and k alike: their share of q.k doubles.
    """

    def __init__(self, *, sigma=0.3, n_freq=None, variant="released", **kwargs):
        super().__init__(**kwargs)
        if variant not in ("released", "paper"):
            raise ValueError(f"unknown FoPE variant {variant!r}; known: released, paper")
        if not (isinstance(sigma, int | float) and sigma >= 0) or not isinstance(n_freq, int | None):
            raise ValueError(f"sigma must be a number that is not negative and n_freq a whole number, not {sigma}, {n_freq}")
        kept = self.freqs[self.freqs >= 2 * math.pi / self.train_len]
        D = len(kept) if n_freq is None else n_freq
        if len(kept) == 0:
            raise ValueError(f"train_len {self.train_len} leaves FoPE no frequency above 2 pi / train_len; use at least 7")
        if len(kept) > D:
            raise ValueError(f"n_freq is {D}, but {len(kept)} frequencies lie above 2 pi / train_len and need a place")
        self.sigma, self.variant = sigma, variant
        K = min(len(kept), self.head_dim // 4) if variant == "released" else len(kept)
        self.register_buffer("freqs", torch.cat((kept, torch.rand(D - len(kept)) * math.pi)))
        self.register_buffer("sin_coef", self.draw_coef(D, K, len(kept)))
        self.register_buffer("cos_coef", self.draw_coef(D, K, len(kept)))

    def draw_coef(self, D, K, n_kept):
        """Identity on the matching frequency plus noise: (n_head, D, K). See the table above."""
        coef = torch.empty(self.n_head, D, K)
        if self.variant == "paper":
            nn.init.normal_(coef, std=self.sigma)
            d = torch.arange(K)
        else:
            # On three dimensions xavier counts D K as fan-in and n_head K as fan-out, as for a convolution. That makes
            # the noise much smaller than sigma, std = sigma sqrt(2 / (K (D + n_head))), and is what the authors ran.
            nn.init.xavier_normal_(coef, gain=self.sigma)
            d = torch.arange(0, n_kept, math.ceil(n_kept / K))  # may end before K: the columns left are noise alone
        coef[:, d, torch.arange(len(d))] += 1.0
        return coef

    def make_tables(self, T):
        cos, sin = rotation_tables(self.freqs, T)
        # Eq. 11, in fp64 because autocast and TF32 would round an fp32 product
        cos = (cos.double() @ self.cos_coef.double()).float()
        sin = (sin.double() @ self.sin_coef.double()).float()
        n_zero = self.head_dim // 2 - cos.size(-1)
        cos = F.pad(cos, (0, n_zero), value=1.0)
        sin = F.pad(sin, (0, n_zero), value=1.0 if self.variant == "released" else 0.0)
        return cos, sin


POSITION_EMBEDDINGS = {"nope": NoPE, "alibi": ALiBi, "rope": RoPE, "fope": FoPE}
