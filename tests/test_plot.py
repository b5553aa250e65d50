"""The figures and tables that paper/plot.py makes of result files."""

import itertools
import json

import matplotlib.image
import numpy as np
import pytest
from conftest import refuses

from paper import plot, tables
from paper.results import load_results


def result_file(folder, kind, pos, seed, value, **recipe):
    row = {"perplexity": 40 * value, "loss": 3.0, "tokens": 10}
    if kind == "passkey":
        row = {"accuracy": value, "token_accuracy": value, "answer_nll": 2.3}
    recipe = {"pos": pos, "pos_args": {}, "train_len": 128, "seed": seed} | recipe
    result = {"kind": kind, "label": None, "recipe": recipe, "lengths": {128: row, 256: row}}
    path = folder / f"{kind}_{pos}_{seed}.json"
    path.write_text(json.dumps(result))
    return path


def changed(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_every_line_of_a_figure_has_a_style_of_its_own():
    labels = ["RoPE", "FoPE", "RoPE + QK-norm"]
    labels += [f"FoPE (sigma={s}, variant=paper)" for s in (0.1, 0.2)]
    labels += ["RoPE to FoPE", "FoPE to FoPE"]
    style = plot.styles(labels)
    assert len({tuple(line.items()) for line in style.values()}) == len(labels)
    assert style["RoPE + QK-norm"] == style["RoPE"] | {"ls": "--"}
    assert style["RoPE to FoPE"]["ls"] == "--" and "ls" not in style["FoPE to FoPE"]
    many = plot.styles([f"mine {i}" for i in range(20)]).values()  # more than there are colours
    assert len({tuple(line.items()) for line in many}) == 20


# how colour-blind eyes see linear RGB (Machado, Oliveira and Fernandes, 2009, severity 1)
COLOUR_BLIND = {
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def linear(colour):
    """Linear RGB, 0 to 1, of "#RRGGBB"."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIELAB of linear RGB: the first number is the lightness, 0 to 100."""
    to_xyz = [[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]]
    xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / np.sum(to_xyz, axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), (903.3 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(a, b):
    low, high = sorted(linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("column, ground", [(0, "#FFFFFF"), (2, "#16181A")])
def test_methods_are_told_apart_by_every_eye_and_in_grey(column, ground):
    """Those that docs/index.html shows side by side."""
    names = ["ALiBi", "RoPE", "RoPE, theta 94", "RoPE, YaRN told the length"]
    names += ["RoPE, window of 512", "FoPE", "FoPE, floor alone"]
    every = [linear(plot.STYLES[name][column]) for name in names]
    for a, b in itertools.combinations(every, 2):
        assert abs(lab(a)[0] - lab(b)[0]) > 6.5
        for matrix in COLOUR_BLIND.values():
            assert np.linalg.norm(lab(matrix @ a) - lab(matrix @ b)) > 8
    for style in (*plot.STYLES.values(), *plot.PAIRS.values()):
        assert contrast(style[column], ground) > 3
    markers = [marker for _, marker, _ in plot.STYLES.values()]
    markers += [marker for _, marker in plot.MORE_STYLES]
    assert len(set(markers)) == len(markers)


def test_long_labels_and_wide_ranges_can_be_read(tmp_path):
    """A legend stays within the figure; ticks are not all at the top of a log axis."""
    files = []
    for i, value in enumerate((0.1, 1.0, 5000.0, 2.0, 3.0)):
        path = result_file(tmp_path, "perplexity", "rope", i, value)
        files.append(changed(path, label=f"an embedding of one's own with all its parameters, {i}"))
    figure = plot.figure_length(load_results(files))
    figure.canvas.draw()
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 > 0 and legend.x1 < figure.bbox.width
    (ax,) = figure.axes
    low, high = ax.get_ylim()
    assert sum(low < tick < 1000 for tick in ax.get_yticks()) >= 5 and high > 200_000


def test_a_figure_of_next_to_no_training_says_so(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(plot, "draw", lambda *args, **how: said.append(how["message"]))
    for preset in ("quick", "tiny"):
        path = changed(result_file(tmp_path, "perplexity", "rope", 0, 1, preset=preset), step=30)
        plot.main([str(path)])
    assert "30 steps" in said[0] and not said[1]


VALUES = {"fope": (0.5, 0.7), "rope": (0.25, 0.25), "nope": (0.0, 0.1), "mine": (0.9, 1.0)}


def test_figure_and_table_come_from_the_json_files(tmp_path, capsys):
    files = [
        result_file(tmp_path, kind, pos, seed, value)
        for kind in ("perplexity", "passkey")
        for pos, values in VALUES.items()
        for seed, value in enumerate(values)
    ]
    plot.main([*map(str, files), "--out", str(tmp_path / "fig")])
    table = capsys.readouterr().out
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()]
    rows = [row for row in rows if row]
    assert [r[0] for r in rows[2:6]] == ["NoPE", "RoPE", "FoPE", "mine"]
    assert rows[4] == [
        "FoPE",
        "2",
        "24.00 ± 50.82",
        "24.00 ± 50.82",
    ]  # of 20 and 28, 1 degree of freedom
    assert ["FoPE", "2", "60 ± 127", "60 ± 127"] in rows
    image = matplotlib.image.imread(tmp_path / "fig.png")
    assert image.shape[0] > 300 and image[..., :3].std() > 0.05
    figure = plot.figure_length(load_results(files))
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["NoPE", "RoPE", "FoPE", "mine"]


def test_tables_of_a_text_are_made_anew(tmp_path):
    files = [result_file(tmp_path, "perplexity", "rope", seed, 1.0 + seed) for seed in range(2)]
    files += [result_file(tmp_path, "passkey", "rope", 0, 0.5)]
    both = [json.loads(path.read_text()) for path in files]
    (tmp_path / "fig.json").write_text(json.dumps(both))
    text = "before\n<!-- table fig{} -->\nold\n<!-- end table -->\nafter\n"
    whole = tables.fill_tables(text.format(""), tmp_path)
    assert "| RoPE | 2 | 60.00 ± 254.12 |" in whole and "| RoPE | 1 | 50 |" in whole
    assert whole.startswith("before\n<!-- table fig -->\n|") and whole.endswith("-->\nafter\n")
    no_end = "<!-- table fig -->\nkept\n"  # up to the next mark's end it would be lost
    assert tables.fill_tables(no_end + text.format(""), tmp_path) == no_end + whole


def test_labels(tmp_path, capsys):
    scaling, warm = {"kind": "yarn", "factor": 4.0, "original_len": 128}, {"temperature": True}
    files = [
        result_file(tmp_path, "perplexity", "rope", 0, 1.0, rope_scaling=scaling),
        result_file(tmp_path, "perplexity", "rope", 2, 1.0, rope_scaling=scaling | warm),
        result_file(tmp_path, "perplexity", "fope", 2, 1.0, rope_scaling=warm | {"kind": "none"}),
        result_file(tmp_path, "perplexity", "rope", 1, 1.0, theta=93.9),
        changed(result_file(tmp_path, "perplexity", "fope", 0, 1.0), label="FoPE, floor of 1024"),
        changed(result_file(tmp_path, "perplexity", "fope", 1, 1.0), label="FoPE, floor of 256"),
        result_file(tmp_path, "perplexity", "kerple", 0, 1.0, qk_norm=True),
    ]
    plot.main([*map(str, files), "--out", str(tmp_path / "fig.png")])
    table = capsys.readouterr().out
    labels = [line.split("|")[1].strip() for line in table.splitlines()[2:9]]
    floors = ["FoPE, floor of 256", "FoPE, floor of 1024"]  # by their numbers
    ropes = ["RoPE (theta 93.9)", "RoPE (yarn x4)", "RoPE (yarn x4, with temperature)"]
    assert labels == [*ropes, "FoPE (with temperature)", *floors, "KERPLE + QK-norm"]
    assert (tmp_path / "fig.png").exists()  # the flag had its .png


ROW = {"perplexity": 40, "loss": 3.0, "tokens": 10}


@pytest.mark.parametrize(
    ("recipe", "result", "word"),
    [
        (dict(train_len=64), {}, "training lengths"),
        (dict(seed=0), dict(commit="x"), "seed 0"),
        (dict(tokenizer="byte"), {}, "tokenizers"),
        (dict(lengths="128,4096"), {}, "--lengths"),
        ({}, dict(lengths={128: ROW | {"tokens": 5}}), "--max_tokens"),
        ({}, dict(lengths={64: ROW}), "length"),
        ({}, dict(trained_on=["x"]), "training data"),
        (dict(lr=0.5), {}, "lr"),
    ],
    ids=str,
)
def test_what_does_not_belong_together_is_refused(recipe, result, word, tmp_path):
    """Two results of RoPE that are no two seeds of the same."""
    first = result_file(tmp_path, "perplexity", "rope", 0, 1.0)
    second = result_file(tmp_path, "perplexity", "rope", 1, 1.0)
    recipe = json.loads(second.read_text())["recipe"] | recipe
    changed(second, recipe=recipe, **result)
    refuses(plot.main, [first, second, "--out", tmp_path / "fig"], word)


@pytest.mark.parametrize("label", [None, "mine"])
def test_a_model_that_is_half_trained_is_named_so(tmp_path, label, capsys):
    """Also where RUN/*.json are drawn, config.json among them."""
    (tmp_path / "config.json").write_text('{"recipe": {}}')
    sizes = dict(tokens=128 * 4 * 157, batch_size=4)
    path = result_file(tmp_path, "perplexity", "rope", 0, 1.0, **sizes)
    for step, told in ((60, True), (157, False)):
        changed(path, step=step, label=label)
        plot.main([str(p) for p in sorted(tmp_path.glob("*.json"))])
        assert (f"{label or 'RoPE'} (step 60 of 157)" in capsys.readouterr().out) == told
    assert (tmp_path / "perplexity_rope_0.png").exists()


def test_what_is_no_result_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for content in ("{}", "[3]", "[]"):
        path.write_text(content)
        refuses(plot.main, [path], "x.json")
    path = result_file(tmp_path, "perplexity", "rope", 0, 1.0)
    for out in (tmp_path, f"{tmp_path}/figs/"):
        refuses(plot.main, [path, "--out", out], "--out")
    refuses(plot.main, [])


TEX = r"$\frac{1}$ $$"


@pytest.mark.parametrize("label", ["_mine", "__init", "a|b", "<b>", "two\nlines", TEX, "$5, $6"])
def test_a_label_is_text_in_figure_and_table(tmp_path, label):
    """Whatever it would mean to matplotlib, to TeX, which may be wrong, or to Markdown."""
    other = result_file(tmp_path, "passkey", "fope", 0, 1.0)
    mine = changed(result_file(tmp_path, "passkey", "rope", 0, 1.0), label=label)
    plot.main([str(mine), "--out", str(tmp_path / "fig")])
    assert (tmp_path / "fig.png").exists()
    results, label = load_results([mine, other]), label.replace("\n", " ")
    figure = plot.figure_length(results)
    figure.canvas.draw()
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == [label.replace("$", r"\$"), "FoPE"]
    lines = [line for line in tables.markdown_table(results).splitlines() if line]
    cell = label.replace("|", r"\|").replace("<", r"\<")
    assert any(line.startswith(f"| {cell} | 1 |") for line in lines)
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda r: r["recipe"].update(dropout=0.0), "dropout"),
        (lambda r: r["recipe"].pop("pos"), "pos"),
        (lambda r: r["recipe"].pop("seed"), "seed"),
        (lambda r: r["recipe"].update(pos_args=None), "pos_args"),
        (lambda r: r.update(recipe=None), "recipe"),
        (lambda r: r.update(lengths={f"{n}x": row for n, row in r["lengths"].items()}), "128x"),
        (lambda r: r.update(lengths=[128]), "lengths"),
        (lambda r: r["lengths"]["128"].pop("loss"), "loss"),
        (lambda r: r["lengths"]["256"].update(perplexity=None), "perplexity"),
        (lambda r: r.update(label=5), "label"),
        (lambda r: r.update(kind=5), "kind"),
    ],
)
def test_a_result_of_other_code_is_refused_with_its_file_and_field(tmp_path, change, word):
    path = result_file(tmp_path, "perplexity", "rope", 0, 1.0)
    plot.main([str(path)])
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps([result]))
    refuses(plot.main, [path], str(path), word)
