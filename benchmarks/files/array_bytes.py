"""Writing and reading the bytes of arrays only: the bound of the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np


def write(arrays: Sequence[np.ndarray], path: str) -> None:
    """Write arrays to the disk one after another, under a temporary name first."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb", buffering=0) as file:
        for array in arrays:
            data = array.reshape(-1).view(np.uint8).data
            while len(data):  # one call writes at most 2 GiB
                data = data[file.write(data) :]
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def read(arrays: Sequence[np.ndarray], path: str) -> None:
    """Read into existing arrays."""
    with open(path, "rb", buffering=0) as file:
        for array in arrays:
            data = array.reshape(-1).view(np.uint8).data
            while len(data):
                count = file.readinto(data)
                if not count:
                    raise EOFError(path)
                data = data[count:]
