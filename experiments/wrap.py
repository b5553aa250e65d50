r"""
Why does a longer text break RoPE? Change the angle that far keys show, without any training.

A far key is the key of a token that is train_len tokens back or more. No training text was long
enough to have one. In a fast pair, which completes turns in training, a far key has an angle that
training had, too. In a slow pair, whose frequency is under FoPE's floor, it has a new angle. Is
that what hurts? A trained model reads a text once as it is. Then it reads the text again, and now a
far key is turned as if it stood at another distance, in the slow pairs, in the fast pairs or in
both:

    held at D    The distance is D for all far keys.
    wrapped      The distance is H + (d mod H), where d is the true distance and H is train_len/2.
                 At 512 this is a distance from 256 to 511, which training had.

"none" changes nothing. With "near" the model cannot see any far key. The loss of "none" minus that
of "near" is the damage of the far keys. Two results matter: how much of the damage is left, and how
much attention the far keys get. Mostly they rise and fall together. But where far keys get equal
attention, a new angle does more damage than a known one.

Why does one distance do harm and not another one? The slow and the fast curve say it: what the slow
or the fast pairs add to the score of the mean query and the mean key of a head, by distance, as a
mean over all heads.

Is it the angle that does harm, or the score that it makes? From the distances of "wrapped" to those
past train_len the slow curve of a head rises by a number. "none, lowered" subtracts it from the
scores of far keys, whose angles are new; "slow, wrapped, raised" adds it, and there the slow pairs'
angles are known.

The commands for RoPE, and what was said before they ran, stand in results/STUDIES.md (held). The
other models, which are those of figure1, enough and figure1_all there:

    python experiments/wrap.py --name wrap_others \
        runs_out/tiny/text/{rope_theta93.9_s{3,4,5},fope_s{1,2,3},rope_a_s{1,2,3}}

The json goes to results/mechanism, over the one that is there; --out names another folder. Without
a run it draws wrap.png from wrap.json and wrap_curve.json.
"""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from shared import FAST, GREY, SLOW, Parser, plt, save, tidy

from checkpoint import load_checkpoint
from common import (
    Refused,
    add_device_flag,
    init_distributed,
    one_sentence_errors,
    positive_int,
    read_json,
)
from data import TokenData, window_loss
from evaluation import spread_windows
from fope import PositionEmbedding, RoPE, apply_rotation, rope_freqs

WRAPPED = {"slow": ("slow",), "fast": ("fast",), "both": ("slow", "fast")}


class PutBack(PositionEmbedding):
    """
    A trained embedding that turns pairs, but far keys are turned otherwise. far_keys: "none",
    "near", "wrapped" or the distance at which they are held. put_back: the pairs that are turned
    so, "slow", "fast" or both. added: to the scores of far keys, a number or (n_head, 1, 1).
    """

    def __init__(self, pos, far_keys, put_back=(), added=0.0):
        super().__init__(head_dim=pos.head_dim, n_head=pos.n_head, train_len=pos.train_len)
        self.pos, self.far_keys, self.put_back, self.added = pos, far_keys, put_back, added
        self.far_attention = []  # of each text, the mean over heads and queries past train_len
        self.means = []  # of each text, the mean query and key (n_head, 1, head_dim) of training
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
            if pairs in self.put_back and isinstance(self.far_keys, int):
                last = torch.full_like(t, self.far_keys)
                first = torch.zeros_like(t)
                held = self.turned(q, last, dims) @ self.turned(k, first, dims).mT
                part = torch.where(distance >= N, held, part)
            elif pairs in self.put_back:
                for far in range(N, T, half):  # keys that are so far back come far - half nearer
                    i, j = slice(far, T), slice(0, T - far)
                    nearer = turned_q[..., i, :] @ self.turned(k[..., j, :], t[i] - half, dims).mT
                    at = distance[i, j] >= far
                    part[..., i, j] = torch.where(at, nearer, part[..., i, j])
            scores = scores + part
        far = distance >= N
        scores = scores / math.sqrt(self.head_dim) + self.added * far
        return scores.masked_fill(far & (self.far_keys == "near"), -torch.inf)

    def attend(self, q, k, v):
        with torch.autocast(q.device.type, enabled=False):  # a fused kernel's scores are fp32
            scores = self.scores(q.float(), k.float())
            future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
            N = self.train_len
            self.far_attention.append(float(weights[..., N:, :].tril(0).sum(dim=-1).mean()))
            self.means.append([x[:, :, :N].float().mean(dim=(0, 2))[:, None] for x in (q, k)])
            return weights.to(v.dtype) @ v

    def curve(self, pairs, length):
        """
        What the slow or the fast pairs add to the score of the mean query and the mean key of each
        head at each distance below `length`: (n_head, length).
        """
        q, k = (torch.stack(x).mean(dim=0) for x in zip(*self.means, strict=True))
        at, dims = torch.arange(length, device=q.device), self.dims[pairs]
        turned_q = self.turned(q.expand(-1, length, -1), at, dims)
        return (turned_q * self.turned(k, at[:1], dims)).sum(dim=-1) / math.sqrt(self.head_dim)


def measure(run, length, n_windows, held, device):
    """
    Measure one run: its loss under each condition; the damage; the share of it that is removed; the
    share of the last layer's attention that far keys get; its curves, as a mean over layers.
    held: the distances (tokens) at which its slow or fast pairs are held.
    """
    model, _, _ = load_checkpoint(run, device)
    trained = [block.attn.pos for block in model.blocks]
    if not isinstance(trained[0], RoPE):
        raise Refused(f"{run} has no pairs that turn")
    windows = spread_windows(TokenData(model.config.data, "val"), length, n_windows)
    loss, found, nothing = {}, defaultdict(dict), [0.0] * len(trained)

    def read(condition, far_keys, put_back=(), added=nothing):
        for block, pos, of_layer in zip(model.blocks, trained, added, strict=True):
            block.attn.pos = PutBack(pos, far_keys, put_back, of_layer)
        loss[condition] = float(window_loss(model, windows, length).mean())
        far_attention = model.blocks[-1].attn.pos.far_attention
        found["far_attention"][condition] = round(float(np.mean(far_attention)), 4)
        print(f"{run} {condition:14} {loss[condition]:.4f}", flush=True)

    read("none", "none")
    N, curves = trained[0].train_len, {}  # of each layer and head
    for pairs in ("slow", "fast"):
        curves[pairs] = torch.stack([block.attn.pos.curve(pairs, length) for block in model.blocks])
        mean = curves[pairs].mean(dim=(0, 1))
        found["curve"][pairs] = [round(float(score), 3) for score in mean]
    new, known = curves["slow"][..., N:].mean(-1), curves["slow"][..., N // 2 : N].mean(-1)
    rise = (new - known)[..., None, None]  # (n_layer, n_head, 1, 1)
    read("near", "near")
    for name, pairs in WRAPPED.items():
        read(f"{name}, wrapped", "wrapped", pairs)
    for pairs in ("slow", "fast"):
        for distance in held:
            read(f"{pairs}, held at {distance}", distance, (pairs,))
    read("none, lowered", "none", added=-rise)
    read("slow, wrapped, raised", "wrapped", WRAPPED["slow"], added=rise)
    damage = loss["none"] - loss["near"]
    removed = {c: (loss["none"] - loss[c]) / damage for c in loss if "," in c}
    name, _, seed = Path(run).name.rpartition("_s")
    return {
        "name": name,
        "seed": int(seed),
        "loss": loss,
        "damage": damage,
        "removed": removed,
    } | found


def damage_left(run, condition):
    """What is left of a run's damage in percent."""
    return 100 * (1 - run["removed"][condition])


def left_if_held(study):
    """{"slow": .., "fast": ..}: what is left of the damage in percent, arrays (run, distance)."""
    left = {}
    for pairs in ("slow", "fast"):
        conditions = [f"{pairs}, held at {distance}" for distance in study["held"]]
        left[pairs] = np.array([[damage_left(run, c) for c in conditions] for run in study["runs"]])
    return left


def draw(study, tested):
    """
    What is left of the damage by the distance whose angles far tokens get (of `study`, which is
    wrap.json), and the two curves (of `tested`, wrap_curve.json).
    """
    fig, axes = plt.subplots(1, 2, figsize=(10.4, 4), layout="constrained", sharex=True)
    left = left_if_held(study)
    curve = {p: np.mean([run["curve"][p] for run in tested["runs"]], axis=0) for p in left}
    for pairs, color, line, width in (("fast", FAST, "s", 0.6), ("slow", SLOW, "o-", 2)):
        axes[0].plot(study["held"], left[pairs].T, ".", color=color, ms=3, alpha=0.5)
        axes[0].plot(
            study["held"], left[pairs].mean(0), line, color=color, ms=4, label=f"{pairs} pairs"
        )
        axes[1].plot(curve[pairs], color=color, lw=width, label=f"{pairs} pairs")
    for ax in axes:
        ax.axvline(study["train_len"], color="black", lw=0.8, ls=":")
        ax.set_xlim(-40, max(study["held"]) + 40)
    axes[0].axhline(100, color=GREY, lw=0.8)
    axes[0].set_ylim(-10, 290)
    where = "distance whose angles far tokens get; dotted: training length"
    tidy(axes[0], where, "% of the damage that is left", "What is left of the damage")
    where = "distance; dotted: training length"
    tidy(axes[1], where, "part of the score", "The curves: what the pairs add to a score")
    return fig


def main(argv=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="folders NAME_sSEED of text models")
    add("--length", type=positive_int, default=2048, help="tokens of a text")
    add("--windows", type=positive_int, default=8, help="texts")
    add("--name", default="wrap", help="of the json")
    add(
        "--held",
        nargs="+",
        type=int,
        default=[],
        metavar="DISTANCE",
        help="hold the slow or the fast pairs at each of these distances, too",
    )
    add_device_flag(parser)
    args = parser.parse_args(argv)
    if not args.runs:
        studies = (read_json(args.out / f"{name}.json") for name in ("wrap", "wrap_curve"))
        draw(*studies).savefig(args.out / "wrap.png", dpi=160)
        return
    device = init_distributed(args.device)
    runs = [measure(run, args.length, args.windows, args.held, device) for run in args.runs]
    numbers = {key: getattr(args, key) for key in ("length", "windows", "held")}
    numbers["train_len"] = load_checkpoint(args.runs[0])[0].config.train_len
    save(numbers | {"runs": runs}, args.out, args.name, device=device)


if __name__ == "__main__":
    one_sentence_errors(main)()
