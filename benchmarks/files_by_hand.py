"""Finding out what many HDF5 files hold, with h5py and mpi4py."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from typing import Any, TypeAlias

import h5py

# For each file the number of rows, and type and shape of one.
Shapes: TypeAlias = "list[tuple[int, str, tuple[int, ...]]]"


def every_rank(pattern: str) -> Shapes:
    """All files opened by every rank, as a program does that knows nothing of the others."""
    return _described(sorted(glob.glob(pattern)))


def own_part(comm: Any, pattern: str) -> Shapes:
    """The files found by one rank, each described by one, and told to all."""
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
