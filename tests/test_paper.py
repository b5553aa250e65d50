"""The figures as data, and the runner that makes them."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, refuses

import evaluation
import train
from common import Refused
from fope import FoPE, rope_freqs
from paper import figures, jobs
from paper.figures import FIGURES
from paper.results import identity
from recipe import RECIPES

paper = importlib.import_module("paper.__main__")


def arguments(tmp_path, size="tiny", **more):
    values = dict(size=size, tokens=None, seeds=range(2), kind=None)
    values |= dict(out=tmp_path, device="cpu", at_once=2)
    return type("Arguments", (), {**values, **more})


@pytest.mark.parametrize("size", ["tiny", "20M"])
@pytest.mark.parametrize("name", FIGURES)
def test_every_command_of_every_figure_is_understood(name, size, tmp_path):
    """By the scripts' own parsers: an unknown flag or preset would fail hours into a campaign."""
    figure = FIGURES[name]
    made = paper.jobs_of(figure, arguments(tmp_path, size))
    names = [job.name for job in made]
    results = [path for job in made for path in job.results]
    assert len(set(names)) == len(names) and len(set(results)) == len(results)
    assert all(job.needs in ["", *names] for job in made)
    for job in made:
        for script, *words in job.commands:
            words = [str(word) for word in words]
            if script == "train.py":
                _, given = train.parse_args(words)
                assert given["seed"] in (0, 1)
                if "init_from" not in given:  # the words say what the job's recipe is
                    recipe = RECIPES[given["preset"]].changed(**given)
                    assert recipe.check() == job.recipe
            else:
                parser = evaluation.evaluation_parser("")
                more = ("--max_tokens", "--data")
                for flag in more if script == "eval_perplexity.py" else ("--task",):
                    parser.add_argument(flag)
                parser.parse_args(words)


@pytest.mark.parametrize("name", ["figure1", "parts", "figure4", "figure4_quarter"])
def test_the_recipe_of_a_committed_figure_is_still_its_recipe(name, tmp_path):
    """What the json says of its training is what paper/ would do today."""
    out = ROOT / "runs_out" / "tiny"
    made = paper.jobs_of(FIGURES[name], arguments(out, seeds=range(1, 11)))
    recipes = {job.name: job.recipe for job in made}
    for result in json.loads((ROOT / "results" / f"{name}.json").read_text()):
        run = "/".join(result["command"].split()[2].split("/")[-2:])
        (path := tmp_path / "result.json").write_text(json.dumps(result))
        assert jobs.answers(path, recipes[run]), run  # refused where the recipe is another
    path.write_text(json.dumps(result | {"step": 3}))
    assert not jobs.answers(path, recipes[run])  # read when it was half trained


def test_from_20M_on_one_model_answers_for_both(tmp_path):
    made = paper.jobs_of(FIGURES["figure1"], arguments(tmp_path, "20M"))
    trained = [job for job in made if job.commands[0][0] == "train.py"]
    assert len(made) == 16 and len(trained) == 8
    passkey = next(job for job in made if job.name == "text/rope_s0 passkey")
    assert passkey.needs == "text/rope_s0" and len(passkey.commands) == 1


def test_models_of_books_are_read_on_two_corpora(tmp_path):
    made = paper.jobs_of(FIGURES["figure5"], arguments(tmp_path, "20M_cpu", seeds=range(1)))
    assert len(made) == 4 and made[0].name == "text/fope_s0"
    rope = next(job for job in made if job.name == "text/rope_s0")
    assert [path.name for path in rope.results] == ["perplexity_books.json", "perplexity_c4.json"]
    assert all(str(tmp_path / "data" / "books") in map(str, c) for c in rope.commands[:2])
    assert str(tmp_path / "data" / "c4") in map(str, rope.commands[2])
    assert rope.recipe.read_tokens == 2**18 + 1 and 700_000 in rope.commands[2]
    tiny = paper.jobs_of(FIGURES["figure5"], arguments(tmp_path, seeds=range(1)))
    data = {job.name: job.recipe.data for job in tiny}
    assert data["books/rope_s0"] == str(tmp_path / "data" / "books")


def test_models_that_go_on_take_small_steps_and_are_read_at_the_first_length(tmp_path):
    """A tenth of the tokens at twice the length: 100 steps of text, 400 of passkeys."""
    made = {j.name: j for j in paper.jobs_of(FIGURES["figure4"], arguments(tmp_path))}
    for kind, n_steps in (("text", 100), ("passkey", 400)):
        job = made[f"{kind}/rope_yarn16_s0"]
        recipe = job.recipe
        assert recipe.train_len == 1024 and recipe.n_steps == n_steps
        scaling = {"kind": "yarn", "factor": 16, "original_len": 512}
        assert recipe.rope_scaling == scaling and recipe.lengths == "512,1024,2048,4096,8192"
        assert job.needs == f"{kind}/rope_s0" and not made[job.needs].shown
    quarter = {j.name for j in paper.jobs_of(FIGURES["figure4_quarter"], arguments(tmp_path))}
    assert quarter & set(made) == {
        f"{k}/{p}_s{s}" for k in ("text", "passkey") for p in ("rope", "fope") for s in (0, 1)
    }


@pytest.mark.parametrize("preset", ["tiny", "20M"])
def test_matched_noise_is_the_noise_of_the_tables(preset):
    """sqrt(D) times the std of a weight, as drawn, is that of FoPE where a label says so."""
    recipe = RECIPES[preset]
    shape = dict(head_dim=64, n_head=4, train_len=recipe.train_len)
    torch.manual_seed(0)

    def noise(**kwargs):
        drawn = [FoPE(**shape, **kwargs) for _ in range(30)]
        noise = [pos.cos_coef - pos.identity(*pos.cos_coef.shape[1:]) for pos in drawn]
        return torch.stack(noise).std() * math.sqrt(noise[0].size(1))

    matched = noise(**figures.FS_MATCHED.changes_to(recipe)["pos_args"])
    assert matched.item() == pytest.approx(noise().item(), rel=0.02)


def test_the_slowest_pair_of_theta_94_completes_one_cycle(tmp_path):
    made = paper.jobs_of(FIGURES["enough"], arguments(tmp_path, seeds=range(3, 4)))
    recipes = {job.name: job.recipe for job in made}
    assert recipes["text/rope_cycles1_s3"].theta == 93.9
    for n in (0.5, 1, 2, 4):
        recipe = recipes[f"text/rope_cycles{n}_s3"]
        cycles = 512 * rope_freqs(64, recipe.theta)[-1] / (2 * math.pi)
        assert cycles == pytest.approx(n, rel=0.01)
    assert "passkey_anywhere/rope_s3" in recipes and "text/rope_s3" not in recipes


def test_models_of_one_kind(tmp_path):
    made = paper.jobs_of(FIGURES["parts"], arguments(tmp_path, kind="passkey"))
    assert made and all(job.name.startswith("passkey/") for job in made)
    refuses(paper.main, ["parts", "--size=20M", "--kind=text"], "leave --kind out")


@pytest.mark.slow
def test_an_embedding_of_ones_own_stands_beside_those_known(tmp_path, monkeypatch, capsys):
    """--pos trains it alone; what is in results/ makes the other rows."""
    results = ROOT / "results" / "figure1.json"
    asked = ["figure1", "--size", "quick", "--pos", "rope_taper", "--out", str(tmp_path)]
    (tmp_path / "results").mkdir()
    known = [r for r in json.loads(results.read_text()) if r["recipe"]["seed"] < 3]
    for row in (row for r in known for row in r["lengths"].values() if "tokens" in row):
        row["tokens"] = 16384  # what --size quick reads
    (tmp_path / "results" / "figure1_quick.json").write_text(json.dumps(known))
    monkeypatch.setattr(paper, "RESULTS", tmp_path / "results")
    paper.main(asked)
    printed = capsys.readouterr().out
    assert "| RoPE, tapered | 1 |" in printed and "| RoPE | 2 |" in printed
    written = json.loads((tmp_path / "figure1_quick.json").read_text())
    assert {r["recipe"]["pos"] for r in written} == {"rope_taper"}
    assert refuses(paper.main, [*asked[:4], "ropee", "--out", tmp_path / "x"], "ropee")


# --- the runner


def result_of(recipe, **changes):
    recipe, step = vars(recipe.resolved()) | changes, recipe.n_steps
    return {"kind": "perplexity", "lengths": {}, "recipe": recipe, "step": step}


def job(tmp_path, name, code="", needs="", tokens=7):
    """A job that runs `code` and writes a result of a model of 7 tokens."""
    result = tmp_path / f"{name}.json"
    code = f"open({str(tmp_path / 'order')!r}, 'a').write({name!r} + ' '); {code}"
    recipe = replace(RECIPES["tiny"], tokens=tokens)
    content = result_of(replace(recipe, tokens=7))
    done = f"{code}\nimport sys, json; json.dump({content}, open(sys.argv[1], 'w'))"
    return jobs.Job(name, recipe, [["-c", done, result]], {result: recipe}, needs)


def test_jobs_run_once_and_in_order(tmp_path):
    made = [job(tmp_path, "b", needs="a"), job(tmp_path, "a"), job(tmp_path, "c")]
    (tmp_path / "c.json").write_text(json.dumps(result_of(made[2].recipe)))
    jobs.run_jobs(made, arguments(tmp_path))
    assert (tmp_path / "order").read_text() == "a b "
    jobs.run_jobs(made, arguments(tmp_path))
    assert (tmp_path / "order").read_text() == "a b "


def test_a_figure_whose_models_were_changed_does_not_show_the_old_ones(tmp_path):
    """Same names, another sigma: refused, and not taken for done."""
    args = arguments(tmp_path, "quick", seeds=range(1))
    for figure in (FIGURES["equations"], FIGURES["figure4"]):
        for job in paper.jobs_of(figure, args):
            for path, asked in job.results.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(result_of(asked)))
            assert job.done()
    changed = figures.Figure("x", (figures.fope("cf", "floor alone", sigma=0.2),))
    with pytest.raises(Refused, match=r"perplexity.json .* pos_args"):
        paper.jobs_of(changed, args)[0].done()


def test_a_failed_job_shows_the_end_of_its_log_and_stops_what_needs_it_alone(tmp_path, capsys):
    made = [
        job(tmp_path, "bad", "import sys; sys.exit('error: this is why')"),
        job(tmp_path, "last", needs="after"),
        job(tmp_path, "after", needs="bad"),
        job(tmp_path, "other", "import time; time.sleep(1)"),
    ]
    with pytest.raises(Refused, match="bad"):
        jobs.run_jobs(made, arguments(tmp_path))
    assert made[3].done() and not made[1].done() and not made[2].done()
    assert (tmp_path / "order").read_text().split() in (["bad", "other"], ["other", "bad"])
    assert "this is why" in capsys.readouterr().err


def test_the_commands_of_a_job_follow_each_other(tmp_path):
    """And nothing follows one that was killed."""
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    note = "import sys; open(sys.argv[1], 'w')"
    words = [["-c", note, tmp_path / "first"], ["-c", kill], ["-c", note, tmp_path / "never"]]
    with pytest.raises(Refused, match="a"):
        jobs.run_jobs([jobs.Job("a", None, words, {})], arguments(tmp_path))
    assert (tmp_path / "first").exists() and not (tmp_path / "never").exists()


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


@pytest.mark.slow
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_what_is_told_to_stop_lets_all_save(tmp_path, told):
    """As runs/demo.sh calls it, in a folder with a blank. What is behind the line is not begun."""
    runs = [tmp_path / "my runs" / f"{n}" for n in range(jobs.n_cores() + 1)]
    (tmp_path / "saves.py").write_text(SAVES)
    for run in runs:
        run.mkdir(parents=True)
    lines = "\n".join(f"python '{tmp_path}/saves.py' '{run}'" for run in runs)
    command = [sys.executable, "-m", "paper.jobs", str(tmp_path), lines]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not all((run / "started").exists() for run in runs[:-1]):
        time.sleep(0.1)
        assert process.poll() is None
    process.send_signal(told)
    ended = process.communicate(timeout=60)[1].strip(), process.returncode
    assert ended == (("", -told) if told == signal.SIGKILL else ("interrupted", 130))
    last = time.monotonic() + 60 * (told == signal.SIGKILL)
    while not all((run / "saved").exists() for run in runs[:-1]):
        assert time.monotonic() < last
    assert not (runs[-1] / "started").exists()


def test_a_result_typed_by_hand_is_not_taken_for_the_figures(tmp_path):
    """Of fewer tokens, other lengths, trials or text, where the figure's would be."""
    made = job(tmp_path, "a")
    jobs.run_jobs([made], arguments(tmp_path))
    path = tmp_path / "a.json"
    for change in (dict(read_tokens=1000), dict(lengths="1x"), dict(trials=3)):
        path.write_text(json.dumps(result_of(made.recipe, **change)))
        assert not made.done()
    for other in (dict(trial_seed=made.recipe.seed + 99), dict(data="data/another")):
        path.write_text(json.dumps(result_of(made.recipe) | other))
        assert not made.done()
    path.write_text(json.dumps(result_of(made.recipe, lengths="512,2x,4x,8x,8192")))
    assert made.done()
    path.write_text(json.dumps(result_of(made.recipe, dropout=0.0)))  # of other code than this
    with pytest.raises(Refused, match=r"a\.json .*dropout"):
        made.done()


# --- the command


def test_list_and_refusals(capsys, tmp_path):
    paper.main(["--list"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in FIGURES)
    wanted = ["figure1", "figure4", "figure5", "figure6a", "figure6b", "figure6c", "table2"]
    assert set(wanted) <= set(FIGURES)
    refuses(paper.main, ["figure9"], "figure6a")
    for flag, value in (("size", "3B"), ("seeds", "0"), ("seeds", "-2"), ("seeds", f"1-{10**20}")):
        refuses(paper.main, ["figure1", f"--{flag}={value}"], f"--{flag}")
    refuses(paper.main, ["figure1", "--gather", "--out", tmp_path], str(tmp_path))
    (tmp_path / "figure1.json").write_text((ROOT / "results" / "parts.json").read_text())
    paper.main(["--primary", "--results", str(tmp_path)])
    assert "has not all of the 10 seeds of ALiBi and FoPE" in capsys.readouterr().err
    argv = ["figure1", "--size", "60M", "--tokens", "1000000", "--out", tmp_path, "--device", "cpu"]
    if not (ROOT / "data" / "c4" / "meta.json").exists():
        refuses(paper.main, argv, "data/c4")


def start(tmp_path, figure):
    command = [sys.executable, "-m", "paper", figure, "--size", "quick", "--out", str(tmp_path)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, **pipes)


@pytest.mark.slow
def test_a_figure_that_is_stopped_continues_and_is_drawn(tmp_path):
    """Ctrl-C in the middle of training saves; the same command ends with figure, json and table."""
    process = start(tmp_path, "equations")
    log = tmp_path / "text" / "fope_s0" / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text()):
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert (tmp_path / "text" / "fope_s0" / "checkpoint.pt").exists()
    output, stderr = start(tmp_path, "equations").communicate(timeout=600)
    assert (tmp_path / "equations_quick.png").exists(), stderr
    results = json.loads((tmp_path / "equations_quick.json").read_text())
    equations = [f"FoPE, equations, sigma {sigma}" for sigma in (0, 0.1, 0.3)]
    assert [r["label"] for r in results] == [None, "FoPE, floor alone", *equations]
    assert all(r["recipe"]["tokens"] == 30000 and r["commit"] for r in results)
    assert "| FoPE, floor alone | 1 |" in output and "the figure: " in output
    logged = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert logged == sorted(set(logged))
    more = results[0] | {"label": "one of another machine, say"}
    (tmp_path / "equations_quick.json").write_text(json.dumps([results[0], more]))
    start(tmp_path, "equations").communicate(timeout=600)
    assert json.loads((tmp_path / "equations_quick.json").read_text()) == [*results, more]
    (tmp_path / "equations_quick.json").write_text('["a note"]')
    _, stderr = start(tmp_path, "equations").communicate(timeout=600)
    assert "error: " in stderr and "equations_quick.json" in stderr
    assert (tmp_path / "equations_quick.json").read_text() == '["a note"]'
    shorter = results[0] | {"recipe": results[0]["recipe"] | {"tokens": 10}}
    assert identity(shorter) != identity(results[0])
