"""
Fine-tune a Llama, swapped or not, with the paper's settings, by TRL's own command line.

    python -m hf.finetune --model_name_or_path smollm_fope --dataset_name chats --output_dir tuned
    torchrun --nproc_per_node=4 -m hf.finetune ...                                on several GPUs

The flags are those of `trl sft`; what is not given is PAPER's below. --dataset_name is a data set
of the hub or a folder of .jsonl files, with a "messages" (chats) or a "text" field. The same seed
gives RoPE and FoPE the same data in the same order. The same command, typed again, continues from
the last checkpoint.
"""

import sys

import torch
from trl.scripts import sft

import common
import hf.swap  # noqa: F401  from here on the library's Auto classes know swapped models
from common import Refused

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


def last_checkpoint(folder):
    """The last whole checkpoint in a folder, or None. Its trainer_state.json is written last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


def check_folder(folder, flags):
    """Refuse a folder that holds other files, or a run that other flags have started."""
    started = folder / "finetune.json"
    if not started.exists() and any(folder.iterdir()):
        raise Refused(f"--output_dir {folder} holds other files; give an empty or a new folder")
    if started.exists() and common.read_json(started) != flags:
        raise Refused(f"--output_dir {folder} holds a run of other flags, see {started}")
    common.write_json(started, flags)


def main(argv=None):
    flags = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    parser = sft.make_parser(prog="python -m hf.finetune")
    parser.set_defaults_with_config(**PAPER)
    script, training, model, data = parser.parse_args_and_config(flags)
    if not model.model_name_or_path or not (script.dataset_name or data.datasets):
        raise Refused("--model_name_or_path and --dataset_name must be given")
    folder = common.make_folder(training.output_dir)
    if training.process_index == 0:
        check_folder(folder, flags)
    if (folder / "training_args.bin").exists():  # the last file of the last save
        print(f"{folder} is done already")
        return
    if last := last_checkpoint(folder):
        training.resume_from_checkpoint = str(last)
    sft.main(script, training, model, data)


if __name__ == "__main__":
    common.one_sentence_errors(main)()
