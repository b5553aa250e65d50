"""
Small data and models that several tests share. No test needs a network.

Without --all only the quick tests run; those marked slow take seconds each.
"""

import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import prepare_data  # noqa: E402
import train  # noqa: E402
from baselines import POSITION_EMBEDDINGS, rope_scaling  # noqa: E402
from common import one_sentence_errors  # noqa: E402

os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(ROOT / ".venv" / "gpt2"))
torch.set_num_threads(1)  # small tensors are faster on one, and a busy machine slows two down


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes seconds, and runs only with --all")


def pytest_ignore_collect(collection_path, config):
    # its imports alone take longer than the quick suite may
    if collection_path.name == "test_hf.py" and not config.getoption("--all"):
        return True


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)


# -----------------------------------------------------------------------------
# data and runs


def write_text(folder, n_documents=40, n_words=400):
    """Documents of made-up words, the frequent ones very frequent, with some numbers in them."""
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioubcdlmnprst", k=rng.randint(2, 8))) for _ in range(300)]
    words += ["17", "2026", "3"]
    weights = [1 / (i + 1) for i in range(len(words))]
    folder.mkdir(parents=True, exist_ok=True)
    for d in range(n_documents):
        text = " ".join(rng.choices(words, weights=weights, k=n_words))
        (folder / f"{d:03d}.txt").write_text(f"Document {d}. {text}.\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """A prepared data folder with a bpe:512 tokenizer."""
    text = write_text(tmp_path_factory.mktemp("text"))
    out = tmp_path_factory.mktemp("data") / "small"
    flags = ["--tokenizer", "bpe:512", "--val_frac", "0.2"]
    prepare_data.main(["--source", str(text), *flags, "--out", str(out)])
    return out


# 20 steps of 128 tokens of a very small model
TRAIN_FLAGS = ["--n_layer=2", "--n_head=2", "--head_dim=16", "--n_embd=32", "--train_len=32"]
TRAIN_FLAGS += ["--batch_size=4", "--tokens=2560", "--eval_tokens=512"]


def run_training(data, out, *flags):
    train.main(["--data", str(data), "--out", str(out), *TRAIN_FLAGS, *flags])
    return out


@pytest.fixture(scope="session")
def checkpoint(data_folder, tmp_path_factory):
    """A run. No test may change what is in it."""
    return run_training(data_folder, tmp_path_factory.mktemp("runs") / "fope")


def weights(folder):
    """All that a checkpoint holds: weights, optimizer, step, and the log without its times."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    for line in state["log"]:
        del line["tokens_per_s"]
    return state


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def untimed_log(folder):
    """The log without what the clock alone decides."""
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in log(folder)]


def same(a, b):
    """Whether two nested states are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# -----------------------------------------------------------------------------
# embeddings


@pytest.fixture(params=list(POSITION_EMBEDDINGS))
def pos_name(request):
    return request.param


SHAPE = dict(head_dim=16, n_head=2, train_len=40)


def make_embedding(name="fope", scaling=None, **kwargs):
    """An embedding of that SHAPE, drawn from seed 0. scaling: keywords of rope_scaling."""
    torch.manual_seed(0)
    kwargs = {**SHAPE, **kwargs}
    if scaling:
        theta = kwargs.get("theta", 10000.0)
        kwargs |= rope_scaling(**scaling, head_dim=kwargs["head_dim"], theta=theta)
    return POSITION_EMBEDDINGS[name](**kwargs)


def draw_qkv(T, head_dim=16, n_head=2, seed=1):
    """q, k and v: (3, 2, n_head, T, head_dim)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, n_head, T, head_dim, generator=generator)


def softmax_attention(pos, q, k, v):
    """Attention by the formula: the softmax of all logits at once, of what a query may see."""
    t = torch.arange(q.size(-2), device=q.device)
    distance = t[:, None] - t
    visible = (distance >= 0) & (distance < (pos.window or torch.inf))
    return pos.scores(q, k).masked_fill(~visible, -torch.inf).softmax(dim=-1) @ v


# -----------------------------------------------------------------------------


def need_gpt2():
    """Skip where runs/setup.sh has not put GPT-2's files, since a test may not download them."""
    encoder = "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"  # as tiktoken names it
    if not (Path(os.environ["TIKTOKEN_CACHE_DIR"]) / encoder).exists():
        pytest.skip("GPT-2's vocabulary is not there; bash runs/test.sh installs it")


def refuses(main, argv, *words):
    """main(argv) must end with exit code 1 and one sentence that has these words, and no more."""
    with pytest.raises(SystemExit) as info:
        one_sentence_errors(main)([str(a) for a in argv])
    message = str(info.value.code)
    assert message.startswith("error: ") and "\n" not in message.strip(), message
    for word in words:
        assert word in message, message
    return message
