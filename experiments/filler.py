"""
Passkeys in another filler, and with the filler hidden: what makes a model lose a passkey?

    python train.py --preset tiny_passkey --task experiments.filler.PasskeyInText --data data/bpe \
        --pos rope --lr 1e-3 --out runs_out/in_text
    python eval_passkey.py runs_out/in_text                              # in the text of the data
    python eval_passkey.py runs_out/in_text --task passkey_anywhere      # in five sentences
    python experiments/filler.py runs_out/in_text --out runs_out         # in nine ways

The last one asks each trial nine times. In five of them a mask hides the far filler from these
queries:

    none            the mask hides nothing
    all             every query
    the question    the question and the answer
    the passkey     the sentence that has the passkey
    both            these two

They see the last train_len keys, the passkey and the first lines of the prompt. The rest see
everything before them. Each key keeps its position. In three more, such as "every 8th", the last
mask lets every 8th far key through, or every 8th block of 64 keys, in which the sentences stay
whole: is it the number of far keys that harms? In "known distances" nothing is hidden, but all far
keys show distances of training, as in wrap.py where both kinds of pairs are wrapped: is it their
distance? RoPE is asked once more with YaRN, without its temperature: it has no new angles then, so
what a mask changes is due to the filler.
"""

import sys
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from checkpoint import load_checkpoint, with_pos
from common import Refused, one_sentence_errors, positive_int
from tasks import QUESTION, PasskeyAnywhere


class PasskeyInText(PasskeyAnywhere):
    """
    Passkeys that are hidden in the text of the data. Half of the documents have the five sentences
    of passkey_anywhere, so one model can be asked in both fillers.
    """

    def __init__(self, encode, read):
        super().__init__(encode, read)
        self.in_sentences = PasskeyAnywhere(encode)

    def filler(self, n, rng):
        return self.read(n, rng)

    def document(self, length, rng, eot):
        if rng.random() < 0.5:
            return self.in_sentences.document(length, rng, eot)
        return super().document(length, rng, eot)


def visible(length, train_len, always, queries):
    """
    Which key a query attends to, (length, length) bool. The queries that are marked in `queries`
    see the last train_len keys and those marked in `always`, all others every key before them.
    """
    i = torch.arange(length)
    distance = i[:, None] - i
    return (distance >= 0) & ((distance < train_len) | always | ~queries[:, None])


@torch.no_grad()
def answers(model, embeddings, tokens, n_answer):
    """Whether the whole answer is right. The blocks keep these position embeddings."""
    for block, pos in zip(model.blocks, embeddings, strict=True):
        block.attn.pos = pos
    tokens = torch.from_numpy(tokens)[None]
    logits = model(tokens[:, :-1], positions=slice(-n_answer, None))
    return (logits.argmax(dim=-1) == tokens[:, -n_answer:]).all().item()


THINNED = {"every 2nd": (2, 1), "every 8th": (8, 1), "every 8th block": (8, 64)}  # step, block
WAYS = ("from none", "from all", "from the question", "from the passkey", "from both")
WAYS = (*WAYS, *THINNED, "known distances")


def ask(model, task, length, n_trials):
    """For each trial the distance of its passkey, and whether it is found, for each of WAYS."""
    from wrap import PutBack

    trials, trained = [], [block.attn.pos for block in model.blocks]
    at_known_distances = [PutBack(pos, "wrapped", ("slow", "fast")) for pos in trained]
    for number in range(n_trials):
        rng = np.random.default_rng((length, number))
        tokens, n_answer, distance = task.sample(length, rng)
        end, T = length - n_answer - distance, length - 1
        n_passkey = len(task.encode(f"\n{task.needle(rng)[0]}\n"))  # every needle's length
        n_question = len(task.encode(f"\n{QUESTION}")) + n_answer
        i = torch.arange(T)
        passkey, question = (i >= end - n_passkey) & (i < end), i >= T - n_question
        always = passkey | (i < len(task.task))  # and the first lines of the prompt
        # the queries of each mask, as in WAYS: none, all, ...
        asked = (i < 0, i >= 0, question, passkey, question | passkey)
        masks = [visible(T, model.config.train_len, always, queries) for queries in asked]
        for step, block in THINNED.values():
            some = always | (i // block % step == 0)
            masks.append(visible(T, model.config.train_len, some, question | passkey))
        found = []
        for mask in masks:
            for pos in trained:
                pos.attend = partial(F.scaled_dot_product_attention, attn_mask=mask)
            found.append(answers(model, trained, tokens, n_answer))
        found.append(answers(model, at_known_distances, tokens, n_answer))
        trials.append((distance, *found))
    return np.array(trials)


def filler_table(models, columns):
    """Markdown: what the models of a filler.json find on average. columns: {one of WAYS: title}"""
    from rows import NAMES, markdown

    groups = {}
    for model in models:
        name = NAMES[model["recipe"]["pos"]] + " with YaRN" * model["yarn"]
        groups.setdefault(name, []).append(model)
    lines = []
    for name, where in product(groups, ("near", "far")):
        shares = [100 * np.mean([model[where][way] for model in groups[name]]) for way in columns]
        lines.append([f"{name}, {where}", *map("{:.0f}".format, shares), str(len(groups[name]))])
    title = f"whole passkeys at {models[0]['length']}, %"
    return markdown([title, *columns.values(), "models"], lines)


def main():
    # here, since train.py imports this file for its class
    from shared import Parser, save

    from eval_passkey import load_task

    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of train.py")
    parser.add_argument("--task", nargs="+", default=["passkey_anywhere"], help="what is asked")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--trials", type=positive_int, default=60)
    args = parser.parse_args()
    results = []
    for run, name in product(args.runs, args.task):
        model = load_checkpoint(run)[0].eval()
        recipe = model.config
        if recipe.pos not in ("rope", "fope"):
            raise Refused(f"{run} has {recipe.pos}: a mask takes the place of its attention")
        task = load_task(name, recipe, run)
        models = [(False, model)]
        if recipe.pos == "rope":
            scaling = {"kind": "yarn", "factor": args.length / recipe.train_len}
            scaled = with_pos(model, recipe.read_with(rope_scaling=scaling)).eval()
            models.append((True, scaled))
        for yarn, asked in models:
            trials = ask(asked, task, args.length, args.trials)
            near = trials[:, 0] < recipe.train_len
            found = {"run": run.name, "recipe": vars(recipe), "task": name, "yarn": yarn}
            found["length"] = args.length
            print(f"{run.name}{' with YaRN' * yarn}, {name}, far filler:")
            for where, part in (("near", trials[near]), ("far", trials[~near])):
                if len(part):
                    found[where] = dict(zip(WAYS, part[:, 1:].mean(axis=0).tolist(), strict=True))
                    shares = [f"{way} {share:.0%}" for way, share in found[where].items()]
                    print(f"    {len(part)} {where} passkeys: {', '.join(shares)}")
            results.append(found)
    save({"trials": args.trials, "models": results}, args.out, "filler")


if __name__ == "__main__":
    one_sentence_errors(main)()
