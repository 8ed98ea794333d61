"""Memory that the ranks of a node share.

A file in memory, mapped by all and unlinked at once: nothing is left behind however the program ends, and
whoever holds an array of it may use it for as long as it likes. An MPI window would be freed under it.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

import numpy as np

from mpistrat.runtime.process import private_file

_FOLDER = "/dev/shm"
_TOKEN_BYTES = 16


class Shared(NamedTuple):
    """A stretch of bytes for every rank of a node, and one for all of them.

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
    """Zeroed memory that all ranks of ``node`` see. Collective over it.

    Parameters
    ----------
    node : mpi4py.MPI.Intracomm
        Ranks that can share memory.
    own, common : int
        Bytes for each rank and for all together, rounded up to pages.

    Raises
    ------
    NoSharedMemoryError
        On every rank of the node, if there is no room, or one rank cannot open what another made.
    """
    own, common = _pages(own), _pages(common + _TOKEN_BYTES)
    stretches = node.size * own
    descriptor, path, token = -1, None, b""
    error: Exception | None = None
    if node.rank == 0:
        try:
            descriptor, path = private_file.create(_FOLDER)
            os.ftruncate(descriptor, stretches + common)
            token = os.urandom(_TOKEN_BYTES)
        except OSError as problem:
            error = problem
    path, token = node.bcast((path, token))
    try:
        if path is not None and error is None:
            try:
                if node.rank:
                    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                # Now, and not by a SIGBUS when it is used; by its owner, so that it lies in memory near to it.
                _reserve(descriptor, node.rank * own, own)
                if node.rank == 0:
                    _reserve(descriptor, stretches, common)
                memory = np.frombuffer(mmap.mmap(descriptor, stretches + common), np.uint8)
                if node.rank == 0:
                    memory[-_TOKEN_BYTES:] = np.frombuffer(token, np.uint8)
            except (OSError, ValueError) as problem:  # what mmap raises where files are limited
                error = problem
        problems = _problems(node, error)
        if not problems and memory[-_TOKEN_BYTES:].tobytes() != token:
            error = OSError("another file was opened: the ranks do not see the same /dev/shm")
        problems = problems or _problems(node, error)
    finally:
        if path is not None and node.rank == 0:
            os.unlink(path)
        if descriptor >= 0:
            os.close(descriptor)
    if problems:
        raise NoSharedMemoryError(
            f"{node.size} ranks of a node cannot share {stretches + common} bytes in {_FOLDER}: {problems[0]}"
        )
    return Shared(memory[:stretches].reshape(node.size, own), memory[stretches:-_TOKEN_BYTES])


def _problems(node: Any, error: Exception | None) -> list[str]:
    return [text for text in node.allgather(None if error is None else str(error)) if text is not None]


def _reserve(descriptor: int, start: int, nbytes: int) -> None:
    if nbytes:
        os.posix_fallocate(descriptor, start, nbytes)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
