"""Measure calls of an empty function on other ranks: how many a second, and how long one takes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report

WARMUP = 100  # calls
SAMPLES = 200  # single calls, of which the median is taken
COORDINATOR = "ClusterCoordinator"


def _empty() -> None:
    pass


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    from mpistrat.coordinator import Executor

    comm = MPI.COMM_WORLD.Dup()
    ways: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
        LIBRARY: Executor,
        "MPICommExecutor": MPICommExecutor,
    }
    many: dict[str, list[float]] = {way: [] for way in ways}
    one: dict[str, list[float]] = {way: [] for way in ways}
    one["Send and Recv"] = []
    for repetition in range(arguments.repetitions):
        for way in [*ways][:: 1 if repetition % 2 else -1]:
            comm.Barrier()
            with ways[way](comm) as executor:
                if executor is not None:
                    _calls(executor, WARMUP)
                    many[way].append(_calls(executor, arguments.calls) / arguments.calls)
                    one[way].append(median([_calls(executor, 1) for _ in range(SAMPLES)]))
        comm.Barrier()
        one["Send and Recv"].append(median([_round_trip(comm) for _ in range(SAMPLES)]))
    if comm.size > 2:  # a parameter server is needed, though the function does not use it
        coordinator = _coordinator(comm.size)
        if coordinator is None:
            return 0
        _scheduled(coordinator, WARMUP)
        repeat = range(arguments.repetitions)
        many[COORDINATOR] = [_scheduled(coordinator, arguments.calls) / arguments.calls for _ in repeat]
        one[COORDINATOR] = [median([_fetched(coordinator) for _ in range(SAMPLES)]) for _ in repeat]
    if comm.rank == 0:
        report = Report("closures", comm.size)
        for case, seconds in (("many calls, each", many), ("one call and its result", one)):
            report.add_medians(case, 0, seconds)
        report.show(arguments.json)
    return 0


def _calls(executor: Any, number: int) -> float:
    """Return the seconds of some calls."""
    start = time.perf_counter()
    for future in [executor.submit(_empty) for _ in range(number)]:
        future.result()
    return time.perf_counter() - start


def _coordinator(size: int) -> Any:
    """Return a coordinator on rank 0. Other ranks serve it, and return None at the end of its program."""
    import mpistrat

    resolver = mpistrat.cluster_resolver.MpiClusterResolver(jobs={"chief": 1, "worker": size - 2, "ps": 1})
    if resolver.task_type != "chief":
        mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return None
    return mpistrat.coordinator.ClusterCoordinator(mpistrat.ParameterServerStrategy(resolver))


def _scheduled(coordinator: Any, number: int) -> float:
    """Return the seconds of some calls by a coordinator."""
    start = time.perf_counter()
    for _ in range(number):
        coordinator.schedule(_empty)
    coordinator.join()
    return time.perf_counter() - start


def _fetched(coordinator: Any) -> float:
    """Return the seconds of a call by a coordinator and of its result."""
    start = time.perf_counter()
    coordinator.schedule(_empty).fetch()
    return time.perf_counter() - start


def _round_trip(comm: Any) -> float:
    """Return the seconds of an empty message from rank 0 to rank 1 and back."""
    start = time.perf_counter()
    if comm.rank == 0:
        comm.Send(b"", 1)
        comm.Recv(bytearray(), 1)
    elif comm.rank == 1:
        comm.Recv(bytearray(), 0)
        comm.Send(b"", 0)
    return time.perf_counter() - start


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=10)
    under_ranks.count(parser, "--calls", 5000, "calls per measurement")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
