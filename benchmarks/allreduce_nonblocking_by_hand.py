"""All-reduce of one array by a non-blocking call and a wait.

Some MPI libraries have other algorithms for it than for the blocking call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI


def all_reduce(comm: Any, send: np.ndarray, receive: np.ndarray) -> Callable[[int], None]:
    """Return a function that reduces ``send`` k times."""
    one, other, op = [send, MPI.FLOAT], [receive, MPI.FLOAT], MPI.SUM

    def times(k: int) -> None:
        for _ in range(k):
            comm.Iallreduce(one, other, op).Wait()

    return times
