"""
Read Llamas, swapped or not, with the benchmarks of the paper's tables and with our own evaluations.

    python -m hf.benchmark smollm_rope smollm_fope --table 1 --out smollm
    python -m hf.benchmark smollm_fope runs_out/rope_60M --tasks hellaswag,piqa --out smollm
    python -m hf.benchmark smollm_rope smollm_fope --text book.txt --passkeys 100 --out smollm
    python -m paper.plot smollm/*_p*.json --out figure

A model is a folder, a name on the hub, or a run of train.py. Tables and tasks are those of
lm-evaluation-harness: 1 is LongBench-E in bins of words, with long prompts cut in the middle, as
its authors cut them; 4 accuracies; 5 losses of the first right answer, in nats; 6 MMLU. --text and
--passkeys are eval_perplexity.py's and eval_passkey.py's, with the model's tokenizer.
"""

import math
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import common
import evaluation
from common import Refused
from data import Passkey
from hf.models import AsGPT, first_line, load_model
from model import GPTConfig
from recipe import parse_lengths

LONGBENCH = [f"longbench_{t}_e" for t in ("gov_report", "multi_news", "trec", "triviaqa", "samsum")]
CHOICES = "arithmetic social_iqa winogrande openbookqa sciq hellaswag piqa commonsense_qa arc_easy"
LOSSES = {"nq_open": "{{answer[0]}}", "triviaqa": "{{answer.value}}"}  # its first right answer
TABLES = {1: LONGBENCH, 4: CHOICES.split(), 5: [*LOSSES], 6: ["mmlu"]}
BINS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, math.inf)}  # words of a document


# --- lm-evaluation-harness


class MiddleCut(HFLM):
    """The harness's model. Prompts that are too long lose their middle, there their beginning."""

    def generate_until(self, requests, **kwargs):
        for request in requests:
            text, settings = request.args
            ids = self.tok_encode(text)
            room = self.max_length - (n := settings.get("max_gen_toks", self.max_gen_toks))
            if room < 2:
                raise Refused(f"--max_length {self.max_length} has no room before {n} new tokens")
            if len(ids) > room:
                halves = ids[: room // 2], ids[len(ids) - room // 2 :]
                request.arguments = ("".join(map(self.tok_decode, halves)), settings)
        return super().generate_until(requests, **kwargs)


def in_bins(samples):
    """LongBench-E's mean score for each bin of document length, and how many documents it has."""
    rows = {}
    for name, (low, high) in BINS.items():
        scores = [s["score"] for s in samples if low <= s["doc"]["length"] < high]
        score = sum(scores) / len(scores) if scores else None
        rows[name] = {"score": score, "documents": len(scores)}
    return rows


def loss_task(task, answer):
    """The harness's task (its yaml as a dict) as the loss of one answer to each question."""
    changes = dict(output_type="loglikelihood", doc_to_target=answer, filter_list=None)
    return task | changes | dict(metric_list=[{"metric": "perplexity"}])


def run_tasks(model, tokenizer, args):
    """{task: its numbers}, and for LongBench-E by bin, too."""
    longest = args.max_length or model.config.max_position_embeddings
    lm = MiddleCut(model, tokenizer=tokenizer, max_length=longest)
    tasks = TABLES[args.table] if args.table else args.tasks.split(",")
    manager = TaskManager(include_path=args.include_path)
    if args.table == 5:
        tasks = [loss_task(manager.task_index[task].cfg, LOSSES[task]) for task in tasks]
    settings = dict(limit=args.limit, task_manager=manager, bootstrap_iters=0)
    out = first_line("tasks", lambda: simple_evaluate(lm, tasks=tasks, **settings))
    rows = {}
    for task, numbers in out["results"].items():
        numbers = {k: v for k, v in numbers.items() if isinstance(v, float | int)}
        row = rows[task] = {k.removesuffix(",none"): v for k, v in numbers.items()}
        if "perplexity" in row:
            row["loss"] = math.log(row["perplexity"])
        samples = out["samples"].get(task, [])
        if samples and "score" in samples[0] and "length" in samples[0]["doc"]:
            row["bins"] = in_bins(samples)
    return rows


# --- our own evaluations


def evaluate_like_ours(model, tokenizer, name, tokenizer_name, args):
    """NAME_perplexity.json and NAME_passkey.json in --out, as our two scripts write them."""
    lengths = parse_lengths(args.lengths, model.config.train_len)

    def encode(text):
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    evaluations = {}
    if args.text:
        with common.file_errors():
            ids = np.array(encode(Path(args.text).read_text(encoding="utf-8")))
        longest = max((n for n in lengths if n < len(ids)), default=1)
        ids = ids[: (len(ids) - 1) // longest * longest + 1]

        def evaluate_text(length):
            if length > longest:
                raise Refused(f"{args.text} has only {len(ids):,} tokens")
            losses = evaluation.window_loss(model, ids, length)
            scored = evaluation.cut(ids, length)[1].flatten()
            n_bytes = len(tokenizer.decode(scored).encode())
            return evaluation.text_row(losses, len(scored), n_bytes)

        evaluations["perplexity"] = evaluate_text
    if args.passkeys:
        ask = partial(evaluation.task_accuracy, model, Passkey(encode), trials=args.passkeys)
        evaluations["passkey"] = ask
    model.config = replace(model.config, lengths=args.lengths)
    for kind, evaluate in evaluations.items():
        measured = evaluation.evaluate_lengths(model, evaluate)
        recipe = {f.name: getattr(model.config, f.name) for f in fields(GPTConfig)}
        recipe["tokenizer"] = tokenizer_name  # how the model was trained is not known here
        about = dict(kind=kind, label=name, recipe=recipe, data=args.text or "", asked=args.asked)
        evaluation.write_result(args.out / f"{name}_{kind}.json", model, about, measured)


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add, size = parser.add_argument, common.positive_int
    add("models", nargs="+", metavar="MODEL", help="folders, names on the hub, runs of train.py")
    add("--out", type=Path, required=True, help="folder for the results")
    add("--table", type=int, choices=TABLES, help="of the paper")
    add("--tasks", help="of the harness, such as hellaswag,piqa")
    add("--include_path", help="folder with further tasks of the harness")
    add("--limit", type=size, help="documents of a task")
    add("--max_length", type=size, help="tokens of a prompt, if not the model's longest")
    add("--text", help="a text file, to read for perplexity")
    add("--passkeys", type=size, help="trials for each length")
    add("--lengths", default="1x,2x,4x,8x,16x", help="of these two, of the training length")
    common.add_device_flag(parser)
    args = parser.parse_args(argv)
    if not (args.table or args.tasks or args.text or args.passkeys):
        raise Refused("nothing to do: give --table, --tasks, --text or --passkeys")
    if len({Path(name).name for name in args.models}) < len(args.models):
        raise Refused("two models have the same name, and so would their results")
    device = common.init_distributed(args.device)
    table = f"table{args.table}" if args.table else "tasks" if args.tasks else ""
    kinds = [table, args.text and "perplexity", args.passkeys and "passkey"]
    common.make_folder(args.out)
    args.asked = {k: str(v) for k, v in vars(args).items() if k not in ("models", "out", "device")}
    for name, kind in product(args.models, filter(None, kinds)):
        path = args.out / f"{Path(name).name}_{kind}.json"
        if path.exists() and common.read_json(path).get("asked") != args.asked:
            raise Refused(f"{path} was asked something else; choose another --out")
    for name in args.models:
        llama, tokenizer, tokenizer_name = load_model(name, device)
        if table:
            rows = run_tasks(llama, tokenizer, args)
            about = {"model": name, "asked": args.asked, "tasks": rows}
            about |= {"swap": getattr(llama.config, "swap", None), "command": common.command()}
            about |= common.provenance(llama.device)
            common.write_json(args.out / f"{Path(name).name}_{table}.json", about)
            for task, row in rows.items():
                print(f"{name} {task}:", ", ".join(f"{k} {v}" for k, v in row.items()))
        if args.text or args.passkeys:
            evaluate_like_ours(
                AsGPT(llama).eval(), tokenizer, Path(name).name, tokenizer_name, args
            )


if __name__ == "__main__":
    common.one_sentence_errors(main)()
