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
import re
from dataclasses import fields
from glob import glob
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


# --- the data

CHAT = 'a list of {"role": a text, "content": a text}'


def check_data(paths, text):
    """
    Refuse .jsonl files of which TRL would only say that something is wrong. Each line needs a text
    in the field `text`, or each a chat in "messages"; all files need the same fields, of one kind.
    """
    field, of_first = None, {}
    for path in paths:
        found = {}  # {(field, type): where it was first}
        with open(path, "rb") as f:
            for n, line in enumerate(f, 1):
                where = f"{path}, line {n}"
                try:
                    if not (line := line.decode("utf-8-sig").strip()):
                        continue
                    row = json.loads(line)
                    json.dumps(row, ensure_ascii=False).encode()  # or it has half a character
                except ValueError as e:
                    raise Refused(f"{where}: this is no JSON in UTF-8 ({e})") from None
                if not isinstance(row, dict) or not {"messages", text} & row.keys():
                    raise Refused(f'{where}: each line needs a "{text}" or "messages"')
                field = field or ("messages" if "messages" in row else text)
                if not (texts := texts_of(row, field)):
                    given = json.dumps(row[field])[:60] if field in row else "not there"
                    needed = CHAT if field == "messages" else "a text"
                    raise Refused(f'{where}: "{field}" is {given}, it needs to be {needed}')
                if any(EOT in one for one in texts):  # TRL would read the end, prepare_data.py text
                    raise Refused(f"{where}: {EOT} would end the text there; take it out")
                for name, value in row.items():
                    found.setdefault((name, type(value)), where)
        if not found:
            raise Refused(f"{path} is empty; take it out")
        of_first = of_first or found
        for (name, kind), where in found.items():
            kinds = {kind for other, kind in of_first if other == name}
            if not kinds or kind not in kinds | {type(None)} | ({int} if float in kinds else set()):
                what = f'"{name}" is not there, or of another kind, in {paths[0]}'
                raise Refused(f"{where}: {what}; give all files the same fields")


def texts_of(row, field):
    """The texts of a line; none where its field is no text or, as "messages", no chat of texts."""
    texts = [row.get(field)]
    if field == "messages":
        try:
            texts = [message[key] for message in row[field] for key in ("role", "content")]
        except (KeyError, TypeError):
            return []
    return texts if all(isinstance(one, str) for one in texts) else []


# --- runs


def last_checkpoint(folder):
    """The last whole checkpoint in a folder, or None. Its trainer_state.json is written last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


# flags that change nothing of the model, or what their names begin with
FREE = "output_dir resume_ run_name project report_to trackio_ disable_tqdm log_ logging_ "
FREE += "save_ hub_ push_to_hub local_rank ddp_timeout dataset_num_proc dataloader_num_workers "
FREE += "dataloader_p"  # pinned, persistent, how many ahead


def files_of(path, pattern="**/*"):
    """The files of a folder that the library reads, no hidden ones; a file is its own."""
    inside = [Path(path)] if Path(path).is_file() else sorted(Path(path).glob(pattern))
    hidden = re.compile(r"/(\..|__)")
    return [p for p in inside if p.is_file() and not hidden.search(f"/{p.relative_to(path)}")]


def all_that_decides(parts, files):
    """{name: value}, as json, of what decides a result: flags, in dataclasses, and files."""
    flags = {field.name: getattr(part, field.name) for part in parts for field in fields(part)}
    free = tuple(FREE.split())
    settings = {name: value for name, value in flags.items() if not name.startswith(free)}
    settings |= {str(path): f"of sha256 {common.file_sha256(path)[:16]}" for path in files}
    return json.loads(json.dumps(settings, default=str))


def check_folder(folder, settings):
    """Refuse one that holds other files, or checkpoints of a run that something else decides."""
    started = folder / "finetune.json"
    if not started.exists() and any(folder.iterdir()):
        raise Refused(f"--output_dir {folder} holds other files; give an empty or a new folder")
    if last_checkpoint(folder) or (folder / "training_args.bin").exists():
        first_settings = common.read_json(started)
        for name in first_settings | settings:  # flags before files
            old, new = (values.get(name, "not there") for values in (first_settings, settings))
            if old != new:
                raise Refused(
                    f"--output_dir {folder} was started with {name} {old}, now it is {new}; "
                    "choose another, or delete it"
                )
    common.write_json(started, settings)


def main(argv=None):
    parser = sft.make_parser(prog="python -m hf.finetune")
    parser.set_defaults_with_config(**PAPER)
    script, training, model, data = parser.parse_args_and_config(argv)
    folder = common.make_folder(training.output_dir)
    paths = [script.dataset_name] if script.dataset_name else []
    for one in data.datasets:
        several = [one.data_files] if isinstance(one.data_files, str) else one.data_files or []
        paths += filter(None, [one.path, one.data_dir, *several])
    if not (model.model_name_or_path and paths):
        raise Refused("--model_name_or_path and --dataset_name must be given")
    if training.process_index == 0:
        paths = [one for path in paths for one in ([path] if Path(path).exists() else glob(path))]
        files = [path for folder in paths for path in files_of(folder)]
        check_data([path for path in files if path.suffix == ".jsonl"], training.dataset_text_field)
        files += files_of(model.model_name_or_path, "*")
        if template := training.chat_template_path:
            if template.endswith((".jinja", ".j2")) and not Path(template).is_file():
                raise Refused(f"there is no --chat_template_path {template}")
            files += files_of(template, "*")
        settings = all_that_decides((script, training, model, data), files)
        check_folder(folder, settings | {"processes": training.world_size})
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
    except ValueError as e:
        if not str(e).startswith("Cannot use chat template"):
            raise
        raise Refused(
            f"the data are chats, and the tokenizer of {model.model_name_or_path} has no template; "
            "--chat_template_path hf/chatml.jinja is one"
        ) from None
    except KeyError as e:
        if e.args != (split := script.dataset_train_split,):
            raise
        raise Refused(
            f"{script.dataset_name} has no split {split}, by the names of its files; "
            "--dataset_train_split names another"
        ) from None
    except (OSError, DatasetsError) as e:  # no such model, no such data
        is_of_data = isinstance(e, DatasetsError) and e.__cause__  # which says more
        reason = " ".join(str(e.__cause__).split()) if is_of_data else str(e).splitlines()[0]
        raise Refused(reason) from None


if __name__ == "__main__":
    common.one_sentence_errors(main)()
