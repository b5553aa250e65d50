"""
Is fine-tuning in the transformers library what train.py does? (hf/)

    python experiments/finetune.py runs_out/tiny/text/rope_s0          about 3 minutes

A trained RoPE model goes on as FoPE at twice its length, twice: by train.py --init_from, and
exported, swapped and fine-tuned by hf/finetune.py. Both start from the same weights and
coefficients, take the same number of steps by the same recipe (but that TRL's trainer decays no
norms), and draw their sequences from the same text, each in its own order. Look at: the loss at the
start, which must agree to rounding, and at 1x to 16x at the end.
"""

import json
import tempfile
from pathlib import Path

from shared import BLUE, GREY, RED, Parser, plt, save, tidy

import hf.finetune
import hf.swap
import prepare_data
import train
from checkpoint import load_checkpoint, load_run, with_pos
from common import one_sentence_errors
from data import TokenData, load_tokenizer
from evaluation import spread_windows, window_loss
from hf.export import to_fast_tokenizer, to_llama
from hf.models import AsGPT

BATCH_SIZE, TEXT_TOKENS, N_WINDOWS, PIECE = 2, 2_000_000, 20, 5000


def write_text(folder, encoding, data):
    """The first TEXT_TOKENS of the training split as a .jsonl of pieces, and its data folder."""
    text = encoding.decode(data.read(0, min(len(data), TEXT_TOKENS)).tolist())
    pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    lines = [json.dumps({"text": piece.replace("<|endoftext|>", "\n")}) for piece in pieces]
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    flags = ["--source", folder / "text.jsonl", "--tokenizer", data.folder, f"--out={folder}/data"]
    prepare_data.main([str(flag) for flag in flags])


def by_train(run, folder, steps, length):
    flags = ["--data", folder / "data", "--init_from", run, "--pos", "fope", "--train_len", length]
    flags += ["--batch_size", BATCH_SIZE, "--tokens", steps * BATCH_SIZE * length, "--device=cpu"]
    train.main([str(flag) for flag in [*flags, "--out", folder / "ours"]])
    return load_checkpoint(folder / "ours")[0]


def by_library(start, folder, steps, length, lr):
    """The same recipe in TRL's words: a cosine to a tenth, a twentieth of warm-up."""
    words = ["lr_scheduler_type=cosine_with_min_lr", 'lr_scheduler_kwargs={"min_lr_rate": 0.1}']
    words += ["use_cpu=true", "bf16=false"]
    words += ["warmup_steps=0.05", "adam_beta2=0.95", "weight_decay=0.1", f"max_steps={steps}"]
    flags = [start, "--data", folder / "text.jsonl", "--context", length, "--lr", lr]
    flags += ["--batch_size", BATCH_SIZE, "--out", folder / "theirs", "--trainer", *words]
    hf.finetune.main([str(flag) for flag in flags])
    return hf.swap.load(folder / "theirs")


def main(argv=None):
    parser = Parser(__doc__)
    parser.add_argument("run", metavar="RUN", help="a RoPE model that train.py has trained")
    args = parser.parse_args(argv)
    rope, _, _ = load_run(args.run)
    recipe = rope.config
    length = 2 * recipe.train_len
    steps = recipe.tokens // 10 // (BATCH_SIZE * length)
    encoding = load_tokenizer(recipe.tokenizer, args.run)

    # what is read: the same windows of held-out text for all
    lengths = [recipe.train_len * multiple for multiple in (1, 2, 4, 8, 16)]
    windows = spread_windows(TokenData(recipe.data, "val"), lengths[-1], N_WINDOWS)

    # the same start: FoPE as train.py will draw it, in the GPT and in the Llama
    uncapped = dict(pos="fope", pos_args={"cap": False}, train_len=length, seed=0)
    fope = with_pos(rope, recipe.changed(**uncapped))
    llama = hf.swap.swap_position_embedding(to_llama(rope, encoding), "fope", length)
    for block, layer in zip(fope.blocks, llama.model.layers, strict=True):
        layer.self_attn.pos.embedding.load_state_dict(block.attn.pos.state_dict(), strict=False)

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_text(folder, encoding, TokenData(recipe.data, "train"))
        llama.save_pretrained(folder / "start")
        to_fast_tokenizer(encoding).save_pretrained(folder / "start")
        models = {
            "RoPE": rope,
            "FoPE at the start, GPT": fope,
            "FoPE at the start, Llama": AsGPT(llama),
            "train.py": by_train(args.run, folder, steps, length),
            "hf/finetune.py": AsGPT(by_library(folder / "start", folder, steps, length, recipe.lr)),
        }
    losses = {
        name: [float(window_loss(model, windows, n).mean()) for n in lengths]
        for name, model in models.items()
    }
    for name, row in losses.items():
        print(f"{name:25}", "".join(f"{loss:9.5f}" for loss in row))
    fig, ax = plt.subplots(figsize=(5.2, 3.8), layout="constrained")
    for name, colour in (("RoPE", GREY), ("train.py", BLUE), ("hf/finetune.py", RED)):
        ax.plot(lengths, losses[name], "o-", color=colour, label=name)
    ax.set_xscale("log", base=2)
    ax.axvline(length, color="black", lw=0.8, ls=":")
    title = f"RoPE of {length // 2} tokens, then FoPE at {length}: two trainers"
    tidy(ax, "evaluation length (tokens)", "loss (nats per token)", title)
    numbers = {"lengths": lengths, "steps": steps, "losses": losses}
    save(fig, numbers, args.out, "finetune")


if __name__ == "__main__":
    one_sentence_errors(main)()
