"""All-reduce of one array with MPI alone: in pieces that fit the CPU cache, or by a non-blocking call and a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

PIECE = 1 << 20  # float32 numbers: 4 MiB


def _pieces(array: np.ndarray) -> list[list[Any]]:
    return [[array[start : start + PIECE], MPI.FLOAT] for start in range(0, len(array), PIECE)]


def in_pieces(comm: Any, send: np.ndarray, receive: np.ndarray) -> Callable[[int], None]:
    """Return a function that reduces ``send`` k times."""
    pairs = list(zip(_pieces(send), _pieces(receive), strict=True))

    def times(k: int) -> None:
        for _ in range(k):
            for one, other in pairs:
                comm.Allreduce(one, other, MPI.SUM)

    return times


def in_place(comm: Any, array: np.ndarray) -> Callable[[int], None]:
    """Return a function that reduces an array k times in place, in pieces."""
    pieces = _pieces(array)

    def times(k: int) -> None:
        for _ in range(k):
            for piece in pieces:
                comm.Allreduce(MPI.IN_PLACE, piece, MPI.SUM)

    return times


def not_blocking(comm: Any, send: np.ndarray, receive: np.ndarray) -> Callable[[int], None]:
    """Return a function that reduces ``send`` k times. Some libraries have other algorithms for this call."""
    one, other, op = [send, MPI.FLOAT], [receive, MPI.FLOAT], MPI.SUM

    def times(k: int) -> None:
        for _ in range(k):
            comm.Iallreduce(one, other, op).Wait()

    return times
