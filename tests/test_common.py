"""What the scripts share: errors in one sentence, files, where a result comes from."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import refuses

import common
from common import git_commit, read_json, write_json

# --- what the scripts need, and how they end

WITH_FOUR_PACKAGES = """
import sys
for package in ("rustbpe", "huggingface_hub", "matplotlib", "scipy", "transformers", "pytest"):
    sys.modules[package] = None  # an import of it fails
import eval_passkey, eval_perplexity, prepare_data, sample, train
prepare_data.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_torch_tiktoken_numpy_and_tqdm_suffice(tmp_path):
    (tmp_path / "text.txt").write_text("some text\n" * 900)
    argv = ["--source", tmp_path / "text.txt", "--tokenizer=byte", "--out", tmp_path / "data"]
    command = [sys.executable, "-c", WITH_FOUR_PACKAGES, *map(str, argv)]
    subprocess.run(command, cwd=common.ROOT, check=True)


FOREIGN = """
import torch
import fope, baselines
for cls in fope.POSITION_EMBEDDINGS.values():
    pos = cls(head_dim=16, n_head=2, train_len=20)
    q, k, v = torch.randn(3, 1, 2, 40, 16, requires_grad=True)
    pos.attend(*pos.rotate(q, k), v).sum().backward()
"""


def test_the_embeddings_serve_in_a_foreign_project(tmp_path):
    """Their two files in a folder of their own need torch alone."""
    for name in ("fope.py", "baselines.py"):
        shutil.copy(common.ROOT / name, tmp_path)
    (tmp_path / "foreign.py").write_text(FOREIGN)
    subprocess.run([sys.executable, "foreign.py"], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    "error, code",
    [
        (MemoryError(), "error: out of memory; "),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "error: out of memory; "),
        (FileNotFoundError(2, "No such file", "x"), "error: x: No such file"),
        (KeyboardInterrupt(), "130"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(error, code):
    def main():
        raise error

    with pytest.raises(SystemExit) as info:
        common.one_sentence_errors(main)()
    assert str(info.value.code).startswith(code)


@pytest.mark.parametrize("error", [RuntimeError("shapes"), FileNotFoundError("x")])
def test_a_bug_keeps_its_traceback(error):
    def main():
        raise error

    with pytest.raises(type(error)) as info:
        common.one_sentence_errors(main)()
    assert info.value is error


# --- files


def test_json_is_read_back_as_it_was(tmp_path):
    content = {"names": ["two  blanks", " [x] ", "a\nb"], "rows": [[1, 2], []], "nothing": None}
    write_json(tmp_path / "x.json", content)
    assert read_json(tmp_path / "x.json") == content
    write_json(tmp_path / "x.json", [1, 2])
    assert read_json(tmp_path / "x.json") == [1, 2]


def test_damaged_json_is_refused_with_a_sentence(tmp_path):
    for content in (b"", b'{"a": \xff}'):
        (tmp_path / "x.json").write_bytes(content)
        refuses(lambda argv: read_json(*argv), [tmp_path / "x.json"], "x.json is damaged")
    refuses(lambda argv: read_json(*argv), [tmp_path / "y.json"], "y.json: No such file")


def test_a_disk_without_locks_is_written_to(tmp_path, monkeypatch):
    def no_locks(fd, how):
        raise OSError("No locks available")

    monkeypatch.setattr(common.fcntl, "flock", no_locks)
    with common.lock(tmp_path):
        assert tmp_path.exists()
    assert not tmp_path.exists()  # an empty folder, which a refusal would leave, goes


# --- provenance


def git(folder, *commands):
    for args in commands:
        subprocess.run(["git", *args.split()], cwd=folder, check=True)


COMMIT = "-c user.name=a -c user.email=a commit -q --allow-empty -m one"


def test_a_result_says_whether_the_code_was_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "ROOT", tmp_path / "fope")
    (tmp_path / "fope" / "results").mkdir(parents=True)
    paths = [tmp_path / "fope" / name for name in ("model.py", "mine.py", "results/x.json")]
    for path in paths:
        path.write_text("1")
    git(tmp_path, "init -q", "add .", COMMIT)
    assert git_commit() == "unknown"  # of somebody's repository, which the code lies in
    git(tmp_path / "fope", "init -q", "add model.py results", COMMIT)
    dirty = git_commit()
    assert dirty.endswith("-dirty") and len(dirty) == 18  # mine.py is new
    paths[1].unlink()
    paths[2].write_text("2")
    assert f"{git_commit()}-dirty" == dirty
    paths[0].write_text("2")
    assert git_commit() == dirty


def test_processes_on_gpus_reduce_tensors_of_the_cpu_too(monkeypatch):
    """Sums of results are on the CPU: with the GPU's backend alone the first of them would fail."""
    seen = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert common.init_distributed("cpu") == torch.device("cpu")  # torchrun did not start this
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    for name in ("LOCAL_RANK", "RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", seen.append)
    made = lambda *_, device: SimpleNamespace(device=torch.device(device))  # noqa: E731
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(common.dist, "init_process_group", seen.append)
    monkeypatch.setattr(common.atexit, "register", lambda call: None)
    assert common.init_distributed("cuda") == torch.device("cuda:1")
    assert seen == [1, "cpu:gloo,cuda:nccl"]
