"""All-reduce of many arrays with MPI alone: of views of one buffer, and of separate arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from allreduce_by_hand import PIECE
from mpi4py import MPI

SMALL = 16 << 10  # 64 KiB: for smaller arrays a message of their own takes longer than a copy


def views(shapes: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a zeroed buffer, and consecutive views of it with these shapes."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    flat = np.zeros(ends[-1], np.float32)
    return flat, [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]


class Separate:
    """The sums of separate arrays over all ranks, in memory that is used again.

    Small arrays are packed. Large ones travel in pieces that fit the CPU cache.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    arrays : sequence of numpy.ndarray of float32

    Attributes
    ----------
    totals : list of numpy.ndarray
    """

    def __init__(self, comm: Any, arrays: Sequence[np.ndarray]):
        self._comm = comm
        self.totals: list[Any] = [None] * len(arrays)
        self._packs: list[tuple[list[np.ndarray], np.ndarray]] = []
        self._pieces: list[tuple[np.ndarray, np.ndarray]] = []
        small: list[int] = []
        for i, array in enumerate(arrays):
            if array.size >= SMALL:
                self.totals[i] = np.zeros(array.shape, np.float32)
                flat, total = array.reshape(-1), self.totals[i].reshape(-1)
                for start in range(0, array.size, PIECE):
                    self._pieces.append((flat[start : start + PIECE], total[start : start + PIECE]))
                continue
            if sum(arrays[j].size for j in small) + array.size > PIECE:
                self._pack(arrays, small)
                small = []
            small.append(i)
        if small:
            self._pack(arrays, small)

    def _pack(self, arrays: Sequence[np.ndarray], members: Sequence[int]) -> None:
        mine = [arrays[i].reshape(-1) for i in members]
        pack = np.zeros(sum(map(len, mine)), np.float32)
        self._packs.append((mine, pack))
        start = 0
        for i in members:
            self.totals[i] = pack[start : start + arrays[i].size].reshape(arrays[i].shape)
            start += arrays[i].size

    def times(self, k: int) -> None:
        """Reduce the arrays k times."""
        all_reduce = self._comm.Allreduce
        for _ in range(k):
            for mine, pack in self._packs:
                np.concatenate(mine, out=pack)
                all_reduce(MPI.IN_PLACE, pack)
            for mine_, total in self._pieces:
                all_reduce(mine_, total)
