"""New files for the ranks of a node, which no other user opens."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

_TOKEN_BYTES = 16


def create(folder: str) -> tuple[int, str]:
    """Make an empty file under a name that nobody can guess.

    What ``tempfile`` does, which takes every rank 10 ms to import.

    Returns
    -------
    tuple of int and str
        Its descriptor, which programs that this one starts do not inherit, and its path.

    Raises
    ------
    OSError
        If there is no such folder, or no leave to write there.
    """
    path = os.path.join(folder, f"mpistrat-{os.urandom(8).hex()}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600), path


def create_without_name(folder: str) -> tuple[int, str]:
    """Make an empty file that ends with the last process that has it open, even if that is killed.

    Returns
    -------
    tuple of int and str
        Its descriptor, and a path under which other processes of this user open it as long as this one has it open.

    Raises
    ------
    OSError
        If the system or the file system of the folder has no such files.
    """
    if not hasattr(os, "O_TMPFILE"):
        raise OSError("this system has no files without a name")
    descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def share(node: Any, folder: str, nbytes: int) -> int:
    """Make one file that all ranks of a node have open. Collective over it.

    It has no name, where the ranks may open each other's files in ``/proc``: ranks of different users, or in
    containers with process numbers of their own, may not. Then it has one until all have opened it.

    Parameters
    ----------
    node : mpi4py.MPI.Intracomm
    folder : str
    nbytes : int
        How many zeros it has, not yet reserved. What follows them is for this function.

    Returns
    -------
    int
        The descriptor.

    Raises
    ------
    OSError
        On every rank, if one cannot make or open it.
    """
    problems: list[str] = []
    for make in (create_without_name, create):
        descriptor, path, token = -1, None, b""
        error: OSError | None = None
        if node.rank == 0:
            try:
                descriptor, path = make(folder)
                token = os.urandom(_TOKEN_BYTES)
                os.ftruncate(descriptor, nbytes + _TOKEN_BYTES)
                os.pwrite(descriptor, token, nbytes)
            except OSError as problem:
                error = problem
        try:
            path, token = node.bcast((path, token))
            if path is not None and node.rank:
                try:
                    descriptor = _open(path, token, nbytes)
                except OSError as problem:
                    error = problem
            problems = on_all_ranks(node, error)
        finally:
            if make is create and path is not None and node.rank == 0:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        if not problems:
            return descriptor
        if descriptor >= 0:
            os.close(descriptor)
    raise OSError(problems[0])


def on_all_ranks(node: Any, error: Exception | None) -> list[str]:
    """The errors of all ranks, None for a rank without. Collective."""
    return [text for text in node.allgather(None if error is None else str(error)) if text is not None]


def _open(path: str, token: bytes, nbytes: int) -> int:
    """Open what the first rank made. Elsewhere its path may be that of something else, which is left alone."""
    if stat.S_ISREG(os.stat(path).st_mode):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        if os.pread(descriptor, _TOKEN_BYTES, nbytes) == token:
            return descriptor
        os.close(descriptor)
    raise OSError("another file was opened: the ranks do not see the same files")
