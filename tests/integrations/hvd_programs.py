"""Programs with Horovod's calls that go wrong on purpose: ``python hvd_programs.py NAME`` under two ranks."""

import os
import signal
import sys

import numpy as np

import mpistrat.integrations.hvd as hvd


def leaves():
    """One rank ends while the other still combines."""
    for step in range(3 if hvd.rank() else 1_000_000):
        hvd.allreduce(np.ones(3), name=f"step {step % 5}")


def killed_in_join():
    """One rank is killed while the other has joined."""
    if hvd.rank():
        hvd.allreduce(np.ones(3), op=hvd.Sum)
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.join()


def ends_without_join():
    """One rank joins, and the other ends."""
    if hvd.rank() == 0:
        hvd.join()


if __name__ == "__main__":
    hvd.init()
    globals()[sys.argv[1]]()
