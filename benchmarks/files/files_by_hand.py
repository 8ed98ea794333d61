"""Describing many HDF5 files with h5py and mpi4py."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from typing import Any, TypeAlias

import h5py

# For each file the number of rows, and the dtype and shape of a row.
Shapes: TypeAlias = "list[tuple[int, str, tuple[int, ...]]]"


def every_rank(pattern: str) -> Shapes:
    """Describe all files on every rank, as a program without communication does."""
    return _described(sorted(glob.glob(pattern)))


def own_part(comm: Any, pattern: str) -> Shapes:
    """List the files on one rank, describe each on one rank, and gather the results on all ranks."""
    paths = comm.bcast(sorted(glob.glob(pattern)) if comm.rank == 0 else None)
    parts = comm.allgather(_described(paths[comm.rank :: comm.size]))
    return [parts[i % comm.size][i // comm.size] for i in range(len(paths))]


def _described(paths: Sequence[str]) -> Shapes:
    found = []
    for path in paths:
        with h5py.File(path, "r", locking=False) as file:
            x = file["x"]
            found.append((x.shape[0], x.dtype.str, x.shape[1:]))
    return found
