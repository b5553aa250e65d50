"""
Where does attention go once the text is longer than in training? (the first screen of
docs/index.html, which holds these numbers and some of results/)

    python experiments/attention_row.py runs_out/tiny/text/{rope,fope_cf,fope,alibi}_s{1,2,3,4,5}
    python experiments/attention_row.py --page                 put the numbers into docs/index.html

Each model reads held-out windows of 4 times its training length. For every 128th position, the
last layer's attention over the distance to the key, in steps of 128 tokens: the mean over heads,
windows, the runs of one name, and the 8 queries up to that position. Look at: how much goes further
than the training length, where RoPE's slow pairs show angles that training never did.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from shared import ROOT, Parser, save

from checkpoint import load_checkpoint
from common import Refused, one_sentence_errors, read_json, write_atomically
from data import TokenData
from evaluation import spread_windows
from paper.results import load_results, seed_stats

STEP, QUERIES, WINDOWS = 128, 8, 8
ON_THE_PAGE = {  # name there: figure and label in results/, name of the runs
    "rope": ("figure1", "RoPE", "rope"),
    "cycle": ("enough", "RoPE, theta 94", "rope_cycles1"),
    "floor": ("parts", "FoPE, floor alone", "fope_cf"),
    "fope": ("figure1", "FoPE", "fope"),
    "alibi": ("figure1", "ALiBi", "alibi"),
}
PUT_BACK = {"none": "rope", "slow, wrapped": "slow", "fast, wrapped": "fast", "near": "near"}


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


def page_numbers(folder):
    """
    What docs/index.html draws: of folder/wrap*.json trained models with pairs put back; the
    attention rows in folder/attention_row.json; and of results/, over the seeds, the loss by
    position in the same steps, perplexity and passkeys by length.
    """
    measured, page = read_json(folder / "attention_row.json"), defaultdict(dict)
    page |= {key: measured[key] for key in ("train_len", "step")}
    page["put_back"] = put_back(folder)
    for name, (figure, label, run) in ON_THE_PAGE.items():
        found = load_results([ROOT / "results" / f"{figure}.json"])
        texts = found["perplexity"][label]
        page["lengths"], *numbers = seed_stats(texts, "perplexity")
        page["texts"] = len(texts[0]["lengths"][page["lengths"][-1]]["by_window"])
        page["perplexity"][name] = rounded(*numbers)
        if figure == "figure1":
            _, mean, std, n = seed_stats(found["passkey"][label], "accuracy")
            page["passkeys"][name] = rounded(100 * mean, 100 * std, n)
        if name == "floor":  # in the last step alone
            continue
        if name != "rope" and run in measured["rows"]:  # RoPE's are in put_back
            page["attention"][name] = measured["rows"][run]
        longest = page["lengths"][-1]
        loss = np.mean([r["lengths"][longest]["by_position"] for r in texts], axis=0)
        by_step = loss.reshape(longest // page["step"], -1).mean(axis=1)
        page["loss"][name] = by_step[: 4 * page["train_len"] // page["step"]].round(3).tolist()
    return page


def put_back(folder):
    """
    Means over RoPE's seeds in wrap.json: what goes of the damage (in the 60M model, too), the
    damage itself beside RoPE-A's, loss and attention by step.
    """

    def runs_of(file, name):
        return [run for run in read_json(folder / file)["runs"] if run["name"] == name]

    def mean(runs, key, condition):  # removed is shown in whole %
        return np.mean([run[key][condition] for run in runs], axis=0).round(4).tolist()

    runs, rope_a = runs_of("wrap.json", "rope"), runs_of("wrap_others.json", "rope_a")
    large = runs_of("wrap_60M.json", "rope")
    numbers = {"seeds": len(runs), "texts": read_json(folder / "wrap.json")["windows"]}
    for key, of in (("removed", runs), ("removed_60M", large)):
        numbers[key] = {condition: mean(of, "removed", condition) for condition in of[0]["removed"]}
    numbers["damage"] = [float(np.mean([run["damage"] for run in of])) for of in (runs, rope_a)]
    numbers["loss"] = {name: mean(runs, "by_position", key) for key, name in PUT_BACK.items()}
    numbers["attention"] = {}
    for key, name in PUT_BACK.items():
        rows = zip(*(run["attention"][key] for run in runs), strict=True)
        numbers["attention"][name] = [np.mean(row, axis=0).round(3).tolist() for row in rows]
    return numbers


def rounded(mean, std, n):
    return {"seeds": n, "mean": mean.round(2).tolist(), "std": std.round(2).tolist()}


def fill_page(path, numbers):
    """Put them into the page's element that holds them."""
    rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in numbers.items())
    element = r'(<script type="application/json" id="measured">\n).*?(\n</script>)'
    text = path.read_text(encoding="utf-8")
    text = re.sub(element, lambda m: f"{m[1]}{{{rows}}}{m[2]}", text, flags=re.S)
    write_atomically(path, lambda f: f.write(text.encode()))


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
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="folders NAME_sSEED of text models")
    add("--page", action="store_true", help="put the numbers into docs/index.html")
    args = parser.parse_args(argv)
    if args.runs:
        measure(args.runs, args.out)
    if args.page:
        fill_page(ROOT / "docs" / "index.html", page_numbers(args.out))


if __name__ == "__main__":
    one_sentence_errors(main)()
