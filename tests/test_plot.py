"""The figures and tables that paper/plot.py makes of result files."""

import json

import matplotlib.image
import numpy as np
import pytest
from conftest import refuses
from matplotlib.text import Text

import common
from common import Refused
from paper import plot, tables
from paper.results import load_results, seed_of


def result_file(folder, kind, pos, seed, value):
    row = {"perplexity": 40 * value, "loss": 3.0, "tokens": 10}
    if kind == "passkey":
        row = {
            "accuracy": value,
            "token_accuracy": value,
            "accuracy_by_depth": [value, None] * 5,
            "trials_by_depth": [3, 0] * 5,
        }
    result = {"kind": kind, "pos": pos, "pos_args": {}, "train_len": 128, "seed": seed}
    result["lengths"] = {128: row, 256: row}
    if kind == "perplexity":
        result["curve"] = [[1000, 5.0, None], [2000, 4.0, 4.1]]
    path = folder / f"{kind}_{pos}_{seed}.json"
    path.write_text(json.dumps(result))
    return path


def test_every_line_of_a_figure_has_a_style_of_its_own():
    labels = ["RoPE", "FoPE", "RoPE + QK-norm"]
    labels += [f"FoPE (sigma={s}, variant=paper)" for s in (0.1, 0.2)]
    labels += ["RoPE to FoPE", "FoPE to FoPE"]
    style = plot.styles(labels)
    assert len({tuple(line.items()) for line in style.values()}) == len(labels)
    assert style["RoPE + QK-norm"] == style["RoPE"] | {"ls": "--"}
    assert style["RoPE to FoPE"]["ls"] == "--" and "ls" not in style["FoPE to FoPE"]


def test_text_has_ten_pixels_in_a_page_838_pixels_wide():
    results = load_results([common.ROOT / "results" / "parts.json"])
    few = {kind: dict(list(labels.items())[:4]) for kind, labels in results.items()}
    figures = [plot.figure_length(found) for found in (results, few)]
    figures += [plot.figure_differences(results, "FoPE")]
    figures += [plot.figure_heat(few["passkey"], "depth")]
    for fig in figures:
        fig.draw_without_rendering()
        scale = min(838 / (72 * fig.get_figwidth()), 160 / 72)
        sizes = {
            t.get_size() * scale for t in fig.findobj(Text) if t.get_text() and t.get_visible()
        }
        assert min(sizes) >= 10, sizes
        plot.plt.close(fig)


def test_differences_are_those_of_the_pairs():
    results = load_results([common.ROOT / "results" / "figure4.json"])
    fig = plot.figure_differences(results, "FoPE to FoPE")
    labels = [text.get_text() for text in fig.axes[0].get_yticklabels()]
    assert "FoPE to FoPE" not in labels and len(labels) == len(results["perplexity"]) - 1
    at = labels.index("RoPE to RoPE")
    losses = [
        {seed_of(r): r["lengths"][4096]["loss"] for r in results["perplexity"][label]}
        for label in ("RoPE to RoPE", "FoPE to FoPE")
    ]
    pairs = np.array([losses[0][seed] - losses[1][seed] for seed in losses[0]])
    bar = fig.axes[0].containers[at]
    assert np.allclose(bar.lines[0].get_xdata(), pairs.mean()) and len(pairs) == 5
    ends = [x for cap in bar.lines[1] for x in cap.get_xdata()]
    half = 2.776445 * pairs.std(ddof=1) / 5**0.5  # Student's t with 4 degrees of freedom
    assert np.allclose(sorted(ends), [pairs.mean() - half, pairs.mean() + half], atol=1e-6)
    plot.plt.close(fig)


def test_one_label_alone_is_drawn_by_length(tmp_path):
    """As when the first model of a figure of differences is gathered."""
    path = result_file(tmp_path, "perplexity", "rope", 0, 1.0)
    refuses(plot.main, [path, "--to", "RoPE"], "--to RoPE is no label beside others")
    results = load_results([path])
    assert plot.draw(results, str(tmp_path / "f"), to="RoPE") == [f"{tmp_path / 'f'}.png"]
    assert (tmp_path / "f.png").stat().st_size > 1000


VALUES = {"fope": (0.5, 0.7), "rope": (0.25, 0.25), "nope": (0.0, 0.1), "mine": (0.9, 1.0)}


def test_figures_and_table_come_from_the_json_files(tmp_path, capsys):
    files = [
        result_file(tmp_path, kind, pos, seed, value)
        for kind in ("perplexity", "passkey")
        for pos, values in VALUES.items()
        for seed, value in enumerate(values)
    ]
    plot.main([*map(str, files), "--out", str(tmp_path / "fig"), "--depth"])
    table = capsys.readouterr().out
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()]
    rows = [row for row in rows if row]
    assert [r[0] for r in rows[2:6]] == ["NoPE", "RoPE", "FoPE", "mine"]
    assert rows[4] == ["FoPE", "2", "24.00 ± 5.66", "24.00 ± 5.66"]  # of 20 and 28, std with n - 1
    assert ["FoPE", "2", "60 ± 14", "60 ± 14"] in rows
    for name in ("fig", "fig_depth"):
        image = matplotlib.image.imread(tmp_path / f"{name}.png")
        assert image.shape[0] > 300 and image[..., :3].std() > 0.05


def test_panels_of_two_corpora_span_the_same_factor(tmp_path):
    files = []
    for i, (corpus, pos, value) in enumerate(
        [("books", "rope", 1), ("books", "fope", 4), ("c4", "rope", 5), ("c4", "fope", 6)]
    ):
        path = result_file(tmp_path, "perplexity", pos, i % 2, value)
        result = json.loads(path.read_text()) | {"data": f"data/{corpus}", "seed": 0}
        files.append(tmp_path / f"{i}.json")
        files[-1].write_text(json.dumps(result))
    books, c4 = plot.figure_length(load_results(files)).axes
    (low, high), (other_low, other_high) = books.get_ylim(), c4.get_ylim()
    assert high / low > 4 and abs(high / low - other_high / other_low) < 1e-9
    assert other_low < 200 and other_high > 240


def test_a_gathered_file_is_read_as_its_parts(tmp_path, capsys):
    files = [result_file(tmp_path, "passkey", "rope", seed, 0.5) for seed in range(3)]
    gathered = tmp_path / "gathered.json"
    gathered.write_text(json.dumps([json.loads(path.read_text()) for path in files]))
    assert load_results([gathered]) == load_results(files)
    plot.main([str(gathered)])
    assert (tmp_path / "gathered.png").exists() and "| RoPE | 3 | 50 ± 0" in capsys.readouterr().out


def test_tables_of_a_text_are_made_anew(tmp_path):
    files = [result_file(tmp_path, "perplexity", "rope", seed, 1.0 + seed) for seed in range(2)]
    files += [result_file(tmp_path, "passkey", "rope", 0, 0.5)]
    both = [json.loads(path.read_text()) for path in files]
    (tmp_path / "fig.json").write_text(json.dumps(both))
    text = "before\n<!-- table fig{} -->\nold\n<!-- end table -->\nafter\n"
    whole = tables.fill_tables(text.format(""), tmp_path)
    assert "| RoPE | 2 | 60.00 ± 28.28 |" in whole and "| RoPE | 1 | 50 |" in whole
    assert whole.startswith("before\n<!-- table fig -->\n|") and whole.endswith("-->\nafter\n")
    one = tables.fill_tables(text.format(" kind=perplexity"), tmp_path)
    assert "| RoPE | 2 | 60.00 ± 28.28 |" in one and "passkey" not in one
    assert "| RoPE | 2 | 3.00 ± 0.00 |" in tables.fill_tables(text.format(" loss"), tmp_path)
    for option, words in (
        ("kind=foo", "has no kind foo"),
        ("only=foo", "has no only foo"),
        ("los", "has los, which is no option"),
        ("distance kind=perplexity", "makes no table"),
    ):
        with pytest.raises(Refused, match=words):
            tables.fill_tables(text.format(f" {option}"), tmp_path)
    with pytest.raises(Refused, match="needs an <!-- end table -->"):  # or text between were lost
        tables.fill_tables("<!-- table fig -->\nkept\n" + text.format(""), tmp_path)


def test_labels_and_loss(tmp_path, capsys):
    files = [result_file(tmp_path, "perplexity", pos, 0, 1.0) for pos in ("rope", "fope", "kerple")]
    changes = (
        {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_len": 128}},
        {"label": "FoPE, CF alone", "pos_args": {"sigma": 0}},
        {"model": {"qk_norm": True}},
    )
    for path, change in zip(files, changes, strict=True):
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    plot.main([*map(str, files), "--out", str(tmp_path / "fig.png"), "--loss"])
    table = capsys.readouterr().out
    labels = [line.split("|")[1].strip() for line in table.splitlines()[2:5]]
    assert labels == ["RoPE (yarn x4)", "FoPE, CF alone", "KERPLE + QK-norm"]
    assert "loss in nats per token" in table and "| 3.00 |" in table
    assert (tmp_path / "fig.png").exists()


def test_foreign_results_are_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    refuses(plot.main, [tmp_path / "x.json"], "no result of")
    a, b = (result_file(tmp_path, "perplexity", "rope", seed, 1.0) for seed in (0, 1))
    b.write_text(b.read_text().replace('"train_len": 128', '"train_len": 64'))
    refuses(plot.main, [a, b, "--out", tmp_path], "several training lengths")
    text = a.read_text()
    refuses(plot.main, [a, a, "--out", tmp_path], "a second result of RoPE with seed 0")
    for old, new, words in (
        ('"tokens": 10}', '"tokens": 10, "loss": "a"}', "no result of"),
        ('"128": {', '"128": 3, "129": {', "no result of"),
        ('"tokens": 10}', '"tokens": 10, "loss": NaN}', "no result of"),
        ('"tokens": 10}', '"tokens": 10, "loss": Infinity}', "no result of"),
        ('"tokens": 10}', '"tokens": 10, "loss": -1}', "no result of"),
        ('"train_len": 128', '"train_len": 0', "no result of"),
        ('"seed": 0', '"seed": 0, "label": "_x"', "the label _x"),
    ):
        b.write_text(text.replace(old, new))
        assert b.read_text() != text
        refuses(plot.main, [b, "--out", tmp_path], words)
    b.write_text(text.replace('"seed": 0', '"seed": 1, "tokenizer": "byte"'))
    refuses(plot.main, [a, b, "--out", tmp_path], "several tokenizers")
    fewer = text.replace('"tokens": 10}', '"tokens": 5}').replace('"seed": 0', '"seed": 1')
    b.write_text(fewer)
    refuses(plot.main, [a, b, "--out", tmp_path], "several amounts of text")
    b.write_text(text.replace('"seed": 0', '"seed": 1, "training": {"lengths": "128,4096"}'))
    refuses(plot.main, [a, b, "--out", tmp_path], "several amounts of text")
    b.write_text(text.replace('"seed": 0', '"seed": 1').replace("{", '{"step": 3, ', 1))
    refuses(plot.main, [a, b, "--out", tmp_path], "the seeds of RoPE differ in step")
    b.write_text(text.replace('"seed": 0', '"seed": 1').replace("{", '{"trained_on": ["x"], ', 1))
    refuses(plot.main, [a, b, "--out", tmp_path], "the seeds of RoPE differ in training data")
    for old, new in (('"seed": 0', '"seed": 1'), ('"128": {', '"64": {'), ('"256": {', '"32": {')):
        text = text.replace(old, new)
    b.write_text(text)
    refuses(plot.main, [a, b, "--out", tmp_path], "no length in common")


def test_keys_by_distance_have_the_same_bins_at_every_length():
    """Under 32, 64, 128, ... tokens from the key to the answer, pooled over seeds."""
    rows = [
        {512: {"distance": [20, 40, 300], "right": [1, 1, 0]}, 2048: {"distance": [], "right": []}},
        {512: {"distance": [60, 511], "right": [0, 1]}, 2048: {"distance": [31], "right": [1]}},
    ]
    grid = plot.distance_grid([{"lengths": row} for row in rows], [512, 2048])
    assert grid.shape == (7, 2)  # under 32, 64, 128, 256, 512, 1024, 2048
    nan = float("nan")
    assert np.array_equal(grid[:, 0], [1, 0.5, nan, nan, 0.5, nan, nan], equal_nan=True)
    assert np.array_equal(grid[:, 1], [1, *[nan] * 6], equal_nan=True)


def test_a_figure_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = result_file(tmp_path, "perplexity", "rope", 0, 1.0)
    argv = [str(path), "--out", str(tmp_path / "fig")]
    plot.main(argv)
    before = (tmp_path / "fig.png").read_bytes()

    def disk_full(self, file, **kwargs):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plot.plt.Figure, "savefig", disk_full)
    refuses(plot.main, argv, "fig.png could not be written (No space left on device)")
    assert (tmp_path / "fig.png").read_bytes() == before
    for out in (tmp_path, f"{tmp_path}/figs/"):
        refuses(plot.main, [path, "--out", out], "is a folder")


def test_numbers_that_no_figure_can_show_are_no_results(tmp_path):
    path = result_file(tmp_path, "passkey", "rope", 0, 1.0)
    text = path.read_text()
    for number in ("null", "1" + "0" * 400, "NaN", "-1"):
        path.write_text(text.replace('"accuracy": 1.0', f'"accuracy": {number}'))
        refuses(plot.main, [path, "--out", tmp_path / "fig"], "is no result")


def test_without_depths_there_is_no_figure_of_them(tmp_path):
    path = result_file(tmp_path, "passkey", "rope", 0, 1.0)
    path.write_text(path.read_text().replace("accuracy_by_depth", "by_something"))
    plot.main([str(path), "--out", str(tmp_path / "fig"), "--depth"])
    assert [p.name for p in tmp_path.glob("*.png")] == ["fig.png"]


def test_labels_are_text_in_a_figure(tmp_path):
    path = result_file(tmp_path, "passkey", "rope", 0, 1.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"label": r"$\frac{1}$ $$"}))
    plot.main([str(path), "--out", str(tmp_path / "fig"), "--depth"])
    assert (tmp_path / "fig.png").exists()


def test_seeds_of_several_recipes_are_not_averaged(tmp_path):
    files = [result_file(tmp_path, "perplexity", "rope", seed, 1.0) for seed in range(2)]
    refuses(plot.main, [write_empty(tmp_path), "--out", tmp_path / "fig"], "there is no result in")
    result = json.loads(files[1].read_text())
    files[1].write_text(json.dumps(result | {"training": {"lr": 0.5}}))
    words = "the seeds of RoPE differ in lr; tell them apart"
    refuses(plot.main, [*files, "--out", tmp_path / "fig"], words)


def write_empty(folder):
    (folder / "empty.json").write_text("[]")
    return folder / "empty.json"


def test_labels_are_text_in_a_page():
    assert "<b>" not in tables.html_tables("| a | b |\n|---|--:|\n| <b>x</b> | 1 |")
