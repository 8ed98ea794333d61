"""Reductions that go on while the next gradient is computed, as MPI alone does them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI


def all_reduce_each(
    comm: Any,
    compute: Callable[[int, Callable[[], object]], np.ndarray],
    totals: Sequence[np.ndarray],
) -> Callable[[int], None]:
    """A function that k times computes all gradients, each one's sum begun when it is there, and waits for all.

    ``compute`` calls what it is given now and then, for MPI to make progress.
    """

    def times(k: int) -> None:
        for _ in range(k):
            requests: list[Any] = []
            for i, total in enumerate(totals):
                gradient = compute(i, partial(MPI.Request.Testall, requests))
                requests.append(comm.Iallreduce([gradient, MPI.FLOAT], [total, MPI.FLOAT], MPI.SUM))
            MPI.Request.Waitall(requests)

    return times
