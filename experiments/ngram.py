"""
What counting letters gives: an n-gram that has counted the windows on which a model was trained.

    python experiments/ngram.py runs_out/tiny/data/bytes --seeds 3        two minutes
    python experiments/ngram.py runs_out/reader --contexts 1 2 3          of the tokens of a run

It is interpolated by Witten and Bell's rule. If N tokens of R kinds were seen after a context, and
a next token n times, its probability is (n + R p) / (N + R), where p is its probability after the
context that is shorter by one. It counts what a run of train.py, or a model of the recipe `tiny`
with the same seed, is trained on. It reads what that model reads, and starts each window anew.
"""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from shared import Parser, save
from torch import nn

from checkpoint import load_checkpoint
from common import one_sentence_errors
from data import Batches, TokenData
from eval_perplexity import bytes_of_tokens, text_row
from evaluation import spread_windows
from recipe import RECIPES


class NGram(nn.Module):
    """A model with the call that eval_perplexity.text_row makes. Each token is a letter here."""

    def __init__(self, windows, context, vocab_size):
        super().__init__()
        self.none = nn.Parameter(torch.empty(0))  # says that it is on the CPU
        self.context, self.vocab_size = context, vocab_size
        self.counts, self.seen, self.kinds = Counter(), Counter(), Counter()
        for text in windows:
            for n in range(1, context + 2):
                self.counts.update(text[i : i + n] for i in range(len(text) - n + 1))
        for piece, n in self.counts.items():
            self.seen[piece[:-1]] += n
            self.kinds[piece[:-1]] += 1

    def probability(self, piece):
        """Of the last letter of a piece, after the letters before it."""
        p = 1 / self.vocab_size
        for context in (piece[i:-1] for i in reversed(range(len(piece)))):
            n_kinds = self.kinds[context]
            if not n_kinds:  # then no longer context was seen
                break
            p = (self.counts[context + piece[-1]] + n_kinds * p) / (self.seen[context] + n_kinds)
        return p

    def forward(self, idx, targets, reduction):
        texts = [to_text([*x, y[-1]]) for x, y in zip(idx.tolist(), targets.tolist(), strict=True)]
        pieces = [[t[max(0, i - self.context) : i + 1] for i in range(1, len(t))] for t in texts]
        return -torch.tensor([[self.probability(p) for p in row] for row in pieces]).log()


def to_text(tokens):
    return "".join(map(chr, tokens))


def trained_on(recipe):
    """The windows of a run, and of that whose weights it started from if these are as long."""
    batches = Batches(TokenData(recipe.data, "train"), recipe)
    n_sequences = recipe.n_steps * recipe.batch_size
    windows = [to_text(batches.sequence(i)) for i in range(n_sequences)]
    if recipe.init_from:
        before = load_checkpoint(recipe.init_from)[0].config
        windows += trained_on(before) if before.train_len == recipe.train_len else []
    return windows


def main():
    parser = Parser(__doc__)
    parser.add_argument("folder", help="of prepare_data.py, of bytes; or a run of train.py")
    parser.add_argument("--seeds", type=int, default=10, help="of so many models, from seed 1 on")
    parser.add_argument("--contexts", type=int, nargs="+", default=[3, 4, 5], help="in tokens")
    args = parser.parse_args()
    if (Path(args.folder) / "checkpoint.pt").exists():
        recipes = [load_checkpoint(args.folder)[0].config]
    else:
        tiny = RECIPES["tiny"].changed(data=args.folder, vocab_size=257)
        recipes = [tiny.changed(seed=seed) for seed in range(1, args.seeds + 1)]
    results = []
    for recipe in recipes:
        validation, windows = TokenData(recipe.data, "val"), trained_on(recipe)
        tokens = spread_windows(validation, 8192, recipe.read_tokens // 8192)
        token_bytes = bytes_of_tokens(validation.tokenizer())
        for context in args.contexts:
            model = NGram(windows, context, recipe.vocab_size)
            rows = {n: text_row(model, tokens, n, token_bytes) for n in (512, 8192)}
            losses = f"{rows[512]['loss']:.3f} {rows[8192]['loss']:.3f}"
            print(f"seed {recipe.seed}, context {context}: {losses}")
            about = asdict(recipe) | {"pos": "n-gram", "pos_args": {"context": context}}
            results.append({"kind": "perplexity", "recipe": about, "lengths": rows})
    save({"results": results}, args.out, "ngram")


if __name__ == "__main__":
    one_sentence_errors(main)()
