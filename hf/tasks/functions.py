"""What the tasks in this folder need beyond lm-evaluation-harness."""

import math
from itertools import pairwise

import numpy as np
from datasets import Dataset
from lm_eval.tasks.longbench import metrics
from transformers import AutoConfig, AutoTokenizer

from tasks import Passkey

BINS = {"0-4k": 4000, "4-8k": 8000, "8k+": math.inf}  # words of a document


def in_bins(score):
    """A score of LongBench, as one of all documents and as one of those of this one's length."""

    def process_results(doc, results):
        value = score(doc, results)["score"]
        name = next(name for name, longest in BINS.items() if doc["length"] < longest)
        return {"score": value, name: value}

    return process_results


rouge = in_bins(metrics.get_rouge_with_score)
classification = in_bins(metrics.get_classification_with_score)
f1 = in_bins(metrics.get_qa_f1_with_score)


def loss(doc, results):
    """The loss of the answer that table5.yaml asks for, in all and per character."""
    answer = doc["choices"]["text"] if "choices" in doc else doc["answer"]
    answer = answer["value"] if isinstance(answer, dict) else answer[0]
    (log_likelihood, _greedy_decoding_gives_it), *_ = results
    return {"loss": -log_likelihood, "loss_per_character": -log_likelihood / len(answer)}


def passkeys(pretrained, max_length=None, tokenizer=None, trials=100, **others):
    """Passkey's trials of max_length tokens. What is in --model_args and --metadata arrives."""
    length = max_length or AutoConfig.from_pretrained(pretrained).max_position_embeddings
    tokenizer = AutoTokenizer.from_pretrained(tokenizer or pretrained)
    pieces = {}  # of text, one for each token: a number

    def encode(text):
        """Joined, the pieces are the text, also where a tokenizer puts a blank before each part."""
        text = "0" + text  # encoded as within a text, not as its beginning
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [1, *(end for _, end in found["offset_mapping"] if end > 1)]
        return [pieces.setdefault(text[a:b], len(pieces)) for a, b in pairwise(ends)]

    task, rng, rows = Passkey(encode), np.random.default_rng((0, length)), []
    for _ in range(trials):
        tokens, n, _ = task.sample(length, rng)
        texts = [*pieces]
        prompt, answer = ("".join(texts[i] for i in part) for part in (tokens[:-n], tokens[-n:]))
        rows.append({"prompt": prompt, "answer": answer})
    return {"test": Dataset.from_list(rows)}
