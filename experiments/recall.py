r"""
Does a model use what stands far back? A passage of a text comes again: what does it cost then?

    python train.py --preset tiny --pos experiments.recall.ShiftedRoPE --data data/bpe --lr 2e-3 \
        --task experiments.recall.Random --task_share 1 --train_len 64 --batch_size 16 \
        --eval_tokens 1024 --out runs_out/warm
    python train.py --init_from runs_out/warm --seed 1 --train_len 512 --data data/bpe \
        --task experiments.recall.Recall --task_share 0.5 --tokens 2048000 --out runs_out/reader
    python experiments/recall.py runs_out/reader

First a model learns to copy random tokens in short windows, then it reads text in which passages
come again. results/APPENDIX.md has what else was tried.

A trial is a held-out text in which a passage of PASSAGE tokens stands somewhere, and again at the
end. Its first CUE tokens tell which passage it is; the loss of the others is compared with their
loss at the first place. A model that reads pays at most half, in each quarter of the distances.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import one_sentence_errors, positive_int
from data import TokenData, window_loss
from fope import RoPE
from tasks import Passkey

PASSAGE, CUE = 32, 8


class Recall(Passkey):
    """A text that repeats passages of itself; see Passkey for what a task has."""

    copied = 0.5  # of the pieces of a document

    def __init__(self, encode, read):
        self.read = read

    def text(self, n, rng):
        return self.read(n, rng)

    def sample(self, length, rng):
        """(tokens, tokens to predict, distance from their first place): the second copy is last."""
        text = self.text(length - PASSAGE, rng)
        start = int(rng.integers(len(text) - PASSAGE + 1))
        tokens = np.append(text, text[start : start + PASSAGE])
        return tokens, PASSAGE - CUE, len(text) - start

    def document(self, length, rng, eot):
        """Pieces of 4 tokens to an eighth of it: of what came before, or a text that goes on."""
        text, longest = self.text(length + 1, rng), length // 8
        tokens, n_read = text[:longest], longest
        while len(tokens) <= length:
            n = int(rng.integers(4, longest + 1))
            if rng.random() < self.copied:
                # The power makes early places likelier: else few copies would be far back.
                start = int(rng.random() ** 1.5 * (len(tokens) - n + 1))
                tokens = np.append(tokens, tokens[start : start + n])
            else:
                tokens, n_read = np.append(tokens, text[n_read : n_read + n]), n_read + n
        return tokens[: length + 1]


class Random(Recall):
    """The same of random tokens: almost nothing but copying helps to predict them."""

    copied = 0.8

    def text(self, n, rng):
        return rng.choice(np.unique(self.read(8 * n, rng)), n)


class ShiftedRoPE(RoPE):
    """
    Half of the heads see, in the place of a key, that of the token before. So a query finds what
    followed an equal token, in one layer and not in two: tiny models learn to copy within minutes.
    Akin to the smeared keys of Olsson et al. (2022) and the key offset of modded-nanogpt.
    """

    def rotate(self, q, k):
        n = self.n_head // 2
        k = torch.cat((F.pad(k[:, :n, :-1], (0, 0, 1, 0)), k[:, n:]), dim=1)
        return super().rotate(q, k)


def costs(model, task, length, n_trials):
    """Nats per token of a passage at its first place and its second, and their distance: (N,)."""
    rngs = (np.random.default_rng((length, i)) for i in range(n_trials))
    samples = [task.sample(length, rng) for rng in rngs]
    # (N, length - 1): the loss of token i + 1 stands at i
    losses = window_loss(model, np.stack([tokens for tokens, *_ in samples]), length - 1)
    distances, n = np.array([distance for *_, distance in samples]), PASSAGE - CUE
    ends = length - 1 - distances  # of the first copy, as the second's end is length - 1
    first = np.array([row[end - n : end].mean() for row, end in zip(losses, ends, strict=True)])
    return first, losses[:, -n:].mean(axis=1), distances


def row(first, second, distance, train_len):
    """
    Nats per token: of the first place; of the second place where the first is as near as in
    training, and where it is further back; and for each quarter of the distances, in their order,
    [the mean distance, first, second].
    """
    near, order = distance < train_len, np.array_split(np.argsort(distance), 4)
    parts = {"first": first, "near": second[near], "far": second[~near]}
    means = {name: float(part.mean()) for name, part in parts.items() if len(part)}
    columns = np.array([distance, first, second])
    quarters = [columns[:, part].mean(axis=1).round(3).tolist() for part in order]
    return means | {"quarters": quarters}


def main(argv=None):
    import evaluation  # here, since train.py imports this file for its classes

    parser = evaluation.evaluation_parser(__doc__)
    parser.add_argument(
        "--trials", type=positive_int, help="at each length; by default the recipe's"
    )
    args = parser.parse_args(argv)
    changes = dict(lengths=args.lengths, trials=args.trials)
    model, trained = evaluation.load_for_evaluation(args, **changes)
    recipe = model.config
    task = Recall(None, TokenData(recipe.data, "val").excerpt)
    out = evaluation.result_file(args, recipe, "recall")

    def evaluate(model, length):
        measured = row(*costs(model, task, length, recipe.trials), recipe.train_len)
        for distance, first, second in measured["quarters"]:
            print(f"{distance:>15.0f} back: {first:.2f} -> {second:.2f}")
        return measured

    measured = evaluation.evaluate_lengths(model, evaluate)
    about = dict(kind="recall", label=args.label, **trained)
    evaluation.write_result(out, model, about, measured)


if __name__ == "__main__":
    one_sentence_errors(main)()
