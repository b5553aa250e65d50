"""
Passkeys in another filler, and with the filler hidden: what makes a model lose a passkey?

    python train.py --preset tiny_passkey --task experiments.filler.PasskeyInText --data data/bpe \
        --pos rope --lr 1e-3 --out runs_out/in_text
    python eval_passkey.py runs_out/in_text                 in the text of the data
    python eval_passkey.py runs_out/in_text --task passkey_anywhere --trials 100
    python experiments/filler.py runs_out/in_text models/keys_rope     with the far filler hidden

The last one asks RoPE's or FoPE's models each trial twice: as it is, and with a mask. Under the
mask a query attends to the last train_len keys, to the passkey and to the first lines of the
prompt, and to nothing else. Each key keeps its position. So a model that fails as it is and answers
under the mask has failed because of the filler. One that fails under the mask, too, cannot use a
passkey at such a distance. RoPE is asked once more with YaRN, without its temperature.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from checkpoint import load_checkpoint, with_pos
from common import one_sentence_errors
from data import TokenData, load_tokenizer
from tasks import PasskeyAnywhere, task_class


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


def visible(length, train_len, shown):
    """Which key a query attends to, (length, length) bool. shown: the keys that all queries see."""
    i = torch.arange(length)
    distance = i[:, None] - i
    return (distance >= 0) & ((distance < train_len) | shown)


@torch.no_grad()
def answers(model, tokens, n_answer, mask=None):
    """Whether each token of the answer is right, with all keys or with those of a mask."""
    for block in model.blocks:
        pos = block.attn.pos
        pos.__dict__.pop("attend", None)
        if mask is not None:
            pos.attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    tokens = torch.from_numpy(tokens)[None]
    logits = model(tokens[:, :-1], positions=slice(-n_answer, None))
    return (logits.argmax(dim=-1) == tokens[:, -n_answer:]).all().item()


def ask(model, task, length, n_trials, seed):
    """For each trial the distance of its passkey, and whether it is found as is and masked."""
    rows = []
    for i in range(n_trials):
        rng = np.random.default_rng((seed, length, i))
        tokens, n_answer, distance = task.sample(length, rng)
        end = length - n_answer - distance
        shown = torch.zeros(length - 1, dtype=torch.bool)
        shown[: len(task.task)] = True
        shown[end - len(task.encode(f"\n{task.needle(rng)[0]}\n")) : end] = True
        mask = visible(length - 1, model.config.train_len, shown)
        found = [answers(model, tokens, n_answer, how) for how in (None, mask)]
        rows.append((distance, *found))
    return np.array(rows)


def main():
    from shared import Parser, save  # here, since train.py imports this file for its class

    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of train.py")
    parser.add_argument("--task", nargs="+", default=["passkey_anywhere"], help="what is asked")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--trials", type=int, default=100)
    args = parser.parse_args()
    results = []
    for run, name, length, yarn in product(args.runs, args.task, args.lengths, (False, True)):
        model = load_checkpoint(run)[0].eval()
        recipe = model.config
        if yarn:  # keeps the slow pairs at the angles of training, for which FoPE has no need
            if recipe.pos != "rope" or length <= recipe.train_len:
                continue
            scaling = {"kind": "yarn", "factor": length / recipe.train_len}
            model = with_pos(model, recipe.read_with(rope_scaling=scaling)).eval()
        encode = load_tokenizer(recipe.tokenizer, run).encode_ordinary
        task = task_class(name)(encode, TokenData(recipe.data, "val").excerpt)
        rows = ask(model, task, length, args.trials, seed=0)
        near = rows[:, 0] < recipe.train_len
        found = {"run": run.name, "recipe": vars(recipe), "task": name, "length": length}
        found |= {"yarn": yarn}
        for where, part in (("near", rows[near]), ("far", rows[~near])):
            if len(part):
                as_it_is, hidden = part[:, 1:].mean(axis=0).tolist()
                found[where] = {"trials": len(part), "as_it_is": as_it_is, "hidden": hidden}
                how = f"{name}, {length}{', yarn' * yarn}, {where}"
                print(f"{run.name}, {how}: {as_it_is:.2f} -> {hidden:.2f}")
        results.append(found)
    save({"models": results}, args.out, "filler")


if __name__ == "__main__":
    one_sentence_errors(main)()
