"""Find the fastest all-reduce algorithm for each size on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from mpistrat.bench import under_ranks
from mpistrat.process import files
from mpistrat.runtime.environment import RuntimeOptions

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
    them. ``way(k)`` repeats the operation k times. A measurement repeats it ``inner`` times, and the seconds are for
    one operation. The first ``warmup`` repetitions are not counted. Before each measurement ``before`` is called, then
    all ranks meet at a barrier.

    >>> from mpi4py import MPI
    >>> seconds = interleaved(MPI.COMM_SELF, {"sleep": lambda k: time.sleep(0.001 * k)}, repetitions=3)
    >>> len(seconds["sleep"]), min(seconds["sleep"]) >= 0.001
    (3, True)
    """
    names = list(ways)
    seconds = np.zeros((len(names), warmup + repetitions))
    for repetition in range(warmup + repetitions):
        for offset in range(len(names)):
            i = (repetition + offset) % len(names)
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


SIZES = "64B,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB"
_MEASUREMENT_SECONDS = 0.005
_FEWEST = 3  # minimum of repetitions


def main(argv: list[str]) -> int | None:
    """Run the subject with these arguments."""
    parser = under_ranks.parser(__doc__, 9, "mpistrat bench tune")
    under_ranks.add_sizes(parser, SIZES)
    parser.add_argument("--seconds", type=float, default=2, help="time limit for repetitions of one size (%(default)g)")
    parser.add_argument("--dry-run", action="store_true", help="print the results without storing them")
    return under_ranks.run(parser, argv, ("-m", "mpistrat.bench.tune"), _measure)


def _measure(arguments: argparse.Namespace) -> int:
    from mpi4py import MPI

    import mpistrat
    from mpistrat.collectives.algorithms import choose
    from mpistrat.collectives.algorithms.choose import ALGORITHMS, Choice
    from mpistrat.runtime.topology import Topology

    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    topology = Topology.of(strategy.comm)
    choice = Choice.of(topology)
    choice.measured = {}  # measure the built-in choice
    names = [name for name in algorithms(topology) if not ALGORITHMS[name].by_name_only]
    if not names:
        print("one rank has no all-reduce to measure: start several, as in mpistrat bench tune -n 4")
        return 1
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    lines = ["bytes         built-in choice     fastest             " + "".join(f"{name:>20}" for name in names)]
    for nbytes in sorted(set(arguments.sizes)):
        value = np.zeros(max(1, nbytes // 4), np.float32)
        ways = {name: all_reduces(strategy, value, [], name) for name in names}
        for name, samples in interleaved_for(comm, ways, arguments.repetitions, arguments.seconds).items():
            points[name].append((nbytes, median(samples)))
        chosen = choice.best(nbytes, value.dtype).algorithm.name
        fastest = min(names, key=lambda name: points[name][-1][1])
        times = "".join(f"{points[name][-1][1] * 1e6:>17.1f} us" for name in names)
        lines.append(f"{nbytes:<14}{chosen:<20}{fastest:<20}{times}")
    if comm.rank == 0:
        print("\n".join([f"tune, {comm.size} ranks", *lines]))
        if not arguments.dry_run:
            files.replace_text(choose.path_of_points(topology), choose.points_to_json(topology, points))
            print(f"kept in {choose.path_of_points(topology)}; programs use it with {RuntimeOptions.tuned.variable}=1")
        if arguments.json:
            files.replace_text(Path(arguments.json), choose.points_to_json(topology, points))
    return 0


def all_reduces(strategy: Any, value: Any, totals: list[Any], name: str | None = None) -> Callable[[int], object]:
    """Return ``times(k)``, which sums a value k times over the ranks, and keeps the last sum in ``totals[0]``.

    ``name`` is the algorithm; by default the library chooses it.
    """
    # Not sooner than here: this loads the BLAS, which reads its number of threads from the environment.
    import mpistrat
    from mpistrat.experimental import CommunicationOptions

    options = None if name is None else CommunicationOptions(implementation=name)

    def times(k: int) -> None:
        replica = mpistrat.get_replica_context()
        assert replica is not None
        for _ in range(k):
            total = replica.all_reduce("SUM", value, options)
        totals[:] = [total]

    return lambda k: strategy.run(times, (k,))


def interleaved_for(
    comm: Any, ways: Mapping[Way, Callable[[int], object]], repetitions: int, seconds: float
) -> dict[Way, list[float]]:
    """Return the seconds of each way as `interleaved` does, within about ``seconds`` in all.

    Fast operations are repeated in each measurement, so that it lasts a few milliseconds.
    """
    once = [samples[0] for samples in interleaved(comm, ways, 1, warmup=1).values()]
    inner = max(1, min(1000, int(_MEASUREMENT_SECONDS / max(once))))
    affordable = int(seconds / (sum(once) * inner)) - 1
    return interleaved(comm, ways, min(repetitions, max(_FEWEST, affordable)), inner, warmup=1)


def algorithms(topology: Any) -> list[str]:
    """Return the names of the algorithms that can reduce float32 here; none on one rank."""
    from mpistrat.collectives.algorithms.choose import ALGORITHMS

    able = [name for name, algorithm in ALGORITHMS.items() if name != "identity" and algorithm.fits(topology)]
    return able if topology.size > 1 else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
