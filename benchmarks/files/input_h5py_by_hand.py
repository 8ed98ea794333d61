"""Reading batches of the dataset "x" of HDF5 files in order with h5py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import h5py
import numpy as np

with contextlib.suppress(ImportError):
    import hdf5plugin  # noqa: F401 (for zstd)


def slices(files: Sequence[str], batch: int) -> int:
    """Read slices, as tutorials do. Return the total bytes."""
    total = 0
    for path in files:
        with h5py.File(path, "r") as file:
            x = file["x"]
            for start in range(0, len(x), batch):
                total += x[start : start + batch].nbytes
    return total


def read_direct(files: Sequence[str], batch: int) -> int:
    """Read into one buffer without a chunk cache, which only takes time here. Return the total bytes."""
    total, buffer = 0, None
    for path in files:
        with h5py.File(path, "r", rdcc_nbytes=0) as file:
            x = file["x"]
            if buffer is None:
                buffer = np.empty((batch, *x.shape[1:]), x.dtype)
            for start in range(0, len(x), batch):
                count = min(batch, len(x) - start)
                x.read_direct(buffer, np.s_[start : start + count], np.s_[:count])
                total += count * buffer[0].nbytes
    return total


if __name__ == "__main__":
    slices(sys.argv[2:], int(sys.argv[1]))
