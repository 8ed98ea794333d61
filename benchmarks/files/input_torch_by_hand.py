"""Reading batches of the dataset "x" of HDF5 files with the DataLoader of torch."""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

with contextlib.suppress(ImportError):  # without torch this module is not used
    import torch
    from torch.utils.data import DataLoader


class Rows:
    """The rows of files. Each process opens the files that it needs once."""

    def __init__(self, files: Sequence[str]):
        self._files = list(files)
        self._open: dict[int, Any] = {}
        self._ends = []
        total = 0
        for path in files:
            with h5py.File(path, "r") as file:
                total += len(file["x"])
            self._ends.append(total)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> torch.Tensor:
        x, row = self._place(i)
        return torch.from_numpy(x[row])

    def _place(self, i: int) -> tuple[Any, int]:
        number = bisect_right(self._ends, i)
        if number not in self._open:
            self._open[number] = h5py.File(self._files[number], "r")["x"]
        return self._open[number], i - (self._ends[number - 1] if number else 0)


class Batches(Rows):
    """The rows of files, read in batches. Neighbouring rows are read at once."""

    def __getitems__(self, wanted: list[int]) -> torch.Tensor:
        parts = []
        start = 0
        while start < len(wanted):
            x, row = self._place(wanted[start])
            stop = start + 1
            while stop < len(wanted) and wanted[stop] == wanted[stop - 1] + 1 and row + stop - start < len(x):
                stop += 1
            parts.append(x[row : row + stop - start])
            start = stop
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))


def loader(files: Sequence[str], batch: int, shuffle: bool, workers: int, batched: bool) -> DataLoader:
    """Return a loader that keeps its workers between epochs."""
    return DataLoader(
        Batches(files) if batched else Rows(files),
        batch_size=batch,
        shuffle=shuffle,
        num_workers=workers,
        collate_fn=_as_it_is if batched else None,
        persistent_workers=workers > 0,
    )


def epoch(loader: DataLoader) -> int:
    """Read all batches. Return their total bytes."""
    return sum(batch.numel() * batch.element_size() for batch in loader)


def _as_it_is(batch: torch.Tensor) -> torch.Tensor:
    return batch


if __name__ == "__main__":
    epoch(loader(sys.argv[3:], int(sys.argv[1]), False, int(sys.argv[2]), False))
