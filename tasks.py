"""
Tasks that a model is asked, and trained on: the passkey and its kin.

A task of one's own is a class in a file of one's own, which --task names as it is: mine.MultiKey.
The class has what Passkey has, or it is a Passkey with another needle(), trial() or filler().
"""

from importlib import import_module

import numpy as np

from common import Refused

PASSKEY = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "What is the pass key? The pass key is"


class Passkey:
    """
    Find a five-digit number in a long filler and repeat it. The prompt is YaRN's (Peng et al.,
    2023), which is landmark attention's. A task has sample(length, rng), one trial; document(
    length, rng, eot), what is trained on; and shortest.
    """

    shortest = 1.0  # a trial in a document, as a share of its length

    def __init__(self, encode, read=None):
        """
        encode: text -> list of token ids, such as a tiktoken.Encoding's encode_ordinary. read(n,
        rng): n tokens of the data's text, from a random place, for tasks that hide something in it:
        of the training text in training, of the held-out text in evaluation.
        """
        self.encode, self.read = encode, read
        self.task = encode(PASSKEY + "\n")
        self.filler_first, self.filler_next = encode(FILLER), encode(" " + FILLER)

    def needle(self, rng):
        """The sentence that is hidden, and the answer as it goes on from the question."""
        key = int(rng.integers(10000, 100000))
        return f"The pass key is {key}. Remember it. {key} is the pass key.", f" {key}"

    def trial(self, rng):
        """The sentences that are hidden, the first with the answer; the question; the answer."""
        needle, answer = self.needle(rng)
        return [needle], QUESTION, answer

    def filler(self, n, rng=None):
        """n tokens in which a needle is hidden."""
        return (self.filler_first + self.filler_next * (n // len(self.filler_next) + 1))[:n]

    def sample(self, length, rng):
        """
        One trial of exactly `length` tokens: (tokens (length,) int64, the number of answer tokens
        at their end, the distance in tokens from the first needle's end to them). The share of the
        filler before a needle is uniform. Refused where the prompt is longer.
        """
        needles, question, answer = self.trial(rng)
        depths = [float(rng.random()) for _ in needles]
        needles = [self.encode(f"\n{needle}\n") for needle in needles]
        question, answer = self.encode(f"\n{question}"), self.encode(answer)
        if len(answer) > 1 and answer[:1] == self.encode(" "):
            # A token for the blank alone says nothing about the key: it belongs to the question.
            question, answer = question + answer[:1], answer[1:]
        without_filler = len(self.task) + sum(map(len, needles)) + len(question) + len(answer)
        n_filler = length - without_filler
        if n_filler < 0:
            raise Refused(
                f"the prompt has {without_filler} tokens without any filler, too many for {length}"
            )
        tokens, n_before, end_of_first = [*self.task], 0, 0
        for i in np.argsort(depths):
            n = int(depths[i] * (n_filler + 1))
            tokens += [*self.filler(n - n_before, rng), *needles[i]]
            n_before = n
            if i == 0:
                end_of_first = len(tokens)
        tokens += [*self.filler(n_filler - n_before, rng), *question, *answer]
        distance = length - len(answer) - end_of_first
        return np.array(tokens, dtype=np.int64), len(answer), distance

    def document(self, length, rng, eot):
        """What is trained on: a trial and the end of text, (length + 1,) int64."""
        return np.append(self.sample(length, rng)[0], eot)


class PasskeyAnywhere(Passkey):
    """
    The same trials, trained on differently. The question stands anywhere from a quarter of the
    length to its end, and a line of filler follows the answer, as if the text went on. So no model
    can learn at which place to answer, nor at which the text ends.
    """

    shortest = 0.25

    def document(self, length, rng, eot):
        trial = self.sample(int(rng.integers(int(self.shortest * length), length + 1)), rng)[0]
        rest = [*self.encode("\n"), *self.filler(length, rng)]
        return np.append(trial, rest[: length + 1 - len(trial)]).astype(np.int64)


TASKS = {"passkey": Passkey, "passkey_anywhere": PasskeyAnywhere}


def task_class(name):
    """That of a name in TASKS, or of a file of one's own, as mine.MultiKey."""
    module, _, in_module = name.rpartition(".")
    cls, why = TASKS.get(name), ""
    if module:
        try:
            cls = getattr(import_module(module), in_module, None)
        except ModuleNotFoundError as e:
            why = f" ({e})"
    if cls is None:
        raise Refused(f"unknown task {name!r}{why}; known: {', '.join(TASKS)}, or FILE.CLASS")
    return cls
