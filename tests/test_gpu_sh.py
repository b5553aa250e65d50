"""runs/gpu.sh: which commands it runs, with what budget, and how it goes on. Nothing is trained."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT

PYTHON = """#!{python}
import json, os, pathlib, sys, time
words = sys.argv[1:]
with open("calls", "a") as f:
    f.write(json.dumps(words) + "\\n")
if words[0] == "-c":
    os.execv({python!r}, [{python!r}, *words])
if words[0] == "train.py":
    out = pathlib.Path(words[words.index("--out") + 1])
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.jsonl").write_text('{{"step": 10, "tokens_per_s": 7}}\\n'
                                   '{{"step": 20, "tokens_per_s": 10000, "loss": 2.0}}\\n')
    if pathlib.Path("hang").exists() and out.name == "fope_s0":
        pathlib.Path("hanging").touch()
        time.sleep(60)
    (out / "passkey.json").write_text("{{}}")
"""


# what this shell may have set, and a newcomer has not
UNSET = ("TIKTOKEN_CACHE_DIR", "NO_INSTALL", "PYTHON")


@pytest.fixture
def project(tmp_path):
    """The script, with a python that notes how it is called and writes what follows need."""
    shutil.copytree(ROOT / "runs", tmp_path / "runs")
    for name in ("requirements.txt", "paper/requirements.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    venv = tmp_path / ".venv/bin"
    venv.mkdir(parents=True)
    (tmp_path / ".venv/gpt2").mkdir()
    (tmp_path / ".venv/gpt2/6c7ea1a7e38e3a7f062df639a5b80947f075ffe6").touch()  # encoder.json
    (venv / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    (venv / "python").write_text(PYTHON.format(python=sys.executable))
    (venv / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: fake\n")
    for file in ("python", "nvidia-smi"):
        (venv / file).chmod(0o755)
    return tmp_path


def command(project, *flags, gpu=True, **env):
    path = f"{project}/.venv/bin:{os.environ['PATH']}" if gpu else "/usr/bin:/bin"
    env = {**os.environ, "PATH": path, **dict.fromkeys(UNSET, ""), **env}
    how = dict(cwd=project, env=env, text=True)
    words = ["bash", "runs/gpu.sh", *flags]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, **how
    )


def run(project, *flags, gpu=True, **env):
    """(exit code, what it says, the calls of scripts of ours)."""
    (project / "calls").unlink(missing_ok=True)
    process = command(project, *flags, gpu=gpu, **env)
    output, _ = process.communicate(timeout=60)
    calls = (project / "calls").read_text() if (project / "calls").exists() else ""
    calls = [" ".join(json.loads(line)) for line in calls.splitlines()]
    return process.returncode, output, [c for c in calls if c.split()[0] not in ("-c", "-m")]


def test_the_commands_on_a_gpu(project):
    code, output, calls = run(project)
    assert code == 0, output
    assert "of the sequences 0 are passkeys" in output
    prepare, *calls = calls
    assert prepare.startswith("prepare_data.py --source gutenberg --unwrap --shards 2 --tokenizer")
    assert [c.split()[0] for c in calls] == ["train.py"] * 4
    out = "runs_out/20M_gpu_gutenberg_0"
    words = f"train.py --preset 20M --device cuda --data {out}/data --batch_size 128"
    assert calls[0].startswith(words)
    budget = "--tokens 400000000 --read_tokens 4194305 --trials 1000"
    words = f"--resume --pos rope {budget} --evaluate perplexity passkey --out {out}/rope_s0"
    assert calls[0].endswith(words)
    assert run(project)[2][1:] == []  # all is there


def test_minutes_are_measured_once(project):
    flags = ["--device", "cpu", "--task_share", "0.25", "--minutes"]
    code, output, calls = run(project, *flags, "8", gpu=False)
    assert code == 0 and "of the sequences 0.25 are passkeys" in output, output
    assert calls[1].endswith("--out runs_out/tiny_cpu_sotu_0.25/timing")
    # 10,000 tokens/s for 8 minutes, a fifth for each model and for reading, less some seconds
    budget = calls[2][calls[2].index("--tokens") :]
    assert 800_000 < int(budget.split()[1]) <= 960_000
    assert budget.endswith("passkey --out runs_out/tiny_cpu_sotu_0.25/rope_s0")
    assert "--task passkey --task_share 0.25 " in calls[2] and "--compile" not in calls[2]
    (project / "runs_out/tiny_cpu_sotu_0.25/rope_s0/passkey.json").unlink()
    _, _, calls = run(project, *flags, "99", gpu=False)
    assert calls[1].endswith(budget) and len(calls) == 2
    shutil.rmtree(project / "runs_out")  # and all that came before counts
    code, output, _ = run(project, *flags, "8", gpu=False, SECONDS="481")
    assert code == 1 and output.splitlines()[-1].endswith("s more than --minutes 8")


def test_stopped_and_started_again(project):
    (project / "hang").touch()
    process = command(project, "--device", "cpu")
    while not (project / "hanging").exists():
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130 and "the same command continues" in output
    (project / "hang").unlink()
    code, _, calls = run(project, "--device", "cpu")
    assert code == 0 and "--pos fope" in calls[1] and len(calls) == 1 + 3


def test_a_folder_of_shards_is_read_as_it_is(project):
    (project / "mine").mkdir()
    (project / "mine/meta.json").touch()
    code, output, calls = run(project, "--device", "cpu", "--data", "mine")
    assert code == 0, output
    assert calls[0].startswith(f"train.py --preset tiny --device cpu --data {project}/mine ")


def test_nothing_is_installed(project):
    shutil.move(project / ".venv/bin", project / "bin")
    how = dict(gpu=False, NO_INSTALL="1")
    flags = ["--device", "cpu", "--data", "runs", "--unwrap"]
    code, output, calls = run(project, *flags, **how, PYTHON=str(project / "bin/python"))
    assert code == 0 and f"torch {torch.__version__}" in output, output
    assert "--unwrap" in calls[0] and "pip" not in (project / "calls").read_text()
    code, output, calls = run(project, *flags, **how, PYTHON="/bin/false")
    assert code == 1 and output.startswith("error: /bin/false") and calls == []


def test_what_it_refuses(project):
    code, output, calls = run(project, gpu=False)
    assert code == 1 and "error: there is no GPU here" in output and calls == []
    code, output, _ = run(project, "--sizes", "60M")
    assert code == 1 and "error: there is no --sizes" in output
