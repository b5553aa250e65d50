"""
Where does the answer look? Attention from the digits of a passkey's answer back to the passkey, at 1x and beyond.

    python experiments/attention_map.py runs_out/tiny/runs/fope_s0_passkey       1 minute

The prompt states the key twice. For every layer and head: how much of the attention of the position that must produce digit
n of the answer falls on digit n of the first or the second statement, and on the tokens around it, averaged over digits and
trials. A textbook copying head looks at the digit itself (offset 0). Look at: whether the best head does, or looks one token
earlier in the second statement, where the model has once had to predict that digit itself (top); and how that head fares
beyond the training length (bottom), beside an even spread of attention.
"""

from pathlib import Path

import numpy as np
import torch
from common import BLACK, BLUE, ORANGE, RED, Parser, one_sentence_errors, plt, save, tidy

from eval_passkey import PasskeyTask  # the prompt is the evaluation's, so are its tokens
from eval_perplexity import load_run
from prepare_data import load_tokenizer

OFFSETS = (-3, -2, -1, 0, 1, 2)  # from the digit to produce


@torch.no_grad()
def answer_attention(model, tokens, n_answer):
    """Attention of the n_answer positions that produce the answer, over all before: (n_layer, n_head, n_answer, T)."""
    seen = []
    handles = []
    for block in model.blocks:
        handles.append(block.attn.q_norm.register_forward_hook(lambda m, i, q: seen.append([q])))
        handles.append(block.attn.k_norm.register_forward_hook(lambda m, i, k: seen[-1].append(k)))
    model(tokens[None, :-1], positions=[-1])
    for handle in handles:
        handle.remove()
    maps = []
    for block, (q, k) in zip(model.blocks, seen, strict=True):
        scores = block.attn.pos.scores(q, k)[0]
        T = scores.size(-1)
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        maps.append(scores.masked_fill(~causal, -torch.inf)[:, -n_answer:].softmax(dim=-1))
    return torch.stack(maps)


def occurrences(tokens, answer):
    """Where `answer` starts in `tokens`, the answer at the end left out."""
    n = len(answer)
    return [i for i in range(len(tokens) - n) if np.array_equal(tokens[i : i + n], answer)]


def measure(model, task, length, trials, seed=0):
    """Mean attention on the tokens around the digit to produce: (n_layer, n_head, statement, offset)."""
    rng, total = np.random.default_rng((seed, length)), 0.0
    for _ in range(trials):
        tokens, n, _ = task.sample(length, rng)
        attention = answer_attention(model, torch.from_numpy(tokens), n)  # row r produces digit r
        rows = torch.arange(n)
        places = [start + rows for start in occurrences(tokens, tokens[-n:])[:2]]
        around = [torch.stack([attention[:, :, rows, at + o].mean(dim=-1) for o in OFFSETS], dim=-1) for at in places]
        total = total + torch.stack(around, dim=2) / trials
    return total


def main(argv=None):
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help="a run of train.py with --passkey_frac")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--name", default="attention_map", help="of figure and json")
    args = parser.parse_args(argv)
    model, about, _ = load_run(args.checkpoint, "cpu")
    task = PasskeyTask(load_tokenizer(about["tokenizer"], Path(args.checkpoint)))
    lengths = [model.config.train_len * f for f in (1, 2, 4, 8, 16)]
    results = {length: measure(model, task, length, args.trials) for length in lengths}

    at_1x = results[lengths[0]]
    layer, head, statement, o = (int(i) for i in np.unravel_index(int(at_1x.argmax()), at_1x.shape))
    where = {0: "on the digit itself", -1: "one token before the digit"}.get(
        OFFSETS[o], f"{OFFSETS[o]:+d} tokens from the digit"
    )
    where += f", {('first', 'second')[statement]} statement"
    best = [100 * results[n][layer, head, statement, o].item() for n in lengths]
    on_key = [100 * results[n][layer, head, :, OFFSETS.index(-1) : OFFSETS.index(0) + 1].sum().item() for n in lengths]
    even = [100 / n for n in lengths]

    fig, (top, bottom) = plt.subplots(2, 1, figsize=(7.2, 6.8), layout="constrained")
    image = top.imshow(100 * at_1x.amax(dim=(2, 3)).numpy(), aspect="auto", cmap="cividis", vmin=0, vmax=100)
    top.set(xlabel="head", ylabel="layer", xticks=range(at_1x.size(1)), yticks=range(at_1x.size(0)))
    fig.colorbar(image, ax=top, label="most attention on one\nof these tokens (%)")
    pos = model.config.pos
    top.set_title(f"{pos} at {lengths[0]} tokens: layer {layer}, head {head} gives {best[0]:.0f} %\n{where}", fontsize=10)
    bottom.plot(lengths, best, color=RED, marker="o", label=f"layer {layer}, head {head}, {where}")
    bottom.plot(
        lengths, on_key, color=BLUE, marker="s", ls="--", label="the same head, both statements, digit and token before"
    )
    bottom.plot(lengths, even, color=ORANGE, ls=":", label="even attention to all tokens")
    bottom.axvline(lengths[0], color=BLACK, lw=0.8, ls=":")
    bottom.set_xscale("log", base=2)
    bottom.set_xticks(lengths, [f"{n}\n{n // lengths[0]}x" for n in lengths])
    bottom.set_ylim(0, 119)
    title = f"At {lengths[1]} tokens that head has {best[1]:.0f} % left, at {lengths[-1]} it has {best[-1]:.1f} %"
    tidy(bottom, "length (tokens)", "attention (%)", title)
    bottom.legend(frameon=False, fontsize=9)
    print(f"layer {layer}, head {head}, {where}: " + ", ".join(f"{n}: {s:.1f} %" for n, s in zip(lengths, best, strict=True)))
    numbers = {
        "checkpoint": str(args.checkpoint), "pos": pos, "trials": args.trials, "lengths": lengths, "offsets": list(OFFSETS),
        "best": {"layer": layer, "head": head, "statement": statement, "offset": OFFSETS[o], "percent": best},
        "attention_by_length_layer_head_statement_offset": {n: results[n].numpy().round(4).tolist() for n in lengths},
    }  # fmt: skip
    save(fig, numbers, args.out, args.name)


if __name__ == "__main__":
    one_sentence_errors(main)()
