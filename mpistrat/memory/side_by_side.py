"""Files of the ranks of a node, mapped side by side.

`shared.share` makes one file for all ranks. Here each rank has a file already, which another library made: memory of
PyTorch, for example. The addresses of all files form one array.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from mpistrat.memory.shared import NoSharedMemoryError, pages
from mpistrat.process import private_file

_MAP_FIXED = 0x10  # of Linux; the module mmap does not have it


def map_side_by_side(node: Any, descriptor: int | None, nbytes: int) -> np.ndarray:
    """Map a file of each rank, and return the bytes of all, each in whole pages. Collective over ``node``.

    ``descriptor`` is an open file in memory of ``nbytes``, whose pages are reserved, or None. Raise NoSharedMemoryError
    on every rank if a rank has no file, or cannot open that of another.
    """
    told = None
    if descriptor is not None:
        told = f"/proc/{os.getpid()}/fd/{descriptor}", _identity(descriptor)
    files = node.allgather(told)
    error: Exception | None = None
    step = pages(nbytes)
    try:
        memory = np.frombuffer(mmap.mmap(-1, node.size * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        for rank, file in enumerate(files):
            if file is None:
                raise OSError(f"rank {rank} of the node does not have a file")
            _map_over(memory[rank * step :], step, *file)
    except (OSError, ValueError) as problem:  # mmap raises these where the address space is limited
        error = problem
    problems = private_file.on_all_ranks(node, error)
    if problems:
        raise NoSharedMemoryError(f"{node.size} ranks of a node cannot map each other's files: {problems[0]}")
    return memory


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _map_over(memory: np.ndarray, nbytes: int, path: str, identity: tuple[int, int]) -> None:
    """Map a file over the first bytes of an array that is mapped itself. They are unmapped with the array."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if _identity(descriptor) != identity:
            raise OSError("another file was opened: the ranks do not see the same processes")
        function = ctypes.CDLL(None, use_errno=True).mmap
        function.restype = ctypes.c_void_p
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        where = memory.ctypes.data
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if function(where, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != where:
            raise OSError(ctypes.get_errno(), "mmap failed")
    finally:
        os.close(descriptor)
