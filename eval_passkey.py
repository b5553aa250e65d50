"""
Passkey retrieval: can a model find a five-digit number in a long filler and repeat it?

    python eval_passkey.py runs_out/fope --trials 1000
    python eval_passkey.py runs_out/fope --lengths 128,512 --generate

The prompt is YaRN's (Peng et al., 2023), which is landmark attention's. Prompt and answer together
have exactly L tokens; the depth of the number is uniform over the filler. A trial is right if
greedy decoding gives every token of the answer.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
import evaluation
from common import positive_int, seed_int
from data import load_tokenizer
from evaluation import DoesNotFit

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INFORMATION = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
DEPTH_BINS = 10


class PasskeyTask:
    """The prompt in a tokenizer's tokens: sample(length, rng) makes one trial."""

    def __init__(self, encoding):
        self.encode = encoding.encode_ordinary
        self.task = self.encode(TASK + "\n")
        self.question = self.encode("\n" + QUESTION)
        self.filler_first, self.filler_next = self.encode(FILLER), self.encode(" " + FILLER)

    def filler(self, n):
        repeats = max(0, n - len(self.filler_first)) // len(self.filler_next) + 1
        return (self.filler_first + self.filler_next * repeats)[:n]

    def sample(self, length, rng, key=None, depth=None):
        """
        One trial of exactly `length` tokens: (tokens (length,) int64, the number of answer tokens
        at their end, depth).

        key is five digits, depth in [0, 1) the share of the filler that comes before it; both are
        drawn from rng where not given. DoesNotFit where the prompt is longer.
        """
        key = int(rng.integers(10000, 100000)) if key is None else key
        depth = float(rng.random()) if depth is None else depth
        information = self.encode("\n" + INFORMATION.format(key=key) + "\n")
        question, answer = self.question, self.encode(f" {key}")
        if len(answer) > 1 and answer[:1] == self.encode(" "):
            # A token for the blank alone says nothing about the key: it belongs to the question.
            question, answer = question + answer[:1], answer[1:]
        without_filler = len(self.task) + len(information) + len(question) + len(answer)
        n_filler = length - without_filler
        if n_filler < 0:
            what = f"the prompt without any filler has {without_filler} tokens"
            raise DoesNotFit(f"{what}, it does not fit {length}")
        n_before = int(depth * (n_filler + 1))
        before, after = self.filler(n_before), self.filler(n_filler - n_before)
        tokens = self.task + before + information + after + question + answer
        return np.array(tokens, dtype=np.int64), len(answer), depth


@torch.no_grad()
def passkey_accuracy(model, task, length, trials, seed=0, generate=False, progress=None):
    """
    The results of `trials` passkey trials of `length` tokens: a dict with exact-match accuracy and
    its 95 % interval, the share of answer tokens right, both by depth, too, and the answer's mean
    NLL in nats per token.

    Greedy decoding gives the answer if and only if every answer token is the arg-max given the
    true prefix: up to the first wrong token both have read the same. So one forward pass decides a
    trial, and at the same time shows how many of the tokens come out right when the ones before
    are given. With generate=True exact match is taken from decoding token by token instead, which
    is slower and must agree.
    """
    rng = np.random.default_rng((seed, length))  # the same trials for every model
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    samples = [task.sample(length, rng) for _ in range(trials)]
    results = np.zeros((3, trials))
    exact, share, nll = results
    n_rows = evaluation.batch_rows(device, length)
    for i in range(common.rank() * n_rows, trials, common.world_size() * n_rows):
        rows = samples[i : i + n_rows]
        tokens = torch.from_numpy(np.stack([t for t, _, _ in rows])).to(device)
        n_max = max(n for _, n, _ in rows)
        answers = tokens[:, -n_max:]
        with common.autocast(device):
            logits = model(tokens[:, :-1], positions=slice(-n_max, None)).float()
        right = (logits.argmax(dim=-1) == answers).cpu().numpy()  # (rows, n_max)
        losses = F.cross_entropy(logits.transpose(1, 2), answers, reduction="none").cpu().numpy()
        for r, (_, n, _) in enumerate(rows):
            exact[i + r], share[i + r] = right[r, -n:].all(), right[r, -n:].mean()
            nll[i + r] = losses[r, -n:].mean()
            if generate:
                with common.autocast(device):
                    decoded = [*model.generate(tokens[r : r + 1, :-n], n, temperature=0)]
                exact[i + r] = torch.equal(torch.cat(decoded, dim=1)[0], tokens[r, -n:])
        if progress is not None:
            progress.update(common.world_size() * len(rows))
    model.train(was_training)
    common.all_reduce_sum(torch.from_numpy(results))  # in place: each process has its own trials
    depths = np.array([depth for _, _, depth in samples])
    return summary(exact, share, nll, np.minimum((depths * DEPTH_BINS).astype(int), DEPTH_BINS - 1))


def summary(exact, share, nll, bins):
    """What passkey_accuracy returns, from the results of each trial and its bin of depth."""
    in_bin = [bins == b for b in range(DEPTH_BINS)]
    low, high = wilson_interval(int(exact.sum()), len(exact))
    return {
        "accuracy": float(exact.mean()),
        "accuracy_low": low,
        "accuracy_high": high,
        "token_accuracy": float(share.mean()),
        "answer_nll": float(nll.mean()),
        "trials": len(exact),
        "trials_by_depth": [int(b.sum()) for b in in_bin],
        "accuracy_by_depth": [float(exact[b].mean()) if b.any() else None for b in in_bin],
        "token_accuracy_by_depth": [float(share[b].mean()) if b.any() else None for b in in_bin],
    }


def wilson_interval(successes, n, z=1.959964):
    """The 95 % score interval of a proportion (Wilson, 1927): honest also near 0 and 1."""
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def main(argv=None):
    parser = evaluation.evaluation_parser(__doc__)
    add = parser.add_argument
    add("--trials", type=positive_int, default=1000, help="trials per length")
    add("--generate", action="store_true", help="decode token by token instead of in one pass")
    add("--seed", type=seed_int, default=0, help="of the numbers and depths")
    args = parser.parse_args(argv)
    model, metadata, state = evaluation.load_for_evaluation(args)
    task = PasskeyTask(load_tokenizer(metadata["tokenizer"], args.checkpoint))

    def evaluate(length):
        settings = dict(desc=f"length {length}", unit="trial", leave=False)
        with tqdm(total=args.trials, disable=common.rank() > 0, **settings) as bar:
            options = args.trials, args.seed, args.generate, bar
            return passkey_accuracy(model, task, length, *options)

    extra = {"step": state["step"], "trial_seed": args.seed, "generate": args.generate}
    evaluation.evaluate_lengths(args, "passkey", evaluate, model, metadata, **extra)


if __name__ == "__main__":
    common.one_sentence_errors(main)()
