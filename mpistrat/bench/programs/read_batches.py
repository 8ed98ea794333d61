"""Reading batches of the dataset "x" of HDF5 files with the library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import mpistrat
from mpistrat.data import Dataset


def distributed(files: Sequence[str], batch: int, shuffle: bool = False, prefetch: int = -1) -> Any:
    """Return a distributed dataset for one replica."""
    dataset = Dataset.from_hdf5(list(files), "x")
    if shuffle:
        dataset = dataset.shuffle(seed=0)
    strategy = mpistrat.OneDeviceStrategy("/cpu:0")
    return strategy.experimental_distribute_dataset(dataset.batch(batch).prefetch(prefetch))


def epoch(dataset: Any, compute: Callable[[Any], object] | None = None) -> int:
    """Read all batches. Return their total bytes."""
    total = 0
    for batch in dataset:
        total += batch.nbytes
        if compute is not None:
            compute(batch)
    return total


if __name__ == "__main__":
    epoch(distributed(sys.argv[2:], int(sys.argv[1])))
