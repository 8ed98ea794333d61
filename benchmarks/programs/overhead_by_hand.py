"""The calls of the library written with NumPy and mpi4py. Each returned function runs k times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI


def all_reduce_list(comm: Any, arrays: list[np.ndarray]) -> Callable[[int], list[np.ndarray]]:
    """Return a function that sums flat arrays in one message, into new arrays."""
    ends = np.cumsum([array.size for array in arrays]).tolist()
    slices = [slice(end - array.size, end) for end, array in zip(ends, arrays, strict=True)]

    def times(k: int) -> list[np.ndarray]:
        for _ in range(k):
            flat = np.concatenate(arrays)
            comm.Allreduce(MPI.IN_PLACE, flat)
            totals = [flat[where] for where in slices]
        return totals

    return times


def all_reduce_list_in_place(comm: Any, arrays: list[np.ndarray]) -> Callable[[int], list[np.ndarray]]:
    """Return a function that sums flat arrays in one message, into the same memory each time."""
    flat = np.concatenate(arrays)
    totals = np.split(flat, np.cumsum([array.size for array in arrays])[:-1])

    def times(k: int) -> list[np.ndarray]:
        for _ in range(k):
            np.concatenate(arrays, out=flat)
            comm.Allreduce(MPI.IN_PLACE, flat)
        return totals

    return times
