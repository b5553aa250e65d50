"""Text from a checkpoint: the model's own, in the run's tokenizer, as it comes."""

import itertools
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, refuses

import sample
from checkpoint import load_checkpoint, save_checkpoint
from data import load_tokenizer
from model import GPT
from recipe import Recipe


def text_of(capsys, checkpoint, *flags):
    sample.main([str(checkpoint), "--prompt", "Document 1.", "--max_new_tokens", "12", *flags])
    return capsys.readouterr().out


def test_greedy_text_is_the_models(checkpoint, capsys):
    printed = text_of(capsys, checkpoint, "--temperature", "0")
    model, encoding = load_checkpoint(checkpoint)[0], load_tokenizer("bpe:512", checkpoint)
    prompt = torch.tensor([encoding.encode_ordinary("Document 1.")])
    tokens = [token.item() for token in model.generate(prompt, 12, temperature=0)]
    tokens = tokens[: tokens.index(511)] if 511 in tokens else tokens  # the end of the text
    assert printed == "Document 1." + encoding.decode(tokens) + "\n"


def test_the_seed_decides_and_one_likely_token_is_greedy(checkpoint, capsys):
    first, again, other = (text_of(capsys, checkpoint, "--seed", s) for s in ("1", "1", "2"))
    assert first == again != other
    greedy = text_of(capsys, checkpoint, "--temperature", "0")
    assert text_of(capsys, checkpoint, "--top_k", "1") == greedy


def byte_model(folder, sequence):
    """A run whose model says these bytes one after the other, whatever it has read before."""
    shape = dict(train_len=8, vocab_size=257, n_layer=1, n_head=1, n_embd=384)
    model = GPT(Recipe(pos="nope", tokenizer="byte", **shape))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.norm.weight.fill_(1.0)
        model.embed.weight[:257, :257] = torch.eye(257)
        for token, following in itertools.pairwise(sequence):
            model.head.weight[following, token] = 9.0
    save_checkpoint(folder, model, step=0, optimizer={})
    return folder


def test_characters_of_several_bytes_come_whole_and_the_end_of_text_ends_it(tmp_path, capsys):
    run = byte_model(tmp_path, [*"aé€".encode(), 256])
    sample.main([str(run), "--prompt", "a", "--temperature", "0", "--max_new_tokens", "50"])
    assert capsys.readouterr().out == "aé€\n"


def test_of_several_prompts_each_is_continued_as_if_it_were_the_only_one(checkpoint, capsys):
    alone = text_of(capsys, checkpoint)
    assert text_of(capsys, checkpoint, "--prompt", "Document 1.") == alone + alone


def test_an_empty_prompt_is_refused(checkpoint):
    refuses(sample.main, [checkpoint, "--prompt", ""], "--prompt")


@pytest.mark.slow
def test_a_reader_that_has_enough(checkpoint):
    """`| head -c 3` ends it without a traceback."""
    command = f"{sys.executable} sample.py {checkpoint} --prompt cafe --max_new_tokens 200"
    how = dict(shell=True, cwd=ROOT, capture_output=True)
    done = subprocess.run(f"{command} | head -c 3", **how)
    assert done.stdout == b"caf" and not done.stderr
