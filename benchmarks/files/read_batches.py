"""Reading batches of the dataset "x" of HDF5 files with the library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import mpistrat
from mpistrat.data import Dataset


def dataset(files: Sequence[str], batch: int, shuffle: bool = False, prefetch: int = -1) -> Dataset:
    """Return a dataset of batches, of which only the first file is known."""
    rows = Dataset.from_hdf5(list(files), "x")
    if shuffle:
        rows = rows.shuffle(seed=0)
    return rows.batch(batch).prefetch(prefetch)


def distributed(files: Sequence[str], batch: int, shuffle: bool = False, prefetch: int = -1) -> Any:
    """Return a distributed dataset for one replica."""
    strategy = mpistrat.OneDeviceStrategy("/cpu:0")
    return strategy.experimental_distribute_dataset(dataset(files, batch, shuffle, prefetch))


def epoch(batches: Any, compute: Callable[[Any], object] | None = None) -> int:
    """Read all batches. Return their total bytes."""
    total = 0
    for batch in batches:
        total += batch.nbytes
        if compute is not None:
            compute(batch)
    return total


if __name__ == "__main__":
    epoch(distributed(sys.argv[2:], int(sys.argv[1])))
