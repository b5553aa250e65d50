"""
A GPT with a switchable position embedding: pre-norm RMSNorm, SwiGLU, no biases, no dropout,
untied embeddings.

Everything about position is behind `self.pos` (fope.py, baselines.py). Nothing here knows a
maximum length: train_len is only what the embedding is told, and any T can be read afterwards.

    model = GPT(GPTConfig(pos="fope", train_len=512))
    loss = model(idx, targets)      # idx, targets (B, T) -> scalar
    logits = model(idx)             # (B, T, vocab_size)
"""

from dataclasses import dataclass, field
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import sdpa_kernel

from fope import POSITION_EMBEDDINGS, SDPA_WITHOUT_CUDNN, PositionEmbedding, PositionError, RoPE

# --- what a model is


def option(default, meaning=""):
    """A dataclass field: its default, and what it means, for --help."""
    if default == {}:
        return field(default_factory=dict, metadata={"help": meaning})
    return field(default=default, metadata={"help": meaning})


@dataclass
class GPTConfig:
    pos: str = option("fope", "position embedding, or a class in a file of your own, as mine.Class")
    pos_args: dict = option({}, "keywords of the embedding, such as variant=paper sigma=0.4")
    rope_scaling: dict | None = option(None, "with --init_from, for example kind=yarn factor=16")
    train_len: int = option(512, "tokens in a training sequence")
    vocab_size: int = option(50257)
    n_layer: int = option(8, "number of blocks")
    n_head: int = option(8, "attention heads in a block")
    head_dim: int = option(64, "width of a head; n_head * head_dim need not be n_embd")
    n_embd: int = option(512, "width of the model")
    theta: float = option(10000.0, "base of RoPE's frequencies theta^(-2m/head_dim)")
    init_std: float = option(0.02, "standard deviation of new matrices, cut off at 3 of them")
    qk_norm: bool = option(False, "normalise queries and keys before the rotation")
    seed: int = option(0, "seed of the weights, FoPE's random numbers and the order of the data")


def embedding_class(pos):
    """That of a name in POSITION_EMBEDDINGS, or of a file of one's own, as mine.Class."""
    cls = POSITION_EMBEDDINGS.get(pos, pos)
    if isinstance(cls, str):
        module, _, name = cls.rpartition(".")
        cls = getattr(import_module(module), name, None) if module else None
    if not (isinstance(cls, type) and issubclass(cls, PositionEmbedding)):
        raise PositionError(f"{pos} is no PositionEmbedding")
    return cls


def make_pos(config):
    """The position embedding that a config names."""
    shape = dict(head_dim=config.head_dim, theta=config.theta)
    kwargs = dict(**shape, n_head=config.n_head, train_len=config.train_len)
    if config.rope_scaling:
        from baselines import rope_scaling  # here, since few models need it

        kwargs |= rope_scaling(**config.rope_scaling, **shape)
    return embedding_class(config.pos)(**kwargs, **config.pos_args)


# --- the network


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6), times a learned weight. On a CPU 1.5 times as fast as torch's."""

    def __init__(self, n_embd):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))

    def forward(self, x):
        return x * (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Attention(nn.Module):
    """Causal self-attention. All that it knows of positions is in self.pos."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.head_dim
        width = config.n_head * config.head_dim
        self.qkv = nn.Linear(config.n_embd, 3 * width, bias=False)
        self.proj = nn.Linear(width, config.n_embd, bias=False)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(config.head_dim, eps=1e-6, bias=False)
            self.k_norm = nn.LayerNorm(config.head_dim, eps=1e-6, bias=False)
        self.pos = make_pos(config)

    def forward(self, x):
        B, T, _ = x.size()
        qkv = self.qkv(x).view(B, T, 3, self.n_head, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, n_head, T, head_dim)
        q, k = self.pos.rotate(self.q_norm(q), self.k_norm(k))
        y = self.pos.attend(q, k, v)  # (B, n_head, T, head_dim)
        return self.proj(y.transpose(1, 2).flatten(2))  # (B, T, n_embd)


class MLP(nn.Module):
    """SwiGLU: widen to 4 n_embd, gate, project back."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1 = RMSNorm(config.n_embd)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config, draw=True):
        """draw=False draws no matrices, for weights that will be loaded: this is faster."""
        super().__init__()
        self.config = config
        self.slice_loss = loss_and_gradient  # at the end of this file; compile_parts compiles it
        padded_vocab = -(-config.vocab_size // 128) * 128  # matrix products like multiples of 128
        with torch.random.fork_rng(devices=[]):  # leave the caller's random state alone
            # the CPU's generator alone: torch.manual_seed would also reseed every GPU's
            torch.default_generator.manual_seed(config.seed)
            self.embed = nn.Embedding(padded_vocab, config.n_embd)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.norm = RMSNorm(config.n_embd)
            self.head = nn.Linear(config.n_embd, padded_vocab, bias=False)
            # again: the weights must not depend on how much the embedding has drawn
            torch.default_generator.manual_seed(config.seed)
            std = config.init_std
            for name, module in self.named_modules() if draw else ():
                if isinstance(module, nn.Linear | nn.Embedding) and ".pos." not in name:
                    nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)

    def num_params(self):
        """Parameters in blocks and head, the paper's way to count: all but the input table."""
        return sum(p.numel() for p in self.parameters()) - self.embed.weight.numel()

    def flops_per_token(self):
        """Of training at train_len, by PaLM's count (Chowdhery et al., 2022, appendix B)."""
        c = self.config
        return 6 * self.num_params() + 12 * c.n_layer * c.n_head * c.head_dim * c.train_len

    def forward(self, idx, targets=None, *, positions=slice(None), reduction="mean"):
        """
        idx (B, T) token ids. Without targets: logits (B, T, vocab_size), or those of `positions`,
        an index into T. With targets (B, T): the mean cross-entropy in nats, or with
        reduction="none" the loss of each position, (B, T).
        """
        x = self.embed(idx)  # (B, T, n_embd)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, positions])[..., : self.config.vocab_size]
        return linear_cross_entropy(
            x, self.head.weight, targets, self.config.vocab_size, reduction, self.slice_loss
        )

    def compile_parts(self):
        """torch.compile by parts: one graph of it all would hold the logits of all positions."""
        for block in self.blocks:
            if isinstance(block.attn.pos, RoPE):  # tables made within would cost a second graph
                block.attn.pos.tables(self.config.train_len)
            block.compile()
        self.slice_loss = torch.compile(loss_and_gradient)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, *, temperature=1.0, top_k=None, generator=None):
        """
        Yields the next token (B, 1) of idx (B, T), max_new_tokens times. temperature 0 takes the
        most likely one. The whole text is read again for each: slow, and at every length the same
        computation as in training.
        """
        for _ in range(max_new_tokens):
            with sdpa_kernel(SDPA_WITHOUT_CUDNN):
                logits = self(idx, positions=[-1])[:, 0].float()  # (B, vocab_size)
            if temperature < 1e-6:  # logits / temperature would overflow
                next_token = logits.argmax(dim=-1, keepdim=True)
            else:
                if top_k is not None:
                    kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, -float("inf"))
                probs = F.softmax(logits / temperature, dim=-1)
                next_token = torch.multinomial(probs, num_samples=1, generator=generator)
            idx = torch.cat((idx, next_token), dim=1)
            yield next_token


# --- the loss, in slices: at T = 8192 and a vocabulary of 50k the logits of one sequence are 1.6 GB

LOGITS_PER_SLICE = 2**25  # 128 MiB in fp32


def sliced_logits(x, weight, vocab_size):
    """
    Yields slices of the N rows of x (N, C) and their logits x weight^T, -inf where the vocabulary
    is only padded. N is halved until a slice fits, since slices of one size compile to one graph.
    On CUDA slices are larger: each of them reads and writes the gradient of all weights.
    """
    n_rows, most = len(x), LOGITS_PER_SLICE * (8 if x.is_cuda else 1)
    while n_rows * len(weight) > most:
        n_rows = -(-n_rows // 2)
    for start in range(0, len(x), n_rows):
        rows = slice(start, start + n_rows)
        logits = F.linear(x[rows], weight)
        logits[:, vocab_size:] = -torch.inf
        yield rows, logits


def loss_and_gradient(logits, targets):
    """Summed cross-entropy of logits (N, V), and its gradient, softmax minus one-hot."""
    log_probs = F.log_softmax(logits, dim=1, dtype=torch.float32)
    loss = -log_probs.gather(1, targets[:, None]).sum()
    # by comparison: compiled, a scatter would first write all probabilities in fp32
    one_hot = torch.arange(logits.size(1), device=logits.device) == targets[:, None]
    # in fp32: bf16 would round a probability of 0.999 to 1, and the difference to 0
    return loss, log_probs.exp_().sub_(one_hot.to(torch.float32)).to(logits.dtype)


def linear_cross_entropy(
    x, weight, targets, vocab_size, reduction="mean", slice_loss=loss_and_gradient
):
    """
    Cross-entropy in nats of targets (B, T) under the logits x weight^T, x (B, T, C), weight (V, C),
    of whose rows only the first vocab_size are tokens; fp32. Its mean, a scalar, to be trained on;
    or with reduction="none" (B, T), for evaluation: with gradients it would keep all logits.
    slice_loss: loss_and_gradient, or the same compiled.
    """
    shape = targets.shape
    x, targets = x.flatten(0, -2), targets.flatten()  # (N, C), (N,)
    if reduction == "mean":
        return SlicedCrossEntropy.apply(x, weight, targets, vocab_size, slice_loss)
    losses = [
        F.cross_entropy(logits.float(), targets[rows], reduction="none")
        for rows, logits in sliced_logits(x, weight, vocab_size)
    ]
    return torch.cat(losses).view(shape)


class SlicedCrossEntropy(torch.autograd.Function):
    """
    The mean cross-entropy, whose gradients are made in the forward pass, while the logits of a
    slice are there. Making the logits again in the backward pass would cost 14 % more at 60M.
    (torch 2.13's own linear_cross_entropy does the same, but in fp32 under autocast.)
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, slice_loss):
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        x_cast, weight_cast = x.to(dtype), weight.to(dtype)
        loss, grad_x, grad_weight = 0.0, torch.empty_like(x), torch.zeros_like(weight)
        for rows, logits in sliced_logits(x_cast, weight_cast, vocab_size):
            slice_sum, gradient = slice_loss(logits, targets[rows])
            loss += slice_sum
            grad_x[rows] = gradient @ weight_cast
            grad_weight += gradient.T @ x_cast[rows]
        ctx.save_for_backward(grad_x, grad_weight)
        return loss / len(x)

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_weight = ctx.saved_tensors
        n = len(grad_x)
        return grad_loss / n * grad_x, grad_loss / n * grad_weight, None, None, None
