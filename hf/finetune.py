"""
Fine-tune a Llama, swapped or not, with the paper's settings, by TRL's own command line.

    python -m hf.finetune --model_name_or_path smollm_fope --dataset_name chats --output_dir tuned
    torchrun --nproc_per_node=4 -m hf.finetune ...                                on several GPUs

The flags are those of `trl sft`; what is not given is PAPER's below. --dataset_name is a data set
of the hub or a folder of .jsonl files, with a "messages" (chats) or a "text" field. The same seed
gives RoPE and FoPE the same data in the same order. Run again, it continues from its last
checkpoint.
"""

import json
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch
from datasets.exceptions import DatasetsError
from transformers import AutoTokenizer
from trl.scripts import sft

import common
import hf.swap  # noqa: F401  from here on the library's Auto classes know swapped models
from common import Refused
from data import EOT

PAPER = dict(  # AdamW, from 2048 to 4096 tokens
    max_length=4096,
    packing=True,
    packing_strategy="wrapped",  # whole sequences, without padding
    per_device_train_batch_size=4,
    num_train_epochs=1.0,
    learning_rate=3e-4,
    lr_scheduler_type="cosine",
    warmup_steps=0.1,  # of all
    seed=0,
    bf16=torch.cuda.is_available(),
    use_cpu=not torch.accelerator.is_available(),  # else torchrun would share nothing there
    save_total_limit=1,
    report_to="none",
)


def check_lines(path):
    """Refuse a .jsonl file that has a line without a chat or a text, or with an end of text."""
    with open(path, encoding="utf-8-sig") as f:
        for n, line in enumerate(f, 1):
            if not line.strip():
                continue
            if EOT in line:  # TRL would read it as the end, prepare_data.py as text
                raise Refused(f"{path}, line {n}: {EOT} would end the text there; take it out")
            row = None
            with suppress(ValueError):
                row = json.loads(line)
            if not isinstance(row, dict) or not {"messages", "text"} & row.keys():
                raise Refused(f'{path}, line {n}: each line needs a "text" or "messages"')


def last_checkpoint(folder):
    """The last whole checkpoint in a folder, or None. Its trainer_state.json is written last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


def check_folder(folder, asked):
    """Refuse one that holds other files, or checkpoints of another model or of other data."""
    started = folder / "finetune.json"
    if not started.exists() and any(folder.iterdir()):
        raise Refused(f"--output_dir {folder} holds other files; give an empty or a new folder")
    begun = last_checkpoint(folder) or (folder / "training_args.bin").exists()
    if begun and common.read_json(started) != asked:
        raise Refused(f"--output_dir {folder} was started with another model, setting or data")
    common.write_json(started, asked)


def main(argv=None):
    parser = sft.make_parser(prog="python -m hf.finetune")
    parser.set_defaults_with_config(**PAPER)
    script, training, model, data = parser.parse_args_and_config(argv)
    folder = common.make_folder(training.output_dir)
    if training.process_index == 0:
        asked = {"model_name_or_path": model.model_name_or_path}
        asked |= {name: getattr(training, name) for name in ("max_length", "learning_rate", "seed")}
        for path in Path(script.dataset_name or "").glob("*.jsonl"):
            check_lines(path)
            asked[path.name] = common.file_sha256(path)
        asked |= {"dataset_name": script.dataset_name or [vars(one) for one in data.datasets]}
        check_folder(folder, asked)
    if (folder / "training_args.bin").exists():  # the last file of the last save
        print(f"{folder} is done already")
        return
    if last := last_checkpoint(folder):
        training.resume_from_checkpoint = str(last)
    from_pretrained = AutoTokenizer.from_pretrained

    def read(*args, **kwargs):  # the end of text that TRL puts after each is to be one token
        tokenizer = from_pretrained(*args, **kwargs)
        tokenizer.split_special_tokens = False  # hf.export's would split it, and marks of a chat
        return tokenizer

    try:
        with patch.object(AutoTokenizer, "from_pretrained", read):
            sft.main(script, training, model, data)
    except (OSError, DatasetsError) as e:  # no such model, no such data
        raise Refused(str(e).splitlines()[0]) from None


if __name__ == "__main__":
    common.one_sentence_errors(main)()
