"""The runner: which runs a grid is, what is done, how long it takes, kills; what gpu.sh calls."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, TRAIN_FLAGS, refuses, run_training

import eval_perplexity
import sweep
from common import Refused, write_json
from recipe import RECIPES


def jobs(data_folder, out, words):
    grid = sweep.parse_grid([*words.split(), "--data", str(data_folder), *TRAIN_FLAGS])
    return sweep.jobs_of(grid, out)


def test_a_grid_is_every_combination_seed_by_seed(data_folder, tmp_path):
    made = jobs(
        data_folder,
        tmp_path,
        "--pos rope fope:pos_args.sigma=0:pos_args.sin_pad=0 rope:theta=93.9:qk_norm --seed 0-1 7 "
        "--lr 1e-3 2e-3 --pos_args.window 16 --rope_scaling kind=ntk factor=2 original_len=16",
    )
    assert len(made) == 3 * 3 * 2 and [job.recipe.seed for job in made[:7]] == [0] * 6 + [1]
    first, _, floor, _, norm, *_ = made
    assert first.folder == tmp_path / "rope_lr1e-3_s0" and first.recipe.lr == 1e-3
    assert floor.recipe.pos_args == {"window": 16, "sigma": 0, "sin_pad": 0}
    assert floor.folder.name == "fope_sigma0_sin_pad0_lr1e-3_s0"
    assert norm.recipe.theta == 93.9 and norm.recipe.qk_norm and not first.recipe.qk_norm
    assert all(job.recipe.rope_scaling["factor"] == 2 for job in made)
    same = jobs(data_folder, tmp_path, "--pos rope rope:theta=10000 --seed 3")
    assert [job.recipe.seed for job in same] == [3]  # once


@pytest.mark.parametrize(
    "words, word",
    [
        ("--pos rope fope --pos_args sigma=0", "sigma"),
        ("--pos ropee", "ropee"),
        ("--lengths 1x 2x", "--lengths"),
        ("--minutes 5 --tokens 100", "--minutes"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(data_folder, tmp_path, words, word):
    where = ["--data", data_folder, "--out", tmp_path / "x", "--device", "cpu"]
    refuses(sweep.main, [*words.split(), *where], word)
    assert not (tmp_path / "x").exists()


def test_what_is_done_is_known_by_its_recipe_its_data_and_its_step(data_folder, tmp_path):
    run = run_training(data_folder, tmp_path / "rope_s0", "--pos=rope", "--lengths=1x")
    words = "--pos rope --lengths 1x"
    (job,) = jobs(data_folder, tmp_path, words)
    assert not sweep.is_done(job, ["perplexity"])
    eval_perplexity.main([str(run)])
    assert sweep.is_done(job, ["perplexity"])
    # a flag that is swept later does not rename the folder
    first, second = jobs(data_folder, tmp_path, f"{words} --lr {RECIPES['tiny'].lr} 7e-3")
    assert first.folder == run and second.folder.name == "rope_lr7e-3_s0"
    # another recipe is another run, and never this result
    with pytest.raises(Refused, match=r"weight_decay 0\.1, not 0\.2"):
        jobs(data_folder, tmp_path, f"{words} --weight_decay 0.2")
    (longer,) = jobs(data_folder, tmp_path, "--pos rope --lengths 1x,2x")
    assert longer.folder == run and not sweep.is_done(longer, ["perplexity"])
    stored = json.loads((run / "perplexity.json").read_text())
    for change in ({"step": 3}, {"trained_on": ["other"]}):
        write_json(run / "perplexity.json", stored | change)
        assert not sweep.is_done(job, ["perplexity"])
    copy = tmp_path / "data"
    shutil.copytree(data_folder, copy)
    meta = json.loads((copy / "meta.json").read_text())
    for shard in meta["shards"]:
        shard["sha256"] = "0" * 64
    write_json(copy / "meta.json", meta)
    with pytest.raises(Refused, match="data"):
        jobs(copy, tmp_path, words)


def test_an_embedding_that_was_edited_is_another_run(data_folder, tmp_path, monkeypatch):
    """And a class that is written into its file, later, changes nothing."""
    monkeypatch.syspath_prepend(tmp_path)
    mine = tmp_path / "mine_of_a_sweep.py"
    first = "from fope import RoPE\n\nSIZE = 1\n\n\nclass Mine(RoPE):\n    pass\n"
    mine.write_text(first)
    words = "--pos mine_of_a_sweep.Mine --lengths 1x"
    run = run_training(data_folder, tmp_path / "mine_of_a_sweep.Mine_s0", *words.split())
    eval_perplexity.main([str(run)])
    mine.write_text(f"import math\n{first}\n\nclass Later(RoPE):  # comes later\n    pass\n")
    (job,) = jobs(data_folder, tmp_path, words)
    assert job.folder == run and sweep.is_done(job, ["perplexity"])
    mine.write_text(first.replace("SIZE = 1", "SIZE = 2"))
    with pytest.raises(Refused, match=r"the code of mine_of_a_sweep\.Mine"):
        jobs(data_folder, tmp_path, words)


def test_minutes_are_shared_by_training_and_reading(data_folder, tmp_path):
    """A fifth of the tokens are read; what is typed is kept; two runs side by side."""
    made = jobs(data_folder, tmp_path, "--pos rope fope --seed 0-1 --lengths 1x,16x")
    args = SimpleNamespace(out=tmp_path, device="cpu", evaluate=["perplexity"], at_once=2)
    (tmp_path / "timing").mkdir()
    for job in made:
        write_json(sweep.cost_file(job, args), {"rate": 1000, "start": 10, "perplexity": 2.0})
    assert len({sweep.cost_file(job, args) for job in made}) == 2
    longer = jobs(
        data_folder, tmp_path, "--pos rope fope --lengths 1x,16x --tokens 9999 --trials 9"
    )
    assert all(sweep.cost_file(job, args).exists() for job in longer)  # is not measured again
    flags = sweep.fit(made, args, {"trials": [["5"]]}, budget=600)
    tokens, read = (int(flags[name][0][0]) for name in ("tokens", "read_tokens"))
    assert set(flags) == {"tokens", "read_tokens"} and read == max(tokens // 40, 16386)
    each = 10 + tokens / 1000 + 2 * read / 8193
    assert 0.97 * 600 < 2 * each <= 600
    with pytest.raises(Refused, match="at the least"):
        sweep.fit(made, args, {}, budget=20)


SAVES = """
import signal, sys, time
from pathlib import Path
def save(*_):
    time.sleep(1)
    sys.exit(Path(sys.argv[-1], "saved").write_text(""))
signal.signal(signal.SIGTERM, save)
Path(sys.argv[-1], "started").write_text("")
time.sleep(100)
"""
RUNNER = """
import json, sys, types
from pathlib import Path
sys.path.insert(0, {root!r})
import common, sweep
args = types.SimpleNamespace(out=Path({out!r}), device="cpu", at_once=2)
common.one_sentence_errors(sweep.run_all)(json.loads({commands!r}), args)
"""


@pytest.mark.slow
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_what_is_told_to_stop_lets_all_save(tmp_path, told):
    """In a folder with a blank. What is behind the line is not begun."""
    runs = [tmp_path / "my runs" / f"{n}" for n in range(3)]
    for run in runs:
        run.mkdir(parents=True)
    commands = json.dumps({run.name: ["-c", SAVES, str(run)] for run in runs})
    code = RUNNER.format(root=str(ROOT), out=str(tmp_path), commands=commands)
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not all((run / "started").exists() for run in runs[:-1]):
        time.sleep(0.1)
        assert process.poll() is None
    process.send_signal(told)
    time.sleep(0.3)
    process.send_signal(told)  # a second one changes nothing
    ended = process.communicate(timeout=300)[1].strip(), process.returncode
    assert ended == (("", -told) if told == signal.SIGKILL else ("interrupted", 130))
    last = time.monotonic() + 300 * (told == signal.SIGKILL)
    while not all((run / "saved").exists() for run in runs[:-1]):
        assert time.monotonic() < last
    assert not (runs[-1] / "started").exists()


def test_a_failed_run_shows_why_and_the_others_go_on(tmp_path, capsys):
    commands = {"bad": ["-c", "import sys; sys.exit('error: this is why')"]}
    commands["good"] = ["-c", f"open({str(tmp_path / 'good')!r}, 'w')"]
    args = SimpleNamespace(out=tmp_path, device="cpu", at_once=1)
    with pytest.raises(Refused, match="1 of 2 failed"):
        sweep.run_all(commands, args)
    assert (tmp_path / "good").exists() and "error: this is why" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_is_measured_trained_and_drawn_and_not_trained_again(data_folder, tmp_path):
    words = ["--pos", "rope", "nope", "--data", data_folder, "--out", tmp_path / "x", *TRAIN_FLAGS]
    words += ["--tokens", 128 * 50, "--lengths", "1x,16x", "--evaluate", "perplexity", "passkey"]
    command = [sys.executable, "sweep.py", *map(str, words), "--device", "cpu"]
    how = dict(cwd=ROOT, capture_output=True, text=True, check=True)
    first = subprocess.run(command, **how).stdout
    assert "2 runs" in first and "tokens, about " in first and "| NoPE | 1 |" in first
    assert (tmp_path / "x" / "figure.png").exists()
    when = (tmp_path / "x" / "rope_s0" / "checkpoint.pt").stat().st_mtime
    again = subprocess.run(command, **how).stdout
    assert "2 of them done" in again and first.endswith(again.split("\n", 1)[1])
    assert (tmp_path / "x" / "rope_s0" / "checkpoint.pt").stat().st_mtime == when


# --- gpu.sh

PYTHON = """#!/bin/sh
case $1 in -c) exec {python} "$@" ;; esac
echo "$@" >> calls
if [ -e hang ]; then touch hanging; exec sleep 60; fi
"""


@pytest.fixture
def project(tmp_path):
    """The script, with a python that notes how it is called."""
    shutil.copytree(ROOT / "runs", tmp_path / "runs")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(PYTHON.format(python=sys.executable))
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\necho GPU 0: fake\n")
    for file in ("python", "nvidia-smi"):
        (tmp_path / "bin" / file).chmod(0o755)
    return tmp_path


def gpu_sh(project, *flags, gpu=True, run=subprocess.run):
    path = f"{project}/bin:{os.environ['PATH']}" if gpu else "/usr/bin:/bin"
    env = {**os.environ, "PATH": path, "NO_INSTALL": "1", "PYTHON": f"{project}/bin/python"}
    how = dict(cwd=project, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ended = run(["bash", "runs/gpu.sh", *flags], **how)
    calls = Path(project / "calls")
    return ended, calls.read_text().splitlines() if calls.exists() else []


def test_the_commands_of_gpu_sh(project):
    ended, (prepare, run) = gpu_sh(project, "--seed", "0-2")
    assert ended.returncode == 0, ended.stderr
    assert prepare.startswith("prepare_data.py --source gutenberg --unwrap --shards 2 --tokenizer")
    out = "runs_out/20M_gpu_gutenberg"
    words = "sweep.py --preset 20M --pos rope fope alibi nope --seed 0-2 --device cuda --data"
    assert run.startswith(f"{words} {out}/data ") and "--tokens 400000000 --batch_size 128" in run
    (project / "calls").unlink()
    (project / "mine").mkdir()
    (project / "mine/meta.json").touch()
    flags = ["--device", "cpu", "--data", "mine", "--minutes", "8"]
    ended, (run,) = gpu_sh(project, *flags, gpu=False)
    assert f"--data {project}/mine --minutes " in run
    assert 0 < float(run.split("--minutes ")[1].split()[0]) <= 8  # the preparation counts
    assert "--tokens" not in run and "--compile" not in run


def test_a_stopped_script_lets_its_command_save(project):
    (project / "hang").touch()
    process, _ = gpu_sh(project, "--device", "cpu", gpu=False, run=subprocess.Popen)
    while not (project / "hanging").exists():
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130 and "the same command continues" in output


def test_what_gpu_sh_refuses(project):
    ended, calls = gpu_sh(project, gpu=False)
    assert ended.returncode == 1 and "there is no GPU here" in ended.stderr and not calls
    assert "there is no --sizes" in gpu_sh(project, "--sizes", "60M")[0].stderr
