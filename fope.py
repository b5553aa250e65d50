"""
Position embeddings: everything a token knows about where it is.

    NoPE    nothing but the causal mask
    ALiBi   a penalty on distance, added to the attention logits           (Press et al., 2022)
    RoPE    each pair of query/key dimensions turns at one frequency       (Su et al., 2021)
    FoPE    each pair follows a Fourier series, slow frequencies removed   (Hua et al., ICML 2025)

Section and equation numbers are those of FoPE's paper in its last version, arXiv 2412.17739.

An embedding is one nn.Module with four methods. q, k, v are (B, n_head, T, head_dim), and position
t is index t:

    rotate(q, k)     what it does to queries and keys
    attend(q, k, v)  fused causal attention over ROTATED q and k, with the embedding's bias on the
                     logits, in O(T) memory
    scores(q, k)     the (B, n_head, T, T) logits of q and k that are NOT rotated yet, before mask
                     and softmax: the formula itself, slow, to be read and to test attend() against
    inherit(old)     take over what `old`, the embedding that the weights were trained with, has
                     learned or drawn

To add one: write a class, and its name into POSITION_EMBEDDINGS, as baselines.py does with the
paper's other baselines. What a class does not take, it says by an assert: scripts show its message.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

# --- the rotation, as pure functions


def rope_freqs(head_dim, theta=10000.0):
    """w_m = theta^(-2m/head_dim), m = 0 .. head_dim/2 - 1, radians per token: (head_dim/2,)."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)


def rotation_tables(freqs, T):
    """cos(t w_m), sin(t w_m) of positions t = 0 .. T-1: two (T, len(freqs)), fp32, on the CPU."""
    angles = torch.outer(torch.arange(T).float(), freqs)
    return angles.cos(), angles.sin()


def apply_rotation(x, cos, sin):
    """
    Each pair of dimensions (m, m + head_dim/2) of x (..., T, head_dim) is a complex number
    x1 + i x2; multiply it by cos + i sin. With RoPE's tables that is e^{i w_m t}, a rotation. The
    tables are (T, head_dim/2) or (n_head, T, head_dim/2). In fp32; returned in the dtype of x.
    """
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


# --- NoPE and ALiBi


class PositionEmbedding(nn.Module):
    """The interface; the base class does nothing. train_len in tokens; theta is RoPE's."""

    def __init__(self, *, head_dim, n_head, train_len, theta=10000.0):
        super().__init__()
        self.head_dim, self.n_head, self.train_len, self.theta = head_dim, n_head, train_len, theta

    def rotate(self, q, k):
        return q, k

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def scores(self, q, k):
        q, k = self.rotate(q, k)
        return q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)

    def inherit(self, old):
        if type(old) is type(self):
            self.load_state_dict(old.state_dict())


class NoPE(PositionEmbedding):
    """No position embedding: order is known through the causal mask alone."""


def alibi_slopes(n_head):
    """
    ALiBi's slopes m_h = 2^(-8h/n_head), h = 1 .. n_head: (n_head,) fp32.

    Where n_head is no power of two, the slopes of the next lower power p come first, then every
    other one of 2p, as in the published code.
    """
    p = 2 ** int(math.log2(n_head))
    slopes = [2 ** (-8 * h / p) for h in range(1, p + 1)]
    slopes += [2 ** (-8 * h / (2 * p)) for h in range(1, 2 * p, 2)]
    return torch.tensor(slopes[:n_head])


class ALiBi(PositionEmbedding):
    """Attention with Linear Biases: head h adds -m_h (i - j) to the logit of query i and key j."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("slopes", alibi_slopes(self.n_head), persistent=False)

    def attend(self, q, k, v):
        q, k, v = self.with_bias(q, k, v, torch.arange(q.size(-2), device=q.device))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        return y[..., : self.head_dim]

    def with_bias(self, q, k, v, j):
        """
        The bias without an attention mask. Softmax ignores what is constant in a row, so
        -m(i - j) can be +m j: one number per key, at position j (.., T), which two extra columns
        of q and k bring into the dot product. j is split into 256 floor(j/256) and j mod 256:
        bf16 holds integers exactly only up to 256, and both parts exactly up to j = 65535.
        """
        key_columns = torch.stack((j // 256 * 256, j % 256), dim=-1).to(k.dtype)
        query_columns = self.slopes.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:-1], 2)
        q = torch.cat((q / math.sqrt(self.head_dim), query_columns), dim=-1)  # head_dim + 2
        k = torch.cat((k, key_columns.expand(*k.shape[:-1], 2)), dim=-1)
        return q, k, F.pad(v, (0, 2))  # the fused CPU kernel wants q, k and v of one width

    def scores(self, q, k):
        t = torch.arange(q.size(-2), device=q.device)
        return super().scores(q, k) - self.slopes.view(-1, 1, 1) * (t[:, None] - t[None, :])


# --- RoPE


class RoPE(PositionEmbedding):
    """
    Rotary position embedding: pair m of the query (key) at position t turns by the angle t w_m.

    scale: maps the frequencies to those that are used, such as YaRN in baselines.py, which lets a
    trained model read further. qk_factor multiplies both q and k.
    """

    def __init__(self, *, scale=lambda freqs: freqs, qk_factor=1.0, **kwargs):
        super().__init__(**kwargs)
        assert self.head_dim % 2 == 0, f"head_dim must be even, not {self.head_dim}: pairs turn"
        self.scale, self.qk_factor = scale, qk_factor
        # not saved: the frequencies follow from the config
        self.register_buffer("freqs", rope_freqs(self.head_dim, self.theta), persistent=False)
        self.forget_tables()
        self.register_load_state_dict_post_hook(RoPE.forget_tables)

    def forget_tables(self, *_):
        """Called when weights are loaded; to be called when frequencies or coefficients change."""
        # no buffers: DDP would copy those of one process over another's, which may be longer
        self.cos = self.sin = None

    def _apply(self, fn, recurse=True):
        self.forget_tables()  # to another device
        return super()._apply(fn, recurse)

    def make_tables(self, T):
        """cos and sin of positions 0 .. T-1, on the CPU: two (T, head_dim/2)."""
        return rotation_tables(self.scale(self.freqs.cpu()), T)

    @torch.no_grad()
    def tables(self, T):
        """
        make_tables(T) on the device, times qk_factor. Kept for the longest text so far, its length
        rounded up to a power of two: a text that grows by a token seldom needs new ones.
        """
        if self.cos is None or self.cos.size(-2) < T:
            cos, sin = self.make_tables(1 << (T - 1).bit_length())
            self.cos = (cos * self.qk_factor).to(self.freqs.device)
            self.sin = (sin * self.qk_factor).to(self.freqs.device)
        return self.cos[..., :T, :], self.sin[..., :T, :]

    def rotate(self, q, k):
        cos, sin = self.tables(q.size(-2))
        return apply_rotation(q, cos, sin), apply_rotation(k, cos, sin)


# --- FoPE


def above_floor(freqs, train_len):
    """The frequencies that complete a cycle in train_len tokens, w >= 2 pi / train_len."""
    return freqs[freqs >= 2 * math.pi / train_len]


class FoPE(RoPE):
    """
    Fourier Position Embedding (section 4), for the head_dim/2 pairs of a head.

    CF, "clip floor to zero": a frequency under 2 pi / train_len never completes a cycle in
    training, so attention never learns what it does there. Those pairs get frequency zero: they
    no longer turn. The floor belongs to the TRAINING length and stays when a longer text is read.
    floor=False keeps all frequencies, floor=256 is the floor of 256 tokens.

    FS, the Fourier series: linear layers and activations mix frequencies into each pair. So each of
    K pairs follows a series over a set of D frequencies, its own with weight 1 and all with small
    random ones (Eq. 11-13):

        cos_table[h, t, k] = sum_d cos(t w_d) cos_coef[h, d, k]       and the same with sin

    The pair is multiplied by the complex number cos + i sin of its tables. Without noise that is
    RoPE's rotation. With noise it also stretches: a sum of waves leaves the unit circle.

    freqs (D,): the n_kept RoPE frequencies above the floor, largest first, then random ones,
    uniform in [0, pi] (under the floor, too), up to n_freq.
    cos_coef, sin_coef (n_table, D, K): drawn once from torch's global generator, independently for
    each table and for cos and sin; never trained, but saved. sigma is the size of the noise.

    variant="released" is the authors' repository, where D is the number of kept frequencies; the
    paper's Table 3 says 64. "paper" has the equations' tables, with sigma as the standard
    deviation; the text calls it a variance. (The equations' logit is one series in i - j. Code
    turns q and k each, so the logit is a product of two series and, with noise, depends on i and j;
    FoPERelative in baselines.py is the equations' own.)

                        "released"                            "paper"
        K               min(n_kept, head_dim/4)               n_kept
        noise           xavier normal, gain sigma             N(0, sigma^2)
        its real std    sigma sqrt(2 / (K (D + n_table)))     sigma
        own weight 1    d = 0, s, 2s, .., s = ceil(n_kept/K)  d = k
        other pairs     cos 1, sin 1                          cos 1, sin 0

    With sin 1 they turn by 45 degrees and are stretched by sqrt(2), q and k alike: their term in
    q.k doubles. Where head_dim/4 cuts, s is 2, and the series after the last own one are of noise
    alone: close to 0, so that their pairs all but drop out of q.k.
    sin_pad is the sine of the other pairs: 1 and 0 where the table has them, unless it is given. It
    belongs to the model: with another, trained weights are read wrongly.
    n_table: the number of tables, by default one a head. With fewer, n_head / n_table neighbouring
    heads share one: with one for each key head, a grouped model turns a key once for all its
    queries. It takes the place of n_head in the size of the noise.
    cap=False removes the limit of head_dim/4. It is for a model that was trained with RoPE: each
    frequency stays on the pair that has learned it, where s = 2 would move them all.
    CF alone is sigma=0. FS alone is floor=False, which removes that limit, too, and needs a larger
    sigma for the same noise.
    """

    def __init__(
        self,
        *,
        sigma: float = 0.3,
        n_freq: int | None = None,
        variant: str = "released",
        floor: bool | int = True,
        cap: bool = True,
        sin_pad: float | None = None,
        n_table: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        assert variant in ("released", "paper"), f"variant {variant!r} is none of released, paper"
        assert sigma >= 0, f"sigma must not be negative, as {sigma} is"
        assert floor >= 0, f"floor must be true, false or a number of tokens, not {floor}"
        floor_len = self.train_len if floor is True else floor
        kept = above_floor(self.freqs, floor_len) if floor_len else self.freqs
        D = len(kept) if n_freq is None else n_freq
        K = len(kept)
        if variant == "released" and floor and cap:
            K = min(K, self.head_dim // 4)
        least = f"head_dim {self.head_dim} must be at least 4, the floor of {floor_len} at least 7"
        assert K > 0, f"FoPE has no frequency left: {least}"
        assert len(kept) <= D, f"n_freq is {D}, but {len(kept)} frequencies are kept"
        self.sigma, self.variant, self.n_kept = sigma, variant, len(kept)
        self.sin_pad = (1.0 if variant == "released" else 0.0) if sin_pad is None else sin_pad
        self.n_table = self.n_head if n_table is None else n_table
        divides = 0 < self.n_table <= self.n_head and self.n_head % self.n_table == 0
        assert divides, f"n_table must divide the {self.n_head} heads, which {n_table} does not"
        # (D,) instead of RoPE's, and saved, since some are random
        self.register_buffer("freqs", torch.cat((kept, torch.rand(D - len(kept)) * math.pi)))
        self.register_buffer("sin_coef", self.identity(D, K) + self.draw_noise(D, K))
        self.register_buffer("cos_coef", self.identity(D, K) + self.draw_noise(D, K))

    def identity(self, D, K):
        """Weight 1 where the table above says: (D, K)."""
        stride = math.ceil(self.n_kept / K)  # over 1 there may be fewer than K of them
        d = torch.arange(0, self.n_kept, stride)[:K]
        identity = torch.zeros(D, K)
        identity[d, torch.arange(len(d))] = 1.0
        return identity

    def draw_noise(self, D, K):
        """Noise of the size that the table above says, anew at every call: (n_table, D, K)."""
        noise = torch.empty(self.n_table, D, K)
        if self.variant == "paper":
            return nn.init.normal_(noise, std=self.sigma)
        # In three dimensions xavier counts D K as fan-in and n_table K as fan-out, as if for a
        # convolution: 0.022 for the 60M model's sigma of 0.3.
        return nn.init.xavier_normal_(noise, gain=self.sigma)

    def make_tables(self, T):
        """The series of K pairs, then the constant pairs: two (n_table, T, head_dim/2), CPU."""
        cos, sin = super().make_tables(T)  # (T, D)
        # Eq. 11, once for each length, in fp64: the same on every device, rounded by no setting
        cos = (cos.double() @ self.cos_coef.cpu().double()).float()  # (n_table, T, K)
        sin = (sin.double() @ self.sin_coef.cpu().double()).float()
        n_constant = self.head_dim // 2 - cos.size(-1)
        cos = F.pad(cos, (0, n_constant), value=1.0)
        sin = F.pad(sin, (0, n_constant), value=self.sin_pad)
        return cos, sin

    def rotate(self, q, k):
        cos, sin = (table[:, None] for table in self.tables(q.size(-2)))
        q, k = (x.unflatten(1, (self.n_table, -1)) for x in (q, k))  # heads that share a table
        q, k = apply_rotation(q, cos, sin), apply_rotation(k, cos, sin)
        return q.flatten(1, 2), k.flatten(1, 2)

    def inherit(self, old):
        """
        Keep the coefficients of every frequency that both have. A longer training length lowers
        the floor, and more frequencies pass it. Each of these gets a row of noise in the old
        series and, where K grows, a series of its own: noise, and weight 1 at d = k.
        """
        if not isinstance(old, FoPE):
            return  # nothing is drawn there: this one's draws stay
        (_, D, K), (_, old_D, old_K) = self.cos_coef.shape, old.cos_coef.shape
        noise, was = (f"sigma {pos.sigma} and variant {pos.variant}" for pos in (self, old))
        all_old = (old_D, old_K) == (D, K)
        assert not all_old or noise == was, f"coefficients were drawn with {was}, not with {noise}"
        tables = f"the model has {old.n_table} tables, not n_table={self.n_table}"
        assert old.n_table == self.n_table, tables
        # the rows (frequencies) that both have: first the kept ones, then the random ones
        n, n_random = min(self.n_kept, old.n_kept), min(D - self.n_kept, old_D - old.n_kept)
        rows = torch.cat((torch.arange(n), self.n_kept + torch.arange(n_random)))
        old_rows = torch.cat((torch.arange(n), old.n_kept + torch.arange(n_random)))
        self.freqs[rows] = old.freqs[old_rows]
        # the columns (series): weight 1 at d = k for new ones, the old coefficients for old ones
        both_K = min(K, old_K)
        new = range(both_K, K)
        for coef, old_coef in ((self.sin_coef, old.sin_coef), (self.cos_coef, old.cos_coef)):
            coef -= self.identity(D, K)
            coef[:, new, new] += 1.0
            coef[:, rows, :both_K] = old_coef[:, old_rows, :both_K]
        self.forget_tables()


# baselines.py, which model.py imports, adds the others
POSITION_EMBEDDINGS = {"nope": NoPE, "alibi": ALiBi, "rope": RoPE, "fope": FoPE}
