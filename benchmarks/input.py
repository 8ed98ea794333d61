"""Compare `mpistrat bench input` with h5py alone, and with the DataLoader of torch if it is installed."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

from mpistrat.bench import input as subject
from mpistrat.bench.input import BATCH
from mpistrat.bench.measuring.report import LIBRARY


class Comparison(subject.Measurement):
    """The measurement of all cases with h5py in addition, and of two cases with torch."""

    def __init__(self, arguments):
        super().__init__(arguments)
        self._torch = not arguments.no_torch and importlib.util.find_spec("torch") is not None

    def rivals(self, paths, decoded):
        import input_h5py_by_hand as by_h5py

        ways = {"h5py, slices": partial(by_h5py.slices, paths, BATCH)}
        if not decoded:  # without a cache it decodes chunks twice
            ways["h5py, read_direct"] = partial(by_h5py.read_direct, paths, BATCH)
        return ways

    def programs(self):
        folder, batch = Path(__file__).parent, str(BATCH)
        found = super().programs()
        found["h5py, slices"] = [str(folder / "input_h5py_by_hand.py"), batch]
        if self._torch:
            by_torch = [str(folder / "input_torch_by_hand.py"), batch]
            found |= {"DataLoader": [*by_torch, "0"], "DataLoader, 2 workers": [*by_torch, "2"]}
        return found

    def further(self):
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


if __name__ == "__main__":
    parser = subject.parser()
    parser.add_argument("--no-torch", action="store_true", help="leave torch out, even if it is installed")
    sys.exit(subject.run(parser, sys.argv[1:], Comparison))
