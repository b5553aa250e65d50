"""
The loss of a Llama by its place in a long text, from results of hf.evaluate perplexity.

    python -m hf.places results/smollm2/{as_it_is,window}.json --out places.png
    python -m hf.places ... --to tuned_rope        and, window by window, how far from that result

A row of the table is a file. Each number is a mean over places and over the texts that all of the
files have.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import common
from common import Refused, read_json
from rows import markdown

ENDS = [0, 2048, 4096, 8192, 9216, 10240, 12288, 16384]  # of the columns, in tokens


def read_places(paths):
    """
    {name of the file: the mean loss of each 128th part of each text, (texts, 128)} of the texts
    that all files have, and the length in tokens. Refused where texts or lengths differ.
    """
    losses, about = {}, set()
    for path in paths:
        result = read_json(path)
        read = result.get("read", {})
        if len(read) != 1 or path.stem in losses:
            raise Refused(f"{path} is no result of one length, or its name comes twice")
        ((length, rows),) = read.items()
        losses[path.stem] = np.array([row["by_position"] for row in rows])
        about.add((int(length), result["data_sha256"]))
    if len(about) > 1:
        raise Refused("the results have read different texts, or texts of different lengths")
    n_texts = min(map(len, losses.values()))
    return {name: by_place[:n_texts] for name, by_place in losses.items()}, about.pop()[0]


def places_table(losses, length):
    """Markdown: a row for each file, a column for each part of the text, in nats per token."""
    width = length // 128  # tokens of a part
    columns = [(a, b) for a, b in pairwise(ENDS) if b <= length]
    lines = []
    for name, by_place in losses.items():
        means = (by_place[:, a // width : b // width].mean() for a, b in columns)
        lines.append([spelled(name), *(f"{mean:.2f}" for mean in means)])
    title = f"nats per token, {len(by_place)} texts"
    return markdown([title, *(f"{a} to {b}" for a, b in columns)], lines)


def spelled(name):
    return name.replace("_", " ")


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("results", nargs="+", type=Path, help="json files of hf.evaluate perplexity")
    add("--to", help="name of the file that the others are compared with, place by place")
    add("--known", type=int, default=8192, help="the length in tokens that the model knows")
    add("--out", type=Path, help="picture to draw")
    args = parser.parse_args(argv)
    losses, length = read_places(args.results)
    print(places_table(losses, length))
    if args.to:
        past = slice(args.known * 128 // length, None)
        for name in [name for name in losses if name != args.to]:
            less = (losses[name] - losses[args.to])[:, past].mean(axis=1)
            each = ", ".join(f"{x:+.2f}" for x in less)
            print(f"{name} minus {args.to} past {args.known}, text by text: {each}")
    if args.out:
        fig = Figure(figsize=(7, 4), layout="constrained")
        ax = fig.subplots()
        for name, by_place in losses.items():
            smooth = by_place.mean(axis=0).reshape(32, 4).mean(axis=1)  # four parts are one point
            ax.plot((np.arange(32) + 0.5) * length / 32, smooth, label=spelled(name))
        ax.axvline(args.known, color="grey", linestyle=":")
        ax.set(xlabel="place in the text, tokens", ylabel="nats per token")
        ax.legend(frameon=False)
        fig.savefig(args.out, dpi=160)
        print(f"wrote {args.out}")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
