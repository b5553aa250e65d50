"""
The mechanism experiments: what they measure against direct calculation, and that each writes its
figure and numbers.
"""

import itertools
import json
import math
import re
import sys
from functools import partial

import matplotlib.image
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, refuses, run_training

sys.path.insert(0, str(ROOT / "experiments"))

import filler
import ngram
import page
import spectrum_leakage
import wrap

from data import TokenData
from fope import RoPE
from model import GPT, GPTConfig
from tasks import PasskeyAnywhere


def test_spectra_write_a_figure_and_numbers(tmp_path):
    spectrum_leakage.main(["--out", str(tmp_path)])
    assert json.loads((tmp_path / "spectrum_leakage.json").read_text())
    assert matplotlib.image.imread(tmp_path / "spectrum_leakage.png").shape[1] >= 1000


# --- spectra


def test_lemma_3_1_on_the_square_where_everything_is_known():
    """(cos a + cos b)^2 = 1 + cos(2a)/2 + cos(2b)/2 + cos(a - b) + cos(a + b), paper's Eq. 18."""
    b1, b2 = spectrum_leakage.TONES
    result = spectrum_leakage.activation(torch.square)
    expected = {2 * b1: 0.5, 2 * b2: 0.5, b2 - b1: 1.0, b1 + b2: 1.0, 0: 1.0}
    for b, value in expected.items():
        assert result["amplitude"][b] == pytest.approx(value, abs=1e-9)
    assert spectrum_leakage.combinations(2) == sorted([*expected, b1, b2])
    assert spectrum_leakage.combinations(2, signs=[1]) == sorted({*expected, b1, b2} - {b2 - b1})
    assert result["predicted_share"] == pytest.approx(1.0)
    energy = {b: a * a / 2 for b, a in expected.items() if b}
    assert result["printed_share"] == pytest.approx(1 - energy[b2 - b1] / sum(energy.values()))


def test_misplaced_energy_of_a_tone_is_that_of_the_dirichlet_kernel():
    """Far from 0 and pi a cut-off tone's spectrum is sin(N x / 2) / sin(x / 2) around it."""
    N, x = 512, np.arange(1, 64 * 256) * 2 * np.pi / (64 * 512)
    kernel = (np.sin(N * x / 2) / np.sin(x / 2)) ** 2
    expected = kernel[x > 2 * np.pi / N].sum() * 2 / (2 * kernel.sum() + N**2)
    (misplaced,) = spectrum_leakage.misplaced_energy([math.pi / 2], N)
    assert misplaced == pytest.approx(expected, rel=0.02)


# --- with a checkpoint


def test_an_ngram_counts_and_interpolates_by_hand():
    model = ngram.NGram(["aab"], context=1, vocab_size=3)
    # before any letter: two of three are a, one is b, and two kinds were seen
    first = [(2 + 2 / 3) / 5, (1 + 2 / 3) / 5, (0 + 2 / 3) / 5]
    assert [model.probability(letter) for letter in "abc"] == pytest.approx(first)
    # after an a came an a and a b; after a b and a c nothing
    after_a = [(1 + 2 * first[0]) / 4, (1 + 2 * first[1]) / 4, (0 + 2 * first[2]) / 4]
    assert [model.probability("a" + letter) for letter in "abc"] == pytest.approx(after_a)
    assert [model.probability("b" + letter) for letter in "abc"] == pytest.approx(first)
    idx, targets = torch.tensor([[97, 97]]), torch.tensor([[97, 98]])
    losses = model(idx, targets, reduction="none")
    assert losses.tolist()[0] == pytest.approx([-math.log(p) for p in after_a[:2]])


@pytest.mark.parametrize("far_keys", ["wrapped", 15, 31])
@pytest.mark.parametrize("put_back", [(), ("slow",), ("fast",), ("slow", "fast")])
def test_put_back_is_the_score_at_a_distance_of_training(far_keys, put_back):
    """Each pair alone, as a complex number: q times conjugate k, turned by w times the distance."""
    N, T = 16, 71
    pos = RoPE(head_dim=8, n_head=1, train_len=N, theta=100.0)
    q, k = torch.randn(2, 1, 1, T, 8, generator=torch.Generator().manual_seed(0)).unbind()
    scores = wrap.PutBack(pos, far_keys, put_back).scores(q, k)[0, 0].double()
    distance = torch.arange(T)[:, None] - torch.arange(T)
    shown = N // 2 + distance % (N // 2) if far_keys == "wrapped" else torch.tensor(far_keys)
    seen = torch.where(distance >= N, shown, distance)
    expected = torch.zeros(T, T, dtype=torch.float64)
    for m, w in enumerate(pos.freqs.tolist()):
        a, b = (torch.complex(x[0, 0, :, m], x[0, 0, :, m + 4]) for x in (q, k))
        pairs = "slow" if w < 2 * math.pi / N else "fast"
        at = w * (seen if pairs in put_back else distance).double()
        expected += (a[:, None] * b.conj() * torch.polar(torch.ones_like(at), at)).real
    causal = distance >= 0
    torch.testing.assert_close(scores[causal], expected[causal] / 8**0.5, atol=1e-5, rtol=1e-5)
    added = torch.full((1, 1, 1), 0.5)  # for each head, to the scores of far keys alone
    raised = wrap.PutBack(pos, far_keys, put_back, added).scores(q, k)[0, 0].double()
    torch.testing.assert_close(raised - scores, (distance >= N).double() / 2, atol=1e-5, rtol=1e-5)


def test_a_curve_is_the_score_of_the_mean_query_and_key_in_some_pairs():
    N, T = 16, 71
    pos = wrap.PutBack(RoPE(head_dim=8, n_head=3, train_len=N, theta=100.0), "none", ())
    q, k, v = torch.randn(3, 2, 3, T, 8, generator=torch.Generator().manual_seed(0)).unbind()
    pos.attend(q, k, v)
    a, b = (x[:, :, :N].mean(dim=(0, 2)).double() for x in (q, k))
    a, b = (torch.complex(x[:, :4], x[:, 4:]) for x in (a, b))
    for distance in (0, 5, 30):
        turn = torch.exp(1j * pos.pos.freqs.double() * distance)
        score = (a * b.conj() * turn).real.mean(dim=0) / math.sqrt(8)
        fast, slow = (float(pos.curve(pairs, 31).mean(0)[distance]) for pairs in ("fast", "slow"))
        assert fast == pytest.approx(float(score[0]), abs=1e-5)
        assert slow == pytest.approx(float(score[1:].sum()), abs=1e-5)


def test_the_cause_is_measured_on_a_run_and_drawn(tmp_path, data_folder):
    run = run_training(data_folder, tmp_path / "rope_s1", "--pos=rope", "--tokens=256")
    flags = ["--length", "256", "--windows", "2", "--held", "0", "9", "99", "--out", tmp_path]
    wrap.main([str(flag) for flag in (run, *flags)])
    study = json.loads((tmp_path / "wrap.json").read_text())
    (rope,) = study["runs"]
    assert rope["name"] == "rope" and len(rope["removed"]) == 5 + 2 * len(study["held"])
    assert [len(rope["curve"][pairs]) for pairs in ("slow", "fast")] == [256, 256]
    assert rope["damage"] == rope["loss"]["none"] - rope["loss"]["near"]
    wrap.main([str(flag) for flag in (run, *flags, "--name", "wrap_curve")])
    wrap.main(["--out", str(tmp_path)])
    assert (tmp_path / "wrap.png").exists()
    nope = run_training(data_folder, tmp_path / "nope_s1", "--pos=nope", "--tokens=256")
    refuses(wrap.main, [nope, *flags], "nope_s1")


# --- passkeys in another filler


def test_passkeys_are_hidden_in_the_text_of_the_data_and_in_half_of_the_documents_in_sentences(
    data_folder,
):
    data = TokenData(data_folder, "train")
    decode = data.tokenizer().decode
    words = decode(data.read(0, len(data)).tolist())
    task = filler.PasskeyInText(data.tokenizer().encode_ordinary, data.excerpt)
    tokens, n_answer, distance = task.sample(1024, np.random.default_rng(0))
    needle = decode(tokens[: 1024 - n_answer - distance].tolist()).split("\n")[-2]
    assert needle.startswith(f"The pass key is {decode(tokens[-n_answer:].tolist()).strip()}.")
    assert decode(tokens[: 1024 - n_answer - distance].tolist()).split("\n")[1][:40] in words
    documents = [decode(task.document(1024, np.random.default_rng(i), 0)) for i in range(40)]
    assert 10 < sum("The grass is green" in document for document in documents) < 30


def test_a_mask_leaves_the_last_keys_and_what_is_shown():
    shown = torch.tensor([True, False, False, False, False])
    mask = filler.visible(5, 2, shown, torch.ones(5).bool()).int().tolist()
    rows = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 1, 1]]
    assert mask == rows
    rows[3] = [1, 1, 1, 1, 0]
    assert filler.visible(5, 2, shown, torch.arange(5) == 4).int().tolist() == rows


def tiny_model(data, pos):
    shape = dict(n_layer=2, n_head=2, head_dim=16, n_embd=32, train_len=256, pos=pos)
    torch.manual_seed(0)
    return GPT(GPTConfig(**shape, vocab_size=data.meta["vocab_size"])).eval()


def test_a_mask_takes_the_place_of_the_causal_one(data_folder):
    data = TokenData(data_folder, "train")
    task = PasskeyAnywhere(data.tokenizer().encode_ordinary)
    tokens = torch.from_numpy(task.sample(256, np.random.default_rng(0))[0])[None, :-1]
    model = tiny_model(data, "rope")
    logits = [model(tokens)]
    for window in (256, 8):
        mask = filler.visible(255, window, torch.zeros(255).bool(), torch.ones(255).bool())
        model.blocks[0].attn.pos.attend = partial(F.scaled_dot_product_attention, attn_mask=mask)
        logits.append(model(tokens))
    torch.testing.assert_close(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])


@pytest.mark.parametrize("pos", ["rope", "fope"])
def test_each_way_of_asking_hides_what_it_says(data_folder, monkeypatch, pos):
    data = TokenData(data_folder, "train")
    task, seen = PasskeyAnywhere(data.tokenizer().encode_ordinary), []

    @torch.no_grad()
    def answers(model, embeddings, tokens, n_answer):
        for block, embedding in zip(model.blocks, embeddings, strict=True):
            block.attn.pos = embedding
        seen.append(model(torch.from_numpy(tokens)[None, :-1])[0, -n_answer:])
        return True

    def logits(length):
        seen.clear()
        (trial,) = filler.ask(tiny_model(data, pos), task, length, 1)
        assert trial[0] < 700  # the passkey stands behind far tokens
        return dict(zip(filler.WAYS, seen, strict=True))

    monkeypatch.setattr(filler, "answers", answers)
    thinned = {"every 2nd": (1, 1), "every 8th": (10**6, 1), "every 8th block": (8, 16)}
    monkeypatch.setattr(filler, "THINNED", thinned)
    close = partial(torch.allclose, atol=1e-5)
    of = logits(1000)
    assert close(of["every 2nd"], of["from none"])  # here it is every single one
    assert close(of["every 8th"], of["from both"])  # and here none
    model = tiny_model(data, pos)
    known = [wrap.PutBack(b.attn.pos, "wrapped", ("slow", "fast")) for b in model.blocks]
    tokens, n_answer, _ = task.sample(1000, np.random.default_rng((1000, 0)))
    answers(model, known, tokens, n_answer)
    assert close(of["known distances"], seen[-1])
    for way, other in itertools.combinations(set(of) - {"every 2nd", "every 8th"}, 2):
        assert not close(of[way], of[other]), (way, other)
    of = logits(256)  # without a far token
    assert all(close(of[way], of["from none"]) for way in of)


# --- the page, and README's picture


def test_the_page_holds_the_numbers_of_the_results():
    """Else run python experiments/page.py."""
    text = (ROOT / "docs" / "index.html").read_text(encoding="utf-8")
    held = re.search('id="measured">(.*?)</script>', text, re.S)[1]
    assert json.loads(held) == page.page_numbers(page.MECHANISM, page.texts())


@pytest.mark.slow
def test_the_picture_of_the_readme_is_drawn_from_the_results():
    files = [ROOT / "docs" / name for name in ("loss.svg", "loss_dark.svg", "index.html")]
    committed = [file.read_bytes() for file in files]
    page.main([])
    assert [file.read_bytes() for file in files] == committed


# --- the notebook


@pytest.mark.slow
def test_the_tour_runs(tmp_path):
    """On shorter texts, in a folder of its own; its exercise has an answer."""
    nbclient = pytest.importorskip("nbclient")
    notebook = pytest.importorskip("nbformat").read(ROOT / "experiments" / "tour.ipynb", 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    answers = [line for cell in notebook.cells for line in cell.source.split("```python\n")[1:]]
    changes = {
        "runs_out/tour": str(tmp_path),
        "4 * 8192": "1024",
        "[512, 1024, 2048, 4096, 8192]": "[512, 1024]",
        "# your lines": answers[0].split("\n")[0],
    }
    for ours, small in changes.items():
        assert any(ours in cell.source for cell in code)
        for cell in code:
            cell.source = cell.source.replace(ours, small)
    resources = {"metadata": {"path": str(ROOT / "experiments")}}
    how = dict(timeout=300, kernel_name="python3", resources=resources)
    nbclient.NotebookClient(notebook, **how).execute()
    outputs = [out for cell in code for out in cell.outputs]
    printed = "".join(out.text for out in outputs if out.get("name") == "stdout")
    assert "largest difference: 0.0\n" in printed and "slow pairs stopped" in printed
