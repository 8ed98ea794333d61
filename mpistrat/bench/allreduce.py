"""All-reduce of one array of float32, size by size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mpistrat.bench import launch, sizes
from mpistrat.bench.report import LIBRARY, Report

if TYPE_CHECKING:
    import numpy as np

SIZES = "4KiB,64KiB,256KiB,1MiB,4MiB,16MiB"
PLAIN, BUFFERS, BOUND = "plain array", "buffer", "bound"
COPY, WIRE = "a copy in memory", "the wire"
_MEASUREMENT_SECONDS = 0.005
_FEWEST = 3  # repetitions

Way = TypeVar("Way")


def main(argv: list[str]) -> int | None:
    """Run the subject with these arguments."""
    parser = launch.parser("allreduce", __doc__ or "", repetitions=21)
    parser.add_argument(
        "--sizes", type=sizes.sizes, default=sizes.sizes(SIZES), help=f"of the array ({SIZES})"
    )
    parser.add_argument(
        "--algorithm",
        action="append",
        default=[],
        metavar="NAME",
        help="also measure the algorithm of that name; may be repeated; 'all' is every one that works here",
    )
    parser.add_argument(
        "--seconds", type=float, default=10, help="for one size: repeat less often than that (%(default)g)"
    )
    parser.add_argument(
        "--wire", type=sizes.rate, metavar="RATE", help="payload that a node's link carries, such as 940mbit"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the array lives: cuda is each rank's GPU (%(default)s)",
    )
    parser.add_argument(
        "--device-pointers",
        action="store_true",
        help="with --device cuda: also the MPI library's own all-reduce on them, which one that is not CUDA-aware "
        "does not survive",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw time and bandwidth over size")
    arguments = parser.parse_args(argv)
    status = launch.launched("allreduce", arguments, argv)
    return _measure(arguments) if status is None else status


def _measure(arguments: argparse.Namespace) -> int:
    from mpi4py import MPI

    import mpistrat
    from mpistrat.bench.timing import median
    from mpistrat.runtime.topology import Topology

    comm = MPI.COMM_WORLD.Dup()
    if arguments.device == "cuda":
        return _measure_on_gpus(arguments, comm)
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    topology = Topology.of(strategy.comm)
    named = algorithms(topology, arguments.algorithm)
    report = Report("allreduce", comm.size)
    for nbytes in arguments.sizes:
        count = max(1, nbytes // 4)
        ways = _ways(comm, strategy, count, named)
        fault = _fault(comm, ways)
        if fault:
            if comm.rank == 0:
                print(fault, file=sys.stderr)
            return 1
        timed = {way: each.times for way, each in ways.items()}
        seconds = interleaved_for(comm, timed, arguments.repetitions, arguments.seconds)
        for way, each in ways.items():
            for case in each.cases:
                report.add(case, way[1], 4 * count, median(seconds[way]))
        if arguments.wire:
            report.add(
                BOUND, WIRE, 4 * count, least_bytes(topology.ranks_per_node, 4 * count) / arguments.wire
            )
    if comm.rank == 0:
        print(report.table())
        if arguments.json:
            report.write_json(arguments.json)
        if arguments.plot:
            from mpistrat.bench.allreduce_plot import plot

            plot(report.rows, topology.ranks_per_node, arguments.plot)
    return 0


def _measure_on_gpus(arguments: argparse.Namespace, comm: Any) -> int:
    import mpistrat
    from mpistrat.bench import allreduce_gpu
    from mpistrat.bench.timing import median
    from mpistrat.collectives.gpu_all_reduce import ROUTES, obstacles

    try:
        strategy = mpistrat.MultiWorkerMirroredStrategy(device="cuda")
    except RuntimeError as error:
        if comm.rank == 0:
            print(error, file=sys.stderr)
        return 1
    topology, device = strategy.extended._topology, strategy.extended._device
    found = obstacles(topology, device)
    names = [name for name, text in found.items() if not text] if "all" in arguments.algorithm else []
    names += [name for name in arguments.algorithm if name != "all"]
    unknown = [name for name in names if name not in ROUTES or found.get(name)]
    if unknown:
        if comm.rank == 0:
            why = found.get(unknown[0]) or f"use one of {', '.join(ROUTES)}"
            print(f"arrays on GPUs cannot be reduced by {unknown[0]!r}: {why}", file=sys.stderr)
        return 1

    def timed(ways: dict[Any, Callable[[int], object]]) -> dict[Any, float]:
        seconds = interleaved_for(comm, ways, arguments.repetitions, arguments.seconds)
        return {way: median(each) for way, each in seconds.items()}

    report = Report("allreduce", comm.size)
    fault = allreduce_gpu.measure(
        comm, strategy, report, arguments.sizes, names, timed, arguments.device_pointers
    )
    if comm.rank == 0:
        if fault:
            print(fault, file=sys.stderr)
        else:
            print(report.table())
            print("\n".join(allreduce_gpu.bandwidths(report, report.rows[-1].bytes)))
            for name, text in found.items():
                print(f"route {name}: {text or 'possible'}")
            if arguments.json:
                report.write_json(arguments.json)
    return 1 if fault else 0


def least_bytes(ranks_per_node: Sequence[int], nbytes: int) -> float:
    """Bytes that every node has to send at least, or every rank where there is one node.

    Patarasuk and Yuan 2009, theorem 1.

    Examples
    --------
    >>> least_bytes((2, 2, 2, 2), 1000)
    1500.0
    >>> least_bytes((2,), 1000)
    1000.0
    """
    parts = len(ranks_per_node) if len(ranks_per_node) > 1 else ranks_per_node[0]
    return 2 * (parts - 1) / parts * nbytes


class _Way:
    """One way to do it, and what is needed to see that it does it right."""

    def __init__(
        self,
        cases: Sequence[str],
        times: Callable[[int], object],
        send: np.ndarray,
        result: Callable[[], np.ndarray],
    ):
        self.cases = cases
        self.times = times
        self.send = send
        self.result = result


def _ways(comm: Any, strategy: Any, count: int, named: Sequence[str]) -> dict[tuple[str, str], _Way]:
    import numpy as np

    from mpistrat.bench import allreduce_nonblocking_by_hand as nonblocking
    from mpistrat.bench import allreduce_one_call_by_hand as one_call
    from mpistrat.bench import allreduce_pieces_by_hand as pieces
    from mpistrat.experimental import CommunicationOptions

    def array() -> np.ndarray:
        return np.zeros(count, np.float32)

    ways: dict[tuple[str, str], _Way] = {}

    def library(case: str, send: np.ndarray, name: str | None = None) -> None:
        options = None if name is None else CommunicationOptions(implementation=name)
        totals: list[np.ndarray] = []
        times = partial(strategy.run, partial(_all_reduce, send, options, totals))
        way = LIBRARY if name is None else f"{LIBRARY}, {name}"
        ways[case, way] = _Way([case], lambda k: times((k,)), send, lambda: totals[0])

    def by_hand(way: str, cases: Sequence[str], module: Any) -> None:
        send, receive = array(), array()
        ways[cases[0], way] = _Way(cases, module.all_reduce(comm, send, receive), send, lambda: receive)

    buffer = strategy.experimental_buffers_like(array())
    library(PLAIN, array())
    library(BUFFERS, buffer)
    for name in named:
        library(PLAIN, array(), name)
        if name in _IN_PLACE:
            library(BUFFERS, buffer, name)
    by_hand("one call", (PLAIN, BUFFERS), one_call)
    by_hand("4 MiB pieces", (PLAIN, BUFFERS), pieces)
    by_hand("not blocking", (PLAIN, BUFFERS), nonblocking)
    own = array()
    ways[BUFFERS, "4 MiB pieces, in place"] = _Way(
        [BUFFERS], pieces.all_reduce_in_place(comm, own), own, lambda: own
    )
    source, target = array(), array()
    ways[BOUND, COPY] = _Way([BOUND], partial(_copy, target, source), source, lambda: target * comm.size)
    return ways


_IN_PLACE = ("hierarchical",)  # the algorithms that a buffer does not have to be copied for


def _all_reduce(send: np.ndarray, options: Any, totals: list[Any], k: int) -> None:
    import mpistrat

    replica = mpistrat.get_replica_context()
    assert replica is not None
    for _ in range(k):
        total = replica.all_reduce("SUM", send, options)
    totals[:] = [total]


def _copy(target: np.ndarray, source: np.ndarray, k: int) -> None:
    for _ in range(k):
        target[...] = source


def _fault(comm: Any, ways: Mapping[tuple[str, str], _Way]) -> str | None:
    """What is wrong with the sums of some way, None if nothing. Leaves all arrays zero, as sums then are."""
    import numpy as np

    faults = []
    for (case, way), each in ways.items():
        pattern = np.arange(each.send.size, dtype=np.float32) % 1000
        each.send[...] = pattern if case == BOUND else (comm.rank + 1) * pattern
        expected = comm.size * pattern if case == BOUND else comm.size * (comm.size + 1) / 2 * pattern
        each.times(1)
        got = each.result()
        if not np.array_equal(got, expected.astype(np.float32)):
            i = int(np.flatnonzero(got != expected)[0])
            faults.append(f"{case}, {way}: element {i} is {got[i]:g}, not {expected[i]:g}")
        each.send[...] = 0
    told = comm.allgather(faults)
    return "\n".join(f"rank {rank}: {fault}" for rank, all_ in enumerate(told) for fault in all_) or None


def interleaved_for(
    comm: Any, ways: Mapping[Way, Callable[[int], object]], repetitions: int, seconds: float
) -> dict[Way, list[float]]:
    """As `timing.interleaved`, each measurement long enough to be one, and few if they take long."""
    from mpistrat.bench.timing import interleaved

    once = [samples[0] for samples in interleaved(comm, ways, 1, warmup=1).values()]
    inner = max(1, min(1000, int(_MEASUREMENT_SECONDS / max(once))))
    affordable = int(seconds / (sum(once) * inner)) - 1
    return interleaved(comm, ways, min(repetitions, max(_FEWEST, affordable)), inner, warmup=1)


def algorithms(topology: Any, names: Sequence[str]) -> list[str]:
    """These names of algorithms, or all that can add up float32 here, if ``"all"`` is among them.

    Raises
    ------
    SystemExit
        If one is unknown.
    """
    import numpy as np

    from mpistrat.collectives.choose import ALGORITHMS
    from mpistrat.runtime.device import Device

    if "all" in names:
        able = [
            name
            for name, each in ALGORITHMS.items()
            if name != "identity" and each.supports(topology, np.dtype(np.float32), Device("cpu"))
        ]
        return able if topology.size > 1 else []
    unknown = [name for name in names if name not in ALGORITHMS]
    if unknown:
        raise SystemExit(f"{unknown[0]!r} is no all-reduce algorithm: use one of {', '.join(ALGORITHMS)}")
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
