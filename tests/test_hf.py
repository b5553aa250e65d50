"""hf/: our embeddings in Llamas of the transformers library, and our checkpoints as such models."""

import copy
import json
import random
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, need_gpt2, refuses, run_training, write_text
from test_robust import torchrun
from torch._dynamo.testing import CompileCounter

from checkpoint import load_checkpoint, load_run, with_pos
from common import Refused
from data import EOT, Passkey, load_tokenizer
from evaluation import task_accuracy, window_loss
from paper import plot

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow

import hf.export  # noqa: E402
import hf.swap  # noqa: E402
from hf.swap import swap_position_embedding  # noqa: E402

EMBEDDINGS = ("nope", "alibi", "rope", "fope")
YARN = {"kind": "yarn", "factor": 4, "original_len": 40}


def random_llama(n_head=4, n_kv_head=2, vocab_size=90, **kwargs):
    """A Llama without training, whose attention is not uniform: larger weights than usual."""
    torch.manual_seed(0)
    shape = dict(num_attention_heads=n_head, num_key_value_heads=n_kv_head, head_dim=16)
    size = dict(vocab_size=vocab_size, hidden_size=36, intermediate_size=48, num_hidden_layers=2)
    ends = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    config = transformers.LlamaConfig(
        **size, **shape, **ends, max_position_embeddings=40, initializer_range=0.3, **kwargs
    )
    return transformers.LlamaForCausalLM(config).eval()


def tokens(*shape):
    return torch.randint(1, 90, shape, generator=torch.Generator().manual_seed(1))


SWAPS = ["nope", "alibi", "rope", "fope", "rope yarn", "fope yarn", "fope 9 heads", "fope old"]


@pytest.fixture(params=SWAPS)
def swapped(request):
    """A swapped Llama; SmolLM-135M has 9 heads, 3 of them for keys. Old: a table a query head."""
    pos, _, how = request.param.partition(" ")
    llama = random_llama(9, 3) if how == "9 heads" else random_llama()
    kwargs = {"yarn": dict(rope_scaling=YARN), "old": dict(n_table=None)}.get(how, {})
    return swap_position_embedding(llama, pos, 40, **kwargs)


@torch.no_grad()
def logits(model, ids, **kwargs):
    return model(ids, **kwargs).logits


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (9, 3)])
def test_our_rope_is_the_librarys_to_the_last_bit(heads):
    llama, ids = random_llama(*heads), tokens(2, 100)
    before = logits(llama, ids)
    assert torch.equal(logits(swap_position_embedding(llama, "rope", 40), ids), before)


def test_our_rope_writes_from_a_padded_batch_what_the_library_does():
    llama, mask = random_llama(), torch.ones(2, 30, dtype=torch.long)
    mask[0, :9] = 0
    ours = swap_position_embedding(copy.deepcopy(llama), "rope", 40)
    more = dict(attention_mask=mask, max_new_tokens=9, do_sample=False)
    more |= dict(output_logits=True, return_dict_in_generate=True)
    a, b = (model.generate(tokens(2, 30), **more) for model in (llama, ours))
    assert all(map(torch.equal, a.logits, b.logits)) and torch.equal(a.sequences, b.sequences)


def test_the_embeddings_differ():
    all_logits = [
        logits(swap_position_embedding(random_llama(), p, 40), tokens(1, 60)) for p in EMBEDDINGS
    ]
    for i in range(4):
        for j in range(i):
            assert (all_logits[i] - all_logits[j]).abs().max() > 0.01


def test_the_cache_changes_nothing(swapped):
    ids = tokens(2, 70)
    whole, out, parts = logits(swapped, ids), None, []
    for part in ids.split([30, 1, 1, 20, 18], dim=1):
        with torch.no_grad():
            out = swapped(part, past_key_values=out and out.past_key_values, use_cache=True)
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(swapped, side):
    ids, lengths = tokens(3, 60), (60, 33, 7)
    padded, mask = torch.zeros(2, 3, 64, dtype=torch.long)
    where = [slice(64 - n, 64) if side == "left" else slice(n) for n in lengths]
    for i, n in enumerate(lengths):
        padded[i, where[i]], mask[i, where[i]] = ids[i, :n], 1
    both = logits(swapped, padded, attention_mask=mask)
    for i, n in enumerate(lengths):
        alone = logits(swapped, ids[i : i + 1, :n])[0]  # RoPE's angles are rounded otherwise there
        torch.testing.assert_close(both[i, where[i]], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "how",
    [
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "prefill_chunk_size": 7},
    ],
    ids=["dynamic", "static", "chunks"],
)
def test_a_padded_batch_generates_what_each_prompt_does(swapped, how):
    ids, lengths = tokens(3, 30), (30, 18, 5)
    padded, mask = torch.zeros(2, 3, 30, dtype=torch.long)
    for i, n in enumerate(lengths):
        padded[i, 30 - n :], mask[i, 30 - n :] = ids[i, :n], 1
    greedy = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    both = swapped.generate(padded, attention_mask=mask, **how, **greedy)
    for i, n in enumerate(lengths):
        prompt = ids[i : i + 1, :n]
        whole_mask = torch.ones_like(prompt)
        alone = swapped.generate(prompt, attention_mask=whole_mask, use_cache=False, **greedy)
        assert both[i, 30:].tolist() == alone[0, n:].tolist()


def test_saved_and_loaded(swapped, tmp_path):
    ids = tokens(2, 60)
    before = logits(swapped, ids)
    swapped.save_pretrained(tmp_path)
    for load in (hf.swap.load, transformers.AutoModelForCausalLM.from_pretrained):
        assert torch.equal(logits(load(tmp_path).eval(), ids), before)
    # in bf16 the tables stay as they are: rounded frequencies would be other frequencies
    loaded = hf.swap.load(tmp_path, dtype=torch.bfloat16).eval()
    for model in (loaded, copy.deepcopy(swapped).to(torch.bfloat16)):
        pos, was = (m.model.layers[1].self_attn.pos.embedding for m in (model, swapped))
        assert all(map(torch.equal, pos.state_dict().values(), was.state_dict().values()))
        assert model(ids).logits.dtype == torch.bfloat16
        agree = logits(model, ids).argmax(-1) == before.argmax(-1)
        assert agree.float().mean() > 0.8


def test_gradients_with_checkpointing(swapped):
    ids, gradients = tokens(2, 48), []
    for _ in range(2):
        swapped.train().zero_grad()
        swapped(ids, labels=ids).loss.backward()
        gradients.append(swapped.model.layers[0].self_attn.k_proj.weight.grad.clone())
        swapped.gradient_checkpointing_enable()
    assert torch.equal(*gradients)


@pytest.mark.parametrize("pos", ["alibi", "fope"])
def test_compiled_it_is_the_same(pos):
    model, ids = swap_position_embedding(random_llama(), pos, 40), tokens(2, 48)
    compiled = torch.compile(model, backend="aot_eager")  # the graph, without a C++ compiler
    torch.testing.assert_close(logits(compiled, ids), logits(model, ids), atol=1e-5, rtol=1e-4)


def test_a_swap_keeps_every_frequency_on_its_own_dimension():
    llama = swap_position_embedding(random_llama(), "fope", 4096, sigma=0.0)
    cos, _ = llama.model.layers[0].self_attn.pos.embedding.tables(64)
    freqs = 10000.0 ** (-torch.arange(8) / 8)
    kept = freqs >= 2 * torch.pi / 4096
    expected = torch.where(kept, torch.outer(torch.arange(64).float(), freqs).cos(), 1.0)
    assert kept.sum() == 6  # more than head_dim / 4
    torch.testing.assert_close(cos, expected.expand_as(cos), atol=1e-5, rtol=0)


def test_the_same_seed_swaps_in_the_same_noise():
    a, b, c = (swap_position_embedding(random_llama(), "fope", 40, seed=s) for s in (0, 0, 1))
    coefs = [m.model.layers[0].self_attn.pos.embedding.cos_coef for m in (a, b, c)]
    assert torch.equal(coefs[0], coefs[1]) and not torch.equal(coefs[0], coefs[2])
    assert not torch.equal(coefs[0], a.model.layers[1].self_attn.pos.embedding.cos_coef)
    longer = swap_position_embedding(a, "fope", 41)  # again: what was drawn is kept
    assert torch.equal(longer.model.layers[0].self_attn.pos.embedding.cos_coef, coefs[0])


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_what_cannot_be_swapped_is_refused_and_stays_as_it_was():
    sizes = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=90)
    sizes |= dict(hidden_size=32, intermediate_size=32, bos_token_id=0, eos_token_id=0)
    gpt2 = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=90)
    make = transformers.AutoModelForCausalLM.from_config
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    for model, pos, kwargs, words in (
        (make(gpt2), "fope", {}, "GPT2LMHeadModel is no Llama"),
        (transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)), "fope", {}, "biases"),
        (transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)), "fope", {}, "norms"),
        (
            transformers.MistralForCausalLM(transformers.MistralConfig(**sizes)),
            "rope",
            {},
            "window",
        ),
        (random_llama(rope_parameters=linear | {"rope_type": "dynamic"}), "fope", {}, "dynamic"),
        (
            random_llama(rope_parameters=linear),
            "rope",
            {"rope_scaling": YARN},
            "would be the second",
        ),
        (random_llama(), "kerple", {}, "kerple"),
        (random_llama(), "fope", {"sigma": -1}, "sigma"),
        (random_llama(), "fope", {"n_table": 3}, "n_table"),
        (random_llama(12, 6), "fope", {"n_table": 4}, "n_table 4 and 6 key heads"),
        (random_llama(), "rope", {"sigma": 1}, "sigma"),
        (random_llama(), "alibi", {"rope_scaling": YARN}, "alibi"),
    ):
        with pytest.raises(Refused, match=words):
            swap_position_embedding(model, pos, 40, **kwargs)
        assert not isinstance(model, hf.swap.SwappedLlama)
        logits(model, tokens(1, 30))


def test_a_swap_can_be_repeated(swapped):
    """What was drawn and given stays; another embedding comes, and the first one again."""
    ids, swap = tokens(1, 60), swapped.config.swap
    before = logits(swapped, ids)
    assert torch.equal(logits(swap_position_embedding(swapped, swap["pos"], 40), ids), before)
    for pos in (*EMBEDDINGS, swap["pos"]):
        again = logits(swap_position_embedding(swapped, pos, 40), ids)
    if swap["pos"] != "fope" and not swap["rope_scaling"]:  # which are drawn and given anew
        assert torch.equal(again, before)


def test_a_trained_rope_model_can_read_further_with_yarn(tmp_path):
    """Figure 4's comparison: RoPE put in RoPE's place, saved, and once more with YaRN."""
    swap_position_embedding(random_llama(), "rope", 40).save_pretrained(tmp_path)
    again = swap_position_embedding(hf.swap.load(tmp_path).eval(), "rope", 40, rope_scaling=YARN)
    once = swap_position_embedding(random_llama(), "rope", 40, rope_scaling=YARN)
    assert torch.equal(logits(again, tokens(1, 90)), logits(once, tokens(1, 90)))


def test_a_refused_swap_changes_nothing(tmp_path):
    model = swap_position_embedding(random_llama(), "fope", 40, rope_scaling=YARN)
    before, ids = logits(model, tokens(1, 60)), tokens(1, 60)
    with pytest.raises(Refused, match="sigma"):
        swap_position_embedding(model, "fope", 40, sigma=0.5)
    assert torch.equal(logits(model, ids), before)
    random_llama().save_pretrained(tmp_path)
    with pytest.raises(Refused, match="no swapped model"):
        hf.swap.load(tmp_path)
    model.config.swap["pos"] = "fop"
    model.save_pretrained(tmp_path)
    with pytest.raises(Refused, match="unknown position embedding 'fop'"):
        hf.swap.load(tmp_path)


def test_a_program_that_does_not_know_a_swapped_model_stops(tmp_path):
    """It must not read the weights with plain RoPE."""
    swap_position_embedding(random_llama(), "fope", 40).save_pretrained(tmp_path)
    code = "import sys, transformers; transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.strip().endswith("KeyError: 'read_by_hf_swap'")


def test_any_attention_of_the_library_has_positions(swapped, tmp_path):
    ids = tokens(2, 60)
    before = logits(swapped, ids)
    swapped.save_pretrained(tmp_path)
    eager = hf.swap.load(tmp_path, attn_implementation="eager").eval()
    assert eager.config._attn_implementation == "eager"
    swapped.set_attn_implementation("flex_attention")
    for model in (eager, swapped):
        torch.testing.assert_close(logits(model, ids), before, atol=1e-4, rtol=1e-4)
    shown = eager(ids, output_attentions=True, output_hidden_states=True)
    assert len(shown.attentions) == 2 and len(shown.hidden_states) == 3


# --- positions


def causal(T):
    return torch.ones(T, T, dtype=torch.bool).tril()


def four_dimensional_masks(T):
    """Prefix, sliding window, two packed texts and random: (T, T), true where a query may look."""
    i, j = torch.arange(T)[:, None], torch.arange(T)
    random_holes = torch.rand(T, T, generator=torch.Generator().manual_seed(0)) < 0.7
    return {
        "prefix": causal(T) | (j < 12),
        "window": causal(T) & (i - j < 9),
        "packed": causal(T) & ((i < 20) == (j < 20)),
        "holes": causal(T) & (random_holes | (i == j)),
    }


@pytest.mark.parametrize("kind", ["prefix", "window", "packed", "holes"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_do_to_rope_what_they_do_in_the_library(kind, dtype):
    llama, ids = random_llama(), tokens(2, 50)
    mask = four_dimensional_masks(50)[kind].expand(2, 1, 50, 50)
    if dtype == torch.float32:
        mask = torch.zeros(2, 1, 50, 50).masked_fill(~mask, torch.finfo(dtype).min)
    positions = torch.arange(50) % 20 + 3
    for more in ({}, {"position_ids": positions[None]}):
        before = logits(llama, ids, attention_mask=mask, **more)
        ours = swap_position_embedding(copy.deepcopy(llama), "rope", 40)
        assert torch.equal(logits(ours, ids, attention_mask=mask, **more), before)


def test_a_float_mask_is_the_boolean_one(swapped):
    ids, positions = tokens(2, 50), torch.arange(50)[None]
    for mask in four_dimensional_masks(50).values():
        mask = mask.expand(2, 1, 50, 50)
        added = torch.zeros(2, 1, 50, 50).masked_fill(~mask, -1e30)
        a, b = (
            logits(swapped, ids, attention_mask=m, position_ids=positions) for m in (mask, added)
        )
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_packed_texts_are_as_if_alone(swapped):
    ids = tokens(1, 50)
    positions = torch.cat((torch.arange(20), torch.arange(30)))[None]
    alone = torch.cat([logits(swapped, part) for part in ids.split([20, 30], dim=1)], dim=1)
    by_mask = four_dimensional_masks(50)["packed"][None, None]
    for how in (dict(use_cache=False), dict(attention_mask=by_mask)):  # the library's two ways
        packed = logits(swapped, ids, position_ids=positions, **how)
        torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)


def test_positions_given_by_hand_are_those_that_are_used():
    """Position t of a longer text: FoPE's logits know where, and the cache knows it later."""
    model = swap_position_embedding(random_llama(), "fope", 40)
    ids, later = tokens(1, 30), torch.arange(100, 130)[None]
    moved = logits(model, ids, position_ids=later)
    assert (moved - logits(model, ids)).abs().max() > 0.01
    with torch.no_grad():
        first = model(ids[:, :20], position_ids=later[:, :20], use_cache=True)
    more = dict(position_ids=later[:, 20:], past_key_values=first.past_key_values)
    torch.testing.assert_close(
        logits(model, ids[:, 20:], **more), moved[:, 20:], atol=1e-4, rtol=1e-4
    )


def test_fope_is_not_given_positions_that_a_mask_does_not_say():
    model, ids = swap_position_embedding(random_llama(), "fope", 40), tokens(1, 20)
    with pytest.raises(Refused, match="FoPE needs position_ids"):
        logits(model, ids, attention_mask=causal(20)[None, None])
    with pytest.raises(Refused, match="FoPE needs position_ids"):
        model.model(ids, causal(20)[None, None])


def test_grouped_keys_are_turned_once_and_as_the_formula_says():
    """Key heads, not query heads, enter the cache, turned; a group's queries share their table."""
    model, ids = swap_position_embedding(random_llama(), "fope", 4096, sigma=3.0), tokens(1, 40)
    layer, turned = model.model.layers[0].self_attn, {}
    pos = layer.pos.embedding
    layer.pos.register_forward_hook(lambda _, args, out: turned.update(args=args, out=out))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    assert pos.cos_coef.shape == (2, 6, 6)
    assert torch.equal(cache.layers[0].keys, turned["out"][1])
    angles = torch.arange(40)[:, None].double() * pos.freqs.double()
    for x, y, heads in zip(turned["args"], turned["out"], (4, 2), strict=False):
        for h in range(heads):
            table = h * 2 // heads
            cos = angles.cos() @ pos.cos_coef[table].double()
            sin = angles.sin() @ pos.sin_coef[table].double()
            cos, sin = (torch.nn.functional.pad(t, (0, 2), value=1.0) for t in (cos, sin))
            pairs = torch.complex(x[0, h, :, :8].double(), x[0, h, :, 8:].double())
            expected = pairs * torch.complex(cos, sin)
            found = torch.complex(y[0, h, :, :8].double(), y[0, h, :, 8:].double())
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_scaled_frequencies_stay_on_the_pairs_that_have_learned_them(tmp_path):
    llama, ids = random_llama(rope_parameters=LLAMA3), tokens(2, 100)
    freqs, before = llama.model.rotary_emb.inv_freq, logits(llama, ids)
    rope = swap_position_embedding(copy.deepcopy(llama), "rope", 40)
    assert torch.equal(logits(rope, ids), before)
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    halved = random_llama(rope_parameters=linear)
    before_halved = logits(halved, ids)
    assert torch.equal(logits(swap_position_embedding(halved, "rope", 40), ids), before_halved)
    fope = swap_position_embedding(llama, "fope", 200)
    kept = freqs[freqs >= 2 * torch.pi / 200]
    plain = 500000.0 ** -(torch.arange(8) / 8)
    assert len(kept) == 2 and (plain >= 2 * torch.pi / 200).sum() == 3  # the floor cuts the scaled
    assert torch.equal(fope.model.layers[1].self_attn.pos.embedding.freqs, kept)
    for model in (rope, fope):
        model.save_pretrained(tmp_path)
        assert torch.equal(logits(hf.swap.load(tmp_path).eval(), ids), logits(model, ids))
    swap_position_embedding(fope, "rope", 40)
    assert torch.equal(logits(fope, ids), before)


@pytest.mark.parametrize("pos", [None, *EMBEDDINGS])
def test_compiled_it_is_one_graph_as_a_llama_is(pos):
    model, ids = random_llama(), tokens(2, 48)
    if pos:
        swap_position_embedding(model, pos, 40)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for T in (48, 30, 47):
        found = logits(compiled, ids[:, :T])
        torch.testing.assert_close(found, logits(model, ids[:, :T]), atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 2  # a second one for any length


def test_processes_with_texts_of_unequal_lengths(tmp_path):
    """DDP copies buffers from the first process: none may have the size of a text."""
    swap_position_embedding(random_llama(), "fope", 40).save_pretrained(tmp_path)
    code, stdout, stderr = torchrun("tests/unequal_lengths.py", "llama", tmp_path)
    assert code == 0, stderr
    assert stdout.count("the same") == 2


def test_tied_weights_in_several_files_are_saved_and_loaded(tmp_path):
    model = swap_position_embedding(random_llama(tie_word_embeddings=True), "fope", 40)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, ids = hf.swap.load(tmp_path).eval(), tokens(1, 60)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


# -----------------------------------------------------------------------------
# hf/export.py


def export(run, out):
    hf.export.main([str(run), "--out", str(out)])
    return transformers.AutoModelForCausalLM.from_pretrained(out).eval()


@pytest.mark.parametrize("flags", [[], ["--qk_norm"]], ids=["", "qk_norm"])
@pytest.mark.parametrize("pos", [*EMBEDDINGS, "rope_a", "fope_shared"])
def test_an_exported_model_has_the_same_logits(pos, flags, data_folder, tmp_path):
    run = run_training(data_folder, tmp_path / "run", f"--pos={pos}", *flags)
    ours, _, _ = load_checkpoint(run)
    theirs = export(run, tmp_path / "exported")
    assert (type(theirs) is transformers.LlamaForCausalLM) == (pos == "rope" and not flags)
    for T in (32, 128):
        ids = torch.randint(512, (2, T))
        torch.testing.assert_close(logits(theirs, ids), ours(ids), atol=1e-5, rtol=0)


def test_an_exported_model_keeps_frequencies_of_its_own(data_folder, tmp_path):
    freqs = f"freqs={[1.0 / 2**i for i in range(8)]}"
    run = run_training(data_folder, tmp_path / "run", "--pos=rope", "--pos_args", freqs)
    ours, _, _ = load_checkpoint(run)
    theirs, ids = export(run, tmp_path / "exported"), torch.randint(512, (2, 128))
    torch.testing.assert_close(logits(theirs, ids), ours(ids), atol=1e-5, rtol=0)


def test_a_swap_after_the_export_is_that_of_train_py(data_folder, tmp_path):
    run = run_training(data_folder, tmp_path / "run", "--pos=rope")
    fope = dict(pos="fope", pos_args={"cap": False, "sigma": 0.0}, train_len=64)
    rope = load_checkpoint(run)[0]
    ours = with_pos(rope, rope.config.changed(**fope))
    theirs = swap_position_embedding(export(run, tmp_path / "exported"), "fope", 64, sigma=0.0)
    ids = torch.randint(512, (2, 100))
    torch.testing.assert_close(logits(theirs, ids), ours(ids), atol=1e-5, rtol=0)


def test_an_exported_run_writes_through_a_pipeline(checkpoint, tmp_path):
    export(checkpoint, tmp_path)
    write = transformers.pipeline("text-generation", str(tmp_path))
    text = write("Document", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert text.startswith("Document") and len(text) > len("Document")
    assert "hf.swap.load" in (tmp_path / "README.md").read_text()


def test_what_cannot_be_exported_is_refused(data_folder, tmp_path):
    run = run_training(data_folder, tmp_path / "run", "--pos=kerple")
    refuses(hf.export.main, [run, "--out", tmp_path / "out"], "kerple")
    refuses(hf.export.main, [run, "--out", run], "holds other files")
    refuses(hf.export.main, [tmp_path / "nothing", "--out", tmp_path / "out"], "no checkpoint")
    narrow = run_training(data_folder, tmp_path / "narrow", "--n_embd=33")
    refuses(hf.export.main, [narrow, "--out", tmp_path / "out"], "multiple of the 2 heads")


@pytest.mark.parametrize("name", ["byte", "bpe", "gpt2"])
def test_the_exported_tokenizer_gives_the_same_ids(name, data_folder, tmp_path):
    if name == "gpt2":
        need_gpt2()
    ours = load_tokenizer("bpe:512" if name == "bpe" else name, data_folder)
    hf.export.to_fast_tokenizer(ours).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [path.read_text() for path in sorted(write_text(tmp_path / "text", 3).iterdir())]
    texts += [
        (ROOT / "README.md").read_text(encoding="utf-8"),
        "",
        " ",
        "\n\n  two\tlines \n",
        "don't 12345 naïve 你好 🙂",
    ]
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode_ordinary(text)
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.convert_tokens_to_ids(EOT) == ours.eot_token


# -----------------------------------------------------------------------------
# hf/finetune.py


@pytest.fixture
def llama_folder(tmp_path):
    """A random Llama of 64 tokens with the byte tokenizer."""
    random_llama(vocab_size=257).save_pretrained(tmp_path / "llama")
    hf.export.to_fast_tokenizer(load_tokenizer("byte", "")).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def write_jsonl(path, chats=False):
    sentence = "The position of a token is known to the model by its embedding alone"
    words = sentence.split()
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as f:
        for _ in range(30):
            text = " ".join(rng.choices(words, k=40))
            turns = [{"role": role, "content": text} for role in ("user", "assistant")]
            f.write(json.dumps({"messages": turns} if chats else {"text": text}) + "\n")
    return path


def finetune():
    return pytest.importorskip("hf.finetune", reason="trl is not installed").main


@pytest.mark.parametrize("chats", [False, True])
def test_finetuning_swaps_learns_resumes_and_saves(chats, llama_folder, tmp_path, capsys):
    data, out = write_jsonl(tmp_path / "data.jsonl", chats), tmp_path / "out"
    argv = [llama_folder, "--pos", "fope", "--data", data, "--context", 64, "--out", out]
    argv += ["--lr", 0.01, "--trainer", "logging_steps=1", "save_steps=5"]
    finetune()([*map(str, argv), "max_steps=10"])
    before, after = re.search(
        r"([0-9.]+) nats.* ([0-9.]+) with fope", capsys.readouterr().out
    ).groups()
    assert float(before) > 5 and abs(float(after) - float(before)) < 2
    torn = shutil.copytree(out / "checkpoint-10", out / "checkpoint-15")  # killed while it saved
    (torn / "trainer_state.json").unlink()
    finetune()([*map(str, argv), "max_steps=20"])
    finetune()([*map(str, argv), "max_steps=20"])
    assert "is done already: 20 steps" in capsys.readouterr().out
    state = json.loads((out / "checkpoint-20" / "trainer_state.json").read_text())
    losses = [line["loss"] for line in state["log_history"] if "loss" in line]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
    config = hf.swap.load(out).config
    assert config.swap["train_len"] == config.max_position_embeddings == 64
    # the same folder takes no other data, and another's files are not written over
    other = write_jsonl(tmp_path / "other.jsonl", chats)
    words = [str(other if word == data else word) for word in argv]
    refuses(finetune(), words, "was started with another --data")
    refuses(finetune(), [*map(str, argv), "--lr", "0.02"], "was started with another --lr")
    refuses(
        finetune(), [str(llama_folder if word == out else word) for word in argv], "other files"
    )


def test_the_calls_of_the_readme(llama_folder, tmp_path, monkeypatch, benchmark):
    """Its block and its commands one after the other, of a small model at a small length."""
    page = (ROOT / "hf" / "README.md").read_text().replace("HuggingFaceTB/SmolLM-1.7B", "llama")
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "chats.jsonl", chats=True)
    write_text(tmp_path / "text", 1, 900).joinpath("000.txt").rename("book.txt")
    block = re.search(r"```python\n(.*?)```", page, re.S)[1]
    exec(block.replace("train_len=4096", "train_len=64"), {})
    commands = [line.split()[2:] for line in page.splitlines() if line.startswith("python -m ")]
    assert [words[0] for words in commands] == ["hf.finetune"] * 2 + ["hf.benchmark"] * 2 + [
        "paper.plot",
        "hf.export",
    ]
    for _, *words in commands[:2]:
        finetune()([*words, "--context", "64", "--trainer", "max_steps=1"])
    small = ["--lengths", "64,448", "--device", "cpu"]
    benchmark.main([word.replace("100", "2") for word in commands[3][1:]] + small)
    assert len(list(tmp_path.glob("smollm/*_p*.json"))) == 4


def test_processes_share_the_work(llama_folder, tmp_path):
    finetune()
    data, out = write_jsonl(tmp_path / "data.jsonl"), tmp_path / "out"
    argv = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29513"]
    argv += ["-m", "hf.finetune", llama_folder, "--pos", "fope", "--data", data, "--out", out]
    argv += ["--context", 64, "--trainer", "max_steps=2", "logging_steps=1"]
    command = [sys.executable, *map(str, argv)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.count("nats per token") == 1  # from the first of them alone
    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["log_history"][-1]["num_tokens"] == 2 * 2 * 4 * 64  # steps, processes, sequences


def gpt2_folder(path):
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=257)
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    hf.export.to_fast_tokenizer(load_tokenizer("byte", "")).save_pretrained(path)
    return path


def test_what_cannot_be_finetuned_is_refused(llama_folder, tmp_path):
    main, data = finetune(), write_jsonl(tmp_path / "data.jsonl")
    out, fope = ["--out", tmp_path / "out"], ["--context", 64, "--pos", "fope"]
    gpt2 = gpt2_folder(tmp_path / "gpt2")
    bad = tmp_path / "bad.jsonl"
    refuses(main, [gpt2, "--data", data, *out], "GPT2LMHeadModel is no LlamaForCausalLM")
    refuses(main, [tmp_path / "none", "--data", data, *out], f"there is no folder {tmp_path}/none")
    for name in ("none.jsonl", "nothing/none.jsonl"):
        refuses(main, [llama_folder, "--data", tmp_path / name, *out], "none.jsonl: No such file")
    for text, words in (
        ("", "bad.jsonl is empty"),
        ('{"question": "who?"}\n', 'bad.jsonl, line 1: each line needs "text"'),
        ('{"text": "one"}\n{"text": 5}\n', "line 2"),
        ('{"text": "one"}\n{"text": \n', "line 2"),
        ('{"text": "one"}\n{"messages": [{"role": "user", "content": "x"}]}\n', "line 2"),
        ('["text"]\n', "line 1"),
        ('{"messages": "hello"}\n', "line 1"),
        ('{"messages": [{"role": "user"}]}\n', "line 1"),
        ("\x00\x01", "line 1"),
    ):
        bad.write_text(text)
        refuses(main, [llama_folder, "--data", bad, *out], words)
    for flags, words in (
        (["--pos", "fire"], "fire"),
        (["--trainer", "weight_deca=1"], "--trainer weight_deca: SFTConfig has no such field"),
        (["--trainer", "bf16"], "--trainer 'bf16'"),
        (["--trainer", "weight_decay=NaN"], "--trainer weight_decay must be float, not 'NaN'"),
        (["--trainer", "weight_decay=high"], "--trainer weight_decay must be float, not 'high'"),
        (["--trainer", "bf16=maybe"], "--trainer bf16 must be bool or None, not 'maybe'"),
        (["--trainer", "report_to=nothing"], "nothing is not supported"),
        (["--trainer", "eval_strategy=steps"], "SFTTrainer: ValueError"),
        (["--trainer", "dataset_text_field=body"], "SFTTrainer: KeyError"),
        (["--seed", 2**32], "--seed: must be at least 0 and at most 4,294,967,295"),
        (["--out", data], "data.jsonl: File exists"),
        (["--trainer", "max_length=32"], "--trainer max_length: --context says that"),
        (["--trainer", "learning_rate=high"], "--trainer learning_rate: --lr says that"),
        (["--context", 100_000], "no whole sequence of the 100,000"),
        (["--data", llama_folder / "config.json"], "config.json, line 1: each line needs"),
        ([*fope, "--pos_args", "train_len=5"], "train_len: that is no keyword of fope"),
        ([*fope, "--pos_args", "sigma=abc"], "sigma of fope must be float, not 'abc'"),
        ([*fope, "--pos_args", "sigm=1"], "fope has no keyword sigm"),
        ([*fope, "--pos_args", "n_table=3"], "n_table must divide"),
        ([*fope, "--rope_scaling", "factor=none"], "factor"),
        (["--pos_args", "sigma=1"], "go with --pos"),
        (["--trainer", "adam_beta1=1.5"], "--trainer: ValueError: Invalid beta parameter"),
    ):
        refuses(main, [llama_folder, "--data", data, *out, *flags], words)


# -----------------------------------------------------------------------------
# hf/benchmark.py


@pytest.fixture
def benchmark():
    return pytest.importorskip("hf.benchmark", reason="lm_eval is not installed")


def write_tasks(folder):
    """A multiple choice, and a text to write that has lengths in words as LongBench-E has."""
    folder.mkdir()
    task = "dataset_path: json\ntest_split: test\n"
    for name, documents, fields in (
        (
            "choice",
            [dict(question=f"Is {i} even?", answer=i % 2) for i in range(4)],
            'output_type: multiple_choice\ndoc_to_text: "{{question}}"\n'
            'doc_to_target: "{{answer}}"\n'
            "doc_to_choice: [' yes', ' no']\nmetric_list: [{metric: acc}]\n",
        ),
        (
            "writing",
            [dict(context="word " * 30, answer="w", length=n) for n in (100, 3999, 4000, 9000)],
            'output_type: generate_until\ndoc_to_text: "{{context}}"\ndoc_to_target: "{{answer}}"\n'
            "generation_kwargs: {max_gen_toks: 4, do_sample: false, until: []}\n"
            "process_results: !function scoring.score\n"
            "metric_list: [{metric: score, aggregation: mean, higher_is_better: true}]\n",
        ),
    ):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        where = f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{task}{where}{fields}")
    score = "def score(doc, results):\n    return {'score': doc['length'] / 1000}\n"
    (folder / "scoring.py").write_text(score)
    return folder


def test_tasks_and_bins(benchmark, llama_folder, tmp_path):
    tasks = ["--tasks", "choice,writing", "--include_path", write_tasks(tmp_path / "tasks")]
    argv = [llama_folder, *tasks, "--out", tmp_path / "out", "--device", "cpu"]
    benchmark.main(list(map(str, argv)))
    result = json.loads((tmp_path / "out" / "llama_tasks.json").read_text())
    assert result["tasks"]["choice"]["acc"] in (0, 0.25, 0.5, 0.75, 1)
    scores = {"0-4k": (4.099 / 2, 2), "4-8k": (4, 1), "8k+": (9, 1)}
    for name, (score, n) in scores.items():
        row = result["tasks"]["writing"]["bins"][name]
        assert row == {"score": pytest.approx(score), "documents": n}
    refuses(benchmark.main, [llama_folder, "--tasks", "none", "--out", tmp_path / "new"], "none")
    refuses(benchmark.main, [llama_folder, "--out", tmp_path / "out"], "nothing to do")
    gpt2 = gpt2_folder(tmp_path / "gpt2")
    refuses(benchmark.main, [gpt2, *tasks, "--out", tmp_path / "out"], "GPT2LMHeadModel is no")
    refuses(
        benchmark.main,
        [*argv[:-3], tmp_path / "new", "--max_length", 5],
        "--max_length 5 has no room before 4",
    )


def test_the_loss_of_an_answer(benchmark, llama_folder, tmp_path, monkeypatch):
    """As in table 5: a task of the harness that generates becomes one that reads its answer."""
    folder = write_tasks(tmp_path / "tasks")
    monkeypatch.setitem(benchmark.TABLES, 5, ["writing"])
    monkeypatch.setattr(benchmark, "LOSSES", {"writing": "{{answer}}"})
    argv = [llama_folder, "--table", 5, "--include_path", folder, "--max_length", 256]
    argv += ["--out", tmp_path / "out"]
    benchmark.main([*map(str, argv), "--device", "cpu"])
    row = json.loads((tmp_path / "out" / "llama_table5.json").read_text())["tasks"]["writing"]
    model, tokenizer, _ = benchmark.load_model(str(llama_folder))
    ids = tokenizer("word " * 30 + "w", return_tensors="pt")["input_ids"]
    log_probs = logits(model, ids[:, :-1]).log_softmax(-1)[0, -2:]
    expected = -log_probs.gather(1, ids[0, -2:, None]).sum()
    assert row["loss"] == pytest.approx(float(expected), abs=1e-3)


def test_a_prompt_that_is_too_long_loses_its_middle(benchmark, llama_folder, monkeypatch):
    model, tokenizer, _ = benchmark.load_model(str(llama_folder))
    lm = benchmark.MiddleCut(model, tokenizer=tokenizer, max_length=40)
    monkeypatch.setattr(benchmark.HFLM, "generate_until", lambda self, requests: requests)
    texts = ["a" * 10 + "b" * 50 + "c" * 10, "short"]
    requests = [SimpleNamespace(args=(text, {"max_gen_toks": 20})) for text in texts]
    cut = lm.generate_until(requests)
    assert cut[0].arguments[0] == "a" * 10 + "c" * 10 and not hasattr(cut[1], "arguments")


def test_the_harness_has_the_papers_tasks(benchmark):
    known = benchmark.TaskManager().all_tasks
    for tasks in benchmark.TABLES.values():
        assert {t if isinstance(t, str) else t["task"] for t in tasks} <= set(known)


def test_a_run_is_read_as_our_scripts_read_it(benchmark, checkpoint, tmp_path):
    text = write_text(tmp_path / "text", 1, 900) / "000.txt"
    argv = [checkpoint, "--text", text, "--passkeys", 8, "--lengths", "224,448"]
    argv += ["--out", tmp_path / "out", "--device", "cpu"]
    benchmark.main(list(map(str, argv)))
    model, _, _ = load_run(checkpoint)
    encoding = load_tokenizer(model.config.tokenizer, checkpoint)
    ids = np.array(encoding.encode_ordinary(text.read_text()))
    n = (len(ids) - 1) // 448 * 448
    for kind in ("perplexity", "passkey"):
        (path,) = (tmp_path / "out").glob(f"*_{kind}.json")
        result = json.loads(path.read_text())
        assert (result["recipe"]["pos"], result["recipe"]["train_len"]) == ("fope", 32)
        assert result["recipe"]["tokenizer"] == "bpe:512" and "tokens" not in result["recipe"]
        assert result["label"] == checkpoint.name  # two models may have one embedding
        for length, row in result["lengths"].items():
            if kind == "perplexity":
                loss = window_loss(model, ids[: n + 1], int(length)).mean()
                assert row["loss"] == pytest.approx(loss, abs=1e-5) and row["tokens"] == n
            else:
                expected = task_accuracy(model, Passkey(encoding.encode_ordinary), int(length), 8)
                for name in ("accuracy", "token_accuracy", "answer_nll", "trials"):
                    assert row[name] == pytest.approx(expected[name], abs=1e-4)
    refuses(benchmark.main, [*argv, "--limit", "3"], "was asked something else")
    plot.main([*map(str, (tmp_path / "out").glob("*.json")), "--out", str(tmp_path / "figure")])
    assert (tmp_path / "figure.png").exists()
