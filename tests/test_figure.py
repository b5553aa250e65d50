"""Figures of results: one colour for one method, intervals and dots, whatever a label is."""

import itertools
import json
import os
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, refuses
from scipy import stats
from test_rows import result, write

import figure
from rows import read_rows


def test_every_line_of_a_figure_has_a_style_of_its_own():
    labels = ["RoPE", "FoPE", "RoPE, qk_norm", *(f"FoPE, sigma={s}" for s in (0.1, 0.2))]
    style = figure.styles(labels)
    assert len({tuple(line.items()) for line in style.values()}) == len(labels)
    assert style["RoPE, qk_norm"] == style["RoPE"] | {"ls": "--"}
    assert figure.styles(["FoPE"])["FoPE"] == style["FoPE"]
    many = figure.styles([f"mine {i}" for i in range(20)]).values()  # more than there are colours
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
    every = [linear(figure.STYLES[name][column]) for name in names]
    for a, b in itertools.combinations(every, 2):
        assert abs(lab(a)[0] - lab(b)[0]) > 6.5
        for matrix in COLOUR_BLIND.values():
            assert np.linalg.norm(lab(matrix @ a) - lab(matrix @ b)) > 8
    for style in (*figure.STYLES.values(), *figure.PAIRS.values()):
        assert contrast(style[column], ground) > 3
    markers = [marker for _, marker, _ in figure.STYLES.values()]
    markers += [marker for _, marker in figure.MORE_STYLES]
    assert len(set(markers)) == len(markers)


@pytest.fixture
def draw(tmp_path):
    return lambda *results: figure.draw(read_rows([write(tmp_path / "a.json", *results)]))


def test_text_has_an_interval_and_passkeys_a_dot_for_each_model(draw):
    values = [1.0, 2.0, 4.0]
    results = [result(seed=s, value=v) for s, v in enumerate(values)]
    results += [result(seed=s, value=v / 4, kind="passkey") for s, v in enumerate(values)]
    text, keys = draw(*results).axes
    low, high = stats.ttest_1samp(np.multiply(values, 40), 0).confidence_interval()
    (band,) = text.collections
    assert {low, high} <= set(band.get_paths()[0].vertices[:, 1])
    assert text.lines[0].get_ydata() == pytest.approx([40 * 7 / 3] * 2)
    assert "3 seeds" in text.get_title() and len(keys.collections) == 3  # dots, and no interval
    many = [result(seed=0, label=f"{i}") for i in range(6)] + [result(seed=1, label="0")]
    assert not draw(*many).axes[0].collections


def test_several_training_lengths_share_an_axis_of_multiples(draw):
    (ax,) = draw(result(), result(train_len=1024, lengths=(1024, 4096))).axes
    assert [line.get_xdata().tolist() for line in ax.lines[:2]] == [[1, 2], [1, 4]]


def test_long_labels_and_wide_ranges_can_be_read(draw):
    """A legend stays within the figure; ticks are not all at the top of a log axis."""
    label = "an embedding of one's own with all its parameters"
    values = enumerate((0.1, 1.0, 5000.0, 2.0, 3.0))
    fig = draw(*(result(value=v, label=f"{label}, {i}") for i, v in values))
    fig.canvas.draw()
    legend = fig.legends[0].get_window_extent()
    assert legend.x0 > 0 and legend.x1 < fig.bbox.width
    (ax,) = fig.axes
    low, high = ax.get_ylim()
    assert sum(low < tick < 1000 for tick in ax.get_yticks()) >= 5 and high > 200_000


def test_a_figure_of_next_to_no_training_says_so(draw):
    assert draw(result(preset="quick"))._suptitle and not draw(result())._suptitle


@pytest.mark.parametrize("label", ["_mine", "__init", "<b>", r"$\frac{1}$ $$", "$5, $6"])
def test_a_label_is_text_in_a_figure(draw, label):
    """Whatever it would mean to matplotlib or to TeX, which may be wrong."""
    fig = draw(result(label=label, kind="passkey"))
    fig.canvas.draw()
    shown = [text.get_text() for text in fig.legends[0].get_texts()]
    assert shown == [label.replace("$", r"\$")]


def test_a_notebooks_backend_and_a_matplotlibrc_change_nothing(tmp_path):
    path = write(tmp_path / "a.json", result())
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    env = os.environ | {"MPLBACKEND": "module://not.installed", "MPLCONFIGDIR": str(tmp_path)}
    subprocess.run([sys.executable, "figure.py", path], cwd=ROOT, env=env, check=True)
    image = matplotlib.image.imread(tmp_path / "a.png")
    assert image.shape[1] > 1000 and image[..., :3].std() > 0.05


def test_chosen_curves_and_panels_and_refusals(tmp_path, capsys):
    path = write(tmp_path / "a.json", result(), result("fope"), result(kind="passkey"))
    (tmp_path / "config.json").write_text(json.dumps({"recipe": {}}))
    figure.main([str(path), str(tmp_path / "config.json"), "--only", "FoPE"])
    assert (tmp_path / "a.png").exists() and "RoPE" not in capsys.readouterr().out
    figure.main([str(path), "--kind", "passkey", "--out", str(tmp_path / "b.png")])
    assert "perplexity" not in capsys.readouterr().out
    refuses(figure.main, [path, "--only", "NoPE"], "NoPE", "FoPE")
    refuses(figure.main, [path, "--kind", "keys"], "keys", "passkey")
    for out in (tmp_path, tmp_path / "x.pdf"):
        refuses(figure.main, [path, "--out", out], "--out")
