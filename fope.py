"""
Position embeddings: everything a token knows about where it is.

    NoPE    nothing but the causal mask
    ALiBi   a penalty on distance, added to the attention logits             (Press et al., 2022)
    RoPE    each pair of query/key dimensions turns at one frequency         (Su et al., 2021)
    FoPE    each pair turns by a Fourier series, slow frequencies removed    (Hua et al., ICML 2025, arXiv 2412.17739)

and the paper's other baselines: KERPLE and FIRE (learned biases), RoPE-A (aligned frequencies), YaRN and position
interpolation (keywords of every embedding that turns).

An embedding is one nn.Module with four methods. q, k, v are (B, n_head, T, head_dim), position t is index t:

    rotate(q, k)     what it does to queries and keys
    attend(q, k, v)  fused causal attention over rotated q and k, with the embedding's bias on the logits, in O(T) memory
    scores(q, k)     the explicit (B, n_head, T, T) logits of unrotated q and k, before mask and softmax: slow, to be read
    inherit(old)     start from what `old`, the embedding that the weights were trained with, has learned or drawn

To add an embedding: write one class, add one line to POSITION_EMBEDDINGS at the end of this file.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

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


def yarn_freqs(freqs, scale, original_len, head_dim, theta=10000.0, beta_fast=32, beta_slow=1):
    """
    YaRN's frequencies for reading `scale` times original_len ("NTK by parts", Peng et al., 2023): what turns more than
    beta_fast times in original_len stays, what turns less than beta_slow times is divided by scale, with a ramp between.

    The ramp is linear in the index m of w_m, between whole indices, as in YaRN's code and in those that followed it; the
    paper's formula is linear in the number of turns. freqs need not be RoPE's: m is computed from the frequency.
    """
    per_octave = head_dim / 2 / math.log2(theta)  # m grows by this much when w halves
    low = max(math.floor(-per_octave * math.log2(2 * math.pi * beta_fast / original_len)), 0)
    high = min(math.ceil(-per_octave * math.log2(2 * math.pi * beta_slow / original_len)), head_dim - 1)
    ramp = ((-per_octave * torch.log2(freqs) - low) / max(high - low, 0.001)).clamp(0, 1)
    return freqs + ramp * (freqs / scale - freqs)


# -----------------------------------------------------------------------------
# the embeddings


class NoPE(nn.Module):
    """No position embedding: order is known through the causal mask alone. The base of all others."""

    def __init__(self, *, head_dim, n_head, train_len, theta=10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, since dimensions turn in pairs; it is {head_dim}")
        self.head_dim, self.n_head, self.train_len, self.theta = head_dim, n_head, train_len, theta

    def extra_repr(self):
        return f"train_len={self.train_len}"

    def rotate(self, q, k):
        return q, k

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def scores(self, q, k):
        q, k = self.rotate(q, k)
        return q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)

    def inherit(self, old):
        """Returns what has been taken over, in words."""
        if type(old) is not type(self) or not self.state_dict():
            return "nothing to take over"
        self.load_state_dict(old.state_dict())
        return f"takes over {', '.join(self.state_dict())}"


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
    """
    Rotary position embedding: pair m of the query (key) at position t turns by the angle t w_m.

    Lower frequencies let a trained model read further: pi_scale=s divides all by s (position interpolation, Chen et al.,
    2023), yarn_scale=s only the slow ones (YaRN). original_len is the length that the frequencies were trained at, by
    default train_len. yarn_temperature also multiplies q and k by 0.1 ln(s) + 1, as YaRN's paper does; the FoPE authors'
    code leaves that out.
    """

    def __init__(self, *, yarn_scale=1.0, pi_scale=1.0, yarn_temperature=False, original_len=None, **kwargs):
        super().__init__(**kwargs)
        for name, value in dict(yarn_scale=yarn_scale, pi_scale=pi_scale, original_len=original_len or 1).items():
            if not isinstance(value, int | float) or not 1 <= value <= 1e9:
                raise ValueError(f"{name} must be a number of at least 1 and at most a billion, not {value}")
        if yarn_scale > 1 and pi_scale > 1:
            raise ValueError("yarn_scale and pi_scale both lower the frequencies: give one of them")
        if not isinstance(yarn_temperature, bool):
            raise ValueError(f"yarn_temperature must be true or false, not {yarn_temperature}")
        self.yarn_scale, self.pi_scale, self.original_len = yarn_scale, pi_scale, original_len or self.train_len
        self.temperature = 0.1 * math.log(yarn_scale) + 1 if yarn_temperature else 1.0
        self.register_buffer("freqs", rope_freqs(self.head_dim, self.theta), persistent=False)
        self._source = self._cos_sin = None

    def extra_repr(self):
        w = self.scaled_freqs()
        turning = f"{int((w > 0).sum())} frequencies from {w.max():.3g} to {w[w > 0].min():.3g}"
        usual = dict(yarn_scale=1, pi_scale=1, original_len=self.train_len, temperature=1)
        scales = "".join(f", {n}={getattr(self, n):g}" for n, value in usual.items() if getattr(self, n) != value)
        return f"{super().extra_repr()}, {turning}{scales}"

    def scaled_freqs(self):
        """The frequencies that positions turn with: `freqs`, unless YaRN or position interpolation lowers them."""
        return yarn_freqs(self.freqs / self.pi_scale, self.yarn_scale, self.original_len, self.head_dim, self.theta)

    def make_tables(self, T):
        """cos and sin of positions 0 .. T-1: two tensors that broadcast to (n_head, T, head_dim/2)."""
        return rotation_tables(self.scaled_freqs(), T)

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
            self._cos_sin = tuple(table * self.temperature for table in self.make_tables(T))
        cos, sin = self._cos_sin
        return cos[..., :T, :], sin[..., :T, :]

    def rotate(self, q, k):
        cos, sin = self.tables(q.size(-2))
        return apply_rotation(q, cos, sin), apply_rotation(k, cos, sin)


def above_floor(freqs, train_len):
    """The frequencies that complete at least one cycle in train_len tokens, w >= 2 pi / train_len, in their order: (K,)."""
    return freqs[freqs >= 2 * math.pi / train_len]


class FoPE(RoPE):
    """
    Fourier Position Embedding (section 4 of the paper; the README lists where its sources disagree).

    CF, the floor: a frequency under 2 pi / train_len never completes a cycle in training, so attention never learns what
    it does there. Those dimensions get frequency zero: they no longer turn with position. The floor belongs to the
    TRAINING length and stays where it is when a longer text is read.

    FS, the series: linear layers and activations mix frequencies into each dimension. So each of the K dimensions above
    the floor turns by a Fourier series over a set of D frequencies, its own with weight 1 and all with small random ones:

        cos_table[h, t, k] = sum_d cos(t w_d) cos_coef[h, d, k]          and the same with sin

    freqs (D,): the RoPE frequencies above the floor, largest first, then random ones, uniform in [0, pi], up to n_freq in all.
    cos_coef, sin_coef (n_head, D, K): drawn once from torch's global generator, never trained, saved with the model.

    variant="released" is the authors' code, from which the paper's numbers come; "paper" is the equations to the letter:

                              "released"                                      "paper"
        outputs K             min(frequencies above the floor, head_dim/4)    all frequencies above the floor
        noise of the coef.    xavier normal, gain sigma (0.02 at D = 16)      N(0, sigma^2)
        weight 1 sits at      d = k; where the cap bites, every 2nd or 3rd    d = k
        dims below the floor  cos 1, sin 1                                    cos 1, sin 0

    With sin 1 those dimensions are turned by 45 degrees and stretched by sqrt(2), q and k alike: their share of q.k doubles.
    CF alone is sigma=0; FS alone is floor=False, where all head_dim/2 frequencies are kept and nothing is capped.
    """

    def __init__(self, *, sigma=0.3, n_freq=None, variant="released", floor=True, **kwargs):
        super().__init__(**kwargs)
        if variant not in ("released", "paper"):
            raise ValueError(f"unknown FoPE variant {variant!r}; known: released, paper")
        if not (isinstance(sigma, int | float) and 0 <= sigma < math.inf):
            raise ValueError(f"sigma must be a number that is not negative, not {sigma}")
        if not isinstance(n_freq, int | None) or (n_freq or 0) > 1e6:
            raise ValueError(f"n_freq must be a whole number, at most a million, not {n_freq}")
        if not isinstance(floor, bool):
            raise ValueError(f"floor must be true or false, not {floor}")
        # YaRN scales the frequencies of a trained model: which ones that model kept is a matter of its own training length
        kept = above_floor(self.freqs, self.original_len) if floor else self.freqs
        D = len(kept) if n_freq is None else n_freq
        if len(kept) > D:
            raise ValueError(f"n_freq is {D}, but {len(kept)} frequencies lie above 2 pi / train_len and need a place")
        self.sigma, self.variant, self.n_kept = sigma, variant, len(kept)
        K = min(len(kept), self.head_dim // 4) if variant == "released" and floor else len(kept)
        if K == 0:
            small = f"head_dim {self.head_dim} and train_len {self.train_len}"
            raise ValueError(f"FoPE has nothing to turn with {small}; they must be at least 4 and 7")
        self.register_buffer("freqs", torch.cat((kept, torch.rand(D - len(kept)) * math.pi)))
        self.register_buffer("sin_coef", self.identity(D, K) + self.draw_noise(D, K))
        self.register_buffer("cos_coef", self.identity(D, K) + self.draw_noise(D, K))

    def extra_repr(self):
        _, D, K = self.cos_coef.shape
        kept = f"{self.n_kept} of {self.head_dim // 2} above the floor"
        return f"{super().extra_repr()}, {kept}, {K} series of {D} frequencies, sigma={self.sigma:g}, {self.variant}"

    def identity(self, D, K):
        """Weight 1 where the table above says: (D, K)."""
        stride = math.ceil(self.n_kept / K)  # may end before K: the columns left are noise alone
        d = torch.arange(0, self.n_kept, stride)[:K]
        identity = torch.zeros(D, K)
        identity[d, torch.arange(len(d))] = 1.0
        return identity

    def draw_noise(self, D, K):
        """Noise of the size that the table above says, anew at every call: (n_head, D, K)."""
        noise = torch.empty(self.n_head, D, K)
        if self.variant == "paper":
            return nn.init.normal_(noise, std=self.sigma)
        # On three dimensions xavier counts D K as fan-in and n_head K as fan-out, as for a convolution. That makes the
        # noise much smaller than sigma, std = sigma sqrt(2 / (K (D + n_head))), and is what the authors ran.
        return nn.init.xavier_normal_(noise, gain=self.sigma)

    def inherit(self, old):
        """
        Keep the coefficients of every frequency that both have. A longer training length lowers the floor; the frequencies
        that pass it now come after the old ones, with coefficients of their own: noise in the old series, and in each new
        series noise and weight 1 on the frequency of its number.
        """
        if not isinstance(old, FoPE):
            return "draws its coefficients, since there are none to take over"
        (_, D, K), (_, old_D, old_K) = self.cos_coef.shape, old.cos_coef.shape
        if (old_D, old_K) == (D, K) and self.sigma != old.sigma:
            raise ValueError(f"sigma was {old.sigma} when all coefficients were drawn, it cannot become {self.sigma}")
        n, n_series = min(self.n_kept, old.n_kept), min(K, old_K)
        n_more = min(D - self.n_kept, old_D - old.n_kept)  # further ones, from n_freq
        rows = torch.cat((torch.arange(n), self.n_kept + torch.arange(n_more)))
        old_rows = torch.cat((torch.arange(n), old.n_kept + torch.arange(n_more)))
        self.freqs[rows] = old.freqs[old_rows]
        for coef, old_coef in ((self.sin_coef, old.sin_coef), (self.cos_coef, old.cos_coef)):
            coef -= self.identity(D, K)
            coef[:, range(n_series, K), range(n_series, K)] += 1.0
            coef[:, rows, :n_series] = old_coef[:, old_rows, :n_series]
        return f"takes over {len(rows)} of {D} frequencies and {n_series} of {K} series, draws the rest"

    def make_tables(self, T):
        """The Fourier series of every head at positions 0 .. T-1, zero frequencies last: two (n_head, T, head_dim/2)."""
        cos, sin = rotation_tables(self.scaled_freqs(), T)
        # Eq. 11, in fp64 because autocast and TF32 would round an fp32 product
        cos = (cos.double() @ self.cos_coef.double()).float()
        sin = (sin.double() @ self.sin_coef.double()).float()
        n_zero = self.head_dim // 2 - cos.size(-1)
        cos = F.pad(cos, (0, n_zero), value=1.0)
        sin = F.pad(sin, (0, n_zero), value=1.0 if self.variant == "released" else 0.0)
        return cos, sin


# -----------------------------------------------------------------------------
# the paper's other baselines


class RoPEA(RoPE):
    """
    RoPE with aligned frequencies, the paper's RoPE-A: each moved to the nearest one that completes whole cycles in the
    training length, so that the rotation itself is periodic there. Of those below one cycle, the upper half completes one,
    and the rest (under half a cycle) none: frequency zero, as under FoPE's floor.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        cycle = 2 * math.pi / self.original_len
        self.freqs = torch.round(self.freqs / cycle) * cycle
        if not self.freqs.any():
            raise ValueError(f"RoPE-A has nothing to turn with train_len {self.original_len}; it must be at least 4")


QUERIES_PER_BLOCK = 128


class LearnedBias(NoPE):
    """The base of embeddings that add a learned bias to the logits, which a subclass gives for any queries and keys."""

    def bias(self, i, j):
        """What to add to the logits of queries at positions i (N,) and keys at j (T,): (n_head, N, T), anything for j > i."""
        raise NotImplementedError

    def attend(self, q, k, v):
        """
        No fused kernel makes such a bias by itself, so it is made for one block of queries at a time, and again in the
        backward pass: never more than (n_head, QUERIES_PER_BLOCK, T) of it. The last block, which is the largest, comes
        first, since a CPU's allocator can give its memory to the smaller ones, but not the other way round.
        """
        starts = range(0, q.size(-2), QUERIES_PER_BLOCK)[::-1]
        if len(starts) == 1:
            return self.attend_block(q, k, v, 0)
        y = []
        for start in starts:
            end = start + QUERIES_PER_BLOCK
            block = q[..., start:end, :], k[..., :end, :], v[..., :end, :], start
            if torch.is_grad_enabled():
                y.append(checkpoint(self.attend_block, *block, use_reentrant=False))
            else:
                y.append(self.attend_block(*block))
        return torch.cat(y[::-1], dim=-2)

    def attend_block(self, q, k, v, start):
        i = torch.arange(start, start + q.size(-2), device=q.device)
        j = torch.arange(k.size(-2), device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            bias = self.bias(i, j).masked_fill(j > i[:, None], -torch.inf).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])  # the fused CPU kernel wants 4 dimensions

    def scores(self, q, k):
        t = torch.arange(q.size(-2), device=q.device)
        return super().scores(q, k) + self.bias(t, t)


@functools.cache
def causal_block_mask(T, device):
    """Which blocks of logits FlexAttention may skip: made once for each T, by way of a (T, T) mask."""
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=device)


class KERPLE(LearnedBias):
    """
    KERPLE's logarithmic kernel (Chi et al., 2022): head h adds -r1 log(1 + r2 (i - j)), with its own learned r1, r2 > 0.

    Drawn uniformly, r1 from [0, 2] and r2 from [0, 1], as in the published code; the absolute value keeps them positive.

    flex=True leaves the bias to FlexAttention's kernel, on CUDA and for a T that is a multiple of 128; all else is read in
    blocks. It is not the default because it has not been measured yet.
    """

    def __init__(self, *, flex=False, **kwargs):
        super().__init__(**kwargs)
        if not isinstance(flex, bool):
            raise ValueError(f"flex must be true or false, not {flex}")
        self.flex = None
        if flex:  # here and not where they are defined, since importing torch's compiler takes a second
            self.flex = torch.compiler.disable(KERPLE.attend_flex, recursive=False)  # a graph of its own, given `row`
            self.flex_attention = torch.compile(flex_attention, dynamic=False)
            torch._dynamo.config.recompile_limit = 1000  # one for each shape; past it torch would make all scores at once
        self.r1 = nn.Parameter(2 * torch.rand(self.n_head))
        self.r2 = nn.Parameter(torch.rand(self.n_head))

    def bias(self, i, j):
        r1, r2 = (r.abs().view(-1, 1, 1) for r in (self.r1, self.r2))
        return -r1 * torch.log1p(r2 * (i[:, None] - j).clamp(min=0))

    def attend(self, q, k, v):
        # a kernel is compiled for each length, so not for those of generated text; its backward pass adds in any order
        if self.flex and q.is_cuda and q.size(-2) % 128 == 0 and not torch.are_deterministic_algorithms_enabled():
            return self.flex(self, q, k, v)
        return super().attend(q, k, v)

    def attend_flex(self, q, k, v):
        """The bias is a function of the distance alone: a row of it, the last query's, is shifted for every other query."""
        last = q.size(-2) - 1
        t = torch.arange(last + 1, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            row = self.bias(t[-1:], t)[:, 0]  # (n_head, T)

        def add_bias(score, b, h, i, j):
            return score + row[h, (last - i + j).clamp(max=last)]

        return self.flex_attention(q, k, v, score_mod=add_bias, block_mask=causal_block_mask(last + 1, q.device))


class FIRE(LearnedBias):
    """
    FIRE (Li et al., 2024): the bias is f(psi(i - j) / psi(max(L, i))) with psi(x) = log(c x + 1), a function f of the
    distance as a share of all that the query can see. f is an MLP 1 -> 32 -> n_head; c and L are learned.

    L starts at a quarter of the training length (512 of 2048 in FIRE's paper) and is stored as a multiple of that, since an
    optimizer step of fixed size means something for a number near 1. c starts at 0.1.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mlp = nn.Sequential(nn.Linear(1, 32), nn.ReLU(inplace=True), nn.Linear(32, self.n_head))
        self.c = nn.Parameter(torch.tensor(0.1))
        self.L_multiple = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("L_start", torch.tensor(self.train_len / 4))

    def bias(self, i, j):
        def psi(x):
            return torch.log1p(self.c.abs() * x)

        L = self.L_multiple.abs() * self.L_start
        x = psi((i[:, None] - j).clamp(min=0)) / psi(torch.maximum(L, i))[:, None]
        return self.mlp(x[..., None]).permute(2, 0, 1)


POSITION_EMBEDDINGS = {
    "nope": NoPE,
    "alibi": ALiBi,
    "rope": RoPE,
    "fope": FoPE,
    "kerple": KERPLE,
    "fire": FIRE,
    "rope_a": RoPEA,
}
