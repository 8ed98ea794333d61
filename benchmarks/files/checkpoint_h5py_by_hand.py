"""Writing and reading arrays of an HDF5 file with h5py alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

import h5py
import numpy as np


def write(arrays: Sequence[np.ndarray], path: str) -> None:
    """Write one dataset per array to the disk, under a temporary name first."""
    temporary = f"{path}.tmp"
    with h5py.File(temporary, "w") as file:
        for number, array in enumerate(arrays):
            file[str(number)] = array
    _to_disk(temporary, os.O_RDWR)
    os.replace(temporary, path)
    _to_disk(os.path.dirname(path), os.O_RDONLY)


def _to_disk(path: str, flags: int) -> None:
    descriptor = os.open(path, flags)
    os.fsync(descriptor)
    os.close(descriptor)


def read(arrays: Sequence[np.ndarray], path: str) -> None:
    """Read into existing arrays."""
    with h5py.File(path, "r") as file:
        for number, array in enumerate(arrays):
            file[str(number)].read_direct(array)
