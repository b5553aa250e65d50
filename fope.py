"""
Position embeddings: everything a token knows about where it is. This file needs torch alone.

    NoPE    nothing but the causal mask
    ALiBi   a penalty on distance, added to the attention logits           (Press et al., 2022)
    RoPE    each pair of query/key dimensions turns at one frequency       (Su et al., 2021)
    FoPE    slow pairs are stopped, the others follow a Fourier series     (Hua et al., ICML 2025)

    pos = FoPE(head_dim=64, n_head=8, train_len=512)
    q, k = pos.rotate(q, k)       # q, k, v: (B, n_head, T, head_dim), of positions 0 .. T-1
    y = pos.attend(q, k, v)       # causal attention, in O(T) memory

An embedding is one nn.Module with three methods: these two, and one for readers and tests:

    scores(q, k)                  # the formula itself, slow: from q and k that are NOT rotated yet
                                  # the logits (B, n_head, T, T), before mask and softmax

To add one: write a class in a file of your own, mine.py, and train with --pos mine.Class, or put it
into POSITION_EMBEDDINGS. It raises PositionError for what it cannot do. Its parameters are trained
with weight decay, as all are; train.make_optimizer is the place to leave some of them out.
An embedding that is added to the input x, as learned absolute positions are, has no place in this
interface: it would be a line in GPT.forward.

Section and equation numbers are those of FoPE's paper in its last version, arXiv 2412.17739.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend


class PositionError(ValueError):
    """A value that an embedding does not take, or a text so long that it cannot read it."""


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
    x1 + i x2; multiply it by cos + i sin. With RoPE's tables that is e^{i w_m t}, a rotation. With
    FoPE's the length changes, too. The tables are (T, head_dim/2), or (n_head, T, head_dim/2) with
    one for each head. In fp32; returned in the dtype of x.
    """
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


# --- FoPE, in two functions (section 4)


def above_floor(freqs, train_len):
    """
    CF, "clip floor to zero": the frequencies that complete a turn in train_len tokens. A pair with
    a slower one has not shown all its angles in training. The paper sets such a frequency to zero,
    so that its pair is stopped; here it is left out.
    """
    return freqs[freqs >= 2 * math.pi / train_len]


def fourier_tables(cos, sin, cos_coef, sin_coef, n_pairs, sin_pad):
    """
    FS, the Fourier series (Eq. 11-13): each pair that turns gets a sum over all kept frequencies.
    The paper's reason is that linear layers and activations mix frequencies anyway.

        cos_table[h, t, k] = sum over d of  cos(t w_d) cos_coef[h, d, k]     and the same with sin

    cos, sin (.., T, D): rotation_tables of the D frequencies above the floor. Coefficients (n_head,
    D, K): 1 for a pair's own frequency, plus small random numbers, never trained. Returns two (..,
    n_head, T, n_pairs): first the K pairs that turn, then the stopped pairs, with cosine 1 and sine
    sin_pad. Without random numbers and with sin_pad 0 it is RoPE whose slow pairs are stopped. The
    dots stand for batch dimensions, if there are any; then cos and sin are (B, 1, T, D).
    """
    # in fp64, since with some settings a GPU makes products of fp32 less exact
    cos = (cos.double() @ cos_coef.double()).float()  # (n_head, T, K)
    sin = (sin.double() @ sin_coef.double()).float()
    n_constant = n_pairs - cos.size(-1)
    cos = F.pad(cos, (0, n_constant), value=1.0)
    sin = F.pad(sin, (0, n_constant), value=sin_pad)
    return cos, sin


EXAMPLE = """
Eight dimensions are four pairs, with frequencies 1, 0.1, 0.01, 0.001. Trained at 64 tokens, a turn
needs w >= 2 pi / 64 = 0.098: two pairs turn, two are stopped.

    >>> freqs = above_floor(rope_freqs(8), train_len=64)
    >>> freqs
    tensor([1.0000, 0.1000])

Cosines of positions 0, 1, 2, 3 without a series: cos t, cos 0.1 t, and a constant for the others.

    >>> cos, sin = rotation_tables(freqs, T=4)
    >>> one = torch.eye(2)[None]
    >>> fourier_tables(cos, sin, one, one, n_pairs=4, sin_pad=0.0)[0][0]
    tensor([[ 1.0000,  1.0000,  1.0000,  1.0000],
            [ 0.5403,  0.9950,  1.0000,  1.0000],
            [-0.4161,  0.9801,  1.0000,  1.0000],
            [-0.9900,  0.9553,  1.0000,  1.0000]])

With a series: the first pair follows cos t + 0.1 cos 0.1 t, the second cos 0.1 t - 0.1 cos t.

    >>> coef = torch.tensor([[[1.0, -0.1], [0.1, 1.0]]])
    >>> fourier_tables(cos, sin, coef, coef, n_pairs=4, sin_pad=0.0)[0][0]
    tensor([[ 1.1000,  0.9000,  1.0000,  1.0000],
            [ 0.6398,  0.9410,  1.0000,  1.0000],
            [-0.3181,  1.0217,  1.0000,  1.0000],
            [-0.8945,  1.0543,  1.0000,  1.0000]])
"""


# --- attention

# cuDNN makes a plan for every new length, which takes longer than the attention itself
SDPA_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_attention(q, k, v, window=None, scale=None):
    """
    Each query attends to its own key and to all keys before it, or to the last `window` keys alone.
    q, k, v: (B, n_head, T, head_dim). With a window it is computed for one block of queries at a
    time. This takes O(T window) time, and in training as much memory.
    """
    T = q.size(-2)
    if window is None or window >= T:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    y = []
    for start in range(0, T, window):
        end, first_key = min(start + window, T), max(0, start - window + 1)
        i = torch.arange(start, end, device=q.device)
        j = torch.arange(first_key, end, device=q.device)
        distance = i[:, None] - j
        visible = (distance >= 0) & (distance < window)
        keys, values = k[..., first_key:end, :], v[..., first_key:end, :]
        block = q[..., start:end, :], keys, values, visible
        y.append(F.scaled_dot_product_attention(*block, scale=scale))
    return torch.cat(y, dim=-2)


# --- NoPE and ALiBi


class PositionEmbedding(nn.Module):
    """
    The interface; the base class knows no position. train_len in tokens; theta is RoPE's. window: a
    query attends to so many keys, its own among them; None: to all before it.
    """

    def __init__(self, *, head_dim, n_head, train_len, theta=10000.0, window: int | None = None):
        super().__init__()
        if window is not None and window < 1:
            raise PositionError(f"window must be at least 1, not {window}")
        self.head_dim, self.n_head, self.train_len, self.theta = head_dim, n_head, train_len, theta
        self.window = window

    def rotate(self, q, k):
        return q, k

    def attend(self, q, k, v):
        return causal_attention(q, k, v, self.window)

    def scores(self, q, k):
        q, k = self.rotate(q, k)
        return q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)


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

    def scores(self, q, k):
        t = torch.arange(q.size(-2), device=q.device)
        return super().scores(q, k) - self.slopes.view(-1, 1, 1) * (t[:, None] - t[None, :])

    def attend(self, q, k, v):
        q, k, v = self.with_bias(q, k, v, torch.arange(q.size(-2), device=q.device))
        y = causal_attention(q, k, v, self.window, scale=1.0)
        return y[..., : self.head_dim]

    def with_bias(self, q, k, v, j):
        """
        The bias without an attention mask. Softmax ignores what is constant in a row: -m(i - j) is
        +m j, a number for each key, at position j (.., T). Three columns of q and k bring it into
        their product: the digits of j in base 256, since bf16 has no odd number above 256. The
        factor 65536 of the third digit stands in q, since in k it would be too large for fp16.
        """
        key_columns = torch.stack((j // 256 % 256 * 256, j % 256, j // 65536), dim=-1).to(k.dtype)
        slopes = self.slopes.to(q.dtype).view(-1, 1, 1)
        query_columns = torch.cat((slopes, slopes, slopes * 65536), -1).expand(*q.shape[:-1], 3)
        q = torch.cat((q / math.sqrt(self.head_dim), query_columns), dim=-1)  # head_dim + 3
        k = torch.cat((k, key_columns.expand(*k.shape[:-1], 3)), dim=-1)
        # as wide as all CUDA kernels take, a multiple of 8; on a CPU v has to be as wide, too
        zeros = -q.size(-1) % 8
        return F.pad(q, (0, zeros)), F.pad(k, (0, zeros)), F.pad(v, (0, 3 + zeros))


# --- RoPE


class RoPE(PositionEmbedding):
    """
    Rotary position embedding: pair m of the query (key) at position t turns by the angle t w_m.

    freqs: the frequencies, if they are not those of theta: a list of head_dim/2 numbers. scale and
    qk_factor are for a trained model that shall read further (YaRN, in baselines.py): a function of
    the frequencies that gives those to use, and a factor on q and k.
    """

    def __init__(self, *, freqs: list | None = None, scale=None, qk_factor=1.0, **kwargs):
        super().__init__(**kwargs)
        if self.head_dim % 2:
            raise PositionError(f"head_dim must be even, not {self.head_dim}: pairs turn")
        self.scale, self.qk_factor = scale, qk_factor
        freqs = rope_freqs(self.head_dim, self.theta) if freqs is None else torch.tensor(freqs)
        # not saved: the frequencies follow from the config
        self.register_buffer("freqs", freqs.float(), persistent=False)
        self.forget_tables()
        self.register_load_state_dict_post_hook(RoPE.forget_tables)

    def scaled_freqs(self):
        """The frequencies that pairs turn at, on the CPU."""
        freqs = self.freqs.cpu()
        return freqs if self.scale is None else self.scale(freqs)

    def make_tables(self, T):
        """cos and sin of positions 0 .. T-1, on the CPU: two (T, head_dim/2)."""
        return rotation_tables(self.scaled_freqs(), T)

    def rotate(self, q, k):
        cos, sin = self.tables(q.size(-2))
        return apply_rotation(q, cos, sin), apply_rotation(k, cos, sin)

    # The tables are kept. They are no buffers: DDP would copy those of one process over another's,
    # which may be longer.

    def tables(self, T):
        """
        make_tables(T) on the device, times qk_factor. Kept for the longest text so far, its length
        rounded up to a power of two: a text that grows by a token seldom needs new ones. With
        parameters of your own they are new at every call, since they may depend on these.
        """
        learns = next(self.parameters(), None) is not None
        if learns or self.cos is None or self.cos.size(-2) < T:
            cos, sin = self.make_tables(1 << (T - 1).bit_length())
            self.cos = (cos * self.qk_factor).to(self.freqs.device)
            self.sin = (sin * self.qk_factor).to(self.freqs.device)
        return self.cos[..., :T, :], self.sin[..., :T, :]

    def forget_tables(self, *_):
        """Called when weights are loaded; to be called when frequencies or coefficients change."""
        self.cos = self.sin = None

    def _apply(self, fn, recurse=True):
        """To another device, but to no other dtype: rounded frequencies would turn other angles."""
        self.forget_tables()
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)


# --- FoPE as a module, with what the released code does otherwise


class FoPE(RoPE):
    """
    Fourier Position Embedding. RoPE turns pair k at position t by the angle t w_k, for which it
    needs the angle's cosine and sine. FoPE changes these two, in three steps:

    1. Floor. It keeps the D frequencies that complete a turn in train_len tokens: of the 32 in a
       head of 64 dimensions, and trained at 512 tokens, these are 16.
    2. Series. In the first K pairs (by default K = D, but at most head_dim/4) a sum over all kept
       frequencies takes the place of the cosine, sum over d of cos(t w_d) cos_coef[d, k], and
       likewise of the sine. A coefficient is 1 for the pair's own frequency and 0 for the others,
       plus a small random number, the noise.
    3. Constants. All pairs after the first K are stopped: at every position their cosine is 1, and
       their sine is sin_pad.

    Each head has coefficients of its own: cos_coef and sin_coef (n_head, D, K). The noise is drawn
    once, by torch's global random generator. The coefficients are saved with a model but never
    trained.

    sigma: the size of the noise. With sigma=0 there is none. If also K = D, as by default at 512
        tokens, the floor alone is left.
    floor: True is the floor of the training length; a longer text does not change it. floor=256 is
        the floor of 256 tokens. floor=False keeps all frequencies: the series alone.
    fourier_dim: take the frequencies that RoPE has in a head of this size instead of head_dim. They
        lie closer together, so more of them pass the floor.
    variant: "released" is the authors' repository, which has the paper's models of text. "paper" is
        as near to the equations as an embedding that turns q and k can be.

                                 "released"                              "paper"
        K                        min(D, head_dim/4); with floor=False D  D
        noise                    xavier_normal_ of torch, gain sigma     normal
        its standard deviation   sigma sqrt(2 / (K (D + n_head)))        sigma
        sin_pad                  1                                       0

        There are only head_dim/2 pairs, so K is never larger. Pairs and frequencies are counted
        from 0. Pair k has frequency number d = k ceil(D/K) as its own. If D = K, as at 512 tokens,
        this is number k. At 1024 tokens D = 18 and K = 16: then pair 1 has number 2, pair 8 has
        number 16, and the pairs from 9 on have none, since there is no number 18. They have noise
        alone; with sigma=0 their cosine and sine are zero.

    cap: whether head_dim/4 limits K in the released variant. With cap=False K is D, and each
        frequency stays on the pair that RoPE has it on. So a model that was trained with RoPE needs
        cap=False; train.py --init_from sets it.
    sin_pad: the sine of the stopped pairs; by default the variant's. With sin_pad=1 such a
        pair is turned by 45 degrees and stretched by sqrt(2), in q and in k. In q.k the two factors
        make 2: the pair counts double, also with sigma=0. A model must be read with the sin_pad
        that it was trained with.

    The paper's words and the authors' code differ in two more ways. The paper calls sigma a
    variance, but it is used as a standard deviation. And in Eq. 11-13 the score of query i and key
    j has one series, which depends on i - j alone. The authors' code and ours, in both variants,
    turn q and k separately, so the score has a product of two series. With noise this product
    depends on i and on j, not only on i - j: it loses what makes RoPE a relative embedding.
    """

    def __init__(
        self,
        *,
        sigma: float = 0.3,
        floor: bool | int = True,
        fourier_dim: int | None = None,
        variant: str = "released",
        cap: bool = True,
        sin_pad: float | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if variant not in ("released", "paper"):
            raise PositionError(f"variant must be released or paper, not {variant}")
        if cap not in (True, False):
            raise PositionError(f"cap must be true or false, not {cap}")
        if not 0 <= sigma < math.inf:
            raise PositionError(f"sigma must be a number from 0 on, not {sigma}")
        if floor < 0:
            raise PositionError(f"floor must be a number of tokens, not {floor}")
        if fourier_dim is not None and not fourier_dim >= self.head_dim:
            raise PositionError(f"fourier_dim must be at least head_dim, not {fourier_dim}")
        floor_len = self.train_len if floor is True else floor
        freqs = rope_freqs(fourier_dim, self.theta) if fourier_dim else self.freqs
        kept = above_floor(freqs, floor_len) if floor_len else freqs
        D = K = len(kept)
        if variant == "released" and floor and cap:
            K = min(D, self.head_dim // 4)
        K = min(K, self.head_dim // 2)
        if K == 0:
            raise PositionError(
                f"no frequency of head_dim {self.head_dim} passes the floor of {floor_len}"
            )
        self.sigma, self.variant = sigma, variant
        self.sin_pad = float(variant == "released") if sin_pad is None else sin_pad
        self.register_buffer("freqs", kept)  # (D,) instead of RoPE's, saved with their coefficients
        self.register_buffer("sin_coef", self.identity(D, K) + self.draw_noise(D, K))
        self.register_buffer("cos_coef", self.identity(D, K) + self.draw_noise(D, K))

    def identity(self, D, K):
        """Weight 1 where the table above says: (D, K)."""
        d = torch.arange(0, D, math.ceil(D / K))  # over a step of 1 there may be fewer than K
        identity = torch.zeros(D, K)
        identity[d, torch.arange(len(d))] = 1.0
        return identity

    def draw_noise(self, D, K):
        """Noise of the size that the table above says, drawn at every call: (n_head, D, K)."""
        noise = torch.empty(self.n_head, D, K)
        if self.variant == "paper":
            return nn.init.normal_(noise, std=self.sigma)
        # xavier takes a tensor of three dimensions for a convolution: fans D K and n_head K
        return nn.init.xavier_normal_(noise, gain=self.sigma)

    def make_tables(self, T):
        """cos and sin of positions 0 .. T-1, on the CPU: two (n_head, T, head_dim/2)."""
        coefs = self.cos_coef.cpu(), self.sin_coef.cpu()
        return fourier_tables(*super().make_tables(T), *coefs, self.head_dim // 2, self.sin_pad)


POSITION_EMBEDDINGS = {"nope": NoPE, "alibi": ALiBi, "rope": RoPE, "fope": FoPE}
# the paper's other baselines, in a file that is read where one of them is named
POSITION_EMBEDDINGS |= {"kerple": "baselines.KERPLE", "fire": "baselines.FIRE"}
POSITION_EMBEDDINGS |= {"rope_a": "baselines.RoPEA", "rope_taper": "baselines.TaperedRoPE"}
