"""Measure all-reduce of one float32 array by size, and compare it with other ways to pass the array to MPI."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from array_ways import BOUND, BUFFERS, COPY, PLAIN, SIZES, WIRE, ArrayWay, least_bytes, wrong_sums

from mpistrat.bench import under_ranks
from mpistrat.bench.tune import algorithms, all_reduces, interleaved_for

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, any_fault

if TYPE_CHECKING:
    import numpy as np

_BITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def rate(text: str) -> float:
    """Return the bytes per second of a rate in bits per second, with a unit of ``tc``."""
    found = re.fullmatch(r"(\d+\.?\d*)\s*([kmg]?bit)", text.lower())
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"must be bits per second, such as 1gbit or 940mbit, not {text!r}")
    return float(found[1]) * _BITS[found[2]] / 8


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    from mpi4py import MPI

    import mpistrat
    from mpistrat.runtime.topology import Topology

    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    topology = Topology.of(strategy.comm)
    named = _named(topology, arguments.algorithm)
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


def _named(topology: Any, names: Sequence[str]) -> list[str]:
    """Return the names of algorithms. ``"all"`` stands for all that can reduce float32 here.

    Raise SystemExit if a name is unknown.
    """
    from mpistrat.collectives.algorithms.choose import ALGORITHMS

    if "all" in names:
        return algorithms(topology)
    unknown = [name for name in names if name not in ALGORITHMS]
    if unknown:
        raise SystemExit(f"{unknown[0]!r} is not an all-reduce algorithm: use one of {', '.join(ALGORITHMS)}")
    return list(dict.fromkeys(names))


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


def rivals(comm: Any, count: int) -> dict[tuple[str, str], ArrayWay]:
    """Return ways to sum an array of ``count`` float32 by their case and name in the report."""
    import allreduce_by_hand as by_hand
    import numpy as np

    def way(make: Callable[..., Callable[[int], object]]) -> ArrayWay:
        send, receive = np.zeros(count, np.float32), np.zeros(count, np.float32)
        return ArrayWay((PLAIN, BUFFERS), make(comm, send, receive), send, lambda: receive)

    own = np.zeros(count, np.float32)
    return {
        (PLAIN, "4 MiB pieces"): way(by_hand.in_pieces),
        (PLAIN, "not blocking"): way(by_hand.not_blocking),
        (BUFFERS, "4 MiB pieces, in place"): ArrayWay((BUFFERS,), by_hand.in_place(comm, own), own, lambda: own),
    }


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, 21)
    under_ranks.add_sizes(parser, SIZES)
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
    parser.add_argument("--wire", type=rate, metavar="RATE", help="payload rate of the link of a node, such as 940mbit")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
