"""
Two processes with torch's own DDP, one of which reads longer texts: what each computes must be what
it computes alone. Run by torchrun, as `unequal_lengths.py llama FOLDER`.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hf.swap


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    alone = hf.swap.load(sys.argv[2])
    generator = torch.Generator().manual_seed(dist.get_rank())
    lengths = [(30, 70), (90, 20), (20, 50)]  # of the two processes, step by step
    texts = [torch.randint(1, 90, (2, n[dist.get_rank()]), generator=generator) for n in lengths]
    expected = [alone(input_ids=ids, labels=ids).loss.item() for ids in texts]
    both = DistributedDataParallel(alone)
    for ids, was in zip(texts, expected, strict=True):
        found = both(input_ids=ids, labels=ids).loss
        found.backward()
        assert abs(found.item() - was) < 1e-6, (found.item(), was)
    print("the same\n", end="", flush=True)
    # If one process ends while the other is within a barrier, that one hangs now and then.
    done = [Path(sys.argv[2]) / f"done_{rank}" for rank in range(dist.get_world_size())]
    done[dist.get_rank()].touch()
    while not all(path.exists() for path in done):
        time.sleep(0.1)
    os._exit(0)


if __name__ == "__main__":
    main()
