"""
The numbers on docs/index.html, and README's picture, from results/.

    python experiments/page.py
    python experiments/page.py --data data/bytes     measures the losses of the passages first

Both show what the models of models/ lose at each byte of a text that is too long for them, in nats
(results/mechanism/strip.json). The passages are the beginnings of two held-out texts. The picture
has lines of one passage, and below them the loss at each place of texts of 8,192 bytes, means over
many models. Its axis is e to this loss, that of README's table.
"""

import json
import re
import string
import sys

import matplotlib.ticker
import numpy as np
from shared import ROOT, STYLES, plt, save
from wrap import left_if_held

from checkpoint import load_checkpoint, with_pos
from common import ArgumentParser, one_sentence_errors, read_json, write_atomically
from data import TokenData, window_loss
from rows import grouped, values_at

sys.path.append(str(ROOT / "results"))
from tables import ALL, learned, of_kind, rows_of

MECHANISM = ROOT / "results" / "mechanism"
LENGTHS = [512, 1024, 2048, 4096, 8192]  # of the charts
DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
STEP = 0.125  # nats; the page holds a loss as one of 64 digits, a whole number of these
LENGTH, N_PASSAGES = 2048, 2
YARN = "RoPE, YaRN told the length"
READ = {  # name on the page: model, its rope_scaling, label in results/
    "rope": ("text_rope", None, "RoPE"),
    "slow": ("text_rope", "slow", "RoPE, slow pairs told the length"),
    "yarn": ("text_rope", "yarn", YARN),
    "fope": ("text_fope", None, "FoPE"),
}
# name on the page: label in results/
PERPLEXITY = {"rope": "RoPE", "yarn": YARN, "window": "RoPE, window of 512"}
PERPLEXITY |= {"cycle": "RoPE, theta 94", "fope": "FoPE", "floor": "FoPE, floor alone"}
PERPLEXITY |= {"alibi": "ALiBi"}
PASSKEYS = {"rope": "RoPE, newer models", "yarn": f"{YARN}, with temperature"}
PASSKEYS |= {"fope": "FoPE, newer models", "sharp": "FoPE, with temperature"}
PASSKEYS |= {"floor": "FoPE, floor alone", "alibi": "ALiBi"}


def texts():
    """{label: the rows of its models of text}."""
    return grouped(of_kind(rows_of(*ALL), "perplexity"), "label")


# --- the passages


def measure(data):
    """What the models lose at each byte of the first held-out texts that have LENGTH bytes."""
    tokens, eot = data.read(0, len(data)), data.meta["eot"]
    documents = np.split(tokens, np.flatnonzero(tokens == eot) + 1)
    documents = [text[:LENGTH] for text in documents if len(text) > LENGTH][:N_PASSAGES]
    passages = [{"text": bytes(text.tolist()).decode(), "losses": {}} for text in documents]
    for name, (folder, kind, _) in READ.items():
        model, _, _ = load_checkpoint(ROOT / "models" / folder)
        if kind:
            scaling = {"kind": kind, "factor": LENGTH / model.config.train_len}
            model = with_pos(model, model.config.read_with(rope_scaling=scaling))
        for passage, text in zip(passages, documents, strict=True):
            losses = window_loss(model, np.append(eot, text), LENGTH)[0]
            passage["losses"][name] = losses.round(2).tolist()
    return passages


# --- the page


def page_numbers(folder, by_label):
    """What docs/index.html draws: folder/strip.json, wrap.json, and two charts of results/."""
    strip, wrap = read_json(folder / "strip.json"), read_json(folder / "wrap.json")
    N = strip["train_len"]
    page = {"train_len": N, "step": STEP, "digits": DIGITS, "passages": []}
    page["lengths"] = LENGTHS
    for row in strip["passages"]:
        losses = {name: packed(at) for name, at in row["losses"].items()}
        past = {}  # train_len: the mean loss of this passage, and of many models and texts
        for name, (*_, label) in READ.items():
            many = np.mean(values_at(by_label[label], "by_position", LENGTH), axis=0)
            many = many[N * len(many) // LENGTH :]
            here = row["losses"][name][N:]
            past[name] = [round(float(np.mean(part)), 3) for part in (here, many)]
        page["passages"].append({"text": row["text"], "past": past, "losses": losses})
    page["left"] = {"distance": wrap["held"], "models": len(wrap["runs"])}
    for pairs, left in left_if_held(wrap).items():
        page["left"][pairs] = left.mean(axis=0).round().tolist()
    page["perplexity"] = by_length(PERPLEXITY, by_label, "perplexity", 1)
    page["passkeys"] = by_length(PASSKEYS, grouped(learned(), "label"), "accuracy", 100)
    return page


def by_length(curves, by_label, number, factor):
    """{name: [models, mean at each length or None, ...]} of a number of results/ times a factor."""
    rows = {}
    for name, label in curves.items():
        at = [values_at(by_label[label], number, n) for n in LENGTHS]
        means = (round(factor * float(np.mean(v)), 2) if len(v) else None for v in at)
        rows[name] = [len(at[0]), *means]
    return rows


def packed(losses):
    """Losses as one digit each; more than 7.9 nats count as 7.9."""
    steps = np.clip(np.round(np.array(losses) / STEP), 0, len(DIGITS) - 1).astype(int)
    return "".join(DIGITS[step] for step in steps)


def fill_page(path, numbers):
    """Put them into the page's element that holds them."""
    rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in numbers.items())
    element = r'(<script type="application/json" id="measured">\n).*?(\n</script>)'
    text = path.read_text(encoding="utf-8")
    text = re.sub(element, lambda m: f"{m[1]}{{{rows}}}{m[2]}", text, flags=re.S)
    write_atomically(path, lambda f: f.write(text.encode()))


# --- the picture

# label in the results, name at the curve's end, and how far above that end the name stands
CURVES = [
    ("RoPE", "RoPE", 1.0),
    (YARN, "RoPE with YaRN", 0.95),
    ("FoPE", "FoPE", 1.06),
    ("ALiBi", "ALiBi", 0.98),
]
RED, MIDDLE = "#DE281C", dict(va="center", ha="center", size=10, family="DejaVu Sans Mono")
WIDTH = 92
LINES = [  # name in strip.json, first byte, what it is
    ("rope", 360, "RoPE reads the text, from byte 360:"),
    ("rope", 1474, "RoPE, from byte 1,474. Red is what the model does not expect:"),
    ("slow", 1474, "the same model, but its slow pairs turn four times as slowly:"),
    ("fope", 1474, "a model that was trained with FoPE:"),
]


def draw_text(ax, passage, ink):
    """LINES of a passage of strip.json. A tint is the mean of 65 bytes, as on docs/index.html."""
    ax.set(xlim=(0, WIDTH), ylim=(2 * len(LINES), 0))
    ax.axis("off")
    for row, (name, first, title) in enumerate(LINES):
        losses = np.array(passage["losses"][name])
        ax.text(0, 2 * row + 0.55, title, color=ink, va="center", size=10)
        for i, letter in enumerate(passage["text"][first : first + WIDTH].replace("\n", " ")):
            loss = losses[first + i - 32 : first + i + 33].mean()
            alpha = np.clip(0.8 * (loss - 1.2) / 1.2, 0, 0.8)
            ax.add_patch(plt.Rectangle((i, 2 * row + 1), 1, 0.9, color=RED, alpha=alpha, lw=0))
            ax.text(i + 0.5, 2 * row + 1.45, letter, color=ink, **MIDDLE)


def draw(by_label, passage, dark):
    """README's picture, for a light or a dark ground."""
    height = {"height_ratios": [1, 2.1]}
    fig, (top, ax) = plt.subplots(2, 1, figsize=(9.2, 6), layout="constrained", gridspec_kw=height)
    ink = "#E6E6E6" if dark else "#1A1A1A"
    draw_text(top, passage, ink)
    for label, name, shift in CURVES:
        rows = values_at(by_label[label], "by_position", LENGTHS[-1])
        perplexity = np.exp(np.mean(rows, axis=0).reshape(-1, 2).mean(axis=1))  # less jagged
        places = (np.arange(len(perplexity)) + 0.5) * LENGTHS[-1] / len(perplexity)
        colour = STYLES[label][2 if dark else 0]
        ax.plot(places, perplexity, color=colour, lw=2)
        end = perplexity[-4:].mean()
        ax.text(LENGTHS[-1] + 60, end * shift, name, color=colour, va="center", size=12)
    ax.axvspan(0, 512, color=ink, alpha=0.12, lw=0)
    ax.text(560, 24, "trained on 512 bytes", color=ink, va="center", size=12)
    ax.set(xlim=(0, LENGTHS[-1] + 1900), ylim=(3, 32), yscale="log")
    ax.set_xticks([512, 2048, 4096, 6144, 8192])
    ax.yaxis.set_major_locator(matplotlib.ticker.FixedLocator([3, 4, 6, 10, 15, 20, 30]))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    ax.set_xlabel("place in the text, in bytes", color=ink, size=12)
    ax.set_ylabel("perplexity there (log axis, lower is better)", color=ink, size=12)
    ax.tick_params(colors=ink, labelsize=11)
    ax.grid(alpha=0.2, color=ink)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(ink)
    return fig


def main(argv=None):
    parser = ArgumentParser(__doc__)
    parser.add_argument("--data", help="data folder of the texts, which must be bytes")
    args = parser.parse_args(argv)
    if args.data:
        passages = measure(TokenData(args.data, "val"))
        save({"train_len": 512, "passages": passages}, MECHANISM, "strip")
    by_label = texts()
    fill_page(ROOT / "docs" / "index.html", page_numbers(MECHANISM, by_label))
    passage = read_json(MECHANISM / "strip.json")["passages"][0]
    plt.rcParams["svg.hashsalt"] = "the same file each time"
    for dark, name in ((False, "loss.svg"), (True, "loss_dark.svg")):
        fig = draw(by_label, passage, dark)
        fig.savefig(ROOT / "docs" / name, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    one_sentence_errors(main)()
