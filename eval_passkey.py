"""
Passkey retrieval: can a model find a five-digit number in a long filler and repeat it?

    python eval_passkey.py runs_out/fope --trials 1000
    python eval_passkey.py runs_out/fope --lengths 128,512 --generate

Prompt and answer together have exactly L tokens; the depth of the number is uniform over the
filler. A trial is right if greedy decoding gives every token of the answer. --task asks another
task of data.TASKS in the same way.
"""

import common
import evaluation
from common import positive_int
from data import TASKS, load_tokenizer


def main(argv=None):
    parser = evaluation.evaluation_parser(__doc__)
    add = parser.add_argument
    add("--task", choices=TASKS, help="without it the one trained on, or else passkey")
    add("--trials", type=positive_int, help="trials per length; else the recipe's")
    add("--generate", action="store_true", help="decode token by token instead of in one pass")
    add("--seed", type=evaluation.seed_int, help="of the trials; else the run's")
    args = parser.parse_args(argv)
    asked = dict(lengths=args.lengths, trials=args.trials)
    model, trained = evaluation.load_for_evaluation(args, **asked)
    recipe = model.config
    name = args.task or recipe.task or "passkey"
    out = evaluation.result_file(args, recipe, name, trained_on=trained["trained_on"])
    task = TASKS[name](load_tokenizer(recipe.tokenizer, args.run).encode_ordinary)
    seed = recipe.seed if args.seed is None else args.seed
    how = recipe.trials, seed, args.generate, common.rank() == 0

    def evaluate(model, length):
        return evaluation.task_accuracy(model, task, length, *how)

    measured = evaluation.evaluate_lengths(model, evaluate)
    about = dict(kind=name, label=args.label, **trained, trial_seed=seed, generate=args.generate)
    evaluation.write_result(out, model, about, measured)


if __name__ == "__main__":
    common.one_sentence_errors(main)()
