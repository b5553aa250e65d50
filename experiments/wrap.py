r"""
Why does a longer text break RoPE? Take the cause away, without training: the loss comes back.

    python experiments/wrap.py runs_out/tiny/text/rope_s{1,2,3,4,5}
    python experiments/wrap.py runs_out/tiny/text/rope_s{1,2,3,4,5} --name held --conditions places
    python experiments/wrap.py runs_out/tiny/text/{rope_cycles1,fope,rope_a}_s{1,2,3} \
        --name others --conditions none near "both, wrapped"

In training no key is train_len tokens back or more. Further back, a pair that completes cycles in
training shows an angle that it has shown before; a slow pair, under FoPE's floor, shows a new one.
So the same weights read the same text, but for some pairs a key that is d >= train_len back is
turned as if it stood where training had keys:

    wrapped    at the distance train_len/2 + (d - train_len/2) mod train_len/2
    held       at the distance train_len - 1; "held 2x": at twice train_len, less 1
    recent     at the distance (d mod train_len/2), as if it were one of the last keys

"none" changes nothing, "near" hides all such keys. The damage is none minus near. Look at: the
share of it that goes when the slow pairs alone, the fast ones alone, or both are put back.

Said beforehand: new angles of slow pairs are not the cause if putting them back removes no more of
the damage than putting back the fast pairs, or if a model without slow pairs (theta 94, FoPE) gains
as much as RoPE does. "recent" came later: it has no new angles either, so it should take most of
the damage away, too. If it does not, slow pairs must score far keys as far. Last came other places
to hold at: if new angles are what hurts, slow pairs held at 1.5, 2 and 3 times train_len take away
less than half of what they do at 0.5 and 0.75, the fast ones about the same at each.
"""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from attention_row import STEP, attention_rows
from shared import BLUE, BROWN, GREEN, GREY, RED, Parser, plt, save, tidy

from checkpoint import load_checkpoint
from common import Refused, add_device_flag, init_distributed, one_sentence_errors, positive_int
from data import TokenData, window_loss
from evaluation import spread_windows
from fope import PositionEmbedding, RoPE, apply_rotation, rope_freqs

PAIRS = {"slow": ("slow",), "fast": ("fast",), "both": ("slow", "fast")}
CONDITIONS = {"none": ("none", ()), "near": ("near", ())}
CONDITIONS |= {f"{p}, {how}": (how, PAIRS[p]) for how in ("wrapped", "held") for p in PAIRS}
USUAL = list(CONDITIONS)
CONDITIONS["slow, recent"] = ("recent", PAIRS["slow"])
HELD = {"held 0.5x": 0.5, "held 0.75x": 0.75, "held": 1}  # at so many train_len, less 1
HELD |= {"held 1.5x": 1.5, "held 2x": 2, "held 3x": 3}
AT_PLACES = {f"{p}, {how}": (how, PAIRS[p]) for p in ("slow", "fast") for how in HELD}
CONDITIONS |= AT_PLACES
PLACES = ["none", "near", *AT_PLACES]


class PutBack(PositionEmbedding):
    """
    A trained embedding that turns pairs, whose keys of train_len tokens back or more are read
    otherwise: `how` is "none", "near" or as above, `put_back` names the pairs that are.
    """

    def __init__(self, pos, how, put_back):
        super().__init__(head_dim=pos.head_dim, n_head=pos.n_head, train_len=pos.train_len)
        self.pos, self.how, self.put_back = pos, how, put_back
        slow = rope_freqs(pos.head_dim, pos.theta) < 2 * math.pi / pos.train_len
        self.dims = {"slow": slow.repeat(2), "fast": ~slow.repeat(2)}

    def turned(self, x, positions, dims):
        """These dimensions of x (.., T, head_dim), each row turned by the angle of its position."""
        cos, sin = (table[..., positions, :] for table in self.pos.tables(int(positions.max()) + 1))
        return apply_rotation(x, cos, sin)[..., dims]

    def scores(self, q, k):
        N, half, T = self.train_len, self.train_len // 2, q.size(-2)
        t = torch.arange(T, device=q.device)
        distance = t[:, None] - t
        scores = 0.0
        for pairs, dims in self.dims.items():
            turned_q = self.turned(q, t, dims)
            part = turned_q @ self.turned(k, t, dims).mT
            if pairs in self.put_back and self.how in HELD:
                last, first = torch.full_like(t, int(HELD[self.how] * N) - 1), torch.zeros_like(t)
                held = self.turned(q, last, dims) @ self.turned(k, first, dims).mT
                part = torch.where(distance >= N, held, part)
            elif pairs in self.put_back:
                least = half if self.how == "wrapped" else 0  # of the distances that are shown
                for far in range(N, T, half):  # keys that are so far back come far - least nearer
                    i, j = slice(far, T), slice(0, T - far)
                    nearer = turned_q[..., i, :] @ self.turned(k[..., j, :], t[i] - least, dims).mT
                    at = distance[i, j] >= far
                    part[..., i, j] = torch.where(at, nearer, part[..., i, j])
            scores = scores + part
        hidden = (distance >= N) & (self.how == "near")
        return (scores / math.sqrt(self.head_dim)).masked_fill(hidden, -torch.inf)

    def attend(self, q, k, v):
        with torch.autocast(q.device.type, enabled=False):  # a fused kernel's scores are fp32
            scores = self.scores(q.float(), k.float())
            future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
            return scores.masked_fill(future, -torch.inf).softmax(dim=-1).to(v.dtype) @ v


def measure(run, length, n_windows, conditions, device):
    """
    One run: its loss under each condition, the damage, the share of it that goes; in steps of STEP
    positions the loss and the last layer's attention by distance (attention_row.py).
    """
    model, _, _ = load_checkpoint(run, device)
    trained = [block.attn.pos for block in model.blocks]
    if not isinstance(trained[0], RoPE):
        raise Refused(f"{run} has no pairs that turn")
    windows = spread_windows(TokenData(model.config.data, "val"), length, n_windows)
    loss, found = {}, defaultdict(dict)
    for condition in conditions:
        how, put_back = CONDITIONS[condition]
        for block, pos in zip(model.blocks, trained, strict=True):
            block.attn.pos = PutBack(pos, how, put_back)
        at = window_loss(model, windows, length).mean(axis=0)
        loss[condition] = float(at.mean())
        found["by_position"][condition] = at.reshape(-1, STEP).mean(axis=1).round(4).tolist()
        rows = attention_rows(model, windows, length)
        found["attention"][condition] = [np.round(row, 3).tolist() for row in rows]
        print(f"{run} {condition:14} {loss[condition]:.4f}", flush=True)
    damage = loss["none"] - loss["near"]
    removed = {c: (loss["none"] - loss[c]) / damage for c in conditions if "," in c}
    name, _, seed = Path(run).name.rpartition("_s")
    return {
        "name": name,
        "seed": int(seed),
        "loss": loss,
        "damage": damage,
        "removed": removed,
    } | found


def draw(rows, train_len):
    """The loss along the text, the mean of these runs; the share of the damage that goes."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4), layout="constrained")
    looks = {"none": (BLUE, "as it is"), "fast, wrapped": (BROWN, "fast pairs put back")}
    looks |= {"slow, wrapped": (RED, "slow pairs put back"), "near": (GREY, "far keys hidden")}
    for condition, (color, label) in looks.items():
        curve = np.mean([row["by_position"][condition] for row in rows], axis=0)
        left.plot(STEP * np.arange(1, len(curve) + 1), curve, color=color, label=label)
    left.axvline(train_len, color="black", lw=0.8, ls=":")
    title = f"The same weights read the same text ({len(rows)} seeds)"
    tidy(left, "position in the text; dotted: training length", "loss in nats per byte", title)
    for how, color, shift in (("wrapped", RED, -0.12), ("held", GREEN, 0.12)):
        shares = [[100 * row["removed"][f"{p}, {how}"] for p in PAIRS] for row in rows]
        x = np.arange(3) + shift
        right.bar(x, np.mean(shares, axis=0), 0.22, color=color, alpha=0.6, label=how)
        right.plot(x, np.transpose(shares), "o", color=color, ms=3.5)
    right.set_xticks(range(3), ["slow pairs", "fast pairs", "both"])
    tidy(right, "what is put back (dots: each seed)", "% of the damage that goes", "")
    return fig


def draw_places(rows, train_len):
    """The share of the damage that goes, by the distance that far keys are held at."""
    fig, ax = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    places = [m * train_len for m in HELD.values()]
    for pairs, color in (("slow", RED), ("fast", BROWN)):
        shares = [[100 * row["removed"][f"{pairs}, {how}"] for how in HELD] for row in rows]
        ax.plot(places, np.mean(shares, axis=0), color=color, label=f"{pairs} pairs")
        ax.plot(places, np.transpose(shares), "o", color=color, ms=3.5)
    ax.axvline(train_len, color="black", lw=0.8, ls=":")
    ax.axhline(0, color=GREY, lw=0.8)
    ax.set_xscale("log")
    ax.set_xticks(places, [f"{place:.0f}" for place in places])
    ax.minorticks_off()
    title = "Held at old angles slow pairs do next to no damage, at new ones nearly all of it"
    where = "distance that far keys are held at; past the dotted line slow pairs show new angles"
    tidy(ax, where, "% of the damage that goes (dots: each seed)", title)
    return fig


def main(argv=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folders NAME_sSEED of text models")
    add("--length", type=positive_int, default=2048, help="tokens of a text")
    add("--windows", type=positive_int, default=8, help="texts")
    add("--name", default="", help="of the files, behind wrap_")
    add_device_flag(parser)
    few = dict(choices=[*CONDITIONS, "places"], default=USUAL, help="none and near among them")
    add("--conditions", nargs="+", **few)
    args = parser.parse_args(argv)
    if args.conditions == ["places"]:
        args.conditions = PLACES
    device = init_distributed(args.device)
    how = args.length, args.windows, args.conditions, device
    rows = [measure(run, *how) for run in args.runs]
    train_len = load_checkpoint(args.runs[0])[0].config.train_len
    numbers = {"length": args.length, "windows": args.windows, "train_len": train_len, "step": STEP}
    first = [row for row in rows if row["name"] == rows[0]["name"]]
    file = "_".join(filter(None, ("wrap", args.name)))
    picture = {tuple(USUAL): draw, tuple(PLACES): draw_places}.get(tuple(args.conditions))
    fig = picture(first, train_len) if picture else None
    save(numbers | {"runs": rows}, args.out, file, fig, device)


if __name__ == "__main__":
    one_sentence_errors(main)()
