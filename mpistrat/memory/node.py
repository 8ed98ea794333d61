"""The memory of a node, through which its ranks exchange data and synchronize.

It is a file in memory without a name, which all ranks map. It disappears however the program ends. Arrays on it stay
valid for as long as they exist; arrays on an MPI window would not, because MPI frees the window's memory.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpistrat.process import private_file
from mpistrat.process.cache import Cache
from mpistrat.record.layout import Kind
from mpistrat.record.ring import timed

FOLDER = "/dev/shm"


class Shared(NamedTuple):
    """Shared bytes: a row for every rank of a node, and bytes for all ranks together."""

    rows: np.ndarray
    common: np.ndarray


class NoSharedMemoryError(OSError):
    """The ranks of a node cannot share this much memory. Raised on all of them."""


def share(node: Any, row_bytes: int, common: int = 0) -> Shared:
    """Return zeroed memory that all ranks of ``node`` share: whole pages for each rank and for all. Collective.

    Raise NoSharedMemoryError on every rank if memory is short, or a rank cannot open the file of another.
    """
    row_bytes, common = pages(row_bytes), pages(common)
    of_ranks = node.size * row_bytes

    def reserve() -> None:
        # Reserved now, a lack of memory is an error here, not a SIGBUS at the first use. Each rank reserves its own
        # part, which the system then places near its core.
        parts = [(node.rank * row_bytes, row_bytes), (of_ranks, common if node.rank == 0 else 0)]
        for start, nbytes in parts:
            if nbytes:
                _reserve(descriptor, start, nbytes)

    try:
        descriptor = private_file.share(node, FOLDER, of_ranks + common)
        try:
            memory = mapped(node, descriptor, of_ranks + common, reserve)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NoSharedMemoryError(
            f"{node.size} ranks of a node cannot share {of_ranks + common} bytes in {FOLDER}: {error}"
        ) from None
    return Shared(memory[:of_ranks].reshape(node.size, row_bytes), memory[of_ranks:])


def share_in_pieces(owner: object, node: Any, nbytes: int, common: int) -> tuple[np.ndarray, int]:
    """Return zeroed memory that all ranks of ``node`` share, and its descriptor, which lives as long as ``owner``.

    The first ``nbytes``, in whole pages, are not reserved: without ``os.posix_fallocate`` their use may be a SIGBUS. At
    most half of the free shared memory is taken, since MPI and others need some later. Collective; raise as `share`.
    """
    first, common = pages(nbytes), pages(common)

    def reserve() -> None:
        if node.rank == 0:
            _check_free(descriptor, nbytes)
        os.posix_fallocate(descriptor, first, common)

    try:
        descriptor = private_file.share(node, FOLDER, first + common)
        # Not at exit: a thread that reads may still use the descriptor.
        weakref.finalize(owner, os.close, descriptor).atexit = False
        return mapped(node, descriptor, first + common, reserve), descriptor
    except OSError as error:
        raise NoSharedMemoryError(
            f"{node.size} ranks of a node cannot share {nbytes} bytes in {FOLDER}: {error}"
        ) from None


def _check_free(descriptor: int, nbytes: int) -> None:
    """Raise OSError if ``nbytes`` are more than half of the free bytes of the file system."""
    system = os.fstatvfs(descriptor)
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and 2 * nbytes > free:  # a file system without a limit says that it has 0 blocks
        raise OSError(f"{free} bytes are free there, of which at most half are taken")


def mapped(node: Any, descriptor: int, nbytes: int, reserve: Callable[[], None]) -> np.ndarray:
    """Map a file after ``reserve()``. Raise OSError on all ranks if one rank fails. Collective over ``node``."""
    error: Exception | None = None
    try:
        reserve()
        memory = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    except (OSError, ValueError) as problem:  # mmap raises these where file sizes are limited
        error = problem
    problems = private_file.on_all_ranks(node, error)
    if problems:
        raise OSError(problems[0])
    return memory


def _reserve(descriptor: int, start: int, nbytes: int) -> None:
    os.posix_fallocate(descriptor, start, nbytes)


def pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


_HEADER = 8  # bytes of a rank's token
_MOST_VIEWS = 1024
_LINE = 64  # bytes of a cache line

_Key = tuple[int, np.dtype, int, int]  # generation, dtype, length, place


class NodeMemory:
    """Two slots for every rank of a node, used alternately, so that one barrier per piece is enough.

    A rank writes to its slot, waits at a barrier, and reads the slots of the other ranks. It may then write to its
    other slot at once: ranks finish reading that slot before they enter the barrier.

    ``results`` are areas for the combination of all slots, two with several nodes, and ``result`` is the first. It and
    the number ``verdict`` are written after one barrier, and read after the next. ``generation`` is the slot, 0 or 1,
    that each rank may write to now. ``meetings`` counts the barriers that this rank entered. An error before a barrier
    does not count it.
    """

    def __init__(self, node: Any, slot_bytes: int, between_nodes: bool, same_place_bytes: int):
        self.rank: int = node.rank
        self.size: int = node.size
        self.slot_bytes = slot_bytes
        self._same_place_bytes = same_place_bytes
        results = (2 if between_nodes else 1) * slot_bytes
        headers = _HEADER * self.size
        shared = share(node, 2 * self.slot_bytes, results + 2 * headers + _HEADER)
        slots = shared.rows[:, : 2 * self.slot_bytes].reshape(self.size, 2, self.slot_bytes)
        self._slots = slots[:, 0], slots[:, 1]
        self.results = tuple(shared.common[:results].reshape(-1, self.slot_bytes))
        self.result = self.results[0]
        tokens = memoryview(shared.common.data)[results:]
        self._tokens = tokens[:headers].cast("q"), tokens[headers : 2 * headers].cast("q")
        self.verdict = tokens[2 * headers : 2 * headers + _HEADER].cast("q")
        self._views = Cache[_Key, tuple[np.ndarray, list[np.ndarray]]](_MOST_VIEWS)
        self._totals = Cache[tuple[np.dtype, int], np.ndarray](_MOST_VIEWS)
        self.generation = 0
        self.meetings = 0
        self._barrier = node.Barrier

    def slots(self, dtype: np.dtype, count: int, generation: int | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return this rank's slot and the slots of all ranks, as arrays of ``count`` elements."""
        if generation is None:
            generation = self.generation
        key = (generation, dtype, count, 0)
        return self._views.get(key) or self._views_at(key, 0)

    def _views_at(self, key: _Key, start: int) -> tuple[np.ndarray, list[np.ndarray]]:
        generation, dtype, count, _ = key
        rows = [row[start : start + count * dtype.itemsize].view(dtype) for row in self._slots[generation]]
        return self._views.keep(key, (rows[self.rank], rows))

    def total(self, dtype: np.dtype, count: int) -> np.ndarray:
        """Return the beginning of `result` as an array of ``count`` elements."""
        total = self._totals.get((dtype, count))
        if total is None:
            total = self._totals.keep((dtype, count), self.result[: count * dtype.itemsize].view(dtype))
        return total

    def pack_values(self, values: np.ndarray) -> list[np.ndarray]:
        """Write to this rank's slot. Return the slots of all ranks, to be read after the next barrier.

        Large values rotate through a slot: data that is dirty in another core's cache is several times slower to read.
        """
        position = stride = 0
        if values.nbytes > self._same_place_bytes:
            stride = -(-values.nbytes // _LINE) * _LINE
            position = (self.meetings >> 1) % max(1, self.slot_bytes // stride)
        key = (self.generation, values.dtype, len(values), position)
        views = self._views.get(key)
        if views is None:
            views = self._views_at(key, position * stride)
        _copy(views[0], values)
        return views[1]

    def meet(self) -> None:
        """Wait for all ranks of the node. Their slots may be read afterwards."""
        self.generation ^= 1
        self.meetings += 1
        self._barrier()

    def barrier_with_token(self, token: int) -> bool:
        """Wait as `meet` does, exchange one number, and return whether all ranks gave the same number.

        Signal handlers run where a function begins and after a call into C: before the first line or after the barrier.
        """
        tokens = self._tokens[self.generation]
        tokens[self.rank] = token
        self.generation ^= 1
        self.meetings += 1
        self._barrier()
        return tokens.tolist().count(token) == self.size

    def agreed(self) -> bool:
        """Return whether all ranks gave the same number in the last `barrier_with_token`."""
        return len(set(self._tokens[self.generation ^ 1].tolist())) == 1


def _copy_to(slot: np.ndarray, values: np.ndarray) -> None:
    slot[...] = values


_copy = timed(Kind.REDUCE_PACK, _copy_to)
