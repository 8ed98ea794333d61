"""All-reduce of the gradients of known networks, float32."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat.bench import launch
from mpistrat.bench.gradients_shapes import NETWORKS
from mpistrat.bench.report import LIBRARY, Report

if TYPE_CHECKING:
    import numpy as np


def main(argv: list[str]) -> int | None:
    """Run the subject with these arguments."""
    parser = launch.parser("gradients", __doc__ or "", repetitions=11)
    parser.add_argument(
        "--network",
        choices=list(NETWORKS),
        action="append",
        help="measure this one, may be repeated (all)",
    )
    parser.add_argument(
        "--part", type=launch.positive, default=1, help="only every such tensor, for a trial (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    status = launch.launched("gradients", arguments, argv)
    return _measure(arguments) if status is None else status


def _measure(arguments: argparse.Namespace) -> int:
    from mpi4py import MPI

    from mpistrat.bench.timing import interleaved, median

    comm = MPI.COMM_WORLD.Dup()
    report = Report("gradients", comm.size)
    for network in arguments.network or NETWORKS:
        shapes = NETWORKS[network]()[:: arguments.part]
        ways = _ways(comm, shapes)
        fault = _fault(comm, ways)
        if fault:
            if comm.rank == 0:
                print(fault, file=sys.stderr)
            return 1
        seconds = interleaved(comm, {name: way.times for name, way in ways.items()}, arguments.repetitions)
        nbytes = sum(each.nbytes for each in ways[_PLAIN, LIBRARY].gradients)
        for (kind, way), samples in seconds.items():
            report.add(f"{network}, {kind}", way, nbytes, median(samples))
        del ways
    if comm.rank == 0:
        print(report.table())
        if arguments.json:
            report.write_json(arguments.json)
    return 0


_PLAIN, _BUFFERS = "separate arrays", "in place"


class _Way(NamedTuple):
    gradients: list[np.ndarray]
    times: Callable[[int], object]
    totals: Callable[[], Sequence[np.ndarray]]


def _ways(comm: Any, shapes: Sequence[tuple[int, ...]]) -> dict[tuple[str, str], _Way]:
    import numpy as np

    import mpistrat
    from mpistrat.bench import gradients_one_buffer_by_hand as one_buffer
    from mpistrat.bench.gradients_separate_by_hand import Separate

    strategy = mpistrat.MultiWorkerMirroredStrategy()

    def library(gradients: list[np.ndarray]) -> _Way:
        totals: list[np.ndarray] = []

        def times(k: int) -> None:
            strategy.run(_all_reduce, (gradients, totals, k))

        return _Way(gradients, times, lambda: totals)

    def arrays() -> list[np.ndarray]:
        return [np.zeros(shape, np.float32) for shape in shapes]

    mine = arrays()
    separate = Separate(comm, mine)
    flat, parts = one_buffer.views(shapes)
    source, sources = one_buffer.views(shapes)
    target, targets = one_buffer.views(shapes)
    return {
        (_PLAIN, LIBRARY): library(arrays()),
        (_PLAIN, "small ones packed, others in 4 MiB pieces"): _Way(
            mine, separate.times, lambda: separate.totals
        ),
        (_PLAIN, "one buffer, one call"): _Way(
            sources, one_buffer.in_one_call(comm, source, target), lambda: targets
        ),
        (_BUFFERS, LIBRARY): library(strategy.experimental_buffers_like(arrays())),
        (_BUFFERS, "one buffer, 4 MiB pieces"): _Way(parts, one_buffer.in_pieces(comm, flat), lambda: parts),
    }


def _all_reduce(gradients: list[np.ndarray], totals: list[np.ndarray], k: int) -> None:
    import mpistrat

    replica = mpistrat.get_replica_context()
    assert replica is not None
    for _ in range(k):
        totals[:] = replica.all_reduce("SUM", gradients)


def _fault(comm: Any, ways: dict[tuple[str, str], _Way]) -> str | None:
    """What is wrong with the sums of some way, None if nothing. Leaves gradients zero, as sums then are."""
    import numpy as np

    faults = []
    for (kind, name), way in ways.items():
        for i, gradient in enumerate(way.gradients):
            gradient[...] = (comm.rank + 1) * (i + 1)
        way.times(1)
        for i, total in enumerate(way.totals()):
            expected = comm.size * (comm.size + 1) // 2 * (i + 1)
            if not (total == expected).all():
                faults.append(f"{kind}, {name}: the total of tensor {i} is not {expected}")
                break
        for gradient in way.gradients:
            gradient[...] = np.float32(0)
    told = comm.allgather(faults)
    return "\n".join(f"rank {rank}: {fault}" for rank, all_ in enumerate(told) for fault in all_) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
