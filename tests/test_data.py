"""Text to shards and back, and everything that can be wrong with either."""

import gzip
import hashlib
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import refuses, write_text

import common
import prepare_data
from data import Batches, TokenData, load_tokenizer, read_shard
from prepare_data import split_documents, strip_gutenberg, write_shard
from tasks import QUESTION


def prepare(out, *argv):
    prepare_data.main([*map(str, argv), "--out", str(out)])
    return out


def is_validation(text, val_frac):
    first = hashlib.sha256(text.encode()).digest()[:8]
    return int.from_bytes(first, "big") < val_frac * 2**64


def read_all(token_data):
    return token_data.read(0, len(token_data))


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def json_lines(path, texts):
    """With a blank line at the end."""
    with gzip.open(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": t, "url": "x"}) + "\n" for t in texts)
        f.write("\n")
    return path


# --- shards


def test_shard_round_trip(tmp_path):
    write_shard(tmp_path / "x.bin", np.array([0, 1, 256, 65535], dtype=np.uint16))
    assert read_shard(tmp_path / "x.bin").tolist() == [0, 1, 256, 65535]
    header = np.fromfile(tmp_path / "x.bin", dtype="<i4", count=256)  # the public layout
    assert header.tolist() == [20240520, 1, 4] + [0] * 253
    assert (tmp_path / "x.bin").stat().st_size == 1024 + 2 * 4


def test_shards_are_read_as_one_sequence(tmp_path):
    """The window order must not see where one shard ends."""
    text = write_text(tmp_path / "text")
    flags = ["--source", text, "--tokenizer", "byte", "--val_frac", "0.2"]
    one = TokenData(prepare(tmp_path / "one", *flags), "train")
    many = TokenData(prepare(tmp_path / "many", *flags, "--shard_tokens", "3000"), "train")
    assert len(one.shards) == 1 and len(many.shards) > 5
    assert np.array_equal(read_all(one), read_all(many))
    rng = np.random.default_rng(0)
    for _ in range(50):
        start = int(rng.integers(len(one)))
        n = int(rng.integers(1, len(one) - start + 1))
        assert np.array_equal(many.read(start, n), one.read(start, n))


def test_published_gpt2_shards_load_without_meta_json(tmp_path):
    for name, start in (("train_000002", 100), ("train_000001", 0), ("val_000000", 0)):
        tokens = np.arange(start, start + 100, dtype=np.uint16)
        write_shard(tmp_path / f"fineweb_{name}.bin", tokens)
    data = TokenData(tmp_path, "train")
    assert data.read(0, len(data)).tolist() == list(range(200))
    assert data.meta["vocab_size"] == 50257


SHARD = "train_000000.bin"


@pytest.mark.parametrize(
    "harm",
    [
        lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:-1]),
        lambda d: (d / SHARD).write_bytes(b"\0" + (d / SHARD).read_bytes()[1:]),
        lambda d: (d / "meta.json").unlink(),
        lambda d: (d / "tokenizer.tiktoken").unlink(),
    ],
)
def test_damaged_data_is_refused_with_a_sentence(data_folder, tmp_path, harm):
    out = shutil.copytree(data_folder, tmp_path / "out")
    harm(out)
    refuses(lambda argv: TokenData(out, "train"), [], str(out))


# --- documents and their split


def test_documents_come_back_in_order_and_split_by_document(tmp_path):
    """Each whole, by its hash: one that occurs twice is in one split."""
    texts = [f"Speech {i}: né, 你好, <|endoftext|> and\n\nmore {i * i}." * 20 for i in range(150)]
    source = json_lines(tmp_path / "a.json.gz", texts + texts[:50])
    out = prepare(tmp_path / "out", "--source", source, "--tokenizer", "byte")
    encoding = load_tokenizer("byte", out)
    for split in ("train", "val"):
        tokens = read_all(TokenData(out, split))
        parts = np.split(tokens, np.flatnonzero(tokens == encoding.eot_token) + 1)
        assert len(parts.pop()) == 0, "the last document must end with the end-of-text token too"
        decoded = [encoding.decode(p[:-1].tolist()) for p in parts]
        in_split = [is_validation(t, 0.05) == (split == "val") for t in texts + texts[:50]]
        assert decoded == [t for t, here in zip(texts + texts[:50], in_split, strict=True) if here]
        assert decoded


def test_of_a_few_text_files_the_end_of_each_is_for_validation(tmp_path):
    """At a line's end; a twentieth, but at least 5,000 characters, and at most half."""
    lines = [f"line {i} of a text of one's own\n" for i in range(9000)]
    for name, n in (("long", 9000), ("middle", 1000), ("short", 40)):
        text = "".join(lines[:n])
        (tmp_path / f"{name}.txt").write_text(text)
        parts = dict(split_documents([tmp_path / f"{name}.txt"], 0.05, False))
        assert parts["train"] + parts["val"] == text and parts["train"].endswith("\n")
        wanted = max(len(text) / 20, min(5000, len(text) / 2))
        assert wanted - 50 < len(parts["val"]) <= wanted
    (tmp_path / "line.txt").write_text("one line " * 1000 + "\n")
    parts = dict(split_documents([tmp_path / "line.txt"], 0.05, False))
    assert len(parts["train"]) == 4501 and len(parts["val"]) == 4500


def test_more_than_twenty_documents_with_text_are_split_whole(tmp_path):
    texts = [f"text {i}\n" * 900 for i in range(20)]
    source = json_lines(tmp_path / "a.json.gz", [*texts, " \n"])  # what is blank is no text
    assert len(list(split_documents([source], 0.4, False))) == 40
    texts.append("one more")
    json_lines(source, texts)
    expected = [("val" if is_validation(text, 0.4) else "train", text) for text in texts]
    assert list(split_documents([source], 0.4, False)) == expected
    assert {split for split, _ in expected} == {"train", "val"}
    # but where none is for validation
    json_lines(source, [text for text in texts * 3 if not is_validation(text, 0.4)])
    assert {split for split, _ in split_documents([source], 0.4, False)} == {"train", "val"}


def test_the_tokenizer_is_trained_on_the_training_split_alone(tmp_path):
    texts = [word + str(i) for word in ("common " * 50, "zq " * 500) for i in range(60)]
    texts = [text for text in texts if is_validation(text, 0.3) == ("zq" in text)]
    source = json_lines(tmp_path / "a.jsonl.gz", texts)
    flags = ["--source", source, "--tokenizer=bpe:262", "--val_frac=0.3"]
    encoding = load_tokenizer("bpe:262", prepare(tmp_path / "out", *flags))
    learned = [encoding.decode_single_token_bytes(token) for token in range(256, 261)]
    assert any(b"mm" in token for token in learned) and not any(b"q" in token for token in learned)


def test_max_tokens_is_exact_and_ends_the_reading(tmp_path):
    """With validation documents in between; of one text its end is read for validation, too."""
    lines = json_lines(tmp_path / "a.jsonl.gz", [f"{i} " * 3000 for i in range(200)])
    with gzip.open(lines, "at") as f:
        f.write("damaged, but never reached")
    argv = ["--source", lines, "--tokenizer", "byte", "--val_frac", 0.3]
    argv += ["--max_tokens", 123456, "--shard_tokens", 50000]
    out = prepare(tmp_path / "out", *argv)
    assert len(list(out.glob("*.bin"))) == 4 and len(TokenData(out, "train")) == 123456
    (tmp_path / "a.txt").write_text("word " * 50_000)
    argv = ["--source", tmp_path / "a.txt", "--tokenizer", "byte", "--max_tokens", 1000]
    out = prepare(tmp_path / "one", *argv)
    assert len(TokenData(out, "train")) == 1000 and len(TokenData(out, "val")) > 10_000


def test_hub_files_take_the_local_path(tmp_path, monkeypatch):
    """c4: the named training files all to training, the validation file all to validation."""
    names = []

    def local(source, name):
        names.append(name)
        texts = [f"{name} document {i}" for i in range(20)]
        return json_lines(tmp_path / name.replace("/", "_"), texts)

    monkeypatch.setattr(prepare_data, "download", local)
    out = prepare(tmp_path / "out", "--source", "c4", "--shards", "4-5", "--tokenizer", "byte")
    expected = ["train.00004-of-01024", "train.00005-of-01024", "validation.00000-of-00008"]
    assert sorted(names) == [f"en/c4-{name}.json.gz" for name in expected]
    n_documents = [np.sum(read_all(TokenData(out, split)) == 256) for split in ("train", "val")]
    assert n_documents == [40, 20]


# --- what is read of a file

BOOK = "{}\n\nChapter I.\n*** not the end ***\nText.\n\n{}\nlicense"
GUTENBERG = [
    ("*** START OF THIS PROJECT GUTENBERG EBOOK A ***", "*** END OF THIS PROJECT GUTENBERG EBOOK"),
    ("*** START OF THE PROJECT GUTENBERG EBOOK A\nB ***", "*** END OF THE PROJECT GUTENBERG EBOOK"),
    ("***START**THE SMALL PRINT!**\n*END THE SMALL PRINT!*Ver.04*", "End of Project Gutenberg's A"),
    ("*END*THE SMALL PRINT! FOR PUBLIC DOMAIN*", "End of the Project Gutenberg EBook of A"),
]


@pytest.mark.parametrize("start, end", GUTENBERG)
def test_gutenberg_headers_and_footers_are_cut(start, end):
    """Also of several books in one file."""
    whole = "The Project Gutenberg EBook\n" + BOOK.format(start, end) + "\n"
    text = "Chapter I.\n*** not the end ***\nText."
    assert strip_gutenberg(2 * whole) == f"{text}\n\n{text}"


def test_other_text_is_left_alone():
    text = "He read of the end of Project Gutenberg.\nEnd of Project Gutenberg is here.\n"
    text += "At the\nend of the Project Gutenberg e-book stands a license.\n* Start of Gutenberg\n"
    assert strip_gutenberg(text) == text


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_unwrap_joins_the_lines_of_paragraphs_alone(tmp_path, end):
    line = "It is a truth universally acknowledged, that a man in possession"
    prose = f"CHAPTER I.\n\n{line}\n{line}\nof a good fortune.\n\n{line}\nends.\n\n"
    verse = f"  {line}\n  {line}\nRoses are red,\nviolets are blue.\n\n\n{line}"
    joined = f"CHAPTER I.\n\n{line} {line} of a good fortune.\n\n{line} ends.\n\n"
    text = json.dumps({"text": (prose + verse).replace("\n", end)})
    (tmp_path / "a.jsonl").write_text(text)
    for unwrap, expected in ((True, joined + verse), (False, prose + verse)):
        assert list(split_documents([tmp_path / "a.jsonl"], 0.0, unwrap)) == [("train", expected)]


def test_a_folder_is_searched_but_for_what_is_hidden(tmp_path):
    read = ["B.TXT", "a.txt", "c.Txt.Gz", "sub/d.JSONL", "sub/e.json.gz"]
    hidden = [".a.txt", "._b.txt", ".ipynb_checkpoints/a-checkpoint.txt", "sub/.Trash/deep/a.txt"]
    for name in [*read, *hidden, "picture.png", "a.txt.bak"]:
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text("x")
    found = prepare_data.expand([tmp_path / "x", tmp_path / "x" / "a.txt"])
    assert [str(path.relative_to(tmp_path / "x")) for path in found] == read
    assert prepare_data.expand([tmp_path / "x" / ".a.txt"]), "who names it wants it"


LINES = b'{"text": "one"}\n' * 3


@pytest.mark.parametrize(
    "name, content, line",
    [
        ("a.json.gz", gzip.compress(LINES * 1000, mtime=0)[:-20], "line"),
        ("a.jsonl", LINES + b"{oops\n" + LINES, "line 4"),
        ("a.jsonl", LINES + b'{"text": null}\n', "line 4"),
        ("a.txt", b"fine\nfine\nl\xe4tin\n", "line 3"),
    ],
)
def test_damaged_source_is_refused_with_file_and_line(tmp_path, name, content, line):
    """A shard finished before the damage may stay; none may pass as the whole."""
    (tmp_path / name).write_bytes(content)
    argv = ["--source", tmp_path / name, "--tokenizer", "byte", "--shard_tokens", "5"]
    refuses(prepare_data.main, [*argv, "--out", tmp_path / "out"], str(tmp_path / name), line)
    assert not (tmp_path / "out" / "meta.json").exists() and not list(tmp_path.glob("out/*.tmp"))


@pytest.mark.parametrize(
    "argv, word",
    [
        (["--source", "EMPTY.txt"], "EMPTY.txt"),
        (["--source", "nowhere"], "nowhere"),
        (["--source", "a.txt", "--tokenizer", "bpe:65537"], "unknown tokenizer 'bpe:65537'"),
        (["--source", "a.txt", "--val_frac", "2"], "--val_frac"),
        (["--source", "c4", "--shards", "0-9999999999"], "--shards"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(tmp_path, monkeypatch, argv, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY.txt").write_text(" \n")
    (tmp_path / "a.txt").write_text("x")
    default = [] if "--tokenizer" in argv else ["--tokenizer", "byte"]
    refuses(prepare_data.main, [*argv, *default, "--out", tmp_path / "out"], word)


# --- a data folder


def test_what_was_cut_off_is_not_read_and_comes_to_the_same_bytes(tmp_path, monkeypatch):
    text = write_text(tmp_path / "text")
    argv = ["--source", text, "--tokenizer=bpe:400", "--val_frac=0.3", "--shard_tokens=2000"]
    whole, cut = prepare(tmp_path / "whole", *argv), tmp_path / "cut"

    def write_shard_or_die(path, tokens):
        if path.name == "train_000003.bin":
            raise KeyboardInterrupt
        return write_shard(path, tokens)

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(prepare_data, "write_shard", write_shard_or_die)
        prepare(cut, *argv)
    refuses(lambda argv: TokenData(cut, "train"), [], str(cut))
    prepare(cut, *argv)
    assert content(cut) == content(whole) and len(content(whole)) > 8


def test_finished_data_is_not_made_again_and_not_overwritten(tmp_path, capsys):
    text = write_text(tmp_path / "text")
    argv = ["--source", text, "--tokenizer", "byte", "--val_frac", 0.2]
    out = prepare(tmp_path / "out", *argv)
    before = content(out)
    prepare(out, *argv)
    assert "nothing to do" in capsys.readouterr().out
    refuses(prepare_data.main, [*argv[:-2], "--out", out], str(out))
    edited = (text / "000.txt").read_text().replace("Document", "document")
    (text / "000.txt").write_text(edited)
    refuses(prepare_data.main, [*argv, "--out", out], str(out))
    assert content(out) == before


@pytest.mark.parametrize("name", ["train_000000.bin", "config.json"])
def test_published_shards_and_a_training_run_are_not_overwritten(tmp_path, name):
    (out := tmp_path / "out").mkdir()
    (out / name).write_bytes(b"theirs")
    argv = ["--source", write_text(tmp_path / "text"), "--tokenizer=bpe:300", "--out", out]
    with common.lock(out):
        refuses(prepare_data.main, argv, "another command is writing to")
    refuses(prepare_data.main, argv, name)
    assert content(out) == {name: b"theirs"}


def test_one_vocabulary_serves_several_folders(data_folder, tmp_path):
    """--tokenizer FOLDER: the same ids, and a run trained on one can be read on the other."""
    argv = ["--source", write_text(tmp_path / "text"), "--tokenizer", data_folder, "--val_frac", 1]
    other, own = TokenData(prepare(tmp_path / "other", *argv), "val"), TokenData(data_folder, "val")
    assert other.tokenizer_id == own.tokenizer_id and " " in own.tokenizer_id
    assert other.sha256() == [other.meta["shards"][0]["sha256"][:16]]


# --- batches


def recipe(**fields):
    plain = dict(train_len=256, batch_size=4, seed=0, task="", task_share=0.0)
    return SimpleNamespace(**plain | fields)


def test_every_window_is_visited_once_per_epoch(data_folder):
    tokens = TokenData(data_folder, "train")
    batches = Batches(tokens, recipe(train_len=50, batch_size=1))
    n = batches.n_windows
    assert n == (len(tokens) - 1) // 50
    starts = {tuple(tokens.read(i * 50, 51)): i for i in range(n)}
    epochs = [[starts[tuple(batches.sequence(e * n + i))] for i in range(n)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(n))
    assert epochs[0] != epochs[1] != list(range(n))
    other = Batches(tokens, recipe(train_len=50, batch_size=1, seed=1))
    assert epochs[0] != [starts[tuple(other.sequence(i))] for i in range(n)]


def test_passkeys_are_evenly_mixed_in_and_leave_the_text_order_alone(data_folder):
    tokens = TokenData(data_folder, "train")
    encoding = tokens.tokenizer()
    mixed = Batches(tokens, recipe(seed=1, task="passkey", task_share=0.3))
    plain = Batches(tokens, recipe(seed=1))
    kinds, text, documents = [], [], []
    for i in range(100):
        sequence = mixed.sequence(i)
        assert len(sequence) == 257
        kinds.append(QUESTION in encoding.decode(sequence.tolist()))
        (documents if kinds[-1] else text).append(sequence)
    assert sum(kinds) == 30 and all(2 <= sum(kinds[i : i + 10]) <= 4 for i in range(0, 100, 10))
    assert all(np.array_equal(a, plain.sequence(i)) for i, a in enumerate(text))
    assert not np.array_equal(*documents[:2])
    other = Batches(tokens, recipe(seed=2, task="passkey", task_share=1.0))
    assert not np.array_equal(documents[0], other.sequence(0))
    assert all(document[-1] == tokens.meta["eot"] for document in documents)


# --- tokenizers


def test_bpe_has_one_token_a_digit_and_loses_nothing(tmp_path):
    """Also where a number stands often in the text."""
    (tmp_path / "a.txt").write_text("In 1790 and 1790, $31.50 of words\n" * 900)
    flags = ["--source", tmp_path / "a.txt", "--tokenizer=bpe:266"]
    encoding = load_tokenizer("bpe:266", prepare(tmp_path / "out", *flags))
    assert encoding.n_vocab == 266 and encoding.eot_token == 265
    for text in ["1790", "In 1790, $31.50 — ¿qué? 你好\n\n  tabs\tand  spaces "]:
        tokens = encoding.encode_ordinary(text)
        assert encoding.decode(tokens) == text
        with_digit = [t for t in tokens if any(c.isdigit() for c in encoding.decode([t]))]
        assert len(with_digit) == sum(c.isdigit() for c in text)


def test_the_default_tokenizer_depends_on_the_text(tmp_path):
    """byte for a short one, bpe:2048 for a long one, for which this is too monotonous."""
    source = tmp_path / "a.txt"
    source.write_text("some words " * 2000)
    assert TokenData(prepare(tmp_path / "short", "--source", source), "train").meta["eot"] == 256
    source.write_text("some words " * 100_000)
    refuses(prepare_data.main, ["--source", source, "--out", tmp_path / "long"], "2048")
