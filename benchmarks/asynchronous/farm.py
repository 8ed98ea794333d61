"""Measure a task farm: the time of tasks of unequal length, beside the best that tasks in this order can take."""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report

CASES = {"5 to 500 ms": (0.005, 0.5), "0.05 to 500 ms": (0.00005, 0.5)}  # the logarithms are equally likely


def list_scheduling(seconds: Sequence[float], workers: int) -> float:
    """Return the time of tasks if each begins, in their order, on the worker that is free first.

    Examples
    --------
    >>> list_scheduling([3.0, 1.0, 1.0, 4.0], 2)
    6.0
    """
    free = [0.0] * workers
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    import numpy as np
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    from mpistrat.coordinator import Executor

    comm = MPI.COMM_WORLD.Dup()
    ways: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
        LIBRARY: Executor,
        "MPICommExecutor": MPICommExecutor,
    }
    simulated = "list scheduling, simulated"
    times = {(case, way): list[float]() for case in CASES for way in [*ways, simulated]}
    for repetition, case in itertools.product(range(arguments.repetitions), CASES):
        shortest, longest = np.log(CASES[case])
        rng = np.random.default_rng(repetition)
        seconds = np.exp(rng.uniform(shortest, longest, arguments.tasks)).tolist()
        for way in [*ways][:: 1 if repetition % 2 else -1]:
            comm.Barrier()
            with ways[way](comm) as executor:
                if executor is not None:
                    list(executor.map(time.sleep, [0.0] * 10 * comm.size))
                    start = time.perf_counter()
                    list(executor.map(time.sleep, seconds))
                    times[case, way].append(time.perf_counter() - start)
        times[case, simulated].append(list_scheduling(seconds, comm.size - 1))
    if comm.rank == 0:
        report = Report("farm", comm.size)
        for (case, way), samples in times.items():
            report.add(f"{arguments.tasks} tasks, {case}", way, 0, median(samples))
        report.show(arguments.json)
    return 0


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=3)
    parser.set_defaults(n=8)
    under_ranks.count(parser, "--tasks", 200, "sleeping tasks per measurement")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
