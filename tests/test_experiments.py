"""The mechanism experiments: what they measure against direct calculation, and that each writes its figure and numbers."""

import json
import math
import shutil
import sys

import matplotlib.image
import nbformat
import numpy as np
import pytest
import torch
from conftest import ROOT, refuses
from nbclient import NotebookClient

sys.path.insert(0, str(ROOT / "experiments"))

import attention_map
import decay
import qk_activation
import relative
import spectrum_leakage
import toy_fourier

from fope import FoPE, NoPE, RoPE, rope_freqs
from model import GPT, GPTConfig, save_checkpoint


@pytest.mark.parametrize("script", [decay, relative, spectrum_leakage, toy_fourier])
def test_script_writes_figure_and_numbers(script, tmp_path):
    script.main(["--out", str(tmp_path)])
    name = script.__name__
    assert json.loads((tmp_path / f"{name}.json").read_text())
    assert matplotlib.image.imread(tmp_path / f"{name}.png").shape[1] >= 1000
    assert (tmp_path / f"{name}.svg").exists()
    with pytest.raises(SystemExit, match="1"):
        script.main(["--outt", "x"])
    refuses(script.main, ["--out", tmp_path / f"{name}.json"], "cannot be made a folder")


# --- spectra


def test_linear_layer_leaks_with_the_amplitudes_of_its_weights():
    bins, before, after, W = spectrum_leakage.linear_layer()
    np.testing.assert_allclose(before[:, bins], np.eye(len(bins)), atol=1e-9)
    np.testing.assert_allclose(after[:, bins], np.abs(W), atol=1e-9)


def test_lemma_3_1_on_the_square_where_everything_is_known():
    """(cos a + cos b)^2 = 1 + cos(2a)/2 + cos(2b)/2 + cos(a - b) + cos(a + b), the paper's Eq. 18."""
    b1, b2 = 1489, 2203
    result = spectrum_leakage.activation(torch.square)
    expected = {2 * b1: 0.5, 2 * b2: 0.5, b2 - b1: 1.0, b1 + b2: 1.0, 0: 1.0}
    for b, value in expected.items():
        assert result["amplitude"][b] == pytest.approx(value, abs=1e-9)
        assert result["predicted_bins"][b] <= 2
    assert result["predicted_share"] == pytest.approx(1.0)
    energy = {b: a * a / 2 for b, a in expected.items() if b}
    assert result["printed_share"] == pytest.approx(1 - energy[b2 - b1] / sum(energy.values()))


@pytest.mark.parametrize("g", [f for f, _ in spectrum_leakage.ACTIVATIONS.values()])
def test_activations_make_the_lemmas_frequencies_and_no_others(g):
    result = spectrum_leakage.activation(g)
    assert result["predicted_share"] > 0.999 and 0.1 < result["new_share"] < 0.5 and result["printed_share"] < 0.7


def test_rest_of_eq_10_is_what_whole_cycles_leave():
    N = 512
    for w, share in zip(rope_freqs(64).tolist(), spectrum_leakage.rest_of_eq_10(rope_freqs(64), N), strict=True):
        period, left = 2 * math.pi / w, float(N)
        while left >= period:
            left -= period
        assert share == pytest.approx(left / N, abs=1e-4)
        assert (share == 1.0) == (w < 2 * math.pi / N)


def test_misplaced_energy_of_a_tone_is_that_of_the_dirichlet_kernel():
    """Far from 0 and pi the spectrum of a cut-off tone is sin(N x / 2) / sin(x / 2) around its frequency."""
    N, x = 512, np.arange(1, 64 * 256) * 2 * np.pi / (64 * 512)
    kernel = (np.sin(N * x / 2) / np.sin(x / 2)) ** 2
    expected = kernel[x > 2 * np.pi / N].sum() * 2 / (2 * kernel.sum() + N**2)
    assert spectrum_leakage.misplaced_energy([math.pi / 2], N)[0] == pytest.approx(expected, rel=0.02)


# --- decay


def test_decay_curves_are_the_mean_cosine():
    freqs = rope_freqs(64)
    T = 40
    direct = [sum(math.cos(n * w) for w in freqs.tolist()) / 32 for n in range(T)]
    np.testing.assert_allclose(decay.mean_cosine(freqs, T), direct, atol=1e-6)
    np.testing.assert_allclose(decay.constant_content(RoPE(**decay.SHAPE), T), direct, atol=1e-4)
    np.testing.assert_allclose(decay.constant_content(NoPE(**decay.SHAPE), T), 1.0)
    for mu in (0.0, 1.0):
        mean, error = decay.sampled_scores(RoPE(**decay.SHAPE), mu, T)
        assert ((mean - mu**2 * torch.tensor(direct)).abs() < 5 * error).all()


# --- relative


def test_not_relative_is_zero_for_a_function_of_distance_and_grows_with_the_noise():
    assert relative.not_relative(relative.scores_of_one_content(RoPE(**relative.SHAPE), 100)) < 1e-4
    shares = []
    for sigma in (0.0, 0.1, 0.4):
        torch.manual_seed(0)
        pos = FoPE(**relative.SHAPE, sigma=sigma, variant="paper")
        shares.append(relative.not_relative(relative.scores_of_one_content(pos, 100)))
    assert shares[0] < 1e-4 < 0.1 < shares[1] < shares[2] < 1


def test_not_relative_is_one_where_distance_explains_nothing():
    """Scores that depend on i alone, drawn at random: every distance has the same mean, up to chance."""
    scores = torch.randn(1, 400, 1, generator=torch.Generator().manual_seed(0)).expand(-1, -1, 400)
    assert relative.not_relative(scores) > 0.95


# --- the toy


def test_toy_ground_truth_is_the_mean_product_at_a_distance():
    W = np.array([[0.8, -0.3], [0.5, 1.1]])
    power, truth = toy_fourier.ground_truth(W)
    x = np.cos(2 * np.pi * np.outer(toy_fourier.BINS, np.arange(toy_fourier.SAMPLES)) / toy_fourier.SAMPLES)
    y = W @ x
    y = y / (1 + np.exp(-y))  # SiLU
    y -= y.mean(axis=1, keepdims=True)
    for n in (0, 5, 77):
        np.testing.assert_allclose(truth[:, n], (y * np.roll(y, -n, axis=1)).mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(toy_fourier.rope_scores(power)[:, 0], truth[:, 0], atol=1e-6)


def test_random_weights_add_their_variance_to_the_expected_squared_error():
    """What the script says of the paper's figure: E |truth - FoPE|^2 = |truth - RoPE|^2 + the series' variance."""
    power, truth = toy_fourier.ground_truth(np.array([[0.8, -0.3], [0.5, 1.1]]))
    rope, rng = toy_fourier.rope_scores(power), np.random.default_rng(0)
    draws = np.array([toy_fourier.fope_scores(power, 0.1, rng) for _ in range(600)])
    expected = ((truth - rope) ** 2).mean() + draws.var(axis=0).mean()
    assert ((truth - draws) ** 2).mean() == pytest.approx(expected, rel=0.05)
    assert ((truth - draws) ** 2).mean() > ((truth - rope) ** 2).mean()


# --- with a checkpoint


def test_qk_activation_sees_queries_and_keys_before_the_rotation(tmp_path):
    """With queries made twice as large under the floor, the script must say so, and not of the keys."""
    model = GPT(GPTConfig(pos="rope", train_len=64, vocab_size=128, n_layer=2, n_head=2, n_embd=64))
    slow = qk_activation.under_the_floor(32, 10000.0, 64)
    assert slow.tolist() == (rope_freqs(32) < 2 * math.pi / 64).tolist() * 2
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:64][slow.repeat(2)] *= 2
    save_checkpoint(tmp_path / "run", model)
    qk_activation.main([str(tmp_path / "run"), "--out", str(tmp_path)])
    result = json.loads((tmp_path / "qk_activation.json").read_text())
    assert result["ratio_q"] == pytest.approx(2, rel=0.15) and result["ratio_k"] == pytest.approx(1, rel=0.15)
    assert len(result["q"]) == 2 and len(result["q"][0]) == 32
    refuses(qk_activation.main, [tmp_path / "nowhere"], "no run of train.py" if not has_transformers() else "no Llama model")


def has_transformers():
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def test_qk_activation_reads_a_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=100
    )
    (q, k), train_len, theta, _ = qk_activation.read_llama(transformers.LlamaForCausalLM(config), 50, None)
    assert q.shape == k.shape == (2, 16) and train_len == config.max_position_embeddings and theta == 10000.0


def test_attention_map_is_the_models_own_attention():
    model = GPT(GPTConfig(pos="fope", train_len=16, vocab_size=50, n_layer=1, n_head=2, n_embd=32))
    tokens = torch.randint(50, (21,), generator=torch.Generator().manual_seed(0))
    maps = attention_map.answer_attention(model, tokens, 3)
    assert maps.shape == (1, 2, 3, 20)
    torch.testing.assert_close(maps.sum(dim=-1), torch.ones(1, 2, 3))
    assert maps[0, 0, 0, 18:].sum() == 0  # causal: the third last position sees all but the last two
    attn = model.blocks[0].attn
    x = model.blocks[0].norm1(model.embed(tokens[None, :-1]))
    v = attn.qkv(x).view(1, 20, 3, 2, 16)[:, :, 2].transpose(1, 2)
    y = (maps[0] @ v[0]).transpose(0, 1).reshape(3, 32)
    torch.testing.assert_close(attn.proj(y), attn(x)[0, -3:], atol=1e-5, rtol=1e-4)


def test_attention_map_runs_on_a_checkpoint(tmp_path):
    """Untrained, with a tokenizer of bytes: no head looks anywhere in particular."""
    prompt = 400
    model = GPT(GPTConfig(pos="nope", train_len=prompt, vocab_size=257, n_layer=1, n_head=2, n_embd=16))
    save_checkpoint(tmp_path / "run", model, {"tokenizer": "byte", "data": "", "training": {}}, step=0, optimizer={})
    attention_map.main([str(tmp_path / "run"), "--trials", "1", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "attention_map.json").read_text())
    assert result["lengths"] == [prompt * f for f in (1, 2, 4, 8, 16)]
    assert result["best"]["percent"][0] == pytest.approx(100 / prompt, rel=0.5)  # untrained: even attention
    model = GPT(GPTConfig(pos="nope", train_len=20, vocab_size=257, n_layer=1, n_head=2, n_embd=16))
    save_checkpoint(tmp_path / "short", model, {"tokenizer": "byte", "data": "", "training": {}}, step=0, optimizer={})
    refuses(attention_map.main, [tmp_path / "short", "--out", tmp_path], "does not fit 20")
    refuses(attention_map.main, [tmp_path / "run", "--out", tmp_path, "--trials", "0"], "--trials must be at least 1")
    refuses(attention_map.main, [tmp_path / "run", "--out", tmp_path, "--name", "a/b"], "--name")
    assert np.array_equal(attention_map.occurrences(np.array([1, 2, 3, 1, 2, 9, 1, 2]), np.array([1, 2])), [0, 3])


def test_the_tour_runs_and_is_committed_with_its_outputs(tmp_path):
    """On models with next to no training, in a folder of its own."""
    notebook = nbformat.read(ROOT / "experiments" / "tour.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    pictures = [out for cell in code for out in cell.outputs if "image/png" in out.get("data", {})]
    assert len(pictures) >= 5 and [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(out.get("name") == "stderr" for cell in code for out in cell.outputs)
    for cell in code:
        for ours, small in (("runs_out/tiny", str(tmp_path)), ("614400", "2048"), ("16 * 2048", "2048")):
            cell.source = cell.source.replace(ours, small)
    resources = {"metadata": {"path": str(ROOT / "experiments")}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    printed = "".join(out.text for cell in code for out in cell.outputs if out.output_type == "stream")
    assert (tmp_path / "runs" / "fope_s0_perplexity" / "checkpoint.pt").exists()
    assert printed.count("perplexity at 128 256 512 1024 2048") == 1 and "FoPE, floor moved" in printed


def test_zero_gain_takes_up_no_results_of_another_recipe(tmp_path):
    import zero_gain

    for folder, kind in (("zero_gain", "perplexity"), ("repeated/zero_gain", "passkey")):
        shutil.copy(ROOT / f"results/{folder}/rope_g1_s0_{kind}.json", tmp_path)
    done = zero_gain.train_and_evaluate((tmp_path, "perplexity", 0.05, "RoPE", 1, 0))
    assert done == tmp_path / "rope_g1_s0_perplexity.json"
    with pytest.raises(ValueError, match="another recipe"):
        zero_gain.train_and_evaluate((tmp_path, "passkey", 0.05, "RoPE", 1, 0))


def test_zero_gain_is_the_padding_of_the_two_variants():
    import zero_gain

    shape = dict(head_dim=16, n_head=2, train_len=40)
    q, k = torch.randn(2, 1, 2, 30, 16, generator=torch.Generator().manual_seed(0))
    for gain, variant in ((2.0, "released"), (1.0, "paper")):
        torch.manual_seed(0)
        pos = zero_gain.GainFoPE(**shape, gain=gain, sigma=0.0, variant=variant)
        torch.testing.assert_close(pos.scores(q, k), FoPE(**shape, sigma=0.0, variant=variant).scores(q, k))
    rope, plain = zero_gain.GainRoPE(**shape, gain=4.0), RoPE(**shape)
    slow = torch.zeros(16)
    slow[(plain.freqs < 2 * math.pi / 40).repeat(2)] = 1.0
    expected = plain.scores(q * (1 - slow), k) + 4 * plain.scores(q * slow, k)
    torch.testing.assert_close(rope.scores(q, k), expected, atol=1e-5, rtol=1e-4)
