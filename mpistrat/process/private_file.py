"""New files and folders, such as those of the ranks of a node, which other users cannot open."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

_TOKEN_BYTES = 16


def open_new(path: str | os.PathLike[str]) -> int:
    """Create an empty file, and return its descriptor, which child programs do not inherit.

    Raise FileExistsError if the path exists, also as a link: other users may write to its folder.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def make_folder(folder: Path, fix: str) -> None:
    """Make a folder, unless there is one. Raise PermissionError with ``fix`` if another user has made it, or a link."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a directory of this user alone (mode 0700): {fix}")


def create(folder: str, prefix: str = "mpistrat-") -> tuple[int, str]:
    """Create an empty file with an unpredictable name. Return its descriptor and its path.

    ``tempfile`` does the same, but its import takes 10 ms on every rank.
    Raise OSError if the folder does not exist or is not writable.
    """
    path = os.path.join(folder, f"{prefix}{os.urandom(8).hex()}")
    return open_new(path), path


def create_without_name(folder: str) -> tuple[int, str]:
    """Create an empty file that disappears with the last process that has it open, even if that is killed.

    Return its descriptor and a path. Other processes of this user can open the path while this process has the file
    open. Raise OSError if the system or the file system does not support files without a name.
    """
    if not hasattr(os, "O_TMPFILE"):
        raise OSError("this system has no files without a name")
    descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def create_in_memory() -> tuple[int, str]:
    """Create an empty file in memory, which is not limited by the size of a file system.

    Return as `create_without_name`. Raise OSError if the system has no such files.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files in memory")
    descriptor = os.memfd_create("mpistrat", os.MFD_CLOEXEC)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def share(node: Any, folder: str, nbytes: int) -> int:
    """Create one file that all ranks of a node have open. Return its descriptor on this rank. Collective over ``node``.

    The file begins with ``nbytes`` zero bytes, not yet reserved. Bytes after them belong to this function.

    The file has no name if the ranks may open each other's files in ``/proc``. Ranks of different users, or in
    containers with separate process numbers, may not. Their file has a name until all ranks have opened it. Raise
    OSError on every rank if one rank cannot create or open the file.
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
                    descriptor = open_other(path, token, nbytes)
                except OSError as problem:
                    error = problem
            problems = on_all_ranks(node, error)
        finally:  # now: a rank that is killed later would leave the name, and its memory, behind
            if make is create and path is not None and node.rank == 0:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        if not problems:
            return descriptor
        # One rank cannot open it: all drop it, since a file that some of them share would divide the node.
        if descriptor >= 0:
            os.close(descriptor)
    raise OSError(problems[0])


def on_all_ranks(node: Any, error: Exception | None) -> list[str]:
    """Return the error messages of all ranks that have one, in rank order. Collective over ``node``."""
    return [text for text in node.allgather(None if error is None else str(error)) if text is not None]


def open_other(path: str, token: bytes, start: int) -> int:
    """Open a file of another process, which has ``token`` at ``start``.

    Raise OSError if the path leads to another file here, or cannot be opened. The other file is not changed.
    """
    if stat.S_ISREG(os.stat(path).st_mode):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        if os.pread(descriptor, len(token), start) == token:
            return descriptor
        os.close(descriptor)
    raise OSError("another file was opened: the ranks do not see the same files")
