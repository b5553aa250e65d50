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
from typing import get_args, get_type_hints

import torch
from datasets import load_dataset
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import common
from common import Refused
from hf.models import AsGPT, first_line, load_model
from hf.swap import EMBEDDINGS, swap_position_embedding
from recipe import is_a, name_of

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
    add, size = parser.add_argument, common.positive_int
    add("model", metavar="MODEL", help="a Llama: a folder, a name on the hub, a run")
    add("--data", required=True, help="a .jsonl file, or a data set of the hub")
    add("--config", help="of a data set of the hub that has several")
    add("--split", default="train", help="of a data set of the hub")
    add("--out", required=True, help="folder for checkpoints and the model")
    add("--pos", choices=EMBEDDINGS, help="without it the model's own stays")
    add("--pos_args", nargs="*", default=[], metavar="K=V", help="keywords of --pos")
    add("--rope_scaling", nargs="*", default=[], metavar="K=V", help="such as kind=yarn factor=2")
    add("--context", type=size, default=4096, help="tokens of a sequence")
    add("--batch_size", type=size, default=4, help="sequences a step and process")
    add("--grad_accum", type=size, default=1, help="batches before a step of the optimizer")
    add("--epochs", type=common.number(float, 0, 1000), default=1.0, help="of the data")
    add("--lr", type=common.number(float, 0, 1), default=3e-4, help="peak learning rate")
    seed = common.number(int, 0, 2**32 - 1)
    add("--seed", type=seed, default=0, help="of FoPE's noise and the data order")
    add("--trainer", nargs="*", default=[], metavar="K=V", help="further fields of TRL's SFTConfig")
    return parser.parse_args(argv)


def check_lines(path):
    """Refuse a .jsonl without lines, and one that has a line without a text or a chat."""
    n = 0
    with common.file_errors(), open(path, encoding="utf-8") as f:
        for n, line in enumerate(f, 1):
            try:
                row = json.loads(line)
                texts = [row["text"]] if "text" in row else []
                for turn in row.get("messages", []):
                    texts += turn["role"], turn["content"]
            except (ValueError, KeyError, TypeError, AttributeError):
                texts = []
            if not texts or not all(isinstance(text, str) for text in texts):
                fields = '"text": "..." and no "messages": [{"role": "...", "content": "..."}]'
                raise Refused(f"{path} has in line {n} no {fields}")
    if n == 0:
        raise Refused(f"{path} is empty")


def read_data(name, config, split):
    """A data set with a "messages" or "text" field. Refused if there is none."""
    which = dict(path=name, name=config, split=split)
    if name.endswith((".jsonl", ".json")):
        check_lines(name)
        which = dict(path="json", data_files=name, split="train")
    data = first_line(f"no data {name}", lambda: load_dataset(**which))
    if not {"messages", "text"} & set(data.column_names):
        raise Refused(f'{name} has no "messages" and no "text", only {data.column_names}')
    return data


def trainer_fields(words):
    """--trainer's fields of SFTConfig. Refused where a flag says it or a number is none."""
    given, types = common.parse_keywords("--trainer", words), get_type_hints(SFTConfig)
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
    pos_args = common.parse_keywords("--pos_args", args.pos_args)
    model, tokenizer, _ = load_model(args.model)
    scaling = common.parse_keywords("--rope_scaling", args.rope_scaling) or None
    if scaling:
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
    first_line("--trainer", lambda: get_reporting_integration_callbacks(config.report_to))
    started = common.make_folder(args.out) / "finetune.json"
    what = "model", "data", "config", "split", "context", "pos", "pos_args", "rope_scaling"
    asked = {name: str(getattr(args, name)) for name in what}
    if not started.exists() and any(started.parent.iterdir()):
        raise Refused(f"--out {args.out} holds other files; give an empty or a new folder")
    if started.exists() and (was := common.read_json(started)) != asked:
        differs = ", ".join(f"--{name}" for name in what if was.get(name) != asked[name])
        raise Refused(f"{args.out} was started with another {differs}; choose another --out")
    data = read_data(args.data, args.config, args.split)
    fed = dict(train_dataset=data, processing_class=tokenizer)
    trainer = first_line("SFTTrainer", lambda: SFTTrainer(model, config, **fed))
    some = [x for x in trainer.train_dataset[:8]["input_ids"] if len(x) == args.context]
    if not some:
        raise Refused(f"{args.data} has fewer tokens than the {args.context:,} of --context")
    if args.pos:
        before = mean_loss(model, some)
        chosen = dict(rope_scaling=scaling, seed=args.seed)
        if taken := {"train_len", "pos", "model", *chosen} & pos_args.keys():
            raise Refused(f"--pos_args {taken.pop()}: that is no keyword of {args.pos}")
        swap_position_embedding(model, args.pos, args.context, **chosen, **pos_args)
        after = f"{mean_loss(model, some):.4f} with {args.pos}"
        if trainer.is_world_process_zero():
            print(f"{before:.4f} nats per token with its own embedding, {after}")
    if trainer.is_world_process_zero():
        common.write_json(started, asked)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out))
    trainer.save_model()


if __name__ == "__main__":
    common.one_sentence_errors(main)()
