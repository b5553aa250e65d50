"""
Loss and perplexity against length: does a model keep reading well past its training length?

    python eval_perplexity.py runs_out/fope                        1x to 16x the training length
    python eval_perplexity.py runs_out/fope --data data/c4 --lengths 512,8192 --out c4.json
    python eval_perplexity.py runs_out/rope --yarn_scale 4 --out yarn.json      slower frequencies

At every length L the same validation tokens are cut into non-overlapping windows of L, and the
loss is the total negative log-likelihood over all tokens scored: nats per token; perplexity is its
exponential. A longer window gives most tokens more context, so a model that can use it gets better
with L, and one that cannot gets worse. The longest windows are spread evenly over the validation
split, however few --max_tokens asks for, so that no single document decides; a length that does not
divide the longest leaves out the end of each.
"""

import math

import numpy as np
import torch
from tqdm import tqdm

import common
import evaluation
from checkpoint import read_log
from common import positive_int
from data import TokenData
from evaluation import DoesNotFit


def spread_windows(data, length, n):
    """n windows of length + 1 tokens, spread evenly over a split of data: (n, length + 1)."""
    starts = np.linspace(0, len(data) - 1 - length, n).astype(int)
    return np.stack([data.read(int(start), length + 1) for start in starts])


@torch.no_grad()
def window_loss(model, tokens, length, progress=None):
    """
    Loss of `tokens`, int64, (S + 1,) or N such rows (N, S + 1), read in non-overlapping windows of
    `length`: (length,) fp64, the mean over the windows of the loss in nats at each position of
    the window. Its mean is the loss per token: all windows are whole, of `length` inputs and the
    target of the last.
    """
    tokens = np.atleast_2d(tokens)
    end = (tokens.shape[1] - 1) // length * length
    inputs = tokens[:, :end].reshape(-1, length)
    targets = tokens[:, 1 : end + 1].reshape(-1, length)
    n_windows = len(inputs)
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    total = torch.zeros(length, dtype=torch.float64)  # on the CPU: not every GPU has fp64
    n_rows = evaluation.batch_rows(device, length)
    for i in range(common.rank() * n_rows, n_windows, common.world_size() * n_rows):
        x, y = (torch.from_numpy(a[i : i + n_rows]).to(device) for a in (inputs, targets))
        with common.autocast(device):
            loss = model(x, y, reduction="none")  # (n_rows, length)
        total += loss.cpu().sum(dim=0, dtype=torch.float64)
        if progress is not None:
            progress.update(common.world_size() * x.numel())
    model.train(was_training)
    return (common.all_reduce_sum(total) / n_windows).numpy()


def main(argv=None):
    parser = evaluation.evaluation_parser(__doc__)
    add = parser.add_argument
    add("--data", help="data folder whose validation split is read, if not the one trained on")
    add("--max_tokens", type=positive_int, help="read only this many validation tokens")
    args = parser.parse_args(argv)
    model, metadata, state = evaluation.load_for_evaluation(args)
    data = TokenData(args.data or metadata["data"], "val")
    if data.tokenizer_id() != metadata["tokenizer"]:
        trained = f"{args.checkpoint} was trained with the tokenizer {metadata['tokenizer']}"
        held = f"{data.folder} holds tokens of {data.tokenizer_id()}"
        raise ValueError(f"{trained}, {held}: their losses cannot be compared")

    # all lengths score the same tokens: whole windows of the longest that fits
    n_tokens = min(len(data), args.max_tokens or len(data))
    lengths = evaluation.parse_lengths(args.lengths, model.config.train_len)
    too_few = f"{data.folder} has {n_tokens:,} validation tokens to read, too few for one window"
    if n_tokens <= lengths[0]:
        raise ValueError(f"{too_few} of {lengths[0]:,}")
    longest = max(n for n in lengths if n < n_tokens)
    n_spread = (n_tokens - 1) // longest
    tokens = spread_windows(data, longest, n_spread)
    by_position = {}

    def evaluate(length):
        if length > longest:
            raise DoesNotFit(too_few)
        n_scored = n_spread * (longest // length * length)
        settings = dict(desc=f"length {length}", unit="tok", unit_scale=True, leave=False)
        with tqdm(total=n_scored, disable=common.rank() > 0, **settings) as bar:
            losses = window_loss(model, tokens, length, bar)
        if length == longest:
            bins = np.array_split(losses, min(128, length))
            starts = np.cumsum([0] + [len(b) for b in bins[:-1]])
            rounded = [round(float(b.mean()), 5) for b in bins]
            by_position.update(start=starts.tolist(), loss=rounded)
        loss = float(losses.mean())
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"loss": loss, "perplexity": perplexity, "tokens": n_scored}

    log = read_log(args.checkpoint)
    curve = [[line["tokens"], round(line["loss"], 4), line.get("val_loss")] for line in log]
    extra = {"data": str(data.folder), "data_sha256": data.sha256()}
    extra |= {"step": state["step"], "curve": curve}
    extra["loss_by_position"] = by_position
    evaluation.evaluate_lengths(args, "perplexity", evaluate, model, metadata, **extra)


if __name__ == "__main__":
    common.one_sentence_errors(main)()
