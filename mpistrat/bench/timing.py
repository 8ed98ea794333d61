"""Several ways to do the same, measured in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

Way = TypeVar("Way")


def interleaved(
    comm: Any,
    ways: Mapping[Way, Callable[[int], object]],
    repetitions: int,
    inner: int = 1,
    warmup: int = 2,
    before: Callable[[], object] | None = None,
) -> dict[Way, list[float]]:
    """Seconds that each way takes, those of the slowest rank, once per repetition. Collective.

    Each repetition measures every way, beginning with another one each time, so that what disturbs the
    machine for a while disturbs all of them. The ranks meet before each measurement.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    ways : mapping of str, or another key, to callable
        ``way(k)`` does the thing k times.
    repetitions : int
    inner : int
        How many times a way does its thing in one measurement; the seconds are those of one time.
    warmup : int
        Repetitions beforehand that are not counted.
    before : callable, optional
        Called before each measurement, and not counted.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> seconds = interleaved(MPI.COMM_SELF, {"sleep": lambda k: time.sleep(0.001 * k)}, repetitions=3)
    >>> len(seconds["sleep"]), median(seconds["sleep"]) >= 0.001
    (3, True)
    """
    names = list(ways)
    seconds = np.zeros((len(names), warmup + repetitions))
    for repetition in range(warmup + repetitions):
        for turn in range(len(names)):
            i = (repetition + turn) % len(names)
            way = ways[names[i]]
            if before is not None:
                before()
            comm.Barrier()
            start = time.perf_counter()
            way(inner)
            seconds[i, repetition] = (time.perf_counter() - start) / inner
    slowest = np.empty_like(seconds)
    from mpi4py import MPI

    comm.Allreduce(seconds, slowest, MPI.MAX)
    return {name: slowest[i, warmup:].tolist() for i, name in enumerate(names)}


def median(seconds: list[float]) -> float:
    """The middle one."""
    return statistics.median(seconds)
