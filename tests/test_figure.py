"""Figures of results: one colour for one method, intervals and dots, whatever a label is."""

import json

import numpy as np
import pytest
from conftest import refuses
from scipy import stats
from test_rows import result, write

import figure
from rows import read_rows


def test_every_line_of_a_figure_has_a_style_of_its_own():
    labels = ["RoPE", "FoPE", "RoPE, qk_norm", *(f"FoPE, sigma={s}" for s in (0.1, 0.2))]
    style = figure.styles(labels)
    assert len({tuple(line.items()) for line in style.values()}) == len(labels)
    assert style["RoPE, qk_norm"] == style["RoPE"] | {"ls": "--"}
    assert figure.method("RoPE, kind=yarn, temperature") == "RoPE"
    assert figure.method("FoPE, floor alone") == "FoPE, floor alone"
    assert figure.styles(["FoPE"])["FoPE"] == style["FoPE"]
    many = figure.styles([f"mine {i}" for i in range(20)]).values()  # more than there are colours
    assert len({tuple(line.items()) for line in many}) == 20


def luminance(colour):
    """Of "#RRGGBB", 0 to 1."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(a, b):
    low, high = sorted(map(luminance, (a, b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("column, ground", [(0, "#FFFFFF"), (2, "#16181A")])
def test_methods_are_told_apart_by_every_eye_and_in_grey(column, ground):
    """By their lightness, 0 to 100: those that docs/index.html shows side by side."""
    names = ["ALiBi", "RoPE", "RoPE, theta 94", "RoPE, YaRN told the length"]
    names += ["RoPE, window of 512", "FoPE", "FoPE, floor alone"]
    lightness = sorted(116 * np.cbrt(luminance(figure.STYLES[n][column])) - 16 for n in names)
    assert min(np.diff(lightness)) > 6.5
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
    two, _ = draw(*results[:2], *results[3:]).axes  # an interval of two would hide everything
    assert len(two.collections) == 2 and "dots" in two.get_title()
    many = [result(seed=0, label=f"{i}") for i in range(6)] + [result(seed=1, label="0")]
    assert not draw(*many).axes[0].collections


def test_several_training_lengths_share_an_axis_of_multiples(draw):
    (ax,) = draw(result(), result(train_len=1024, lengths=(1024, 4096))).axes
    assert [line.get_xdata().tolist() for line in ax.lines[:2]] == [[1, 2], [1, 4]]
    (ax,) = draw(result(), result(train_len=1024)).axes  # but not where all have one length
    assert [line.get_xdata().tolist() for line in ax.lines[:2]] == [[128, 256], [128, 256]]


def test_chosen_curves_and_panels_and_refusals(tmp_path, capsys):
    path = write(tmp_path / "a.json", result(), result("fope"), result(kind="passkey"))
    (tmp_path / "config.json").write_text(json.dumps({"recipe": {}}))
    figure.main([str(path), str(tmp_path / "config.json"), "--only", "FoPE"])
    assert (tmp_path / "a.png").exists() and "RoPE" not in capsys.readouterr().out
    figure.main([str(path), "--kind", "passkey", "--out", str(tmp_path / "b.pdf")])
    assert (tmp_path / "b.pdf").read_bytes().startswith(b"%PDF")
    assert "perplexity" not in capsys.readouterr().out
    refuses(figure.main, [path, "--only", "NoPE"], "NoPE", "FoPE")
    refuses(figure.main, [path, "--kind", "keys"], "keys", "passkey")
    for out in (tmp_path, tmp_path / "x.jpg"):
        refuses(figure.main, [path, "--out", out], "--out")
