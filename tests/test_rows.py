"""Results as rows: labels, means, intervals, differences, tables; and those that the texts cite."""

import json
import sys

import pytest
from conftest import ROOT, refuses
from scipy import stats

import rows
from common import Refused
from rows import cell, grouped, minus, read_rows, values_at

sys.path.insert(0, str(ROOT / "results"))
import tables


def result(pos="rope", seed=0, value=1.0, kind="perplexity", lengths=(128, 256), **more):
    """An evaluation; more: fields of the recipe, or of the result itself."""
    row = {"perplexity": 40 * value, "loss": value, "tokens": 10, "bits_per_byte": value}
    if kind != "perplexity":
        row = {"accuracy": value, "token_accuracy": value, "answer_nll": 2.3}
        row |= {"accuracy_low": value / 2, "accuracy_high": 1.0}
    recipe = {"pos": pos, "train_len": 128, "seed": seed, "tokens": 128 * 4 * 157, "batch_size": 4}
    of_result = {"label", "data", "data_sha256", "trained_on", "step", "own_code"}
    recipe |= {name: v for name, v in more.items() if name not in of_result}
    about = {name: v for name, v in more.items() if name in of_result}
    return {"kind": kind, "recipe": recipe, "lengths": {str(n): row for n in lengths}} | about


def write(path, *results):
    path.write_text(json.dumps(results))
    return path


@pytest.fixture
def read(tmp_path):
    return lambda *results: read_rows([write(tmp_path / "a.json", *results)])


def labels(found):
    return list(grouped(found, "label"))


# --- labels


def test_an_embeddings_settings_are_always_in_its_label_and_others_where_they_differ(read):
    of_own = [
        result("fope", pos_args={"sigma": 0}),
        result("rope", theta=93.9, lr=1e-3),
        result("rope", qk_norm=True),
        result("rope", rope_scaling={"kind": "yarn", "temperature": True, "original_len": 128}),
        result("nope", init_from="runs_out/x/nope_s0"),
    ]
    assert labels(read(of_own[0])) == ["FoPE, sigma=0"]
    assert labels(read(*of_own)) == [
        "NoPE, init_from=nope, lr=0.0006",
        "RoPE, kind=yarn, temperature, lr=0.0006",
        "RoPE, qk_norm, lr=0.0006",
        "RoPE, theta=93.9, lr=0.001",
        "FoPE, sigma=0, lr=0.0006",
    ]


@pytest.mark.parametrize("name", [n for n in vars(rows.Recipe()) if n not in rows.NEVER])
def test_whatever_field_of_a_recipe_differs_makes_two_curves(read, name):
    """Also the fields of a recipe that are yet to come."""
    value = {"theta": 5.0, "qk_norm": True, "task": "passkey", "tokenizer": "byte"}.get(name, 48)
    value = {"pos_args": {"n": 3}, "rope_scaling": {"factor": 2}}.get(name, value)
    value = {"preset": "tiny", "init_from": "x", "tokens": 128 * 4 * 99}.get(name, value)
    other = result(seed=1, **{name: value})
    assert len(labels(read(result(), other))) == 2


def test_what_is_decided_by_other_settings_is_in_no_label(read):
    found = read(result(warmup_steps=7), result(tokens=128 * 4 * 300, warmup_steps=15))
    assert labels(found) == ["RoPE, tokens=80384", "RoPE, tokens=153600"]


def test_a_label_of_ones_own_and_one_of_a_half_trained_model(read):
    assert labels(read(result(label="two\nlines"))) == ["two lines"]
    for label, name in ((None, "RoPE"), ("mine", "mine")):
        assert labels(read(result(step=60, label=label))) == [f"{name} (step 60 of 157)"]
        assert labels(read(result(step=157, label=label))) == [name]


def test_models_of_two_data_folders(read):
    """Trained on two texts: two curves, each read on its own text. Two folders of one text: one."""
    one, two = dict(data="a/books", trained_on=["x"]), dict(data="b/c4", trained_on=["y"])
    found = read(result(**one), result(seed=1, **two))
    assert {row["kind"] for row in found} == {"perplexity on books", "perplexity on c4"}
    same = result(seed=1, **one) | {"data": "elsewhere/books"}
    assert labels(read(result(**one), same)) == ["RoPE"]


def test_two_tokenizers_and_two_training_lengths_can_be_compared(read):
    byte = dict(tokenizer="byte", data="data/bytes", data_sha256=["x"])
    bpe = dict(tokenizer="bpe:2048 0a1b", data="data/bpe", data_sha256=["y"], vocab_size=2048)
    found = read(result(**byte), result(**bpe))
    assert labels(found) == ["RoPE, tokenizer=bpe:2048", "RoPE, tokenizer=byte"]
    assert "| bits per byte | models |" in rows.tables(found)
    found = read(result(), result(train_len=1024, lengths=(1024, 2048)))
    table = rows.tables(found)
    assert "| models | 128 | 256 | 1024 | 2048 |" in table
    assert "| RoPE, train_len=128 | 1 | 40.00 | 40.00 |  |  |" in table


# --- what does not belong together


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (dict(seed=0), "seed 0"),
        (dict(data_sha256=["x"]), "data_sha256"),
        (dict(lengths="128,4096"), "longest"),
        (dict(label="mine", lr=0.5), "lr"),
        (dict(label="mine", trained_on=["x"]), "trained_on"),
        (dict(own_code={"mine.Class": "1a"}), "own_code"),
        (dict(label="mine", init_from="runs_out/rope_s1"), "init_from"),
    ],
    ids=str,
)
def test_what_is_no_second_seed_is_refused(tmp_path, change, word):
    first, recipe = result(label=change.get("label")), {}
    if "lengths" in change:
        recipe, change = change, {}
    second = result(**{"seed": 1, "value": 2.0} | change)
    second["recipe"] |= recipe
    refuses(rows.main, [write(tmp_path / "a.json", first, second)], word)


def test_fewer_tokens_of_the_same_text_are_refused(read):
    other = result(seed=1)
    other["lengths"] = {n: row | {"tokens": 5} for n, row in other["lengths"].items()}
    with pytest.raises(Refused, match="--max_tokens"):
        read(result(), other)


def test_the_same_result_in_two_files_counts_once(tmp_path):
    files = [write(tmp_path / name, result()) for name in ("a.json", "b.json")]
    assert len(read_rows(files)) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["recipe"].update(dropout=0.0),
        lambda r: r.update(lengths={"128x": {}}),
        lambda r: r.pop("kind"),
    ],
)
def test_a_result_of_other_code_is_refused_with_its_file(tmp_path, change):
    other = result()
    change(other)
    refuses(rows.main, [write(tmp_path / "x.json", other)], "x.json")


# --- means


def test_an_interval_is_students_and_an_incomplete_length_is_empty(read):
    values = [1.0, 2.0, 4.0]
    found = read(*(result(seed=s, value=v) for s, v in enumerate(values)))
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    assert cell(values_at(found, "loss", 128)) == f"2.33 ± {(high - low) / 2:.2f}"
    found = read(result(), result(seed=1, lengths=(128,)))
    assert values_at(found, "loss", 128) == [1.0, 1.0] and values_at(found, "loss", 256) == []
    assert cell([-0.001]) == "0.00" and cell([1.0, 2.0]) == "1.50"
    assert cell([0.5, 0.5, 0.5], sign="+") == "+0.50 ± 0.00"


def test_differences_are_paired_by_seed(read):
    """Seeds that vary by 1 nat, and a difference that varies by a hundredth of it."""
    fope, rope = [1.0, 2.0, 3.0, 9.0], [1.11, 2.10, 3.09]
    found = read(
        *(result("fope", s, v) for s, v in enumerate(fope)),
        *(result("rope", s, v) for s, v in enumerate(rope)),
    )
    half = stats.ttest_rel(rope, fope[:3]).confidence_interval(0.95).high - 0.1
    assert f"| RoPE | 3 | +0.100 ± {half:.3f} |" in rows.tables(found, ["FoPE"])
    assert len(minus(found, "FoPE", "loss")) == 6
    assert "minus" not in rows.tables(read(result("fope"), result("rope")), ["FoPE"])


def test_all_or_nothing_is_counted_and_one_model_has_its_own_interval(read):
    found = read(*(result("rope", s, v, "passkey") for s, v in enumerate((1.0, 0.92, 0.0))))
    assert "(2 of 3) |" in rows.tables(found)
    assert "| RoPE | 1 | 50 (25 to 100) |" in rows.tables(read(result(value=0.5, kind="passkey")))


def test_differences_to_an_unknown_label_are_refused(tmp_path):
    refuses(rows.main, [write(tmp_path / "a.json", result()), "--to", "FoPE"], "FoPE", "RoPE")


def test_near_is_as_near_as_in_training(read):
    passkeys = result(kind="passkey", lengths=[256])  # trained at 128
    row = passkeys["lengths"]["256"]
    row |= {"distance": [20, 127, 128, 900], "right": [1, 0, 0, 0]}
    assert [(r["near"], r["far"]) for r in read(passkeys)] == [(0.5, 0.0)]
    row |= {"distance": [20, 30, 40, 50]}
    assert [(r["near"], r["far"]) for r in read(passkeys)] == [(0.25, None)]


# --- what was named beforehand, and the tables of the texts


def test_named_comparisons_are_corrected_for_their_number():
    """Holm's method: the smallest of three p times 3, the next times 2, never below the last."""
    found = [{"p": p} for p in (0.9, 0.01, 0.012)]
    tables.correct(found)
    assert [one["p_holm"] for one in found] == pytest.approx([0.9, 0.03, 0.03])


def test_what_a_comparison_says_is_by_the_test_or_by_the_interval():
    about = {"label": "a", "to": "b", "figure": "c", "length": 512, "seeds": 8}
    for measure, mean, half_interval, p_holm, expected in (
        ("loss", -0.2, 0.1, 0.04, "confirmed"),
        ("loss", 0.04, 0.01, 0.06, "clear"),
        ("loss", 0.02, 0.07, 1, "level"),
        ("loss", 0.02, 0.09, 1, "unclear"),
        ("accuracy", 0.02, 0.07, 1, "unclear"),
    ):
        numbers = {"mean": mean, "half_interval": half_interval, "p_holm": p_holm}
        table = tables.primary_table([about | numbers | {"measure": measure}])
        assert table.endswith(f"| {expected} |")


def test_the_committed_comparisons_are_those_of_the_committed_results():
    paths = [ROOT / "results" / f"{name}.json" for name in tables.SEEDS]
    committed = [one for path in paths for one in json.loads(path.read_text())]
    again = [one for name in tables.SEEDS for one in tables.compare(name)]
    tables.correct(again)
    for row, new in zip(committed, again, strict=True):
        assert new == {k: pytest.approx(v) if isinstance(v, float) else v for k, v in row.items()}


@pytest.mark.parametrize("text", tables.TEXTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_committed_results(text):
    """Else run python results/tables.py."""
    committed = text.read_text(encoding="utf-8")
    assert "<!-- table " in committed and tables.filled(committed) == committed
