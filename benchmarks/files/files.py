"""Measure the start of reading many small HDF5 files: with and without a stored manifest, and by hand with h5py."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report

_KEPT = f"{LIBRARY}, manifest kept"
_ROWS, _WIDTH = 8, 64  # rows per file, and float32 values per row
_BATCH = 64
_START, _COLLECTIVES, _OPENED = "start", "start, in collectives", "opened"


def measure(arguments: argparse.Namespace) -> int:
    """Measure with these arguments, and return the exit status."""
    import files_by_hand as by_hand
    from mpi4py import MPI

    import mpistrat
    from mpistrat.bench.tune import interleaved
    from mpistrat.data import Dataset, DistributedDataset
    from mpistrat.runtime.topology import Topology

    comm = MPI.COMM_WORLD.Dup()
    topology = Topology.of(mpistrat.MultiWorkerMirroredStrategy().comm)
    folder = _made(comm, arguments.data, arguments.files)
    pattern, manifest = str(folder / "*.h5"), folder / "manifest.json"
    collectives: dict[str, list[float]] = {LIBRARY: [], _KEPT: []}

    def ours(way: str, kept: Path | None) -> Callable[[int], None]:
        def start(k: int) -> None:
            for _ in range(k):
                ranks: Any = _Timed(topology)
                dataset = Dataset.from_hdf5(pattern, "x", manifest=kept).batch(_BATCH)
                assert DistributedDataset(dataset, ranks).cardinality > 0
                collectives[way].append(ranks.seconds)

        return start

    starts = {LIBRARY: ours(LIBRARY, None), _KEPT: ours(_KEPT, manifest)}
    starts[_KEPT](1)  # the first start writes the manifest
    opened = {way: _opened(comm, start) for way, start in starts.items()}
    ways: dict[str, Callable[[int], object]] = {
        **starts,
        "every rank opens all": lambda k: [by_hand.every_rank(pattern) for _ in range(k)],
        "by hand, each its part": lambda k: [by_hand.own_part(comm, pattern) for _ in range(k)],
    }
    seconds = interleaved(comm, ways, arguments.repetitions, warmup=1)

    report = Report("files", comm.size)
    nbytes = 4 * _WIDTH * _ROWS * arguments.files
    report.add_medians(_START, nbytes, seconds)
    for way, each in collectives.items():
        slowest = comm.allreduce(median(each[-arguments.repetitions :]), MPI.MAX)
        report.add(_COLLECTIVES, way, nbytes, slowest)
    for way, count in opened.items():
        report.add(_OPENED, way, count, 0.0)
    if comm.rank == 0:
        lines = []
        for way in starts:
            spent = {row.case: row.seconds for row in report.rows if row.way == way}
            share = spent[_COLLECTIVES] / spent[_START]
            lines.append(
                f"{way}: {opened[way]} opens of {arguments.files} files by {comm.size} ranks together, "
                f"{share:.0%} of the start in collectives, which wait for the slowest rank"
            )
        report.show(arguments.json, *lines)
    return 0 if opened == {LIBRARY: arguments.files, _KEPT: 0} else 1


class _Timed:
    """Collectives of replicas that measure the seconds of this replica in them."""

    def __init__(self, ranks: Any):
        self._ranks = ranks
        self.size, self.rank = ranks.size, ranks.rank
        self.seconds = 0.0

    def all_gather_object(self, value: Any) -> list[Any]:
        with self._clock():
            found: list[Any] = self._ranks.all_gather_object(value)
            return found

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        with self._clock():
            return self._ranks.broadcast_object(value, root)

    def all_true(self, flag: Any) -> bool:
        with self._clock():
            return bool(self._ranks.all_true(flag))

    @contextlib.contextmanager
    def _clock(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


def _opened(comm: Any, start: Callable[[int], None]) -> int:
    """Return the number of files that all ranks together open in HDF5."""
    import h5py

    real, count = h5py.h5f.open, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return real(*arguments, **options)

    h5py.h5f.open = counted
    try:
        start(1)
    finally:
        h5py.h5f.open = real
    return int(comm.allreduce(count))


def _made(comm: Any, data: Path, count: int) -> Path:
    """Return the folder of the files. All ranks make it together if it does not exist."""
    import h5py
    import numpy as np

    folder = data / f"files-{count}"
    made = comm.bcast(folder.is_dir())
    if made:
        return folder
    making = data / f".files-{count}.making"
    making.mkdir(parents=True, exist_ok=True)
    comm.Barrier()
    for number in range(comm.rank, count, comm.size):
        with h5py.File(making / f"{number:07}.h5", "w") as file:
            file["x"] = np.full((_ROWS, _WIDTH), number, np.float32)
    comm.Barrier()
    if comm.rank == 0:
        os.rename(making, folder)
    comm.Barrier()
    return folder


if __name__ == "__main__":
    parser = under_ranks.parser(__doc__, 3)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder for the files")
    under_ranks.count(parser, "--files", 10_000, "number of files")
    sys.exit(under_ranks.run(parser, sys.argv[1:], [__file__], measure))
