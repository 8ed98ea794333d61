"""Measure reading batches from HDF5 files, warm (from the page cache) and cold (from the disk).

Beside it h5py alone, the DataLoader of torch if it is installed, and the bytes alone. Also measures the index of a
shuffled epoch, and peak memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from mpistrat.bench import under_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from reporting import LIBRARY, Report, repeated

BATCH = 64
WARM, COLD = "warm", "cold"
INDICES = (6, 9, 12)  # numbers of rows, as powers of ten
_COMPUTED = 0.005  # seconds of computation per step
_UNTHREADED = f"{LIBRARY}, prefetch(0)"


class Measurement:
    """The measurement of all cases.

    ``files`` is the module that makes the files, and ``paths`` has the files of each layout.
    """

    def __init__(self, arguments: argparse.Namespace):
        # Imported here: it loads the BLAS, which reads its number of threads from the environment set before.
        import hdf5_files

        self.files = hdf5_files
        self.arguments = arguments
        self.report = Report("input", 1)
        self.nbytes = arguments.mib << 20
        self._torch = not arguments.no_torch and importlib.util.find_spec("torch") is not None
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
        self._index()
        self._beside_torch()
        self._memory()
        warm = "nothing is measured cold: this system does not drop files from the page cache on request"
        self.report.show(self.arguments.json, *([] if cold else [warm]))
        return 0

    def _by_hand(self, paths: list[str], decoded: bool) -> dict[str, Callable[[], object]]:
        """Return ways to read these files in order by h5py. ``decoded``: their chunks are compressed."""
        import input_h5py_by_hand as by_h5py

        ways: dict[str, Callable[[], object]] = {"h5py, slices": partial(by_h5py.slices, paths, BATCH)}
        if not decoded:  # without a cache it decodes chunks twice
            ways["h5py, read_direct"] = partial(by_h5py.read_direct, paths, BATCH)
        return ways

    def _raw(self, paths: list[str]) -> Callable[[], object]:
        """Return a function that reads the bytes of these files: no program reads faster."""
        import read_bytes

        return partial(read_bytes.epoch, paths, BATCH * self.files.ROW_BYTES)

    def _in_order(self, cold: bool) -> None:
        import read_batches as library

        for layout, paths in self.paths.items():
            stored = layout in ("gzip", "zstd")
            ways: dict[str, Callable[[], object]] = {
                LIBRARY: partial(library.epoch, library.distributed(paths, BATCH)),
                _UNTHREADED: partial(library.epoch, library.distributed(paths, BATCH, prefetch=0)),
                **self._by_hand(paths, stored),
            }
            if not stored:
                ways["raw read"] = self._raw(paths)
            self._compare(f"{layout}, {WARM}", ways)
            if cold and not stored:
                self._compare(f"{layout}, {COLD}", ways, partial(self.files.forget, paths))

    def _first_epoch(self) -> None:
        """Measure from distributing a dataset to the last batch."""
        import read_batches as library

        import mpistrat

        paths = self.paths["contiguous"]
        distribute = mpistrat.OneDeviceStrategy("/cpu:0").experimental_distribute_dataset
        new: dict[bool, Any] = {}  # of each measurement, since a dataset remembers the files that it has seen

        def make() -> None:
            new.update((shuffle, library.dataset(paths, BATCH, shuffle)) for shuffle in (False, True))

        ways: dict[str, Callable[[], object]] = {
            LIBRARY: lambda: library.epoch(distribute(new[False])),
            f"{LIBRARY}, shuffled": lambda: library.epoch(distribute(new[True])),
            **self._by_hand(paths, False),
            "raw read": self._raw(paths),
        }
        self._compare("first epoch", ways, make)

    def _shuffled(self, cold: bool) -> None:
        import read_batches as library

        paths = self.paths["contiguous"]
        ways: dict[str, Callable[[], object]] = {
            LIBRARY: partial(library.epoch, library.distributed(paths, BATCH, shuffle=True)),
            "in order": partial(library.epoch, library.distributed(paths, BATCH)),
        }
        self._compare(f"shuffled, {WARM}", {**ways, "raw read": self._raw(paths)})
        if cold:
            self._compare(f"shuffled, {COLD}", ways, partial(self.files.forget, paths))

    def _step(self) -> None:
        """Measure a program that computes for a fixed time while its next batch is read."""
        import numpy as np
        import read_batches as library

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
            self._compare(f"{_COMPUTED * 1000:g} ms of computing a batch, {layout}", ways)

    def _index(self) -> None:
        """Measure one index of a shuffled epoch, computed in batches as the library does."""
        import numpy as np
        from mpi4py import MPI

        from mpistrat.bench.tune import interleaved
        from mpistrat.data.pipeline.plan import ORDER_AHEAD_ROWS
        from mpistrat.data.rows.blocks import BlockOrder, Blocks

        def batches(rows: int) -> Callable[[int], None]:
            order = BlockOrder(rows, Blocks.of(self.files.ROW_BYTES, 0, np.array([0, rows])))

            def find(k: int) -> None:
                for i in range(0, k, ORDER_AHEAD_ROWS):
                    first = i % (rows - ORDER_AHEAD_ROWS)
                    order(np.arange(first, first + ORDER_AHEAD_ROWS), self.arguments.seed, 0)

            return find

        ways = {exponent: batches(10**exponent) for exponent in INDICES}
        each = 64 * ORDER_AHEAD_ROWS
        seconds = interleaved(MPI.COMM_SELF, ways, self.arguments.repetitions, each)
        for exponent, samples in seconds.items():
            self.report.add(f"an index of 10^{exponent}, shuffled", LIBRARY, 8, median(samples))

    def _beside_torch(self) -> None:
        if not self._torch:
            print("torch is left out" if self.arguments.no_torch else "torch is not installed, and left out")
            return
        import input_torch_by_hand as by_torch
        import read_batches as library

        paths = self.paths["contiguous"]
        for case, shuffle in (("torch, in order", False), ("torch, shuffled", True)):
            ways = {LIBRARY: partial(library.epoch, library.distributed(paths, BATCH, shuffle))}
            for name, workers, batched in (
                ("DataLoader", 0, False),
                ("DataLoader, batched", 0, True),
                ("DataLoader, 2 workers", 2, False),
            ):
                loader = by_torch.loader(paths, BATCH, shuffle, workers, batched)
                ways[name] = partial(by_torch.epoch, loader)
            if not shuffle:
                ways["raw read"] = self._raw(paths)
            self._compare(case, ways)

    def _memory(self) -> None:
        import peak_memory

        for way, program in self._programs().items():
            peak = peak_memory.peak([*program, *self.paths["contiguous"]])
            if peak is not None:
                self.report.add("memory", way, peak, 0.0)

    def _programs(self) -> dict[str, list[str]]:
        """Return the programs for measurements of memory: arguments of Python, without the files."""
        import read_batches
        import read_bytes

        folder, batch = Path(__file__).parent, str(BATCH)
        found = {
            LIBRARY: [read_batches.__file__, batch],
            "raw read": [read_bytes.__file__, str(BATCH * self.files.ROW_BYTES)],
            "h5py, slices": [str(folder / "input_h5py_by_hand.py"), batch],
        }
        if self._torch:
            by_torch = [str(folder / "input_torch_by_hand.py"), batch]
            found |= {"DataLoader": [*by_torch, "0"], "DataLoader, 2 workers": [*by_torch, "2"]}
        return found

    def _compare(
        self, case: str, ways: dict[str, Callable[[], object]], before: Callable[[], object] | None = None
    ) -> None:
        from mpi4py import MPI

        from mpistrat.bench.tune import interleaved

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder for the files")
    under_ranks.count(parser, "--mib", 512, "MiB of rows in each layout")
    parser.add_argument("--seed", type=int, default=0, help="seed of the contents of the files (%(default)s)")
    under_ranks.count(parser, "--repetitions", 5, "measurements of each program")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to a file")
    parser.add_argument("--no-torch", action="store_true", help="leave torch out, even if it is installed")
    arguments = parser.parse_args()
    if under_ranks.under_several_ranks():
        parser.error("input measures one rank: call it without a launcher")
    os.environ.update(under_ranks.one_thread(os.environ))
    sys.exit(Measurement(arguments).run())
