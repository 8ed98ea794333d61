"""Interleaved timing of several programs that do the same."""

from __future__ import annotations

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
    """Return the seconds of each way, by the slowest rank, once per repetition. Collective.

    Each repetition measures every way and starts with another one, so that a disturbance of the machine affects all of
    them. ``way(k)`` repeats the operation k times. The seconds are those of one operation, of ``inner`` in each
    measurement. The first ``warmup`` repetitions are not counted. Before each measurement ``before`` is called, then
    all ranks meet at a barrier.

    >>> from mpi4py import MPI
    >>> seconds = interleaved(MPI.COMM_SELF, {"sleep": lambda k: time.sleep(0.001 * k)}, repetitions=3)
    >>> len(seconds["sleep"]), min(seconds["sleep"]) >= 0.001
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


def repeated(call: Callable[[], Any]) -> Callable[[int], Any]:
    """Return ``times(k)``, which calls a function k times and returns its last result."""

    def times(k: int) -> Any:
        result = None
        for _ in range(k):
            result = call()
        return result

    return times
