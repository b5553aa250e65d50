"""
Where does attention go once the text is longer than in training?

    python experiments/attention_row.py runs_out/tiny/text/{rope,fope_sigma0,fope,alibi}_s?

Each model reads held-out windows of 4 times its training length. For every 128th position, the
last layer's attention over the distance to the key, in steps of 128 tokens: the mean over heads,
windows, the runs of one name, and the 8 queries up to that position. Look at: how much goes further
than the training length, where RoPE's slow pairs show angles that training never did.
"""

from collections import defaultdict
from pathlib import Path

import torch
from shared import Parser, save

from checkpoint import load_checkpoint
from common import Refused, one_sentence_errors
from data import TokenData
from evaluation import spread_windows

STEP, QUERIES, WINDOWS = 128, 8, 8


@torch.no_grad()
def attention_rows(model, windows, T):
    """[for the query at STEP - 1, 2 STEP - 1, ...: [share of each step of distance, ...], ...]"""
    heard, attn, device = [], model.blocks[-1].attn, model.embed.weight.device
    hooks = [
        m.register_forward_hook(lambda *a: heard.append(a[-1])) for m in (attn.q_norm, attn.k_norm)
    ]
    rows = torch.zeros(T // STEP, T // STEP, device=device)
    future = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
    for window in windows:
        heard.clear()
        model(torch.as_tensor(window[:T]).long()[None].to(device))
        scores = attn.pos.scores(*heard)[0]  # (n_head, T, T), of q and k before their rotation
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        for n, row in enumerate(rows):
            for t in range((n + 1) * STEP - QUERIES, (n + 1) * STEP):
                near_first = weights[:, t, : t + 1].mean(dim=0).flip(0)
                row += torch.nn.functional.pad(near_first, (0, T - t - 1)).view(-1, STEP).sum(-1)
    for hook in hooks:
        hook.remove()
    rows = rows / (len(windows) * QUERIES)
    return [row[: n + 1].tolist() for n, row in enumerate(rows)]


def measure(runs, out):
    """The rows of these runs, the mean over those of one name, to out/attention_row.json."""
    of_name, first_T = defaultdict(list), 0
    for run in runs:
        model, _, _ = load_checkpoint(run)
        name, T = Path(run).name.rpartition("_s")[0], 4 * model.config.train_len
        if not name or (first_T := first_T or T) != T:
            raise Refused(f"{run} is no NAME_sSEED, or has another training length than the first")
        windows = spread_windows(TokenData(model.config.data, "val"), T, WINDOWS)
        of_name[name].append(attention_rows(model, windows, T))
    numbers = {"train_len": T // 4, "step": STEP, "runs": len(runs), "rows": {}}
    for name, found in of_name.items():
        rows = [torch.tensor(rows).mean(dim=0) for rows in zip(*found, strict=True)]
        numbers["rows"][name] = [[round(x, 3) for x in row.tolist()] for row in rows]
    save(numbers, out, "attention_row")


def main(argv=None):
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders NAME_sSEED of text models")
    args = parser.parse_args(argv)
    measure(args.runs, args.out)


if __name__ == "__main__":
    one_sentence_errors(main)()
