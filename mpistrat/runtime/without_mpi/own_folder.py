"""Directories that the ranks of a user share, and that no other user can replace by another one.

Who may write to the parent directory may rename another directory of the user to a name that is expected here. So what
was made here has a mode that other directories do not have, which ``mkdir`` sets in one step, and only files in such a
directory are removed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_MODE = 0o1700  # the sticky bit, and no rights for others
_BITS = 0o1777  # without those that a directory may get from its parent


def make(folder: Path) -> bool:
    """Make a directory, unless it exists. Return whether it was made here. Raise OSError if it cannot be made."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, _MODE)
    return is_made(folder)


def is_made(folder: Path) -> bool:
    """Return whether a directory is there and was made here, by this user."""
    try:
        return _is_own(folder.lstat())
    except OSError:
        return False


def remove(folder: Path) -> None:
    """Remove a directory that was made here, and the files in it, but no directories. Do nothing where it was not.

    Raise OSError if it is not empty then, or is not there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_own(os.fstat(descriptor)):
            return
        for name in os.listdir(descriptor):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    folder.rmdir()


def only_this_user_writes(folder: Path) -> bool:
    """Return whether no other user but root can put files into a directory, or rename them there."""
    status = folder.stat()
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & _BITS == _MODE
