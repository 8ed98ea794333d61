"""The bytes of arrays into a file and out of it, and nothing else: what a disk can do."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np


def write(arrays: Sequence[np.ndarray], path: str) -> None:
    """One after another, to the disk, under another name first."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb", buffering=0) as file:
        for array in arrays:
            data = array.reshape(-1).view(np.uint8).data
            while len(data):  # a call writes 2 GiB at most
                data = data[file.write(data) :]
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def read(arrays: Sequence[np.ndarray], path: str) -> None:
    """Into arrays that are there."""
    with open(path, "rb", buffering=0) as file:
        for array in arrays:
            data = array.reshape(-1).view(np.uint8).data
            while len(data):
                count = file.readinto(data)
                if not count:
                    raise EOFError(path)
                data = data[count:]
