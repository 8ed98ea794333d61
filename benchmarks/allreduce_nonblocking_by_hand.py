"""The sum of one array over all ranks: one call that does not block, and waiting for it.

Some MPI libraries have other algorithms for this than for the call that blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI


def all_reduce(comm: Any, send: np.ndarray, receive: np.ndarray) -> Callable[[int], None]:
    """A function that does it k times."""
    one, other, op = [send, MPI.FLOAT], [receive, MPI.FLOAT], MPI.SUM

    def times(k: int) -> None:
        for _ in range(k):
            comm.Iallreduce(one, other, op).Wait()

    return times
