"""hf/: our embeddings in Llamas of the transformers library, and our checkpoints as such models."""

import copy
import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, need_gpt2, refuses, run_training, write_text

from checkpoint import load_checkpoint
from common import Refused
from data import EOT, load_tokenizer
from tasks import Passkey

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow

import hf.evaluate  # noqa: E402
import hf.export  # noqa: E402
import hf.places  # noqa: E402
import hf.swap  # noqa: E402
from eval_perplexity import text_row  # noqa: E402
from hf.evaluate import Reader  # noqa: E402
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


SWAPS = ["nope", "alibi", "rope", "fope", "rope yarn", "fope yarn", "fope 9 heads"]


@pytest.fixture(params=SWAPS)
def swapped(request):
    """A swapped Llama; SmolLM-135M has 9 heads, 3 of them for keys."""
    pos, _, how = request.param.partition(" ")
    llama = random_llama(9, 3, tie_word_embeddings=True) if how == "9 heads" else random_llama()
    return swap_position_embedding(llama, pos, 40, rope_scaling=YARN if how == "yarn" else None)


@torch.no_grad()
def logits(model, ids, **kwargs):
    return model(ids, **kwargs).logits


QUERY, KEY = torch.arange(50)[:, None], torch.arange(50)
PREFIX = (QUERY >= KEY) | (KEY < 12)  # true where a query may look
PACKED = (QUERY >= KEY) & ((QUERY < 20) == (KEY < 20))  # two texts, of 20 and of 30 tokens


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (9, 3)])
def test_our_rope_is_the_librarys_to_the_last_bit(heads):
    llama, ids = random_llama(*heads), tokens(2, 50)
    ours = swap_position_embedding(copy.deepcopy(llama), "rope", 40)
    added = torch.zeros(50, 50).masked_fill(~PACKED, torch.finfo(torch.float32).min)
    masks = [None, *(mask.expand(2, 1, 50, 50) for mask in (PREFIX, PACKED, added))]
    for mask, positions in itertools.product(masks, (None, torch.arange(50)[None] % 20 + 3)):
        more = dict(attention_mask=mask, position_ids=positions)
        assert torch.equal(logits(ours, ids, **more), logits(llama, ids, **more))


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


def test_the_cache_and_packing_change_nothing(swapped):
    """Nor does a text leave a buffer of its size, which DDP would copy to other processes."""
    ids, out, parts = tokens(2, 50), None, []
    sizes = [buffer.shape for buffer in swapped.buffers()]
    whole = logits(swapped, ids)
    assert [buffer.shape for buffer in swapped.buffers()] == sizes
    for part in ids.split([20, 1, 1, 18, 10], dim=1):
        with torch.no_grad():
            out = swapped(part, past_key_values=out and out.past_key_values, use_cache=True)
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-4)
    positions = torch.cat((torch.arange(20), torch.arange(30)))[None]
    alone = torch.cat((whole[:, :20], logits(swapped, ids[:, 20:])), dim=1)[:1]
    # the library's two ways
    for how in (dict(use_cache=False), dict(attention_mask=PACKED[None, None])):
        packed = logits(swapped, ids[:1], position_ids=positions, **how)
        torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)


def test_a_padded_batch_generates_what_each_prompt_does(swapped):
    """With a cache whose shape is made beforehand, and which is filled part by part."""
    ids, lengths = tokens(3, 30), (30, 18, 5)
    padded, mask = torch.zeros(2, 3, 30, dtype=torch.long)
    for i, n in enumerate(lengths):
        padded[i, 30 - n :], mask[i, 30 - n :] = ids[i, :n], 1
    greedy = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    cache = dict(cache_implementation="static", prefill_chunk_size=7)
    both = swapped.generate(padded, attention_mask=mask, **cache, **greedy)
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
    for attention in ("eager", "flex_attention"):
        model = hf.swap.load(tmp_path, attn_implementation=attention).eval()
        torch.testing.assert_close(logits(model, ids), before, atol=1e-4, rtol=1e-4)
    # in bf16 the tables stay as they are: rounded frequencies would be other frequencies
    loaded = hf.swap.load(tmp_path, dtype=torch.bfloat16).eval()
    for model in (loaded, copy.deepcopy(swapped).to(torch.bfloat16)):
        pos, was = (m.model.layers[1].self_attn.pos.embedding for m in (model, swapped))
        assert all(map(torch.equal, pos.state_dict().values(), was.state_dict().values()))
        assert model(ids).logits.dtype == torch.bfloat16
        agree = logits(model, ids).argmax(-1) == before.argmax(-1)
        assert agree.float().mean() > 0.8


def test_the_same_seed_swaps_in_the_same_noise():
    a, b, c = (swap_position_embedding(random_llama(), "fope", 40, seed=s) for s in (0, 0, 1))
    coefs = [m.model.layers[0].self_attn.pos.embedding.cos_coef for m in (a, b, c)]
    assert torch.equal(coefs[0], coefs[1]) and not torch.equal(coefs[0], coefs[2])
    assert not torch.equal(coefs[0], a.model.layers[1].self_attn.pos.embedding.cos_coef)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_what_cannot_be_swapped_is_refused_and_stays_as_it_was():
    gpt2 = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=90)
    for model, pos, kwargs, word in (
        (transformers.GPT2LMHeadModel(gpt2).eval(), "fope", {}, "GPT2"),
        (random_llama(rope_parameters=LLAMA3 | {"rope_type": "dynamic"}), "fope", {}, "dynamic"),
        (random_llama(), "kerple", {}, "kerple"),
        (random_llama(), "fope", {"sigma": -1}, "sigma"),
    ):
        before = logits(model, tokens(1, 30))
        with pytest.raises(Refused, match=word):
            swap_position_embedding(model, pos, 40, **kwargs)
        assert torch.equal(logits(model, tokens(1, 30)), before)


def test_a_swap_can_be_repeated(swapped):
    """What was drawn and given stays; another embedding comes, and the first one again."""
    ids, swap = tokens(1, 60), swapped.config.swap
    before = logits(swapped, ids)
    assert torch.equal(logits(swap_position_embedding(swapped, swap["pos"], 40), ids), before)
    for pos in (*EMBEDDINGS, swap["pos"]):
        again = logits(swap_position_embedding(swapped, pos, 40), ids)
    if swap["pos"] != "fope" and not swap["rope_scaling"]:  # which are drawn and given anew
        assert torch.equal(again, before)


def test_a_program_that_does_not_know_a_swapped_model_stops(tmp_path):
    """It must not read the weights with plain RoPE."""
    swap_position_embedding(random_llama(), "fope", 40).save_pretrained(tmp_path)
    code = "import sys, transformers; transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.strip().endswith("KeyError: 'read_by_hf_swap'")


def test_fope_is_not_given_positions_that_a_mask_does_not_say():
    model = swap_position_embedding(random_llama(), "fope", 40)
    with pytest.raises(Refused, match="position_ids"):
        logits(model, tokens(1, 20), attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool))


def test_grouped_keys_are_turned_once_and_as_the_formula_says():
    """
    Key heads, not query heads, enter the cache, turned; a group's queries share their table. Each
    frequency above the floor, 6 here, is on its own pair: more than head_dim / 4, the released cap.
    """
    model, ids = swap_position_embedding(random_llama(), "fope", 4096, sigma=3.0), tokens(1, 40)
    layer, turned = model.model.layers[0].self_attn, {}
    pos = layer.pos.embedding
    layer.pos.register_forward_hook(lambda _, args, out: turned.update(args=args, out=out))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    assert pos.cos_coef.shape == (2, 6, 6)
    assert torch.equal(cache.layers[0].keys, turned["out"][1])
    angles = torch.arange(40)[:, None].double() * 10000.0 ** (-torch.arange(6).double() / 8)
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
    ids, linear = tokens(2, 100), {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    for parameters in (linear, LLAMA3):
        llama = random_llama(rope_parameters=parameters)
        rope, before = copy.deepcopy(llama), logits(llama, ids)
        assert torch.equal(logits(swap_position_embedding(rope, "rope", 40), ids), before)
    freqs, fope = llama.model.rotary_emb.inv_freq, swap_position_embedding(llama, "fope", 200)
    kept = freqs[freqs >= 2 * torch.pi / 200]
    assert len(kept) == 2  # of the three that were above the floor before they were scaled
    assert torch.equal(fope.model.layers[1].self_attn.pos.embedding.freqs, kept)
    fope.save_pretrained(tmp_path)
    assert torch.equal(logits(hf.swap.load(tmp_path).eval(), ids), logits(fope, ids))
    swap_position_embedding(fope, "rope", 40)
    assert torch.equal(logits(fope, ids), before)


# -----------------------------------------------------------------------------
# hf/export.py


EXPORTED = [*EMBEDDINGS, "rope_a", "rope --qk_norm", "fope --qk_norm"]
EXPORTED += ["rope --rope_scaling factor=4 original_len=16 temperature=true"]


@pytest.mark.parametrize("flags", EXPORTED)
def test_an_exported_model_has_the_same_logits(flags, data_folder, tmp_path):
    run = run_training(data_folder, tmp_path / "run", "--pos", *flags.split())
    ours, _, _ = load_checkpoint(run)
    hf.export.main([str(run), "--out", str(tmp_path / "exported")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    assert (type(theirs) is transformers.LlamaForCausalLM) == (flags == "rope")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == 511
    for T in (32, 128):
        ids = torch.randint(512, (2, T))
        torch.testing.assert_close(logits(theirs, ids), ours(ids), atol=1e-5, rtol=0)


def test_what_cannot_be_exported_is_refused(data_folder, tmp_path):
    run, out = run_training(data_folder, tmp_path / "run", "--pos=kerple"), tmp_path / "out"
    refuses(hf.export.main, [run, "--out", out], "kerple")
    refuses(hf.export.main, [run, "--out", run], "--out")


@pytest.mark.parametrize("name", ["byte", "bpe", "gpt2"])
def test_the_exported_tokenizer_gives_the_same_ids(name, data_folder, tmp_path):
    if name == "gpt2":
        need_gpt2()
    ours = load_tokenizer("bpe:512" if name == "bpe" else name, data_folder)
    hf.export.to_fast_tokenizer(ours).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [path.read_text() for path in sorted(write_text(tmp_path / "text", 3).iterdir())]
    texts += ["<|endoftext|", "", " ", "\n\n  two\tlines \n", "don't 12345 naïve 你好 🙂"]
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode_ordinary(text)
        assert theirs.decode(ids) == text
    assert theirs("a" + EOT)["input_ids"] == [*ours.encode_ordinary("a"), ours.eot_token]
    assert theirs.eos_token_id == theirs.convert_tokens_to_ids(EOT) == ours.eot_token


# -----------------------------------------------------------------------------
# hf/evaluate.py: the project's evaluations of a Llama


@torch.no_grad()
def test_the_reader_gives_the_librarys_logits_losses_and_text(swapped):
    reader, ids = Reader(swapped), tokens(2, 70)
    x, y, expected = ids[:, :-1], ids[:, 1:], logits(swapped, ids[:, :-1])
    torch.testing.assert_close(reader(x, positions=slice(-3, None)), expected[:, -3:])
    losses = torch.nn.functional.cross_entropy(expected.transpose(1, 2), y, reduction="none")
    torch.testing.assert_close(reader(x, y, reduction="none"), losses)
    cached = torch.cat([*reader.generate(x[:1], 12, temperature=0)], dim=1)
    text = x[:1]
    for _ in range(12):
        text = torch.cat((text, logits(swapped, text)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(cached, text[:, -12:])


@pytest.mark.parametrize("pos", EMBEDDINGS)
def test_a_window_hides_what_is_further_back(pos):
    ids, t = tokens(1, 60), torch.arange(60)
    distance = t[:, None] - t
    mask = torch.zeros(60, 60).masked_fill((distance < 0) | (distance >= 9), -torch.inf)
    positions = dict(attention_mask=mask[None, None], position_ids=t[None])
    expected = logits(swap_position_embedding(random_llama(), pos, 40), ids, **positions)
    model = swap_position_embedding(random_llama(), pos, 40, window=9)
    torch.testing.assert_close(logits(model, ids, use_cache=False), expected)
    for kwargs in (dict(use_cache=True), dict(use_cache=False, **positions)):
        with pytest.raises(Refused, match="window"):
            model(ids, **kwargs)


@pytest.fixture
def text_and_llama(tmp_path):
    """A .jsonl file of four texts, of which three are long, and the folder of a random Llama."""
    texts = [path.read_text() for path in sorted(write_text(tmp_path / "text", 4).iterdir())]
    texts = [texts[0][:300], "too short", texts[1][:300], texts[2][:300]]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    random_llama(vocab_size=257).save_pretrained(tmp_path / "plain")
    tokenizer = hf.export.to_fast_tokenizer(load_tokenizer("byte", ""))
    tokenizer.chat_template = (ROOT / "hf" / "chatml.jinja").read_text()
    tokenizer.save_pretrained(tmp_path / "plain")
    return tmp_path / "texts.jsonl", tmp_path / "plain"


def evaluate(*words):
    hf.evaluate.main([str(word) for word in words])
    return json.loads(Path(words[words.index("--out") + 1]).read_text())


def test_a_text_is_read_as_our_models_read_it_and_goes_on_after_a_stop(text_and_llama, tmp_path):
    (texts, llama), out = text_and_llama, tmp_path / "r.json"
    words = ["perplexity", llama, "--data", texts, "--lengths", "64,128", "--windows", 3]
    words += ["--rope_scaling", "kind=yarn", "temperature=true", "--out", out]
    result = evaluate(*words)
    read = {"64": result["read"]["64"][:2]}  # as if it had stopped then
    read["64"][0]["tokens"] += 999  # by which we see that it is not read again
    out.write_text(json.dumps(result | {"read": read}))
    again = evaluate(*words)["lengths"]
    assert again["128"] == result["lengths"]["128"]
    assert again["64"] == result["lengths"]["64"] | {"tokens": 3 * 64 + 999}
    encoding = load_tokenizer("byte", "")
    lines = map(json.loads, texts.read_text().splitlines())
    windows = [encoding.encode_ordinary(line["text"])[:129] for line in lines]
    windows = np.array([window for window in windows if len(window) == 129])
    for length in (64, 128):
        scaling = dict(kind="yarn", temperature=True, original_len=40, factor=length / 40)
        model = transformers.AutoModelForCausalLM.from_pretrained(llama)
        swap_position_embedding(model, "rope", 40, rope_scaling=scaling)
        row = result["lengths"][str(length)]
        expected = text_row(Reader(model), windows[:, : length + 1], length, np.ones(257, int))
        for name in ("loss", "perplexity", "bits_per_byte", "tokens", "by_position", "by_window"):
            assert row[name] == pytest.approx(expected[name], abs=2e-4), name
    refuses(hf.evaluate.main, [*map(str, words), "--lengths=32"], "holds something else")


def test_places_are_means_over_texts_and_differences_text_by_text(tmp_path, capsys):
    a, b = np.full((2, 128), 3.0), np.full((3, 128), 2.0)
    a[1, 64:] += 1.5  # past 8,192, in the second text alone
    for name, losses in (("as_it_is", a), ("window", b)):
        read = {"16384": [{"by_position": row.tolist()} for row in losses]}
        (tmp_path / f"{name}.json").write_text(json.dumps({"read": read, "data_sha256": "0"}))
    paths = [str(tmp_path / f"{name}.json") for name in ("as_it_is", "window")]
    hf.places.main([*paths, "--to", "window", "--out", str(tmp_path / "places.png")])
    said = capsys.readouterr().out
    row = " | ".join(["3.00"] * 3 + ["3.75"] * 4)
    assert f"| as it is | {row} |" in said and "2 texts" in said
    assert "as_it_is minus window past 8192, text by text: +1.00, +2.50" in said
    assert (tmp_path / "places.png").stat().st_size > 0


def test_passkeys_are_asked_by_the_chat_template_and_generated_alike(text_and_llama, tmp_path):
    _, llama = text_and_llama
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    ids, n, _ = hf.evaluate.ChatPasskey(tokenizer).sample(700, np.random.default_rng(0))
    text = tokenizer.decode(ids)
    assert re.search(r"What is the pass key\?<\|im_end\|>\n<\|im_start\|>assistant\n", text)
    assert re.search(r"The pass key is (\d{5})\. .*The pass key is \1$", text, re.S) and n == 5
    words = ["passkey", llama, "--lengths", "700", "--trials", 3, "--out"]
    once, decoded = evaluate(*words, tmp_path / "a.json"), tmp_path / "b.json"
    decoded = evaluate(*words, decoded, "--generate")
    assert once["lengths"] == decoded["lengths"]


# -----------------------------------------------------------------------------
# hf/finetune.py and hf/benchmark.py: the command lines of TRL and lm-evaluation-harness


@pytest.fixture
def llama_folder(tmp_path):
    """A random Llama with FoPE and the byte tokenizer."""
    llama = swap_position_embedding(random_llama(vocab_size=257), "fope", 64)
    llama.save_pretrained(tmp_path / "llama")
    hf.export.to_fast_tokenizer(load_tokenizer("byte", "")).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def write_chats(folder):
    words = ["the", "position", "of", "a", "token", "is", "known", "by", "its", "embedding"]
    rng, lines = random.Random(0), []
    for _ in range(30):
        turns = [(role, " ".join(rng.choices(words, k=40))) for role in ("user", "assistant")]
        lines.append(json.dumps({"messages": [dict(role=r, content=text) for r, text in turns]}))
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def test_the_calls_of_the_readme(llama_folder, tmp_path, monkeypatch, capsys):
    """Its block and its commands one after the other, of a small model at a small length."""
    main = pytest.importorskip("hf.finetune", reason="trl is not installed").main
    benchmark = pytest.importorskip("hf.benchmark", reason="lm_eval is not installed").main
    page = (ROOT / "hf" / "README.md").read_text().replace(" \\\n", "")
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path / "chats")
    block = re.search(r"```python\n(.*?)```", page, re.S)[1]
    exec(block.replace("4096", "64").replace("HuggingFaceTB/SmolLM-1.7B", "llama"), {})
    commands = [line.split()[2:] for line in page.splitlines() if line.startswith("python -m ")]
    (words,) = [words[1:] for words in commands if "smollm_fope" in words]
    words[words.index("hf/chatml.jinja")] = str(ROOT / "hf" / "chatml.jinja")
    words += ["--gradient_accumulation_steps=1", "--max_length=64", "--max_steps=20"]
    words += ["--learning_rate=0.01", "--logging_steps=1", "--save_steps=5", "--save_total_limit=4"]
    main(words)
    out = tmp_path / "tuned_fope"
    (out / "training_args.bin").unlink()  # as if killed while it saved the last checkpoint
    (out / "checkpoint-20" / "trainer_state.json").unlink()
    first = (out / "checkpoint-5" / "trainer_state.json").stat()
    main(words)
    assert (out / "checkpoint-5" / "trainer_state.json").stat() == first  # it has not begun anew
    state = json.loads((out / "checkpoint-20" / "trainer_state.json").read_text())
    losses = [line["loss"] for line in state["log_history"] if "loss" in line]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
    # what was drawn is still there, beside what was learned
    tuned, start = hf.swap.load(out), hf.swap.load("smollm_fope")
    coefs, drawn = (m.model.layers[1].self_attn.pos.embedding.cos_coef for m in (tuned, start))
    assert torch.equal(coefs, drawn) and tuned.config.swap == start.config.swap
    main(words)
    assert "done" in capsys.readouterr().out
    refuses(main, [*words, "--learning_rate=0.02"], "holds a run of other flags")
    refuses(main, [*words, "--output_dir", llama_folder], "holds other files")
    (passkeys,) = [words for words in commands if "passkeys" in words]
    words = ["run", *passkeys[2:4], "--limit=2", "--output_path=scores", "--device=cpu"]
    words += ["--model_args", "pretrained=tuned_fope,max_length=448"]
    monkeypatch.setattr(sys, "argv", ["hf.benchmark", *words])
    benchmark()
    (path,) = Path("scores").rglob("results*.json")
    assert json.loads(path.read_text())["results"]["passkeys"]["acc,none"] in (0, 0.5, 1)


def test_passkeys_of_the_harness_are_ours(llama_folder):
    functions = pytest.importorskip("hf.tasks.functions", reason="lm_eval is not installed")
    encoding, rng = load_tokenizer("byte", ""), np.random.default_rng((0, 448))
    trials = functions.passkeys(llama_folder, max_length=448, trials=3)["test"]
    for trial in trials:  # those of evaluation.task_accuracy
        ids, n, _ = Passkey(encoding.encode_ordinary).sample(448, rng)
        assert encoding.encode_ordinary(trial["prompt"] + trial["answer"]) == ids.tolist()
        assert len(trial["answer"]) == n


def test_the_tables_have_bins_of_words_and_the_loss_of_the_first_answer():
    functions = pytest.importorskip("hf.tasks.functions", reason="lm_eval is not installed")
    score = functions.in_bins(lambda doc, results: {"score": doc["length"]})
    for length, name in ((3999, "0-4k"), (4000, "4-8k"), (8000, "8k+")):
        assert score({"length": length}, []) == {"score": length, name: length}
    several = ["wo", "rd"]
    for doc in ({"answer": several}, {"answer": {"value": "wo"}}, {"choices": {"text": several}}):
        assert functions.loss(doc, [(-6.0, False)]) == {"loss": 6.0, "loss_per_character": 3.0}


def test_a_prompt_that_is_too_long_loses_its_middle(llama_folder, monkeypatch):
    benchmark = pytest.importorskip("hf.benchmark", reason="lm_eval is not installed")
    lm = benchmark.MiddleCut(str(llama_folder), max_length=40, device="cpu")
    monkeypatch.setattr(benchmark.HFLM, "generate_until", lambda self, requests: requests)
    texts = ["a" * 10 + "b" * 50 + "c" * 10, "short"]
    requests = [SimpleNamespace(args=(text, {"max_gen_toks": 20})) for text in texts]
    cut = lm.generate_until(requests)
    assert cut[0].arguments[0] == "a" * 10 + "c" * 10 and not hasattr(cut[1], "arguments")
