"""Measure all-reduce of the float32 gradients of known networks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from networks import NETWORKS

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, any_fault

if TYPE_CHECKING:
    import numpy as np

PLAIN, BUFFERS = "separate arrays", "in place"


class GradientsWay(NamedTuple):
    """A way to reduce: ``times(k)`` reduces ``gradients`` k times, and ``totals()`` returns the sums."""

    gradients: list[np.ndarray]
    times: Callable[[int], object]
    totals: Callable[[], Sequence[np.ndarray]]


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    from mpi4py import MPI

    from mpistrat.bench.tune import interleaved

    comm = MPI.COMM_WORLD.Dup()
    report = Report("gradients", comm.size)
    for network in arguments.network or NETWORKS:
        shapes = NETWORKS[network]()[:: arguments.part]
        ways = _ways(comm, shapes)
        if any_fault(comm, _faults(comm, ways)):
            return 1
        seconds = interleaved(comm, {name: way.times for name, way in ways.items()}, arguments.repetitions)
        nbytes = sum(each.nbytes for each in ways[PLAIN, LIBRARY].gradients)
        for (kind, way), samples in seconds.items():
            report.add(f"{network}, {kind}", way, nbytes, median(samples))
        del ways
    if comm.rank == 0:
        report.show(arguments.json)
    return 0


def _ways(comm: Any, shapes: Sequence[tuple[int, ...]]) -> dict[tuple[str, str], GradientsWay]:
    import numpy as np
    from allreduce_by_hand import in_place
    from gradients_by_hand import Separate, views

    import mpistrat
    from mpistrat.bench.tune import all_reduces

    strategy = mpistrat.MultiWorkerMirroredStrategy()

    def library(gradients: list[np.ndarray]) -> GradientsWay:
        totals: list[list[np.ndarray]] = []
        return GradientsWay(gradients, all_reduces(strategy, gradients, totals), lambda: totals[0])

    def arrays() -> list[np.ndarray]:
        return [np.zeros(shape, np.float32) for shape in shapes]

    source, sources = views(shapes)
    target, targets = views(shapes)
    flat, parts = views(shapes)
    mine = arrays()
    separate = Separate(comm, mine)
    return {
        (PLAIN, LIBRARY): library(arrays()),
        (PLAIN, "one buffer, one call"): GradientsWay(
            sources, partial(_one_call, comm, source, target), lambda: targets
        ),
        (PLAIN, "small ones packed, others in 4 MiB pieces"): GradientsWay(
            mine, separate.times, lambda: separate.totals
        ),
        (BUFFERS, LIBRARY): library(strategy.experimental_buffers_like(arrays())),
        (BUFFERS, "one buffer, 4 MiB pieces"): GradientsWay(parts, in_place(comm, flat), lambda: parts),
    }


def _one_call(comm: Any, flat: np.ndarray, total: np.ndarray, k: int) -> None:
    """Call MPI's own all-reduce k times for the same number of bytes."""
    for _ in range(k):
        comm.Allreduce(flat, total)


def _faults(comm: Any, ways: dict[tuple[str, str], GradientsWay]) -> list[str]:
    """Return the wrong sums of all ways. Set gradients to zero, and so their sums."""
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
    return faults


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=11)
    parser.add_argument(
        "--network", choices=list(NETWORKS), action="append", help="measure only this network; repeatable (all)"
    )
    under_ranks.count(parser, "--part", 1, "measure only every N-th tensor, for a trial")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
