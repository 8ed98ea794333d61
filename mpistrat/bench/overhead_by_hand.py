"""What the library's calls do, in NumPy and mpi4py and nothing else. Each function does it k times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI


def call(function: Callable[[], Any]) -> Callable[[int], None]:
    """Call a function."""

    def times(k: int) -> None:
        for _ in range(k):
            function()

    return times


def all_reduce(comm: Any, array: np.ndarray) -> Callable[[int], None]:
    """Add up one array, into one that is there."""
    total = np.empty_like(array)

    def times(k: int) -> None:
        for _ in range(k):
            comm.Allreduce(array, total)

    return times


def all_reduce_list(comm: Any, arrays: list[np.ndarray]) -> Callable[[int], list[np.ndarray]]:
    """Add up many flat arrays in one message, into new arrays."""
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
    """Add up many flat arrays in one message, into the same memory each time: views made once."""
    flat = np.concatenate(arrays)
    totals = np.split(flat, np.cumsum([array.size for array in arrays])[:-1])

    def times(k: int) -> list[np.ndarray]:
        for _ in range(k):
            np.concatenate(arrays, out=flat)
            comm.Allreduce(MPI.IN_PLACE, flat)
        return totals

    return times


def add_total(comm: Any, value: np.ndarray, delta: np.ndarray) -> Callable[[int], None]:
    """Add the total of all ranks' arrays to one that is kept."""
    total = np.empty_like(delta)

    def times(k: int) -> None:
        for _ in range(k):
            comm.Allreduce(delta, total)
            np.add(value, total, out=value)

    return times
