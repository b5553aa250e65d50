"""
A GPT with a switchable position embedding: pre-norm RMSNorm, SwiGLU, no biases, no dropout, untied embeddings.

Everything about position is behind `self.pos` (fope.py). Nothing here knows a maximum length: train_len is only what the
embedding is told, and any T can be read afterwards.

    config = GPTConfig.preset("60M", pos="fope", train_len=512)
    model = GPT(config)
    loss = model(idx, targets)      # idx, targets (B, T) -> scalar
    logits = model(idx)             # (B, T, vocab_size)
"""

import atexit
import json
import os
import re
import sys
import zipfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fope import POSITION_EMBEDDINGS

# name: (n_layer, n_head, n_embd). The paper's sizes (Table 3) count blocks + output head; the input table comes on top.
SIZES = {
    "tiny": (4, 4, 128),  # 1.0M in the blocks, for a CPU
    "20M": (8, 4, 256),
    "60M": (8, 8, 512),
    "180M": (8, 8, 1024),
    "1.2B": (16, 16, 2048),
}
INIT_STD = {"tiny": 0.05}  # GPT-2's 0.02 at a width of 768, times sqrt(768 / 128): narrow models start to learn sooner
FOPE_SIGMA = {"180M": 0.4, "1.2B": 0.6}  # Table 3; FoPE's own default 0.3 is the 60M value


@dataclass
class GPTConfig:
    pos: str = "fope"  # a name in fope.POSITION_EMBEDDINGS
    pos_args: dict = field(default_factory=dict)  # its further keywords, such as {"sigma": 0.4}
    train_len: int = 512  # tokens per training sequence
    vocab_size: int = 50257
    n_layer: int = 8
    n_head: int = 8
    n_embd: int = 512
    theta: float = 10000.0
    init_std: float = 0.02  # of all weight matrices, normal, cut off at three times this
    qk_norm: bool = False  # each query and key is normalised to mean 0 and variance 1 before it is rotated (Table 2)
    seed: int = 0  # of the weights and of the embedding's random coefficients

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @classmethod
    def preset(cls, name, **overrides):
        """The config of one of the SIZES, with any field overridden."""
        if name not in SIZES:
            raise ValueError(f"unknown preset {name!r}; known: {', '.join(SIZES)}")
        size = dict(zip(("n_layer", "n_head", "n_embd"), SIZES[name], strict=True))
        config = cls(**{**size, "init_std": INIT_STD.get(name, cls.init_std), **overrides})
        if config.pos == "fope" and name in FOPE_SIGMA:
            config.pos_args = {"sigma": FOPE_SIGMA[name], **config.pos_args}
        return config


def make_pos(config):
    """The position embedding that a config names. Raises ValueError for what it does not know."""
    if config.pos not in POSITION_EMBEDDINGS:
        raise ValueError(f"unknown position embedding {config.pos!r}; known: {', '.join(POSITION_EMBEDDINGS)}")
    shape = dict(head_dim=config.head_dim, n_head=config.n_head, train_len=config.train_len, theta=config.theta)
    try:
        return POSITION_EMBEDDINGS[config.pos](**shape, **config.pos_args)
    except TypeError as e:
        why = str(e).split("() ")[-1]
        raise ValueError(f"position embedding {config.pos!r} does not take {config.pos_args}: {why}") from None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6), times a learned weight. On a CPU in two thirds of the time of torch's own."""

    def __init__(self, n_embd):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))

    def forward(self, x):
        return x * (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.head_dim
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(config.head_dim, eps=1e-6, bias=False)
            self.k_norm = nn.LayerNorm(config.head_dim, eps=1e-6, bias=False)
        self.pos = make_pos(config)

    def forward(self, x):
        B, T, C = x.size()
        qkv = self.qkv(x).view(B, T, 3, self.n_head, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, n_head, T, head_dim)
        q, k = self.pos.rotate(self.q_norm(q), self.k_norm(k))
        y = self.pos.attend(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """SwiGLU: one projection to 8 n_embd, half of it the gate of the other half, back from 4 n_embd."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 8 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        # two products instead of one cut in two, whose gradient autograd would have to put together again
        up, gate = (F.linear(x, weight) for weight in self.up.weight.chunk(2))
        return self.down(F.silu(gate) * up)


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
    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd {config.n_embd} is not divisible by n_head {config.n_head}")
        self.config = config
        padded_vocab = -(-config.vocab_size // 128) * 128  # matrix products like multiples of 128
        with torch.random.fork_rng(devices=[]):  # leave the caller's random state alone
            torch.manual_seed(config.seed)
            self.embed = nn.Embedding(padded_vocab, config.n_embd)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.norm = RMSNorm(config.n_embd)
            self.head = nn.Linear(config.n_embd, padded_vocab, bias=False)
            self.slice_loss = loss_and_gradient
            torch.manual_seed(config.seed)  # again: the weights must not depend on how much the embedding has drawn
            std = config.init_std
            for name, module in self.named_modules():
                if isinstance(module, nn.Linear | nn.Embedding) and ".pos." not in name:
                    nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)

    def num_params(self):
        """Parameters in blocks and head, the way the paper counts its sizes: all but the input table."""
        return sum(p.numel() for p in self.parameters()) - self.embed.weight.numel()

    def forward(self, idx, targets=None, *, positions=slice(None), reduction="mean"):
        """
        idx (B, T) token ids. Without targets: logits (B, T, vocab_size), or those of `positions`, an index into T. With
        targets (B, T): the mean cross-entropy in nats, or with reduction="none" the loss of each position, (B, T).
        """
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, positions])[..., : self.config.vocab_size]
        loss = linear_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten(), reduction, self.slice_loss)
        return loss if reduction == "mean" else loss.view_as(targets)

    def compile_parts(self):
        """torch.compile what takes the time, part by part: one graph of it all would hold the logits of all positions."""
        for block in self.blocks:
            block.compile()
        self.slice_loss = torch.compile(loss_and_gradient)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, *, temperature=1.0, top_k=None, generator=None):
        """Append max_new_tokens to idx (B, T). temperature 0 takes the most likely token. The whole text is read again
        for each token: slow, and the same computation as in training at every length."""
        for _ in range(max_new_tokens):
            logits = self(idx, positions=[-1])[:, 0].float()
            if temperature == 0:
                next_token = logits.argmax(dim=-1, keepdim=True)
            else:
                if top_k is not None:
                    kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, -float("inf"))
                probs = F.softmax(logits / temperature, dim=-1)
                next_token = torch.multinomial(probs, num_samples=1, generator=generator)
            idx = torch.cat((idx, next_token), dim=1)
        return idx


def with_pos(model, **changes):
    """
    The same weights in a model whose position embedding or training length is another: changes are fields of GPTConfig,
    such as pos, pos_args and train_len. The new embedding inherits from the old one what it can. Both models are on the
    CPU. Returns the new one, and what has changed in words.
    """
    new = GPT(replace(model.config, **changes))
    weights = {name: weight for name, weight in model.state_dict().items() if ".pos." not in name}
    new.load_state_dict(weights, strict=False)
    for old_block, new_block in zip(model.blocks, new.blocks, strict=True):
        inherited = new_block.attn.pos.inherit(old_block.attn.pos)
    return new, f"from {old_block.attn.pos}\nto   {new_block.attn.pos}, {inherited}"


# -----------------------------------------------------------------------------
# devices and processes


def autocast(device):
    """bf16 where a CUDA device has it, fp32 elsewhere."""
    use_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.autocast("cuda", dtype=torch.bfloat16) if use_bf16 else nullcontext()


def join_processes(device):
    """
    The torch.device of this process. Where torchrun has started several, they join here: each takes a GPU of its own or
    shares the CPU, and all but the first stop printing. Raises ValueError for a device that is not there.
    """
    n_processes = int(os.environ.get("WORLD_SIZE", 1))
    if n_processes > 1 and device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"--device must be cpu or cuda, not {device}")
    try:
        device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device {device} cannot be used here: {str(e).splitlines()[0]}") from None
    if n_processes > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
        if dist.get_rank() > 0:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return device


def processes():
    """(rank of this process, number of processes) that torchrun has started and that have joined; (0, 1) without it."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_processes(tensor):
    """The sum of a tensor that every process has, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


# -----------------------------------------------------------------------------
# the loss

LOGITS_PER_SLICE = 2**25  # 128 MiB in fp32


def loss_and_gradient(logits, targets):
    """The summed cross-entropy of logits (N, V), and its gradient, softmax minus one-hot, in their dtype."""
    log_probs = F.log_softmax(logits, dim=1, dtype=torch.float32)
    loss = -log_probs.gather(1, targets[:, None]).sum()
    # minus one while it is fp32: bf16 would round a probability of 0.999 to 1, and the difference to 0
    gradient = log_probs.exp_().scatter_add_(1, targets[:, None], -torch.ones_like(log_probs[:, :1]))
    return loss, gradient.to(logits.dtype)


def linear_cross_entropy(x, weight, targets, reduction="mean", slice_loss=loss_and_gradient):
    """
    Cross-entropy in nats of x (N, C) under the logits x weight^T: weight (V, C), targets (N,) -> its mean, a scalar, or with
    reduction="none" (N,), fp32.

    At T = 8192 and 50k tokens the logits of one sequence are 1.6 GB, so they are made in slices of rows, each at most
    LOGITS_PER_SLICE. slice_loss: loss_and_gradient, or its compiled form.
    """
    rows = max(1, LOGITS_PER_SLICE // len(weight))
    if torch.is_grad_enabled() and reduction == "mean":
        return SlicedCrossEntropy.apply(x, weight, targets, rows, slice_loss)
    losses = [
        F.cross_entropy(F.linear(x[i : i + rows], weight).float(), targets[i : i + rows], reduction="none")
        for i in range(0, len(x), rows)
    ]
    loss = torch.cat(losses)
    return loss.mean() if reduction == "mean" else loss


class SlicedCrossEntropy(torch.autograd.Function):
    """
    The mean cross-entropy, whose gradients are made in the forward pass, while the logits of a slice are there: to make
    the logits again in the backward pass would be a seventh more work for the 60M model.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, rows, slice_loss):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        x_cast, weight_cast = x.to(dtype), weight.to(dtype)
        loss, grad_x, grad_weight = 0.0, torch.empty_like(x), torch.zeros_like(weight)
        for i in range(0, len(x), rows):
            part = slice(i, i + rows)
            logits = F.linear(x_cast[part], weight_cast)
            part_loss, gradient = slice_loss(logits, targets[part])
            loss += part_loss
            grad_x[part] = gradient @ weight_cast
            grad_weight += gradient.T @ x_cast[part]
        ctx.save_for_backward(grad_x, grad_weight)
        return loss / len(x)

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_loss / len(grad_x) * grad_x, grad_loss / len(grad_x) * grad_weight, None, None, None


# -----------------------------------------------------------------------------
# files


def write_atomically(path, write):
    """
    Call write(file), then rename: a run killed half-way, or a full disk, leaves the old file or the new one, never a half.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())  # before the rename, or a power cut could leave the new name without its content
        os.replace(temporary, path)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        disk = e if isinstance(e, OSError) else e.__context__  # torch.save has words of its own for a full disk
        if isinstance(disk, OSError):
            raise OSError(f"{path} could not be written ({disk.strerror or disk}); what it held before is untouched") from None
        raise


def write_json(path, content):
    """Indented, but with each innermost list on one line."""
    text = json.dumps(content, indent=1) + "\n"
    text = re.sub(r"\[\n([^\[\]{}]*?)\n *\]", lambda m: "[" + re.sub(r"\n *", " ", m[1]).strip() + "]", text)
    write_atomically(Path(path), lambda f: f.write(text.encode()))


def read_json(path):
    """A json object from a file. Raises ValueError or OSError with one sentence."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no file {path}") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is damaged: it is not JSON ({e})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is not a JSON object")
    return content


# -----------------------------------------------------------------------------
# checkpoints: a folder with config.json, to be read by people too, and checkpoint.pt (the same, weights, optimizer, step)


def save_checkpoint(folder, model, about=None, **state):
    """Write the model, its config, `about` (json: the data, tokenizer and flags it came from) and any further state."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model": asdict(model.config), **(about or {})}
    write_json(folder / "config.json", config)
    state = {"config": config, "model": model.state_dict(), **state}
    write_atomically(folder / "checkpoint.pt", lambda f: torch.save(state, f))


def load_checkpoint(folder, device="cpu"):
    """
    Read what save_checkpoint wrote: (model, about, state). The state's tensors stay on disk until they are used.

    Raises OSError or ValueError, each with one sentence, for a folder that is no checkpoint or is damaged.
    """
    folder = Path(folder)
    about = read_json(folder / "config.json")
    path = folder / "checkpoint.pt"
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint in {folder}: {path.name} is missing")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.save writes a zip with a checksum of every tensor
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"bad checksum of {damaged}")
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if state.get("config") != about:
            raise ValueError("it was saved with another config.json than the one beside it")
        model = GPT(GPTConfig(**about.pop("model")))
        model.load_state_dict(state["model"])
    except Exception as e:  # whatever a foreign or damaged file makes zipfile, pickle or torch raise
        reason = str(e).strip().split("\n")[0]
        raise ValueError(f"{path} is damaged or was not written by this project: {reason}") from None
    return model.to(device), about, state
