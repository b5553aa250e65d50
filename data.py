"""
What training and evaluation read: tokenizers, token shards, batches, windows of a text.

A shard is 256 little-endian int32 (magic 20240520, version 1, token count), then uint16 tokens:
the layout of llm.c and modded-nanogpt, whose published shards can be read here and ours there.
"""

import base64
import math
from bisect import bisect
from pathlib import Path

import numpy as np
import tiktoken
import torch

import common
from common import Bar, Refused
from tasks import task_class

EOT = "<|endoftext|>"

# --- tokenizers: "gpt2", "byte", or "bpe:N", trained on the text itself

# GPT-2's pattern, but with digits one by one, so that a number has as many tokens as digits
BPE_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def load_tokenizer(name, folder):
    """
    The tiktoken.Encoding of a tokenizer name; folder is where bpe:N has its tokenizer.tiktoken.
    The name may go on with the first digits of that file's sha256, as in TokenData.tokenizer_id:
    then another file is refused.
    """
    name, _, sha256 = name.partition(" ")
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as e:  # whatever the HTTP library raises
            why = f"tiktoken could not download GPT-2's files ({type(e).__name__})"
            raise Refused(f"{why}; offline it looks for them in $TIKTOKEN_CACHE_DIR") from None
    if name == "byte":
        ranks, pattern = {bytes([i]): i for i in range(256)}, r"[\s\S]{1,64}"
    else:
        path, pattern = Path(folder) / "tokenizer.tiktoken", BPE_PATTERN
        if not common.file_sha256(path).startswith(sha256):
            raise Refused(f"{path} is not the file that the tokens were made with")
        lines = map(bytes.split, path.read_bytes().splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    special = {EOT: len(ranks)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


# --- shards

MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256


def read_shard(path):
    """The tokens of one shard: a read-only memory map, uint16. Refused if it is no whole one."""
    size, header = Path(path).stat().st_size, np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    is_whole = len(header) == HEADER_INTS and size == 4 * HEADER_INTS + 2 * int(header[2])
    if not is_whole or (header[0], header[1]) != (MAGIC, VERSION):
        raise Refused(f"{path} is damaged or no token shard: its header does not fit its size")
    # a memmap's own slices are slow to make
    return np.asarray(np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER_INTS))


class TokenData:
    """
    The tokens of one split, "train" or "val", of a data folder, as one long sequence: len(data),
    data.read(start, n). A folder of published GPT-2 shards (fineweb_train_000001.bin, ...), which
    has no meta.json, is read too. Refused where anything is missing.
    """

    def __init__(self, folder, split):
        self.folder, self.split = Path(folder), split
        if (self.folder / "meta.json").exists():
            self.meta = common.read_json(self.folder / "meta.json")
            names = [s["name"] for s in self.meta["shards"] if s["split"] == split]
        else:
            self.meta = {"tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256, "shards": []}
            names = sorted(p.name for p in self.folder.glob("*.bin") if split in p.stem.split("_"))
            if f"{split}_000000.bin" in names:  # ours, not published ones
                raise Refused(f"{folder} has no meta.json, which prepare_data.py writes at its end")
        if not names:
            where = self.folder.absolute()
            raise Refused(f"{where} has no {split} text; prepare_data.py makes it (--val_frac)")
        self.tokenizer_id = tokenizer_id(self.meta)
        if self.tokenizer_id.startswith("bpe:"):
            self.tokenizer()  # now: what is trained without its tokenizer cannot be read later
        self.shards = [read_shard(self.folder / name) for name in names]
        self.starts = np.cumsum([0] + [len(s) for s in self.shards]).tolist()

    def __len__(self):
        return self.starts[-1]

    def read(self, start, n):
        """Tokens start .. start + n - 1 as int64, across shards."""
        tokens, done, i = np.empty(n, dtype=np.int64), 0, bisect(self.starts, start) - 1
        while done < n:
            part = self.shards[i][start + done - self.starts[i] :][: n - done]
            tokens[done : done + len(part)] = part
            done, i = done + len(part), i + 1
        return tokens

    def excerpt(self, n, rng):
        """n tokens in a row, from a random place."""
        if len(self) < n:
            raise Refused(f"{self.folder} has fewer than {n:,} tokens of {self.split} text")
        return self.read(int(rng.integers(len(self) - n + 1)), n)

    def sha256(self, split=None):
        """Of its own or another split: the first digits of each shard's; [] without a meta.json."""
        shards = [s for s in self.meta["shards"] if s["split"] == (split or self.split)]
        return [s["sha256"][:16] for s in shards]

    def tokenizer(self):
        return load_tokenizer(self.tokenizer_id, self.folder)


def tokenizer_id(meta):
    """What must agree between two data folders for their tokens to mean the same."""
    return f"{meta['tokenizer']} {meta.get('tokenizer_sha256', '')[:16]}".strip()


# --- batches


class Batches:
    """
    The training sequences as a pure function of their number, so that any step can be made again,
    by any process.

    Text is cut into windows of train_len; each is visited once per epoch, in an order that the
    seed and the epoch give. A share task_share of the sequences, evenly spread, are documents of
    a task, of the training length, instead.
    """

    def __init__(self, data, recipe):
        self.data, self.train_len, self.batch_size = data, recipe.train_len, recipe.batch_size
        self.seed, self.task_share = recipe.seed, recipe.task_share
        self.n_windows = (len(data) - 1) // self.train_len
        if self.n_windows < 1:
            raise Refused(f"{data.folder} has too few tokens for --train_len {self.train_len:,}")
        self.epoch, self.order = None, None
        if recipe.task:
            self.task = task_class(recipe.task)(data.tokenizer().encode_ordinary, data.excerpt)
            shortest = int(self.task.shortest * self.train_len)
            try:  # refused here, and not in the middle of training, if the prompt does not fit
                self.task.sample(shortest, np.random.default_rng(0))
            except Refused as e:
                raise Refused(
                    f"--train_len {self.train_len} is too short for --task {recipe.task}, whose "
                    f"trials have {shortest} tokens or more: {e}"
                ) from None

    def sequence(self, i):
        """
        The i-th sequence, train_len + 1 tokens, the last one the target of the others: a window of
        text, or a document of the task.
        """
        before = math.floor(i * self.task_share)  # documents of the task among the i sequences
        if math.floor((i + 1) * self.task_share) > before:
            rng = np.random.default_rng((self.seed, 1, before))
            return self.task.document(self.train_len, rng, self.data.meta["eot"])
        epoch, position = divmod(i - before, self.n_windows)
        if epoch != self.epoch:
            rng = np.random.default_rng((self.seed, 0, epoch))
            self.epoch, self.order = epoch, rng.permutation(self.n_windows)
        return self.data.read(int(self.order[position]) * self.train_len, self.train_len + 1)

    def batch(self, step, device):
        """This process's share of a step: (batch_size / world_size, train_len + 1) int64."""
        n = self.batch_size // common.world_size()
        first = step * self.batch_size + common.rank() * n
        batch = torch.from_numpy(np.stack([self.sequence(i) for i in range(first, first + n)]))
        if device.type == "cuda":  # on its way from pinned memory, while the GPU computes
            return batch.pin_memory().to(device, non_blocking=True)
        return batch.to(device)


# --- windows of a text, and their loss: training validates by it, evaluation measures it


def slices(n, length, device, show=False):
    """Those of n windows that this process reads, so many at once as fit: on a CPU in its cache."""
    n_rows = max(1, (2048 if device.type == "cpu" else 8192) // length)
    starts = range(common.rank() * n_rows, n, common.world_size() * n_rows)
    for i in Bar(starts, f"length {length}", disable=not show, leave=False):
        yield slice(i, i + n_rows)


def cut(tokens, length):
    """
    (inputs, targets), (n, length) each, of `tokens`, (S + 1,) or N such rows (N, S + 1), in
    non-overlapping windows: whole ones, of `length` inputs and the target of the last.
    """
    tokens = np.atleast_2d(tokens)
    end = (tokens.shape[1] - 1) // length * length
    return tokens[:, :end].reshape(-1, length), tokens[:, 1 : end + 1].reshape(-1, length)


@torch.no_grad()
def window_loss(model, tokens, length, show=False):
    """
    The loss in nats of `tokens`, int64, as cut() makes windows of them: (windows, length) fp64. Its
    mean is the loss per token. show: a progress bar.
    """
    inputs, targets = cut(tokens, length)
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    losses = torch.zeros(inputs.shape, dtype=torch.float64)  # on the CPU: not every GPU has fp64
    for rows in slices(len(inputs), length, device, show):
        x, y = (torch.from_numpy(a[rows]).to(device) for a in (inputs, targets))
        with common.autocast(device):
            losses[rows] = model(x, y, reduction="none").cpu()
    model.train(was_training)
    return common.all_reduce_sum(losses).numpy()  # each process has its own windows
