"""
Passkey retrieval: can a model find a five-digit number in a long filler and repeat it?

    python eval_passkey.py runs_out/keys --task passkey_anywhere --trials 1000
    python eval_passkey.py runs_out/keys --task passkey_anywhere --lengths 512,2048 --out x.json

Prompt and answer together have exactly L tokens; the depth of the number is uniform over the
filler. A trial is right if greedy decoding gives every token of the answer. The result goes to
TASK.json in the folder of the run. A model finds hardly any passkey unless it was trained on them.
"""

import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

import common
import evaluation
from common import positive_int
from data import TokenData, load_tokenizer, slices
from tasks import TASKS, task_class

# --- how a trial is measured


@torch.no_grad()
def task_accuracy(model, task, length, trials, seed=0, generate=False, show=False):
    """
    Ask a model `trials` trials of a task, each of `length` tokens. Returns a dict: the share of
    trials whose whole answer is right and its 95 % interval; the share of answer tokens that are
    right; the mean NLL of the answer in nats per token; then for each trial the distance in tokens
    from the end of the needle to the answer, whether the answer is right, and the share of its
    tokens that are.

    Greedy decoding gives the answer if and only if each answer token is the arg-max given the true
    tokens before it: up to the first wrong token decoding has read the same. So one forward pass
    decides a trial. It also shows which tokens come out right when the ones before are given. With
    generate=True the answer is decoded token by token instead, which is slower and must agree.
    """
    rng = np.random.default_rng((seed, length))  # the same trials for every model
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    samples = [task.sample(length, rng) for _ in range(trials)]
    results = np.zeros((3, trials))
    exact, share, nll = results
    for rows in slices(trials, length, device, show):
        tokens = torch.from_numpy(np.stack([t for t, *_ in samples[rows]])).to(device)
        n_max = max(n for _, n, *_ in samples[rows])
        answers = tokens[:, -n_max:]
        with common.autocast(device):
            logits = model(tokens[:, :-1], positions=slice(-n_max, None)).float()
        right = (logits.argmax(dim=-1) == answers).cpu().numpy()  # (rows, n_max)
        losses = F.cross_entropy(logits.transpose(1, 2), answers, reduction="none").cpu().numpy()
        for r, (_, n, *_) in enumerate(samples[rows]):
            i = rows.start + r
            exact[i], share[i] = right[r, -n:].all(), right[r, -n:].mean()
            nll[i] = losses[r, -n:].mean()
            if generate:
                with common.autocast(device):
                    decoded = [*model.generate(tokens[r : r + 1, :-n], n, temperature=0)]
                exact[i] = torch.equal(torch.cat(decoded, dim=1)[0], tokens[r, -n:])
    model.train(was_training)
    common.all_reduce_sum(torch.from_numpy(results))  # in place: each process has its own trials
    each = {"distance": [distance for *_, distance in samples]}
    each |= {"right": exact.astype(int).tolist(), "share_right": share.round(2).tolist()}
    return summary(exact, share, nll) | each


def summary(exact, share, nll):
    """What task_accuracy returns, from the results of each trial."""
    low, high = wilson_interval(int(exact.sum()), len(exact))
    return {
        "accuracy": float(exact.mean()),
        "accuracy_low": low,
        "accuracy_high": high,
        "token_accuracy": float(share.mean()),
        "answer_nll": float(nll.mean()),
        "trials": len(exact),
    }


def wilson_interval(successes, n, z=1.959964):
    """The 95 % score interval of a proportion (Wilson, 1927): honest also near 0 and 1."""
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


# --- the command line


def load_task(name, recipe, run):
    """A task in the tokens of a run. It reads the run's held-out text, if it reads any."""
    encode = load_tokenizer(recipe.tokenizer, run).encode_ordinary
    held_out = cache(lambda: TokenData(recipe.data, "val"))
    return task_class(name)(encode, lambda n, rng: held_out().excerpt(n, rng))


def main(argv=None):
    parser = evaluation.evaluation_parser(__doc__)
    add = parser.add_argument
    tasks = f"{', '.join(TASKS)}, or FILE.CLASS"
    add("--task", help=f"{tasks}; by default the one it was trained on, or passkey")
    add(
        "--trials",
        type=positive_int,
        help="number of trials at each length; by default the recipe's",
    )
    add("--generate", action="store_true", help="decode token by token instead of in one pass")
    add("--seed", type=evaluation.seed_int, help="seed of the trials; by default the run's")
    args = parser.parse_args(argv)
    changes = dict(lengths=args.lengths, trials=args.trials)
    model, trained = evaluation.load_for_evaluation(args, **changes)
    recipe = model.config
    name = args.task or recipe.task or "passkey"
    task = load_task(name, recipe, args.run)
    seed = recipe.seed if args.seed is None else args.seed
    read = dict(trained_on=trained["trained_on"], trial_seed=seed)
    out = evaluation.result_file(args, recipe, name, **read)

    def evaluate(model, length):
        return task_accuracy(
            model,
            task,
            length,
            trials=recipe.trials,
            seed=seed,
            generate=args.generate,
            show=common.rank() == 0,
        )

    measured = evaluation.evaluate_lengths(model, evaluate)
    about = dict(kind=name, label=args.label, **trained, trial_seed=seed, generate=args.generate)
    evaluation.write_result(out, model, about, measured)


if __name__ == "__main__":
    common.one_sentence_errors(main)()
