"""
Fine-tune a Llama, with another position embedding or its own, by TRL's SFTTrainer.

    python -m hf.finetune HuggingFaceTB/SmolLM-1.7B --pos fope --data chats.jsonl --out smollm_fope
    torchrun --nproc_per_node=4 -m hf.finetune ...                            on several GPUs

As the paper fine-tunes: AdamW, 3e-4, a cosine with a tenth of warm-up, one epoch, from 2048 to 4096
tokens. --data has a "messages" (chats) or "text" field: a .jsonl, or a data set of the hub, packed
into sequences of --context tokens. The same --seed gives RoPE and FoPE the same data in the same
order. Run again, it continues from its last checkpoint.
"""

import json
from pathlib import Path
from typing import get_args, get_type_hints

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

import common
from common import Refused
from hf.models import AsGPT, first_line, load_model
from hf.swap import EMBEDDINGS, swap_position_embedding
from recipe import Keywords, is_a, name_of

# for models that have no template of their own; SmolLM's is the same
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


FLAGS = dict(output_dir="--out", max_length="--context", learning_rate="--lr", seed="--seed")
FLAGS |= dict(per_device_train_batch_size="--batch_size", num_train_epochs="--epochs")
FLAGS |= dict(gradient_accumulation_steps="--grad_accum")


def parse_args(argv):
    parser = common.ArgumentParser(__doc__)
    add, size, number = parser.add_argument, common.positive_int, common.number
    add("model", metavar="MODEL", help="a Llama: a folder, a name on the hub, a run")
    add("--data", required=True, help="a .jsonl file, or a data set of the hub")
    add("--config", help="of a data set of the hub that has several")
    add("--split", default="train", help="of a data set of the hub")
    add("--out", required=True, help="folder for checkpoints and the model")
    add("--pos", choices=EMBEDDINGS, help="without it the model's own stays")
    words = dict(nargs="*", metavar="K=V", action=Keywords, default={})
    add("--pos_args", **words, help="keywords of --pos")
    add("--rope_scaling", **words, help="such as kind=yarn factor=2")
    add("--context", type=size, default=4096, help="tokens of a sequence")
    add("--batch_size", type=size, default=4, help="sequences a step and process")
    add("--grad_accum", type=size, default=1, help="batches before a step of the optimizer")
    add("--epochs", type=number(float, 0, 1000), default=1.0, help="of the data")
    add("--lr", type=number(float, 0, 1), default=3e-4, help="peak learning rate")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0, help="of noise and data order")
    add("--trainer", **words, help="further fields of TRL's SFTConfig")
    return parser.parse_args(argv)


def check_lines(path):
    """Refuse a .jsonl without lines, and one that has a line without a text or a chat."""
    n, first = 0, ""
    with common.file_errors(), open(path, encoding="utf-8-sig") as f:
        for n, line in enumerate(f, 1):
            try:
                row = json.loads(line)
                field = "messages" if "messages" in row else "text"
                turns = row["messages"] if field == "messages" else []
                texts = [turn[key] for turn in turns for key in ("role", "content")] or [row[field]]
            except (ValueError, KeyError, TypeError, AttributeError):
                texts = []
            good = texts and field == (first := first or field)
            if not good or not all(isinstance(text, str) for text in texts):
                fields = '"text": "..." or "messages": [{"role": "...", "content": "..."}]'
                raise Refused(f"{path}, line {n}: each line needs {fields}, all the same")
    if n == 0:
        raise Refused(f"{path} is empty")


def read_data(name, config, split):
    """A data set with a "messages" or "text" field. Refused if there is none."""
    which = dict(path=name, name=config, split=split)
    if name.endswith((".jsonl", ".json")) or Path(name).is_file():
        check_lines(name)
        which = dict(path="json", data_files=name, split="train")
    data = first_line(f"no data {name}", lambda: load_dataset(**which))
    if not {"messages", "text"} & set(data.column_names):
        raise Refused(f'{name} has no "messages" and no "text", only {data.column_names}')
    return data.select_columns("messages" if "messages" in data.column_names else "text")


def trainer_fields(given):
    """--trainer's fields of SFTConfig. Refused where a flag says it or a number is none."""
    types = get_type_hints(SFTConfig)
    for name, value in given.items():
        if name in FLAGS:
            raise Refused(f"--trainer {name}: {FLAGS[name]} says that")
        if name not in types:
            raise Refused(f"--trainer {name}: SFTConfig has no such field")
        kinds = get_args(types[name]) or (types[name],)
        if {*kinds} <= {bool, int, float, type(None)} and not is_a(value, types[name]):
            raise Refused(f"--trainer {name} must be {name_of(types[name])}, not {value!r}")
    return given


@torch.no_grad()
def mean_loss(model, sequences):
    """Nats per token of sequences (N, context)."""
    model.eval()
    ids = torch.tensor(sequences, device=model.device)[:, None]
    return sum(model(x, labels=x).loss.item() for x in ids) / len(ids)


def main(argv=None):
    args = parse_args(argv)
    if (args.pos_args or args.rope_scaling) and not args.pos:
        raise Refused("--pos_args and --rope_scaling go with --pos")
    model, tokenizer, _ = load_model(args.model)
    if scaling := args.rope_scaling or None:
        scaling = AsGPT(model).config.scaling_of_trained(scaling)
    tokenizer.chat_template = tokenizer.chat_template or CHATML
    recipe = dict(
        output_dir=args.out,
        max_length=args.context,
        packing=True,
        packing_strategy="wrapped",
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.grad_accum,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # of all
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.accelerator.is_available(),  # else torchrun would share nothing there
        seed=args.seed,
        save_total_limit=1,
        report_to="none",
    )
    recipe |= trainer_fields(args.trainer)
    config = first_line("--trainer", lambda: SFTConfig(**recipe))
    started = common.make_folder(args.out) / "finetune.json"
    asked = {k: str(value) for k, value in vars(args).items() if k not in ("out", "trainer")}
    if Path(args.data).is_file():
        asked["data"] = f"{args.data} {common.file_sha256(args.data)}"
    if not started.exists() and any(started.parent.iterdir()):
        raise Refused(f"--out {args.out} holds other files; give an empty or a new folder")
    if started.exists() and (was := common.read_json(started)) != asked:
        differs = ", ".join(f"--{name}" for name in asked if was.get(name) != asked[name])
        raise Refused(f"{args.out} was started with another {differs}; choose another --out")
    data = read_data(args.data, args.config, args.split)
    fed = dict(train_dataset=data, processing_class=tokenizer)
    trainer = first_line("SFTTrainer", lambda: SFTTrainer(model, config, **fed))
    some = [x for x in trainer.train_dataset[:8]["input_ids"] if len(x) == args.context]
    if not some:
        raise Refused(f"{args.data} gives no whole sequence of the {args.context:,} of --context")
    if args.pos:
        before = mean_loss(model, some)
        chosen = dict(rope_scaling=scaling, seed=args.seed)
        if taken := {"train_len", "pos", "model", *chosen} & args.pos_args.keys():
            raise Refused(f"--pos_args {taken.pop()}: that is no keyword of {args.pos}")
        swap_position_embedding(model, args.pos, args.context, **chosen, **args.pos_args)
        after = f"{mean_loss(model, some):.4f} with {args.pos}"
        if trainer.is_world_process_zero():
            print(f"{before:.4f} nats per token with its own embedding, {after}")
    if trainer.is_world_process_zero():
        common.write_json(started, asked)
    # a kill can leave a checkpoint without its last file
    whole = [path.parent for path in started.parent.glob("checkpoint-*/trainer_state.json")]
    steps = {int(path.name.partition("-")[2]): str(path) for path in whole}
    last = max(steps, default=0)
    if 0 < config.max_steps <= last:
        print(f"{args.out} is done already: {last} steps")
        return
    # some of --trainer's fields are read only now
    run = first_line if args.trainer else lambda _, call: call()
    run("--trainer", lambda: trainer.train(resume_from_checkpoint=steps.get(last)))
    trainer.save_model()


if __name__ == "__main__":
    common.one_sentence_errors(main)()
