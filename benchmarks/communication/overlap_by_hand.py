"""Non-blocking all-reduces that overlap with the computation of the next gradient, with MPI alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI


def all_reduce_each(
    comm: Any, compute: Callable[[int, Callable[[], object]], np.ndarray], totals: Sequence[np.ndarray]
) -> Callable[[int], None]:
    """Return a function that k times computes all gradients, begins each sum at once, and waits for all sums.

    ``compute`` calls its second argument between blocks, so that MPI makes progress.
    """

    def times(k: int) -> None:
        for _ in range(k):
            requests: list[Any] = []
            for i, total in enumerate(totals):
                gradient = compute(i, partial(MPI.Request.Testall, requests))
                requests.append(comm.Iallreduce([gradient, MPI.FLOAT], [total, MPI.FLOAT], MPI.SUM))
            MPI.Request.Waitall(requests)

    return times
