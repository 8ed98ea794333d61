"""Memory that the ranks of a node share.

It is a file in memory without a name, which all ranks map. It disappears however the program ends. Arrays on it stay
valid for as long as they exist; arrays on an MPI window would not, because MPI frees the window's memory.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

import numpy as np

from mpistrat.runtime.process import private_file

FOLDER = "/dev/shm"


class Shared(NamedTuple):
    """Shared bytes for every rank of a node, and bytes for all ranks together.

    Attributes
    ----------
    stretches : numpy.ndarray of uint8, shape (ranks, bytes)
    common : numpy.ndarray of uint8
    """

    stretches: np.ndarray
    common: np.ndarray


class NoSharedMemoryError(OSError):
    """The ranks of a node cannot share this much memory. Raised on all of them."""


def share(node: Any, own: int, common: int = 0) -> Shared:
    """Return zeroed memory that all ranks of ``node`` share. Collective over ``node``.

    Parameters
    ----------
    node : mpi4py.MPI.Intracomm
        Ranks that can share memory.
    own, common : int
        Bytes for each rank and for all together, rounded up to pages.

    Raises
    ------
    NoSharedMemoryError
        On every rank of the node, if memory is exhausted, or if a rank cannot open the file of another rank.
    """
    own, common = pages(own), pages(common)
    stretches = node.size * own
    try:
        descriptor = private_file.share(node, FOLDER, stretches + common)
        try:
            memory = _map(node, descriptor, own, common)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NoSharedMemoryError(
            f"{node.size} ranks of a node cannot share {stretches + common} bytes in {FOLDER}: {error}"
        ) from None
    return Shared(memory[:stretches].reshape(node.size, own), memory[stretches:])


def _map(node: Any, descriptor: int, own: int, common: int) -> np.ndarray:
    """Reserve and map a file. Raise OSError on all ranks if one rank fails."""
    stretches = node.size * own
    error: Exception | None = None
    try:
        # Reserved now, a lack of memory is an error here, not a SIGBUS at the first use. Each rank reserves its own
        # part, which the system then places near its core.
        _reserve(descriptor, node.rank * own, own)
        if node.rank == 0:
            _reserve(descriptor, stretches, common)
        memory = np.frombuffer(mmap.mmap(descriptor, stretches + common), np.uint8)
    except (OSError, ValueError) as problem:  # mmap raises these where file sizes are limited
        error = problem
    problems = private_file.on_all_ranks(node, error)
    if problems:
        raise OSError(problems[0])
    return memory


def _reserve(descriptor: int, start: int, nbytes: int) -> None:
    if nbytes:
        os.posix_fallocate(descriptor, start, nbytes)


def pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
