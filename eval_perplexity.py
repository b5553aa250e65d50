"""
Loss and perplexity against length: does a model keep reading well past its training length?

    python eval_perplexity.py runs_out/fope                        1x to 16x the training length
    python eval_perplexity.py runs_out/fope --data data/c4 --lengths 512,8192 --out c4.json
    python eval_perplexity.py runs_out/rope --rope_scaling kind=yarn --out yarn.json

At every length L the same validation tokens are cut into non-overlapping windows of L, and the
loss is the total negative log-likelihood over all tokens scored: nats per token; perplexity is its
exponential. A longer window gives most tokens more context, so a model that can use it gets better
with L, and one that cannot gets worse. The longest windows are spread evenly over the validation
split, however few --max_tokens asks for, so that no single document decides; a length that does not
divide the longest leaves out the end of each.
"""

import common
import evaluation
from common import Refused, positive_int
from data import TokenData, load_tokenizer
from recipe import parse_lengths


def main(argv=None):
    parser = evaluation.evaluation_parser(__doc__)
    add = parser.add_argument
    add("--data", help="data folder whose validation split is read, if not the one trained on")
    add("--max_tokens", type=positive_int, help="validation tokens to read; else the recipe's")
    args = parser.parse_args(argv)
    asked = dict(lengths=args.lengths, read_tokens=args.max_tokens)
    model, trained = evaluation.load_for_evaluation(args, **asked)
    recipe = model.config
    data = TokenData(recipe.data if args.data is None else args.data, "val")
    corpus, read = data.folder.name if args.data else "", {"data_sha256": data.sha256()}
    read["trained_on"] = trained["trained_on"]
    if data.tokenizer_id != recipe.tokenizer:
        was = f"{args.run} was trained with the tokenizer {recipe.tokenizer}"
        held = f"{data.folder} holds tokens of {data.tokenizer_id}"
        raise Refused(f"{was}, {held}: their losses cannot be compared")
    if args.data is None and data.sha256("train") != trained["trained_on"]:
        what = f"{data.folder} was prepared anew, {args.run} may have read what is for validation"
        raise Refused(f"{what} there now; --data {data.folder} reads it all the same")
    out = evaluation.result_file(args, recipe, "perplexity", corpus, **read)

    # all lengths score the same tokens: whole windows of the longest that fits
    n_tokens = min(len(data), recipe.read_tokens)
    lengths = parse_lengths(recipe.lengths, recipe.train_len)
    too_few = f"--max_tokens reads {n_tokens:,} of {data.folder}, too few for one window"
    if n_tokens <= lengths[0]:
        raise Refused(f"{too_few} of {lengths[0]:,}")
    longest = max(n for n in lengths if n < n_tokens)
    tokens = evaluation.spread_windows(data, longest, (n_tokens - 1) // longest)
    token_bytes = evaluation.bytes_of_tokens(load_tokenizer(recipe.tokenizer, args.run))

    def evaluate(model, length):
        if length > longest:
            raise Refused(too_few)
        return evaluation.text_row(model, tokens, length, token_bytes, common.rank() == 0)

    measured = evaluation.evaluate_lengths(model, evaluate)
    about = dict(kind="perplexity", label=args.label, **trained)
    about |= dict(data=str(data.folder), data_sha256=data.sha256())
    evaluation.write_result(out, model, about, measured)


if __name__ == "__main__":
    common.one_sentence_errors(main)()
