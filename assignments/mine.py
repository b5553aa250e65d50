"""
An embedding of your own, for `python train.py --pos mine.MyEmbedding`.

Build on an embedding of fope.py or baselines.py. Override rotate where queries and keys change,
scores and attend where the logits do.
"""

import torch

from fope import RoPE


class MyEmbedding(RoPE):
    """What does a token know about where it is? Say it here, with the formula."""

    def rotate(self, q, k):
        half = self.n_head // 2  # the first half of the heads turns, the others see content alone
        turned = zip(super().rotate(q, k), (q, k), strict=True)
        return tuple(torch.cat((t[:, :half], x[:, half:]), dim=1) for t, x in turned)
