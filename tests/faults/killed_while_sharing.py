"""A rank is killed while the ranks make memory in common: ``python killed_while_sharing.py WHERE RANK NAMED``."""

import os
import signal
import sys

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.process import private_file

where, victim, named = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "named"


def refuse(folder):
    raise OSError("not here")


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


class Killing:
    """The module ``os``, of which one function kills this process."""

    def __getattr__(self, name):
        return kill if name == where else getattr(os, name)


if named:
    private_file.create_without_name = refuse
strategy = None if len(sys.argv) > 4 else mpistrat.MultiWorkerMirroredStrategy()
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == victim:
    private_file.os = Killing()
if strategy is None:
    strategy = mpistrat.MultiWorkerMirroredStrategy()
strategy.experimental_buffers_like([np.zeros(500_000)])
print("no rank was killed", flush=True)
