"""
Tasks that a model is asked, and trained on: the passkey and its kin. To add one, write a class with
what Passkey has, or only another needle, and a line in TASKS.
"""

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
    2023), which is landmark attention's. A task is a class that takes encode and has sample(length,
    rng), one trial; document(length, rng, eot), what is trained on; and shortest. Another needle in
    the same filler needs only its own needle(rng).
    """

    shortest = 1.0  # a trial in a document, as a share of its length

    def __init__(self, encode):
        """encode: text -> list of token ids, such as a tiktoken.Encoding's encode_ordinary."""
        self.encode = encode
        self.task = encode(PASSKEY + "\n")
        self.question = encode("\n" + QUESTION)
        self.filler_first, self.filler_next = encode(FILLER), encode(" " + FILLER)

    def needle(self, rng):
        """The sentence that is hidden, and the answer as it goes on from the question."""
        key = int(rng.integers(10000, 100000))
        return f"The pass key is {key}. Remember it. {key} is the pass key.", f" {key}"

    def filler(self, n):
        return (self.filler_first + self.filler_next * (n // len(self.filler_next) + 1))[:n]

    def sample(self, length, rng):
        """
        One trial of exactly `length` tokens: (tokens (length,) int64, the number of answer tokens
        at their end, the distance in tokens from the needle's end to them). The share of the filler
        before the needle is uniform. Refused where the prompt is longer.
        """
        needle, answer = self.needle(rng)
        depth = float(rng.random())
        needle, question, answer = self.encode(f"\n{needle}\n"), self.question, self.encode(answer)
        if len(answer) > 1 and answer[:1] == self.encode(" "):
            # A token for the blank alone says nothing about the key: it belongs to the question.
            question, answer = question + answer[:1], answer[1:]
        without_filler = len(self.task) + len(needle) + len(question) + len(answer)
        n_filler = length - without_filler
        if n_filler < 0:
            raise Refused(
                f"the prompt has {without_filler} tokens without any filler, too many for {length}"
            )
        n_before = int(depth * (n_filler + 1))
        before, after = self.filler(n_before), self.filler(n_filler - n_before)
        tokens = self.task + before + needle + after + question + answer
        distance = len(after) + len(question)
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
        rest = self.encode("\n") + self.filler(length)
        return np.append(trial, rest[: length + 1 - len(trial)]).astype(np.int64)


TASKS = {"passkey": Passkey, "passkey_anywhere": PasskeyAnywhere}
