"""Reading batches out of HDF5 files, warm (from memory) and cold (from the disk)."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mpistrat.bench import launch
from mpistrat.bench.report import LIBRARY, Report

BATCH = 64
WARM, COLD = "warm", "cold"
_COMPUTED = 0.005  # seconds of a step
_INDICES = (6, 9, 12)  # rows: ten to the power of these
_SHUFFLED = f"{LIBRARY}, shuffled"
_UNTHREADED = f"{LIBRARY}, prefetch(0)"


def main(argv: list[str]) -> int | None:
    """Run the subject with these arguments."""
    parser = argparse.ArgumentParser(prog="mpistrat bench input", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder to make the files in")
    parser.add_argument(
        "--mib", type=launch.positive, default=512, help="MiB of rows in each layout (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is in the files (%(default)s)")
    parser.add_argument(
        "--repetitions", type=launch.positive, default=5, help="measurements of each way (%(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows to a file")
    parser.add_argument("--no-torch", action="store_true", help="leave torch out, though it is installed")
    arguments = parser.parse_args(argv)
    if launch.under_several_ranks():
        parser.error("input measures one rank: call it without a launcher")
    os.environ.update(launch.one_thread(os.environ))
    return _Measurement(arguments).run()


class _Measurement:
    """All cases, one after another."""

    def __init__(self, arguments: argparse.Namespace):
        # Here, since these load the BLAS, whose number of threads is set by now.
        from mpistrat.bench import input_files

        self._files = input_files
        self._arguments = arguments
        self._report = Report("input", 1)
        self._nbytes = arguments.mib << 20
        self._torch = not arguments.no_torch and importlib.util.find_spec("torch") is not None
        arguments.data.mkdir(parents=True, exist_ok=True)
        self._paths = {
            name: input_files.made(arguments.data, name, how, self._nbytes, arguments.seed)
            for name, how in input_files.layouts().items()
        }

    def run(self) -> int:
        """Measure, print and write."""
        cold = self._files.forget(self._paths["contiguous"])
        self._in_order(cold)
        self._shuffled(cold)
        self._index()
        self._step()
        if self._torch:
            self._against_torch()
        self._memory()
        print(self._report.table())
        if not cold:
            print(
                "nothing is measured cold: this system does not drop files from its memory when it is told to"
            )
        if not self._torch:
            print("torch is left out" if self._arguments.no_torch else "torch is not installed, and left out")
        if self._arguments.json:
            self._report.write_json(self._arguments.json)
        return 0

    def _in_order(self, cold: bool) -> None:
        from mpistrat.bench import input_h5py_by_hand as by_h5py
        from mpistrat.bench import input_raw_by_hand as raw
        from mpistrat.bench import input_with_library as library

        for layout, paths in self._paths.items():
            stored = layout in ("gzip", "zstd")
            ways: dict[str, Callable[[], object]] = {
                LIBRARY: partial(library.epoch, library.distributed(paths, BATCH)),
                _UNTHREADED: partial(library.epoch, library.distributed(paths, BATCH, prefetch=0)),
                "h5py, slices": partial(by_h5py.slices, paths, BATCH),
                "h5py, read_direct": partial(by_h5py.read_direct, paths, BATCH),
            }
            if stored:
                del ways["h5py, read_direct"]  # without a cache it would decode chunks twice
            else:
                ways["raw read"] = partial(raw.epoch, paths, BATCH * self._files.ROW_BYTES)
            self._compare(f"{layout}, {WARM}", ways)
            if cold and not stored:
                self._compare(f"{layout}, {COLD}", ways, partial(self._files.forget, paths))

    def _shuffled(self, cold: bool) -> None:
        from mpistrat.bench import input_with_library as library

        paths = self._paths["contiguous"]
        ways: dict[str, Callable[[], object]] = {
            LIBRARY: partial(library.epoch, library.distributed(paths, BATCH, shuffle=True)),
            "in order": partial(library.epoch, library.distributed(paths, BATCH)),
        }
        self._compare(f"shuffled, {WARM}", ways)
        if cold:
            self._compare(f"shuffled, {COLD}", ways, partial(self._files.forget, paths))

    def _index(self) -> None:
        """One index of a shuffled epoch, in batches of as many as the library finds at once."""
        import numpy as np
        from mpi4py import MPI

        from mpistrat.bench.timing import interleaved, median
        from mpistrat.data.blocks import BlockOrder, Blocks
        from mpistrat.data.plan import ORDER_AHEAD_ROWS

        def batches(order: BlockOrder) -> Callable[[int], None]:
            def find(k: int) -> None:
                for i in range(0, k, ORDER_AHEAD_ROWS):
                    order(np.arange(i, i + ORDER_AHEAD_ROWS), self._arguments.seed, 0)

            return find

        ways = {
            exponent: batches(
                BlockOrder(10**exponent, Blocks.of(self._files.ROW_BYTES, 0, np.array([0, 10**exponent])))
            )
            for exponent in _INDICES
        }
        each = 64 * ORDER_AHEAD_ROWS
        seconds = interleaved(MPI.COMM_SELF, ways, self._arguments.repetitions, each)
        for exponent, samples in seconds.items():
            self._report.add(f"an index of 10^{exponent}, shuffled", LIBRARY, 8, median(samples))

    def _step(self) -> None:
        """A program that computes for as long as it says, and finds its batches read when it is done."""
        import numpy as np

        from mpistrat.bench import input_with_library as library

        matrix = np.ones((256, 256), np.float32)
        times = _calls_within(_COMPUTED, lambda: matrix @ matrix)

        def compute(batch: Any) -> None:
            for _ in range(times):
                matrix @ matrix

        steps = -(-self._nbytes // self._files.ROW_BYTES // BATCH)
        for layout in ("contiguous", *(["zstd"] if "zstd" in self._paths else ["gzip"])):
            paths = self._paths[layout]
            ways: dict[str, Callable[[], object]] = {
                LIBRARY: partial(library.epoch, library.distributed(paths, BATCH), compute),
                _UNTHREADED: partial(library.epoch, library.distributed(paths, BATCH, prefetch=0), compute),
                "computing alone": lambda: deque(map(compute, range(steps)), maxlen=0),
                "reading alone": partial(library.epoch, library.distributed(paths, BATCH)),
            }
            self._compare(f"{_COMPUTED * 1000:g} ms of computing a batch, {layout}", ways)

    def _against_torch(self) -> None:
        from mpistrat.bench import input_raw_by_hand as raw
        from mpistrat.bench import input_torch_by_hand as by_torch
        from mpistrat.bench import input_with_library as library

        paths = self._paths["contiguous"]
        for case, shuffle in (("torch, in order", False), ("torch, shuffled", True)):
            ways: dict[str, Callable[[], object]] = {
                LIBRARY: partial(library.epoch, library.distributed(paths, BATCH, shuffle))
            }
            for name, workers, batched in (
                ("DataLoader", 0, False),
                ("DataLoader, batched", 0, True),
                ("DataLoader, 2 workers", 2, False),
            ):
                loader = by_torch.loader(paths, BATCH, shuffle, workers, batched)
                ways[name] = partial(by_torch.epoch, loader)
            if not shuffle:  # what nobody is faster than
                ways["raw read"] = partial(raw.epoch, paths, BATCH * self._files.ROW_BYTES)
            self._compare(case, ways)

    def _memory(self) -> None:
        from mpistrat.bench import memory

        folder, paths, batch = Path(__file__).parent, self._paths["contiguous"], str(BATCH)
        programs = {
            LIBRARY: ["input_with_library.py", batch],
            "h5py, slices": ["input_h5py_by_hand.py", batch],
            "raw read": ["input_raw_by_hand.py", str(BATCH * self._files.ROW_BYTES)],
        }
        if self._torch:
            programs["DataLoader"] = ["input_torch_by_hand.py", batch, "0"]
            programs["DataLoader, 2 workers"] = ["input_torch_by_hand.py", batch, "2"]
        for way, (name, *options) in programs.items():
            peak = memory.peak([str(folder / name), *options, *paths])
            if peak is not None:
                self._report.add("memory", way, peak, 0.0)

    def _compare(
        self, case: str, ways: dict[str, Callable[[], object]], before: Callable[[], object] | None = None
    ) -> None:
        from mpi4py import MPI

        from mpistrat.bench.timing import interleaved, median

        def times(way: Callable[[], object]) -> Callable[[int], object]:
            return lambda k: [way() for _ in range(k)]

        seconds = interleaved(
            MPI.COMM_SELF,
            {name: times(way) for name, way in ways.items()},
            self._arguments.repetitions,
            warmup=1,
            before=before,
        )
        for way, samples in seconds.items():
            self._report.add(case, way, self._nbytes, median(samples))


def _calls_within(seconds: float, call: Callable[[], object]) -> int:
    """How often a function can be called in that time."""
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
