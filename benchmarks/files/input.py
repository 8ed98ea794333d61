"""Compare `mpistrat bench input` with h5py alone, and with the DataLoader of torch if it is installed.

Also measures the index of a shuffled epoch, and peak memory.
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from statistics import median

from mpistrat.bench import input as subject
from mpistrat.bench.input import BATCH
from mpistrat.bench.measuring.report import LIBRARY

INDICES = (6, 9, 12)  # numbers of rows, as powers of ten


class Comparison(subject.Measurement):
    """The measurement of all cases with h5py in addition, of indices and memory, and of two cases with torch."""

    def __init__(self, arguments):
        super().__init__(arguments)
        self._torch = not arguments.no_torch and importlib.util.find_spec("torch") is not None

    def rivals(self, paths, decoded):
        import input_h5py_by_hand as by_h5py

        ways = {"h5py, slices": partial(by_h5py.slices, paths, BATCH)}
        if not decoded:  # without a cache it decodes chunks twice
            ways["h5py, read_direct"] = partial(by_h5py.read_direct, paths, BATCH)
        return ways

    def further(self):
        self._index()
        self._beside_torch()
        self._memory()

    def _index(self):
        """Measure one index of a shuffled epoch, computed in batches as the library does."""
        import numpy as np
        from mpi4py import MPI

        from mpistrat.bench.measuring.timing import interleaved
        from mpistrat.data.pipeline.plan import ORDER_AHEAD_ROWS
        from mpistrat.data.rows.blocks import BlockOrder, Blocks

        def batches(rows):
            order = BlockOrder(rows, Blocks.of(self.files.ROW_BYTES, 0, np.array([0, rows])))

            def find(k):
                for i in range(0, k, ORDER_AHEAD_ROWS):
                    first = i % (rows - ORDER_AHEAD_ROWS)
                    order(np.arange(first, first + ORDER_AHEAD_ROWS), self.arguments.seed, 0)

            return find

        ways = {exponent: batches(10**exponent) for exponent in INDICES}
        each = 64 * ORDER_AHEAD_ROWS
        seconds = interleaved(MPI.COMM_SELF, ways, self.arguments.repetitions, each)
        for exponent, samples in seconds.items():
            self.report.add(f"an index of 10^{exponent}, shuffled", LIBRARY, 8, median(samples))

    def _beside_torch(self):
        if not self._torch:
            print("torch is left out" if self.arguments.no_torch else "torch is not installed, and left out")
            return
        import input_torch_by_hand as by_torch

        from mpistrat.bench.programs import read_batches as library

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
                ways["raw read"] = self.raw(paths)
            self.compare(case, ways)

    def _memory(self):
        import peak_memory

        for way, program in self._programs().items():
            peak = peak_memory.peak([*program, *self.paths["contiguous"]])
            if peak is not None:
                self.report.add("memory", way, peak, 0.0)

    def _programs(self):
        """Return the programs for measurements of memory: arguments of Python, without the files."""
        from mpistrat.bench.programs import read_batches, read_bytes

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


if __name__ == "__main__":
    parser = subject.parser()
    parser.add_argument("--no-torch", action="store_true", help="leave torch out, even if it is installed")
    sys.exit(subject.run(parser, sys.argv[1:], Comparison))
