"""Memory that the ranks of a node share.

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

FOLDER = "/dev/shm"


class Shared(NamedTuple):
    """Shared bytes: a row for every rank of a node, and bytes for all ranks together."""

    stretches: np.ndarray
    common: np.ndarray


class NoSharedMemoryError(OSError):
    """The ranks of a node cannot share this much memory. Raised on all of them."""


def share(node: Any, own: int, common: int = 0) -> Shared:
    """Return zeroed memory that all ranks of ``node`` share: whole pages for each rank and for all. Collective.

    Raise NoSharedMemoryError on every rank if memory is short, or a rank cannot open the file of another.
    """
    own, common = pages(own), pages(common)
    stretches = node.size * own

    def reserve() -> None:
        # Reserved now, a lack of memory is an error here, not a SIGBUS at the first use. Each rank reserves its own
        # part, which the system then places near its core.
        parts = [(node.rank * own, own), (stretches, common if node.rank == 0 else 0)]
        for start, nbytes in parts:
            if nbytes:
                _reserve(descriptor, start, nbytes)

    try:
        descriptor = private_file.share(node, FOLDER, stretches + common)
        try:
            memory = mapped(node, descriptor, stretches + common, reserve)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NoSharedMemoryError(
            f"{node.size} ranks of a node cannot share {stretches + common} bytes in {FOLDER}: {error}"
        ) from None
    return Shared(memory[:stretches].reshape(node.size, own), memory[stretches:])


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
