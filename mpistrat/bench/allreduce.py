"""Measure all-reduce of one float32 array by size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from mpistrat.bench.measuring import sizes, under_ranks
from mpistrat.bench.measuring.report import LIBRARY, Report, any_fault
from mpistrat.bench.reduction import (
    BOUND,
    BUFFERS,
    COPY,
    PLAIN,
    WIRE,
    ArrayWay,
    all_reduces,
    least_bytes,
    wrong_sums,
)

if TYPE_CHECKING:
    import numpy as np

PROGRAM = ("-m", "mpistrat.bench.allreduce")
SIZES = "4KiB,64KiB,256KiB,1MiB,4MiB,16MiB"
_MEASUREMENT_SECONDS = 0.005
_FEWEST = 3  # minimum of repetitions

Key = TypeVar("Key")
Rivals: TypeAlias = "Callable[[Any, int], Mapping[tuple[str, str], ArrayWay]]"


def main(argv: list[str], program: Sequence[str] = PROGRAM, rivals: Rivals = lambda comm, count: {}) -> int | None:
    """Run the subject with these arguments. Measure the programs of ``rivals`` too."""
    parser = under_ranks.parser(__doc__, 21, "mpistrat bench allreduce")
    parser.add_argument("--sizes", type=sizes.sizes, default=sizes.sizes(SIZES), help=f"sizes of the array ({SIZES})")
    parser.add_argument(
        "--algorithm",
        action="append",
        default=[],
        metavar="NAME",
        help="also measure this algorithm; repeatable; 'all' is every algorithm that works here",
    )
    parser.add_argument(
        "--seconds", type=float, default=10, help="time limit for the repetitions of one size (%(default)g)"
    )
    parser.add_argument(
        "--wire", type=sizes.rate, metavar="RATE", help="payload rate of the link of a node, such as 940mbit"
    )
    return under_ranks.run(parser, argv, program, partial(_measure, rivals=rivals))


def _measure(arguments: argparse.Namespace, rivals: Rivals) -> int:
    from mpi4py import MPI

    import mpistrat
    from mpistrat.runtime.topology import Topology

    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    topology = Topology.of(strategy.comm)
    named = algorithms(topology, arguments.algorithm)
    report = Report("allreduce", comm.size)
    for nbytes in arguments.sizes:
        count = max(1, nbytes // 4)
        ways = {**_ways(comm, strategy, count, named), **rivals(comm, count)}
        if any_fault(comm, wrong_sums(comm, ways)):
            return 1
        timed = {way: each.times for way, each in ways.items()}
        seconds = interleaved_for(comm, timed, arguments.repetitions, arguments.seconds)
        for way, each in ways.items():
            for case in each.cases:
                report.add(case, way[1], 4 * count, median(seconds[way]))
        if arguments.wire:
            report.add(BOUND, WIRE, 4 * count, least_bytes(topology.ranks_per_node, 4 * count) / arguments.wire)
    if comm.rank == 0:
        report.show(arguments.json)
    return 0


def _ways(comm: Any, strategy: Any, count: int, named: Sequence[str]) -> dict[tuple[str, str], ArrayWay]:
    import numpy as np

    def array() -> np.ndarray:
        return np.zeros(count, np.float32)

    ways: dict[tuple[str, str], ArrayWay] = {}

    def library(case: str, send: np.ndarray, name: str | None = None) -> None:
        totals: list[np.ndarray] = []
        times = all_reduces(strategy, send, totals, name)
        way = LIBRARY if name is None else f"{LIBRARY}, {name}"
        ways[case, way] = ArrayWay([case], times, send, lambda: totals[0])

    buffer = strategy.experimental_buffers_like(array())
    library(PLAIN, array())
    library(BUFFERS, buffer)
    for name in named:
        library(PLAIN, array(), name)
        if name in _IN_PLACE:
            library(BUFFERS, buffer, name)
    send, receive = array(), array()
    one_call = partial(_one_call, comm, send, receive)
    ways[PLAIN, "one call"] = ArrayWay((PLAIN, BUFFERS), one_call, send, lambda: receive)
    source, target = array(), array()
    ways[BOUND, COPY] = ArrayWay([BOUND], partial(_copy, target, source), source, lambda: target)
    return ways


_IN_PLACE = ("hierarchical",)  # algorithms that reduce a buffer without a copy


def _one_call(comm: Any, send: np.ndarray, receive: np.ndarray, k: int) -> None:
    """Call MPI's own all-reduce k times."""
    from mpi4py import MPI

    one, other, op = [send, MPI.FLOAT], [receive, MPI.FLOAT], MPI.SUM
    for _ in range(k):
        comm.Allreduce(one, other, op)


def _copy(target: np.ndarray, source: np.ndarray, k: int) -> None:
    for _ in range(k):
        target[...] = source


def interleaved_for(
    comm: Any, ways: Mapping[Key, Callable[[int], object]], repetitions: int, seconds: float
) -> dict[Key, list[float]]:
    """Return the seconds of each way as `timing.interleaved` does, within about ``seconds`` in all.

    Fast operations are repeated in each measurement, so that it lasts a few milliseconds.
    """
    from mpistrat.bench.measuring.timing import interleaved

    once = [samples[0] for samples in interleaved(comm, ways, 1, warmup=1).values()]
    inner = max(1, min(1000, int(_MEASUREMENT_SECONDS / max(once))))
    affordable = int(seconds / (sum(once) * inner)) - 1
    return interleaved(comm, ways, min(repetitions, max(_FEWEST, affordable)), inner, warmup=1)


def algorithms(topology: Any, names: Sequence[str]) -> list[str]:
    """Return the names of algorithms. ``"all"`` stands for all that can reduce float32 here.

    Raise SystemExit if a name is unknown.
    """
    from mpistrat.collectives.algorithms.choose import ALGORITHMS

    if "all" in names:
        able = [name for name, each in ALGORITHMS.items() if name != "identity" and each.fits(topology)]
        return able if topology.size > 1 else []
    unknown = [name for name in names if name not in ALGORITHMS]
    if unknown:
        raise SystemExit(f"{unknown[0]!r} is not an all-reduce algorithm: use one of {', '.join(ALGORITHMS)}")
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
