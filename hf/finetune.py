"""
Fine-tune a Llama, with another position embedding or its own, by TRL's SFTTrainer.

    python -m hf.finetune HuggingFaceTB/SmolLM-1.7B --pos fope --data chats.jsonl --out smollm_fope
    torchrun --nproc_per_node=4 -m hf.finetune ...                            on several GPUs

As the paper fine-tunes: AdamW, 3e-4, a cosine with a tenth of warm-up, one epoch, from 2048 to 4096
tokens. --data has a "messages" (chats) or "text" field: a .jsonl, or a data set of the hub, packed
into sequences of --context tokens. The same --seed gives RoPE and FoPE the same data in the same
order. Run again, it continues from its last checkpoint.
"""

from functools import partial

import torch
from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import common
from common import Refused
from hf.models import AsGPT, first_line, load_model
from hf.swap import EMBEDDINGS, swap_position_embedding

# for models that have no template of their own; SmolLM's is the same
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
    add("--seed", type=common.seed_int, default=0, help="of FoPE's noise and the data order")
    add("--trainer", nargs="*", default=[], metavar="K=V", help="further fields of TRL's SFTConfig")
    return parser.parse_args(argv)


def read_data(name, config, split):
    """A data set with a "messages" or "text" field. Refused if there is none."""
    which = dict(path=name, name=config, split=split)
    if name.endswith((".jsonl", ".json")):
        which = dict(path="json", data_files=name, split="train")
    data = first_line(f"no data {name}", lambda: load_dataset(**which))
    if not {"messages", "text"} & set(data.column_names):
        raise Refused(f'{name} has no "messages" and no "text", only {data.column_names}')
    return data


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
        ddp_broadcast_buffers=False,  # FoPE's tables are buffers, and the same everywhere
        report_to="none",
    )
    recipe |= common.parse_keywords("--trainer", args.trainer)
    config = first_line("--trainer", lambda: SFTConfig(**recipe))
    data = read_data(args.data, args.config, args.split)
    trainer = SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer)
    some = [x for x in trainer.train_dataset[:8]["input_ids"] if len(x) == args.context]
    if not some:
        raise Refused(f"{args.data} has fewer tokens than the {args.context:,} of --context")
    if args.pos:
        before = mean_loss(model, some)
        chosen = dict(rope_scaling=scaling, seed=args.seed) | pos_args
        swap = partial(swap_position_embedding, model, args.pos, **chosen)
        first_line(f"--pos {args.pos}", lambda: swap(args.context))
        after = f"{mean_loss(model, some):.4f} with {args.pos}"
        if trainer.is_world_process_zero():
            print(f"{before:.4f} nats per token with its own embedding, {after}")
    last = get_last_checkpoint(args.out)
    now = getattr(model.config, "swap", None)
    if last and common.read_json(f"{last}/config.json").get("swap") != now:
        raise Refused(f"{last} has another embedding: choose another --out")
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()


if __name__ == "__main__":
    common.one_sentence_errors(main)()
