"""The scripts on a disk that takes its time, so that to be killed during a write is no accident: for test_robust.py."""

import os
import time

import prepare_data
import train

SECONDS = 0.02


def run(main, argv):
    os.fsync = lambda descriptor: time.sleep(SECONDS)
    main(argv)


def run_train(argv):
    run(train.main, argv)


def run_prepare_data(argv):
    run(prepare_data.main, argv)
