"""All-reduce of arrays that are views of one buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

PIECE = 1 << 20  # float32 numbers: 4 MiB


def views(shapes: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a zeroed buffer, and consecutive views of it with these shapes."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    flat = np.zeros(ends[-1], np.float32)
    return flat, [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]


def in_pieces(comm: Any, flat: np.ndarray) -> Callable[[int], None]:
    """Return a function that reduces a buffer k times in place, in pieces that fit the CPU cache."""
    pieces = [flat[start : start + PIECE] for start in range(0, len(flat), PIECE)]

    def times(k: int) -> None:
        for _ in range(k):
            for piece in pieces:
                comm.Allreduce(MPI.IN_PLACE, piece)

    return times
