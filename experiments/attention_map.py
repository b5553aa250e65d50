"""
Where does the answer look? Attention from the digits of a passkey's answer back to the passkey, at
1x and beyond.

    python experiments/attention_map.py runs_out/tiny/passkey/fope_s0        1 minute

The prompt states the key twice. For every layer and head: how much of the attention of the position
that must produce digit n of the answer falls on digit n of the first or the second statement, and
on the tokens around it, averaged over digits and trials. A textbook copying head looks at the digit
itself (offset 0). Look at: whether the best head does, or looks one token earlier in the second
statement, where the model has once had to predict that digit itself (top); and how that head fares
beyond the training length (bottom), beside an even spread of attention.
"""

import numpy as np
import torch
from shared import BLACK, BLUE, ORANGE, RED, Parser, outputs_of, plt, save, tidy

from checkpoint import load_run
from common import one_sentence_errors, positive_int
from data import load_tokenizer
from eval_passkey import PasskeyTask  # the prompt is the evaluation's, so are its tokens

OFFSETS = (-3, -2, -1, 0, 1, 2)  # from the digit to produce


def answer_attention(model, tokens, n_answer):
    """Of the n_answer positions that produce the answer: (n_layer, n_head, n_answer, T)."""
    layers = [block.attn for block in model.blocks]
    norms = [norm for attn in layers for norm in (attn.q_norm, attn.k_norm)]
    q_and_k = outputs_of(norms, model, tokens[None, :-1], positions=[-1])
    maps = []
    for attn, q, k in zip(layers, q_and_k[::2], q_and_k[1::2], strict=True):
        scores = attn.pos.scores(q, k)[0]
        causal = torch.ones_like(scores, dtype=torch.bool).tril()
        maps.append(scores.masked_fill(~causal, -torch.inf)[:, -n_answer:].softmax(dim=-1))
    return torch.stack(maps)


def occurrences(tokens, answer):
    """Where `answer` starts in `tokens`, the answer at the end left out."""
    n = len(answer)
    return [i for i in range(len(tokens) - n) if np.array_equal(tokens[i : i + n], answer)]


def measure(model, task, length, trials, seed=0):
    """Mean attention around the digit to produce: (n_layer, n_head, statement, offset)."""
    rng, total = np.random.default_rng((seed, length)), 0.0
    for _ in range(trials):
        tokens, n, _ = task.sample(length, rng)
        attention = answer_attention(model, torch.from_numpy(tokens), n)  # row r produces digit r
        rows = torch.arange(n)
        starts = torch.tensor(occurrences(tokens, tokens[-n:])[:2])
        columns = starts[:, None, None] + torch.tensor(OFFSETS)[:, None] + rows
        total = total + attention[:, :, rows, columns].mean(dim=-1) / trials
    return total


def best_head(results, lengths):
    """The head that gives one of the tokens the most attention at the training length."""
    at_1x = results[lengths[0]]
    layer, head, statement, o = map(int, np.unravel_index(int(at_1x.argmax()), at_1x.shape))
    percent = [100 * results[n][layer, head, statement, o].item() for n in lengths]
    best = {"layer": layer, "head": head, "statement": statement, "offset": OFFSETS[o]}
    return best | {"percent": percent}


def draw(pos, results, lengths, best):
    layer, head, percent = best["layer"], best["head"], best["percent"]
    known = {0: "on the digit itself", -1: "one token before the digit"}
    where = known.get(best["offset"], f"{best['offset']:+d} tokens from the digit")
    where += f", {('first', 'second')[best['statement']]} statement"
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(7.2, 6.8), layout="constrained")
    most = 100 * results[lengths[0]].amax(dim=(2, 3)).numpy()
    image = top.imshow(most, aspect="auto", cmap="cividis", vmin=0, vmax=100)
    n_layer, n_head = most.shape
    top.set(xlabel="head", ylabel="layer", xticks=range(n_head), yticks=range(n_layer))
    fig.colorbar(image, ax=top, label="most attention on one\nof these tokens (%)")
    title = f"{pos} at {lengths[0]} tokens: layer {layer}, head {head} gives {percent[0]:.0f} %"
    top.set_title(f"{title}\n{where}", fontsize=10)

    bottom.plot(lengths, percent, "o-", color=RED, label=f"layer {layer}, head {head}, {where}")
    key = slice(OFFSETS.index(-1), OFFSETS.index(0) + 1)
    on_key = [100 * results[n][layer, head, :, key].sum().item() for n in lengths]
    label = "the same head, both statements, digit and token before"
    bottom.plot(lengths, on_key, color=BLUE, marker="s", ls="--", label=label)
    even = [100 / n for n in lengths]
    bottom.plot(lengths, even, color=ORANGE, ls=":", label="even attention to all tokens")
    bottom.axvline(lengths[0], color=BLACK, lw=0.8, ls=":")
    bottom.set_xscale("log", base=2)
    bottom.set_xticks(lengths, [f"{n}\n{n // lengths[0]}x" for n in lengths])
    bottom.set_ylim(0, 119)
    title = f"At {lengths[1]} tokens that head has {percent[1]:.0f} % left, "
    title += f"at {lengths[-1]} it has {percent[-1]:.1f} %"
    tidy(bottom, "length (tokens)", "attention (%)", title)
    return fig


def main(argv=None):
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help="a run of train.py with --passkey_frac")
    parser.add_argument("--trials", type=positive_int, default=20)
    args = parser.parse_args(argv)
    model, metadata, _ = load_run(args.checkpoint)
    task = PasskeyTask(load_tokenizer(metadata["tokenizer"], args.checkpoint))
    lengths = [model.config.train_len * factor for factor in (1, 2, 4, 8, 16)]
    results = {length: measure(model, task, length, args.trials) for length in lengths}
    best = best_head(results, lengths)
    fig = draw(model.config.pos, results, lengths, best)
    rounded = {n: result.numpy().round(4).tolist() for n, result in results.items()}
    numbers = {"checkpoint": args.checkpoint, "pos": model.config.pos, "trials": args.trials}
    numbers |= {"lengths": lengths, "offsets": OFFSETS, "best": best}
    numbers |= {"attention_by_length_layer_head_statement_offset": rounded}
    save(fig, numbers, args.out, f"attention_map_{model.config.pos}")


if __name__ == "__main__":
    one_sentence_errors(main)()
