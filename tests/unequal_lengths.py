"""
Two processes with torch's own DDP, one of which reads longer texts: what each computes must be what
it computes alone. Run by torchrun, as `unequal_lengths.py gpt` or `llama FOLDER`.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model import GPT, GPTConfig


def read_gpt():
    config = GPTConfig(vocab_size=90, n_layer=2, n_head=2, head_dim=16, n_embd=32, train_len=40)
    return GPT(config), lambda model, ids: model(ids[:, :-1], ids[:, 1:])


def read_llama():
    import hf.swap

    return hf.swap.load(sys.argv[2]), lambda model, ids: model(input_ids=ids, labels=ids).loss


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    alone, loss = read_llama() if sys.argv[1] == "llama" else read_gpt()
    generator = torch.Generator().manual_seed(dist.get_rank())
    lengths = [(30, 70), (90, 20), (20, 50)]  # of the two processes, step by step
    texts = [torch.randint(1, 90, (2, n[dist.get_rank()]), generator=generator) for n in lengths]
    expected = [loss(alone, ids).item() for ids in texts]
    both = DistributedDataParallel(alone)
    for ids, was in zip(texts, expected, strict=True):
        found = loss(both, ids)
        found.backward()
        assert abs(found.item() - was) < 1e-6, (found.item(), was)
    print("the same\n", end="")
    dist.barrier()  # one that ends while the other still talks to it is aborted now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
