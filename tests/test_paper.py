"""The figures as data, and the runner that makes them."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, refuses

import common
import figures
import jobs
import paper
import train
from evaluation import evaluation_parser
from fope import FoPE


def arguments(tmp_path, size="tiny", **more):
    values = dict(
        size=size, tokens=None, seeds=2, passkey_seeds=None, out=tmp_path, device="cpu", at_once=2
    )
    return type("Arguments", (), {**values, **more})


@pytest.mark.parametrize("size", ["tiny", "20M"])
@pytest.mark.parametrize("name", paper.FIGURES)
def test_every_command_of_every_figure_is_understood(name, size, tmp_path, monkeypatch):
    """By the scripts' own parsers: an unknown flag or preset would fail hours into a campaign."""
    figure = paper.FIGURES[name]
    if figure.tiny_only and size != "tiny":
        pytest.skip(f"{name} has tiny models alone")
    monkeypatch.setattr(train, "take_over", lambda args: setattr(args, "preset", "tiny"))
    made = paper.jobs_of(figure, arguments(tmp_path, size))
    names = [job.name for job in made]
    results = [path for job in made for path in job.results]
    assert len(set(names)) == len(names) and len(set(results)) == len(results)
    assert all(job.needs in ["", *names] for job in made)
    for job in made:
        for script, *words in job.commands:
            words = [str(word) for word in words]
            if script == "train.py":
                args = train.parse_args(words)
                assert args.tokens == job.tokens and args.seed in (0, 1)
            else:
                parser = evaluation_parser("")
                of_script = {
                    "eval_passkey.py": ("--trials", "--seed"),
                    "eval_perplexity.py": ("--max_tokens", "--data"),
                }
                for flag in of_script[script]:
                    parser.add_argument(flag)
                parser.parse_args(words)


def test_the_recipe_of_the_committed_figure_is_still_its_recipe(tmp_path):
    """What figure 1's json says of its training is what paper.py would do today."""
    found = {}
    for result in json.loads((ROOT / "results" / "figure1.json").read_text()):
        kind = "text" if result["kind"] == "perplexity" else "passkey"
        found[f"{kind}/{result['pos']}_s{result['seed']}"] = result["training"]
    seeds = arguments(tmp_path, seeds=5, passkey_seeds=10)
    made = paper.jobs_of(paper.FIGURES["figure1"], seeds)
    assert {job.name for job in made} == set(found)
    for job in made:
        args = vars(train.parse_args([str(word) for word in job.commands[0][1:]]))
        recorded = found[job.name]
        for name in ("pos", "n_head", "train_len", "tokens", "batch_size", "lr", "passkey_frac"):
            assert args[name] == recorded[name], (job.name, name)


def test_series_of_twice_the_frequencies(tmp_path):
    """K = 11 frequencies of 32 lie above the floor."""
    made = paper.jobs_of(paper.FIGURES["figure6c"], arguments(tmp_path, seeds=1))
    commands = {job.name: job.commands[0] for job in made}
    assert "n_freq=22" in commands["text/fope_D2_s0"]
    assert "n_freq=44" in commands["passkey/fope_D4_s0"]


def test_from_20M_on_one_model_answers_for_both(tmp_path):
    made = paper.jobs_of(paper.FIGURES["figure1"], arguments(tmp_path, "20M"))
    trained = [job for job in made if job.trains]
    assert len(made) == 16 and len(trained) == 8
    passkey = next(job for job in made if job.name == "text/rope_s0 passkey")
    assert passkey.needs == "text/rope_s0" and len(passkey.commands) == 1


def test_kinds_may_have_other_numbers_of_seeds(tmp_path):
    made = paper.jobs_of(paper.FIGURES["figure1"], arguments(tmp_path, passkey_seeds=3))
    names = [job.name for job in made]
    assert sum(name.startswith("text/") for name in names) == 8
    assert sum(name.startswith("passkey/") for name in names) == 12


def test_models_of_books_are_read_on_two_corpora(tmp_path):
    made = paper.jobs_of(paper.FIGURES["figure5"], arguments(tmp_path, "20M_cpu", seeds=1))
    assert len(made) == 4 and made[0].name == "text/fope_s0"
    rope = next(job for job in made if job.name == "text/rope_s0")
    assert [path.name for path in rope.results] == ["perplexity_books.json", "perplexity_c4.json"]
    assert all(str(tmp_path / "data" / "books") in map(str, c) for c in rope.commands[:2])
    assert str(tmp_path / "data" / "c4") in map(str, rope.commands[2])
    assert 2**18 + 1 in rope.commands[1] and 700_000 in rope.commands[2]
    tiny = paper.jobs_of(paper.FIGURES["figure5"], arguments(tmp_path, seeds=1))
    data = {job.name: job.commands[0][2].name for job in tiny}
    assert data["books/rope_s0"] == "books"


def test_models_that_go_on_take_small_steps_and_are_read_at_the_first_length(tmp_path):
    """A tenth of the tokens at twice the length: 100 steps of text, 200 of passkeys."""
    made = {j.name: j for j in paper.jobs_of(paper.FIGURES["figure4"], arguments(tmp_path))}
    for kind, n_steps in (("text", 100), ("passkey", 200)):
        job = made[f"{kind}/rope_yarn16_s0"]
        words = [str(word) for word in job.commands[0]]
        batch = int(words[words.index("--batch_size") + 1])
        assert words[words.index("--train_len") + 1] == "256" and "--yarn_scale" in words
        assert job.tokens // (256 * batch) == n_steps
        assert "128,256,512,1024,2048" in job.commands[1]
        assert job.needs == f"{kind}/rope_s0" and not made[job.needs].shown
    quarter = {j.name for j in paper.jobs_of(paper.FIGURES["figure4_quarter"], arguments(tmp_path))}
    assert quarter & set(made) == {
        f"{k}/{p}_s{s}" for k in ("text", "passkey") for p in ("rope", "fope") for s in (0, 1)
    }


@pytest.mark.parametrize("preset", ["tiny", "20M"])
def test_matched_noise_is_the_noise_of_the_tables(preset):
    """sqrt(D) times the std of a weight, as drawn, is that of FoPE where a label says so."""
    config = paper.recipe_config(preset)
    shape = dict(head_dim=64, n_head=4, train_len=config.train_len)
    torch.manual_seed(0)

    def noise(**kwargs):
        drawn = [FoPE(**shape, **kwargs) for _ in range(30)]
        noise = [pos.cos_coef - pos.identity(*pos.cos_coef.shape[1:]) for pos in drawn]
        return torch.stack(noise).std() * math.sqrt(noise[0].size(1))

    plain, matched = noise(), (figures.FS_MATCHED, figures.DS[-1])
    for model in matched:
        words = paper.model_flags(model, config).split("--pos_args ")[1]
        assert noise(**common.parse_keywords("--pos_args", words.split())) == pytest.approx(
            plain, rel=0.02
        )


# --- the runner


def job(tmp_path, name, code="", needs="", tokens=7):
    """A job that runs `code` and writes a result of a model of 7 tokens."""
    result = tmp_path / f"{name}.json"
    code = f"open({str(tmp_path / 'order')!r}, 'a').write({name!r} + ' '); {code}"
    content = {"training": {"tokens": 7}}
    done = f"{code}\nimport sys, json; json.dump({content}, open(sys.argv[1], 'w'))"
    return jobs.Job(name, [["-c", done, result]], [result], tokens, needs)


def test_jobs_run_once_and_in_order(tmp_path):
    made = [job(tmp_path, "b", needs="a"), job(tmp_path, "a"), job(tmp_path, "c")]
    made[2].results[0].write_text('{"training": {"tokens": 7}}')  # done before
    jobs.run_jobs(made, arguments(tmp_path))
    assert (tmp_path / "order").read_text() == "a b "
    jobs.run_jobs(made, arguments(tmp_path))
    assert (tmp_path / "order").read_text() == "a b "


def test_results_of_another_budget_are_not_taken_for_these(tmp_path):
    jobs.run_jobs([job(tmp_path, "a")], arguments(tmp_path))
    with pytest.raises(ValueError, match="a model of 7 tokens, not 8"):
        jobs.run_jobs([job(tmp_path, "a", tokens=8)], arguments(tmp_path))


def test_a_failed_job_shows_the_end_of_its_log_and_stops_what_needs_it_alone(tmp_path, capsys):
    made = [
        job(tmp_path, "bad", "import sys; sys.exit('error: this is why')"),
        job(tmp_path, "last", needs="after"),
        job(tmp_path, "after", needs="bad"),
        job(tmp_path, "other", "import time; time.sleep(1)"),
    ]
    with pytest.raises(ValueError, match=r"(?s)1 of 4 jobs failed; of bad .*bad.log.*this is why"):
        jobs.run_jobs(made, arguments(tmp_path))
    assert made[3].done() and not made[1].done() and not made[2].done()
    assert (tmp_path / "order").read_text().split() in (["bad", "other"], ["other", "bad"])
    assert "bad failed; the end of" in capsys.readouterr().err


def test_the_runner_shows_the_bar_of_a_command(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.Running, "start_next", lambda self: None)
    running = jobs.Running(job(tmp_path, "a", ""), 0, arguments(tmp_path))
    bar = "\rrope:  12%|# | 1k/9k [00:01<00:09]\rrope:  37%|#### | 4k/9k [00:04<00:05, loss=2]"
    running.log.write_text(bar)
    running.show()
    assert running.bar.n == 37


# --- the command


def test_list_and_refusals(capsys, tmp_path):
    paper.main(["--list"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in paper.FIGURES)
    wanted = ["figure1", "figure4", "figure5", "figure6a", "figure6b", "figure6c", "table2"]
    assert set(wanted) <= set(paper.FIGURES)
    refuses(paper.main, ["figure9"], "invalid choice", "figure6a")
    refuses(paper.main, ["figure1", "--size", "3B"], "invalid choice")
    refuses(paper.main, ["figure1", "--seeds", "0"], "--seeds", "at least 1")
    refuses(paper.main, ["figure6a_shape", "--size", "20M"], "tiny alone")
    argv = ["figure1", "--size", "60M", "--tokens", "1000000", "--out", tmp_path, "--device", "cpu"]
    if not (ROOT / "data" / "c4" / "meta.json").exists():
        refuses(paper.main, argv, "no data/c4", "python prepare_data.py --help")


@pytest.mark.slow
def test_dry_run_counts_what_is_left(capsys, tmp_path):
    paper.main(["figure1", "--seeds", "2", "--dry-run", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "16 of 16 jobs" in printed and "16 models of 12,288,000 tokens" in printed
    assert "GB of disk" in printed and "hours on this machine" in printed
    assert not list(tmp_path.iterdir())


def start(tmp_path, figure):
    command = [sys.executable, "paper.py", figure, "--size", "quick", "--out", str(tmp_path)]
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
    assert process.returncode == 130 and "the same command continues" in stderr
    assert (tmp_path / "text" / "fope_s0" / "checkpoint.pt").exists()
    output, stderr = start(tmp_path, "equations").communicate(timeout=300)
    assert (tmp_path / "equations.png").exists(), stderr
    results = json.loads((tmp_path / "equations.json").read_text())
    equations = [f"FoPE, equations, sigma {sigma}" for sigma in (0, 0.1, 0.3)]
    assert [r["label"] for r in results] == [None, "FoPE, CF alone", *equations]
    assert all(r["training"]["tokens"] == 30000 and r["commit"] for r in results)
    assert "| FoPE, CF alone | 1 |" in output and "the figure: " in output
    logged = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert logged == sorted(set(logged))
