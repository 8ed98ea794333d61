"""Measure how much of an all-reduce of gradients overlaps with the computation of the next gradients.

From the last layer to the first, a gradient is computed and its reduction begun. The times of computing alone and of
reducing alone show how much could overlap. Most MPI libraries make progress only inside MPI calls, so a layer is
computed in blocks with an MPI call after each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, any_fault

if TYPE_CHECKING:
    import numpy as np

COMPUTING, REDUCING = "computing alone", "reducing alone"
ONE_LIST, BY_HAND = f"{LIBRARY}, one list at the end", "by hand"


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    from mpi4py import MPI

    from mpistrat.bench.tune import interleaved

    comm = MPI.COMM_WORLD.Dup()
    network = Network(comm.rank, arguments.layers, arguments.width, arguments.rows, arguments.blocks)
    ways, totals = _ways(comm, network)
    if any_fault(comm, _faults(comm, network, ways, totals)):
        return 1
    seconds = interleaved(comm, ways, arguments.repetitions)
    if comm.rank == 0:
        report = Report("overlap", comm.size)
        nbytes = sum(each.nbytes for each in network.gradients)
        report.add_medians(f"{arguments.layers} layers", nbytes, seconds)
        medians = {row.way: row.seconds for row in report.rows}
        ours = [way for way in totals if way != ONE_LIST]
        lines = [f"{way} hides {hidden(medians, way):.0%} of the time of reducing alone" for way in ours]
        report.show(arguments.json, *lines)
    return 0


def hidden(seconds: Mapping[str, float], way: str) -> float:
    """Return the part of the time of reducing alone that a way hides behind computation.

    Examples
    --------
    >>> hidden({COMPUTING: 2.0, REDUCING: 1.0, LIBRARY: 2.25}, LIBRARY)
    0.75
    """
    return 1 - (seconds[way] - seconds[COMPUTING]) / seconds[REDUCING]


class Network:
    """A network of square layers without activations. Each gradient takes two matrix products."""

    def __init__(self, rank: int, layers: int, width: int, rows: int, blocks: int):
        import numpy as np

        rng = np.random.default_rng(rank)
        self._inputs = [rng.standard_normal((rows, width), np.float32) for _ in range(layers)]
        scale = np.float32(width**-0.5)  # keeps the values of all gradients in the same range
        self._weights = [scale * rng.standard_normal((width, width), np.float32) for _ in range(layers)]
        self._deltas = [rng.standard_normal((rows, width), np.float32) for _ in range(layers + 1)]
        self.gradients = [np.zeros((width, width), np.float32) for _ in range(layers)]
        self._blocks = [slice(width * i // blocks, width * (i + 1) // blocks) for i in range(blocks)]

    def compute(self, i: int, between: Callable[[], object] = lambda: None) -> np.ndarray:
        """Compute gradient ``i`` of the backward pass. Call ``between`` after each block."""
        import numpy as np

        for block in self._blocks:
            np.matmul(self._inputs[i].T[block], self._deltas[i], out=self.gradients[i][block])
            self._deltas[i + 1][:, block] = self._deltas[i] @ self._weights[i][block].T
            between()
        return self.gradients[i]


def _ways(comm: Any, network: Network) -> tuple[dict[str, Callable[[int], object]], dict[str, Sequence[np.ndarray]]]:
    """Return the ways to measure, and the lists that get the totals of those that reduce."""
    import numpy as np
    import overlap_by_hand

    import mpistrat

    strategy = mpistrat.MultiWorkerMirroredStrategy()
    layers = range(len(network.gradients))
    by_hand = [np.zeros_like(each) for each in network.gradients]
    totals: dict[str, Any] = {LIBRARY: [], ONE_LIST: [], BY_HAND: by_hand}

    def begin_each(k: int) -> None:
        replica = mpistrat.get_replica_context()
        assert replica is not None
        for _ in range(k):
            pending: list[Any] = []
            for i in layers:
                gradient = network.compute(i, pending[-1].test if pending else lambda: None)
                pending.append(replica.experimental_all_reduce_async("SUM", gradient))
            totals[LIBRARY][:] = [each.wait() for each in pending]

    def one_list(k: int) -> None:
        replica = mpistrat.get_replica_context()
        assert replica is not None
        for _ in range(k):
            gradients = [network.compute(i) for i in layers]
            totals[ONE_LIST][:] = replica.all_reduce("SUM", gradients)

    def reducing(k: int) -> None:
        replica = mpistrat.get_replica_context()
        assert replica is not None
        for _ in range(k):
            replica.all_reduce("SUM", network.gradients)

    def computing(k: int) -> None:
        for _ in range(k):
            for i in layers:
                network.compute(i)

    def in_replicas(fn: Callable[[int], None]) -> Callable[[int], object]:
        return lambda k: strategy.run(fn, (k,))

    ways = {
        LIBRARY: in_replicas(begin_each),
        ONE_LIST: in_replicas(one_list),
        BY_HAND: overlap_by_hand.all_reduce_each(comm, network.compute, by_hand),
        COMPUTING: computing,
        REDUCING: in_replicas(reducing),
    }
    return ways, totals


def _faults(
    comm: Any, network: Network, ways: Mapping[str, Callable[[int], object]], totals: Mapping[str, Sequence[np.ndarray]]
) -> list[str]:
    """Return the wrong totals of all ways."""
    import numpy as np

    ways[COMPUTING](1)
    expected = [sum(comm.allgather(gradient)) for gradient in network.gradients]
    faults = []
    for way, got in totals.items():
        ways[way](1)
        for i, (want, total) in enumerate(zip(expected, got, strict=True)):
            if not np.allclose(total, want, rtol=1e-4, atol=1e-3):
                faults.append(f"{way}: the total of gradient {i} is off by {np.abs(total - want).max():g}")
    return faults


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=15)
    under_ranks.count(parser, "--layers", 8, "layers of the network")
    under_ranks.count(parser, "--width", 1024, "width of a layer; its gradient is square")
    under_ranks.count(parser, "--blocks", 8, "blocks per layer")
    under_ranks.count(parser, "--rows", 256, "rows per batch")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
