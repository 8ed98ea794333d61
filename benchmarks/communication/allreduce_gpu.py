"""All-reduce of one float32 array on GPUs: every route of the library, and the usual ways without it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from array_ways import BOUND, SIZES, ArrayWay, wrong_sums

from mpistrat.arrays.device import bounds
from mpistrat.bench import under_ranks
from mpistrat.bench.tune import all_reduces, interleaved_for

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, any_fault

if TYPE_CHECKING:
    import numpy as np

ARRAY = "array on a GPU"
CUDA_AWARE, UNPINNED = "one call on device pointers", "unpinned copy and one call"
LINK, MEMORY = "down and up again, pinned", "a copy on the GPU"


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    import cupy
    from mpi4py import MPI

    import mpistrat
    from mpistrat.collectives.gpu.all_reduce import ROUTES, obstacles

    comm = MPI.COMM_WORLD.Dup()
    try:
        strategy = mpistrat.MultiWorkerMirroredStrategy(device="cuda")
    except RuntimeError as error:
        if comm.rank == 0:
            print(error, file=sys.stderr)
        return 1
    topology, device = strategy.extended.engine.topology, strategy.extended.engine.device
    found = obstacles(topology, device)
    names = [name for name, text in found.items() if not text] if "all" in arguments.algorithm else []
    names += [name for name in arguments.algorithm if name != "all"]
    unknown = [name for name in names if name not in ROUTES or found.get(name)]
    if unknown:
        if comm.rank == 0:
            why = found.get(unknown[0]) or f"use one of {', '.join(ROUTES)}"
            print(f"arrays on GPUs cannot be reduced by {unknown[0]!r}: {why}", file=sys.stderr)
        return 1
    report, limits = Report("allreduce", comm.size), bounds(device.index)
    for nbytes in arguments.sizes:
        count = max(1, nbytes // 4)
        ways = _ways(comm, strategy, count, names, arguments.device_pointers)
        if any_fault(comm, wrong_sums(comm, ways, cupy.asarray, cupy.asnumpy)):
            return 1
        timed = {name: way.times for name, way in ways.items()}
        seconds = interleaved_for(comm, timed, arguments.repetitions, arguments.seconds)
        for (case, way), each in seconds.items():
            report.add(case, way, 4 * count, median(each))
        if limits.link is not None:
            report.add(BOUND, f"{limits.link_name}, as the system says", 4 * count, 4 * count / limits.link)
        if limits.memory is not None:
            report.add(BOUND, "memory read and written, as the GPU says", 4 * count, 8 * count / limits.memory)
    if comm.rank == 0:
        routes = [f"route {name}: {text or 'possible'}" for name, text in found.items()]
        report.show(arguments.json, *bandwidths(report, report.rows[-1].bytes), *routes)
    return 0


def bandwidths(report: Report, nbytes: int) -> list[str]:
    """Return lines with the GB/s of each way for arrays of one size, and its fraction of the bound."""
    seconds = {row.way: row.seconds for row in report.rows if row.bytes == nbytes}
    lines = []
    for way, each in seconds.items():
        line = f"{way:<42} {nbytes / each / 1e9:8.2f} GB/s"
        if way == f"{LIBRARY}, pinned" and LINK in seconds:
            line += f"  {seconds[LINK] / each:6.1%} of the bound: {LINK}"
        lines.append(line)
    return lines


def _ways(
    comm: Any, strategy: Any, count: int, names: Sequence[str], device_pointers: bool
) -> dict[tuple[str, str], ArrayWay]:
    import cupy
    import numpy as np

    from mpistrat.process import mpi

    MPI = mpi.start()
    ways: dict[tuple[str, str], ArrayWay] = {}
    wait = cupy.cuda.get_current_stream().synchronize

    def library(name: str | None) -> None:
        send = cupy.zeros(count, np.float32)
        totals: list[Any] = []
        reduce = all_reduces(strategy, send, totals, name)

        def times(k: int) -> None:
            reduce(k)
            wait()

        ways[ARRAY, LIBRARY if name is None else f"{LIBRARY}, {name}"] = ArrayWay(
            [ARRAY], times, send, lambda: totals[0]
        )

    def by_hand(way: str, once: Callable[[Any, Any], None], case: str = ARRAY) -> None:
        send, receive = cupy.zeros(count, np.float32), cupy.zeros(count, np.float32)

        def times(k: int) -> None:
            for _ in range(k):
                once(send, receive)
            wait()

        ways[case, way] = ArrayWay([case], times, send, lambda: receive)

    def on_device(send: Any, receive: Any) -> None:
        wait()
        ends = [MPI.buffer.fromaddress(int(each.data.ptr), each.nbytes) for each in (send, receive)]
        comm.Allreduce(*([end, MPI.FLOAT] for end in ends))

    def unpinned(send: Any, receive: Any) -> None:
        host = cupy.asnumpy(send)
        total = np.empty_like(host)
        comm.Allreduce(host, total)
        receive[...] = cupy.asarray(total)

    def down_and_up(send: Any, receive: Any) -> None:
        from mpistrat.arrays.gpu import pinned

        step, source, target = pinned.CHUNK_BYTES, int(send.data.ptr), int(receive.data.ptr)
        work = [
            pinned.StagedCopy(source + start, min(step, send.nbytes - start), _same, target + start)
            for start in range(0, send.nbytes, step)
        ]
        with pinned.staging(send.device.id) as stage:
            pinned.through_host(stage, work)

    def copy(send: Any, receive: Any) -> None:
        receive[...] = send

    library(None)
    for name in names:
        library(name)
    by_hand(UNPINNED, unpinned)
    if device_pointers:
        by_hand(CUDA_AWARE, on_device)
    by_hand(LINK, down_and_up, BOUND)
    by_hand(MEMORY, copy, BOUND)
    return ways


def _same(down: np.ndarray, up: np.ndarray) -> np.ndarray:
    return down


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, repetitions=21)
    under_ranks.add_sizes(parser, SIZES)
    parser.add_argument(
        "--algorithm",
        action="append",
        default=[],
        metavar="NAME",
        help="also measure this route; repeatable; 'all' is every route that works here",
    )
    parser.add_argument(
        "--seconds", type=float, default=10, help="time limit for the repetitions of one size (%(default)g)"
    )
    parser.add_argument(
        "--device-pointers",
        action="store_true",
        help="also measure the MPI library's own all-reduce on device pointers; a library that is not CUDA-aware "
        "crashes",
    )
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
