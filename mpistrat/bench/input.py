"""Measure reading batches from HDF5 files, warm (from the page cache) and cold (from the disk)."""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mpistrat.bench.measuring import under_ranks
from mpistrat.bench.measuring.report import LIBRARY, Report

BATCH = 64
WARM, COLD = "warm", "cold"
_COMPUTED = 0.005  # seconds of computation per step
_UNTHREADED = f"{LIBRARY}, prefetch(0)"


def main(argv: list[str]) -> int | None:
    """Run the subject with these arguments."""
    return run(parser(), argv, Measurement)


def parser() -> argparse.ArgumentParser:
    """Return a parser of the arguments of this subject."""
    parser = argparse.ArgumentParser(prog="mpistrat bench input", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder for the files")
    under_ranks.count(parser, "--mib", 512, "MiB of rows in each layout")
    parser.add_argument("--seed", type=int, default=0, help="seed of the contents of the files (%(default)s)")
    under_ranks.count(parser, "--repetitions", 5, "measurements of each program")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to a file")
    return parser


def run(parser: argparse.ArgumentParser, argv: list[str], measurement: type[Measurement]) -> int:
    """Run the subject by a measurement class, which may add ways and cases."""
    arguments = parser.parse_args(argv)
    if under_ranks.under_several_ranks():
        parser.error("input measures one rank: call it without a launcher")
    os.environ.update(under_ranks.one_thread(os.environ))
    return measurement(arguments).run()


class Measurement:
    """The measurement of all cases.

    ``files`` is the module that makes the files, and ``paths`` has the files of each layout.
    """

    def __init__(self, arguments: argparse.Namespace):
        # Imported here: it loads the BLAS, which reads its number of threads from the environment set before.
        from mpistrat.bench.programs import hdf5_files

        self.files = hdf5_files
        self.arguments = arguments
        self.report = Report("input", 1)
        self.nbytes = arguments.mib << 20
        arguments.data.mkdir(parents=True, exist_ok=True)
        self.paths = {
            name: hdf5_files.made(arguments.data, name, how, self.nbytes, arguments.seed)
            for name, how in hdf5_files.layouts().items()
        }

    def run(self) -> int:
        """Measure all cases, print the table and write the file."""
        cold = self.files.forget(self.paths["contiguous"])
        self._in_order(cold)
        self._first_epoch()
        self._shuffled(cold)
        self._step()
        self.further()
        warm = "nothing is measured cold: this system does not drop files from the page cache on request"
        self.report.show(self.arguments.json, *([] if cold else [warm]))
        return 0

    def rivals(self, paths: list[str], decoded: bool) -> dict[str, Callable[[], object]]:
        """Return further ways to read these files in order. ``decoded``: their chunks are compressed."""
        return {}

    def further(self) -> None:
        """Measure further cases. Subclasses add them."""

    def raw(self, paths: list[str]) -> Callable[[], object]:
        """Return a function that reads the bytes of these files: no program reads faster."""
        from mpistrat.bench.programs import read_bytes

        return partial(read_bytes.epoch, paths, BATCH * self.files.ROW_BYTES)

    def _in_order(self, cold: bool) -> None:
        from mpistrat.bench.programs import read_batches as library

        for layout, paths in self.paths.items():
            stored = layout in ("gzip", "zstd")
            ways: dict[str, Callable[[], object]] = {
                LIBRARY: partial(library.epoch, library.distributed(paths, BATCH)),
                _UNTHREADED: partial(library.epoch, library.distributed(paths, BATCH, prefetch=0)),
                **self.rivals(paths, stored),
            }
            if not stored:
                ways["raw read"] = self.raw(paths)
            self.compare(f"{layout}, {WARM}", ways)
            if cold and not stored:
                self.compare(f"{layout}, {COLD}", ways, partial(self.files.forget, paths))

    def _first_epoch(self) -> None:
        """Measure from distributing a dataset to the last batch."""
        import mpistrat
        from mpistrat.bench.programs import read_batches as library

        paths = self.paths["contiguous"]
        distribute = mpistrat.OneDeviceStrategy("/cpu:0").experimental_distribute_dataset
        new: dict[bool, Any] = {}  # of each measurement, since a dataset remembers the files that it has seen

        def make() -> None:
            new.update((shuffle, library.dataset(paths, BATCH, shuffle)) for shuffle in (False, True))

        ways: dict[str, Callable[[], object]] = {
            LIBRARY: lambda: library.epoch(distribute(new[False])),
            f"{LIBRARY}, shuffled": lambda: library.epoch(distribute(new[True])),
            **self.rivals(paths, False),
            "raw read": self.raw(paths),
        }
        self.compare("first epoch", ways, make)

    def _shuffled(self, cold: bool) -> None:
        from mpistrat.bench.programs import read_batches as library

        paths = self.paths["contiguous"]
        ways: dict[str, Callable[[], object]] = {
            LIBRARY: partial(library.epoch, library.distributed(paths, BATCH, shuffle=True)),
            "in order": partial(library.epoch, library.distributed(paths, BATCH)),
        }
        self.compare(f"shuffled, {WARM}", {**ways, "raw read": self.raw(paths)})
        if cold:
            self.compare(f"shuffled, {COLD}", ways, partial(self.files.forget, paths))

    def _step(self) -> None:
        """Measure a program that computes for a fixed time while its next batch is read."""
        import numpy as np

        from mpistrat.bench.programs import read_batches as library

        matrix = np.ones((256, 256), np.float32)
        times = _calls_within(_COMPUTED, lambda: matrix @ matrix)

        def compute(batch: Any) -> None:
            for _ in range(times):
                matrix @ matrix

        steps = -(-self.nbytes // self.files.ROW_BYTES // BATCH)
        for layout in ("contiguous", *(["zstd"] if "zstd" in self.paths else ["gzip"])):
            paths = self.paths[layout]
            ways: dict[str, Callable[[], object]] = {
                LIBRARY: partial(library.epoch, library.distributed(paths, BATCH), compute),
                _UNTHREADED: partial(library.epoch, library.distributed(paths, BATCH, prefetch=0), compute),
                "computing alone": lambda: deque(map(compute, range(steps)), maxlen=0),
                "reading alone": partial(library.epoch, library.distributed(paths, BATCH)),
            }
            self.compare(f"{_COMPUTED * 1000:g} ms of computing a batch, {layout}", ways)

    def compare(
        self, case: str, ways: dict[str, Callable[[], object]], before: Callable[[], object] | None = None
    ) -> None:
        from mpi4py import MPI

        from mpistrat.bench.measuring.timing import interleaved, repeated

        calls = {name: repeated(way) for name, way in ways.items()}
        seconds = interleaved(MPI.COMM_SELF, calls, self.arguments.repetitions, warmup=1, before=before)
        self.report.add_medians(case, self.nbytes, seconds)


def _calls_within(seconds: float, call: Callable[[], object]) -> int:
    """Return how often a function can be called in this time."""
    import time

    call()
    fastest = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - start)
    return max(1, round(seconds / fastest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
