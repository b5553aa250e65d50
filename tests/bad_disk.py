"""
train.py on a disk that takes its time, and on one where the power fails in the middle of a write:
for test_robust.py.
"""

import os
import signal
import time

from train import main

SECONDS = 0.02  # per write, so that a run is not over before it can be killed from outside


def train(argv, last_write):
    """
    main(argv), killed in its write number last_write (from 1), when half of that file is there;
    None: not killed.
    """
    n_writes = 0

    def fsync(descriptor):
        nonlocal n_writes
        n_writes += 1
        time.sleep(SECONDS)
        if n_writes == last_write:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = fsync
    main(argv)
