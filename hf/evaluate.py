"""
The project's evaluations of a Llama of the transformers library, swapped or not.

    python -m hf.evaluate perplexity smollm2 --data addresses/test.jsonl --out text.json
    python -m hf.evaluate passkey smollm2 --lengths 2048,8192 --trials 10 --out keys.json
    python -m hf.evaluate perplexity smollm2 ... --rope_scaling kind=yarn temperature=true

The result is as that of eval_perplexity.py or eval_passkey.py, so that the same figure shows it. A
text gives one window, its first tokens. Each window (each length of passkeys) is saved when it has
been read, and the same command goes on from there. Passkeys are asked by the model's chat template.
"""

import json
import math
import re
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
from common import Refused, positive_int
from eval_passkey import task_accuracy
from eval_perplexity import text_row
from hf.swap import swap_position_embedding
from model import linear_cross_entropy
from recipe import Keywords, Recipe, parse_lengths
from tasks import PASSKEY, QUESTION, Passkey


class Reader(nn.Module):
    """A Llama with the calls of our GPT that an evaluation makes."""

    def __init__(self, llama):
        super().__init__()
        self.llama = llama.eval()

    def forward(self, idx, targets=None, *, positions=slice(None), reduction="mean"):
        """As GPT.forward: logits at positions, or the loss of each target, in slices."""
        x = self.llama.model(idx, use_cache=False).last_hidden_state  # (B, T, C)
        weight = self.llama.lm_head.weight
        if targets is None:
            return F.linear(x[:, positions], weight)
        return linear_cross_entropy(x, weight, targets, len(weight), reduction)

    def generate(self, idx, max_new_tokens, *, temperature):
        """Yields the next token (B, 1), the most likely one, with the library's cache."""
        assert temperature == 0
        cache = None
        for _ in range(max_new_tokens):
            new = self.llama(idx, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, idx = new.past_key_values, new.logits.argmax(dim=-1)
            yield idx


class ChatPasskey(Passkey):
    """A passkey in a chat: the user's message holds it and asks, the model begins to answer."""

    def __init__(self, tokenizer):
        super().__init__(lambda text: tokenizer.encode(text, add_special_tokens=False))
        user, statement = QUESTION.split("? ")
        chat = [{"role": "user", "content": "CONTENT"}]
        template = dict(tokenize=False, add_generation_prompt=True)
        before, after = tokenizer.apply_chat_template(chat, **template).split("CONTENT")
        self.task = self.encode(before + PASSKEY + "\n")
        self.question = f"{user}?{after}{statement}"

    def trial(self, rng):
        needles, _, answer = super().trial(rng)
        return needles, self.question, answer


def recipe_of(llama, tokenizer):
    """What is evaluated, as a Recipe: its shape, its embedding and the length that it knows."""
    config = llama.config
    shape = dict(n_layer=config.num_hidden_layers, n_head=config.num_attention_heads)
    shape |= dict(head_dim=config.head_dim, n_embd=config.hidden_size)
    shape |= dict(theta=config.rope_parameters["rope_theta"], vocab_size=config.vocab_size)
    swap = getattr(config, "swap", None)
    swap = swap or {"pos": "rope", "train_len": config.max_position_embeddings}
    tokens = "\n".join(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    name = f"llama {sha256(tokens.encode()).hexdigest()[:16]}"  # the same in each fine-tuned folder
    return Recipe(preset="", data="", tokenizer=name, **shape, **swap)


def bytes_of_tokens(tokenizer):
    """
    (vocab_size,): a byte-level tokenizer, as SmolLM's is, writes each byte as one letter. One of
    SentencePiece, as Llama 2's is, spells letters, a blank as ▁ and a lone byte as <0x0A>.
    """
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    if "<0x0A>" in tokens:
        spelled = (re.sub("<0x..>", " ", token).replace("▁", " ") for token in tokens)
        tokens = [token.encode() for token in spelled]
    return np.array([len(token) for token in tokens])


def read_windows(path, tokenizer, length, n_windows):
    """The first length + 1 tokens of the first n_windows long texts: (n_windows, length + 1)."""
    windows = []
    with open(path, encoding="utf-8") as f:
        for line in f:
            tokens = tokenizer.encode(json.loads(line)["text"], add_special_tokens=False)
            if len(tokens) > length:
                windows.append(tokens[: length + 1])
            if len(windows) == n_windows:
                break
    if len(windows) < n_windows:
        raise Refused(f"{path} has {len(windows)} texts of {length:,} tokens, not {n_windows}")
    return np.array(windows)


def mean_row(rows):
    """The row of several windows of one length."""
    loss = float(np.mean([row["loss"] for row in rows]))
    n_bytes = sum(row["loss"] / row["bits_per_byte"] for row in rows)  # in units that cancel
    by_position = np.mean([row["by_position"] for row in rows], axis=0)
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss * len(rows) / n_bytes,
        "tokens": sum(row["tokens"] for row in rows),
        "by_position": by_position.round(4).tolist(),
        "by_window": [loss for row in rows for loss in row["by_window"]],
    }


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("kind", choices=("perplexity", "passkey"))
    add("model", type=Path, help="folder of a Llama")
    add("--lengths", default="1x,2x", help="1x,2x of the length that it knows, or 2048,16384")
    add("--data", type=Path, help='.jsonl file of texts, {"text": ...} a line; for perplexity')
    add("--windows", type=positive_int, default=4, help="texts to read; for perplexity")
    add("--trials", type=positive_int, default=10, help="passkeys at each length")
    add("--generate", action="store_true", help="decode token by token instead of in one pass")
    add("--seed", type=int, default=0, help="seed of the passkeys")
    add("--out", type=Path, required=True, help="json file of the result")
    add("--label", help="name in figures and tables; by default what is special about the model")
    keywords = dict(nargs="*", metavar="K=V", action=Keywords, default={})
    add("--pos_args", **keywords, help="changed keywords of the embedding, such as window=8192")
    add("--rope_scaling", **keywords, help="as in eval_perplexity.py: kind=yarn temperature=true")
    common.add_device_flag(parser)
    args = parser.parse_args(argv)
    device = common.init_distributed(args.device)
    if args.kind == "perplexity" and not args.data:
        raise Refused("perplexity needs --data, a .jsonl file of texts")
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        llama = AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True)
    except (OSError, ValueError) as e:
        raise Refused(f"{args.model} is no model: {str(e).splitlines()[0]}") from None
    reader = Reader(llama.to(device))
    changes = {"rope_scaling": args.rope_scaling, "pos_args": args.pos_args}
    changes = {name: value for name, value in changes.items() if value}
    recipe = recipe_of(llama, tokenizer).read_with(lengths=args.lengths, **changes)
    lengths = parse_lengths(recipe.lengths, recipe.train_len)
    result = {"kind": args.kind, "label": args.label, "recipe": asdict(recipe)}
    if args.kind == "perplexity":
        result |= {"data": str(args.data), "data_sha256": common.file_sha256(args.data)}
        windows = read_windows(args.data, tokenizer, lengths[-1], args.windows)
        token_bytes = bytes_of_tokens(tokenizer)
    elif not tokenizer.chat_template:
        raise Refused(f"the tokenizer of {args.model} has no chat template to ask a passkey by")
    else:
        result |= {"trials": args.trials, "trial_seed": args.seed, "generate": args.generate}
        task = ChatPasskey(tokenizer)
    weights = sorted(args.model.glob("*.safetensors"))
    result["weights"] = {path.name: common.file_sha256(path)[:16] for path in weights}
    if args.out.exists():
        old = common.read_json(args.out)
        if any(old.get(name, value) != value for name, value in result.items()):
            raise Refused(f"--out {args.out} holds something else; give another name")
        done = {int(length): rows for length, rows in old["read"].items()}
    else:
        done = {}
    common.make_folder(args.out.parent)

    def save():
        rows = {n: rows[:n_parts] for n, rows in done.items() if len(rows) >= n_parts}
        means = {n: mean_row(r) if args.kind == "perplexity" else r[0] for n, r in rows.items()}
        here = {"command": common.command(), **common.provenance(device)}
        common.write_json(args.out, result | here | {"lengths": means, "read": done})

    n_parts = args.windows if args.kind == "perplexity" else 1
    bar = common.Bar(total=n_parts * len(lengths), desc=args.out.name)
    for length in lengths:
        if changes:
            scaling = recipe.rope_scaling
            if scaling and "factor" not in scaling:
                scaling = scaling | {"factor": max(1.0, length / scaling["original_len"])}
            kwargs = dict(rope_scaling=scaling, **args.pos_args)
            swap_position_embedding(llama, recipe.pos, recipe.train_len, **kwargs)
        for i in range(n_parts):
            if i >= len(done.setdefault(length, [])):
                if args.kind == "perplexity":
                    row = text_row(reader, windows[i][: length + 1], length, token_bytes)
                else:
                    kwargs = dict(seed=args.seed, generate=args.generate)
                    row = task_accuracy(reader, task, length, args.trials, **kwargs)
                done[length].append(row)
                save()
            bar.update()
    bar.close()
    save()
    print(f"wrote {args.out}")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
