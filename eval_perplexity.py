"""
Loss and perplexity against length: does a model keep reading well past its training length?

    python eval_perplexity.py runs_out/fope                        1x to 16x the training length
    python eval_perplexity.py runs_out/fope_60M --data data/gutenberg --out books.json
    python eval_perplexity.py runs_out/rope --rope_scaling kind=yarn --out yarn.json

At every length L the same validation tokens are cut into windows of L that do not overlap. The loss
is the mean negative log-likelihood of all tokens, in nats per token; perplexity is its exponential.
A longer window gives most tokens more context, so the loss of a model that can use it falls with L,
and the loss of a model that cannot use it rises. The longest windows are spread evenly over the
validation split, so that no single document decides. A length that does not divide the longest one
leaves out the end of each window.
"""

import math

import numpy as np

import common
import evaluation
from common import Refused, positive_int
from data import TokenData, cut, load_tokenizer, window_loss
from recipe import parse_lengths


def bytes_of_tokens(encoding):
    """The length in bytes of each token: (n_vocab,) int64. The end of text has none."""
    tokens = map(encoding.decode_single_token_bytes, range(encoding.eot_token))  # it is the last
    return np.array([*map(len, tokens), 0])


def text_row(model, tokens, length, token_bytes, show=False):
    """
    Measure the loss of a text at one length. tokens: as window_loss takes them. token_bytes: the
    length in bytes of each token id. Returns a dict: the loss in nats per token; perplexity; bits
    per byte, in which models of different tokenizers can be compared; then the loss by position in
    the window, in at most 128 bins, and the loss of each window.
    """
    losses, (_, targets) = window_loss(model, tokens, length, show), cut(tokens, length)
    loss, n_bytes = float(losses.mean()), int(token_bytes[targets].sum())
    bins = np.array_split(losses.mean(axis=0), min(128, losses.shape[1]))
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss * targets.size / n_bytes / math.log(2),
        "tokens": targets.size,
        "by_position": [round(float(b.mean()), 4) for b in bins],
        "by_window": losses.mean(axis=1).round(4).tolist(),
    }


def main(argv=None):
    parser = evaluation.evaluation_parser(__doc__)
    add = parser.add_argument
    add("--data", help="data folder whose validation split is read; by default the run's own")
    add(
        "--max_tokens", type=positive_int, help="validation tokens to read; by default the recipe's"
    )
    args = parser.parse_args(argv)
    changes = dict(lengths=args.lengths, read_tokens=args.max_tokens)
    model, trained = evaluation.load_for_evaluation(args, **changes)
    recipe = model.config
    data = TokenData(recipe.data if args.data is None else args.data, "val")
    corpus, read = data.folder.name if args.data else "", {"data_sha256": data.sha256()}
    read["trained_on"] = trained["trained_on"]
    if data.tokenizer_id != recipe.tokenizer:
        raise Refused(
            f"{args.run} was trained with the tokenizer {recipe.tokenizer}, but {data.folder} has "
            f"tokens of {data.tokenizer_id}"
        )
    if args.data is None and data.sha256("train") != trained["trained_on"]:
        raise Refused(
            f"{data.folder} was prepared again since {args.run} was trained, so that the model may "
            f"have read its validation text; --data {data.folder} evaluates on it all the same"
        )
    out = evaluation.result_file(args, recipe, "perplexity", corpus, **read)

    # all lengths score the same tokens: whole windows of the longest that fits
    n_tokens = min(len(data), recipe.read_tokens)
    lengths = parse_lengths(recipe.lengths, recipe.train_len)
    too_few = f"--max_tokens reads {n_tokens:,} of {data.folder}, too few for one window"
    if n_tokens <= lengths[0]:
        raise Refused(f"{too_few} of {lengths[0]:,}")
    longest = max(n for n in lengths if n < n_tokens)
    tokens = evaluation.spread_windows(data, longest, (n_tokens - 1) // longest)
    token_bytes = bytes_of_tokens(load_tokenizer(recipe.tokenizer, args.run))

    def evaluate(model, length):
        if length > longest:
            raise Refused(too_few)
        return text_row(model, tokens, length, token_bytes, common.rank() == 0)

    measured = evaluation.evaluate_lengths(model, evaluate)
    about = dict(kind="perplexity", label=args.label, **trained)
    about |= dict(data=str(data.folder), data_sha256=data.sha256())
    evaluation.write_result(out, model, about, measured)


if __name__ == "__main__":
    common.one_sentence_errors(main)()
