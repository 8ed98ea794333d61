"""Notices that the nodes of a job leave for each other in shared directories, when MPI does not work.

A notice lies in each directory that nodes may share, since it is not known which of them they do. The directories of
a job are made with its first notice, so a job that never leaves one costs a look for each of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpistrat.runtime.process.launch_key import hashed
from mpistrat.runtime.process.mailbox import read_json, write_json

_PREFIX = ".mpistrat-board-"
_KEPT = 24 * 3600.0  # seconds after which the boards of jobs that were killed are removed
_ENDING = ".json"
_CLAIM = "claim-"


class Board:
    """The notices of the nodes of one job.

    Parameters
    ----------
    key : str
        A text that only the ranks of this job know or can find.
    parents : sequence of path
        Where to look in addition to the working directory, the home directory and that for temporary files.
    """

    def __init__(self, key: str, parents: Sequence[Path] = ()):
        self._name = _PREFIX + hashed(key)
        found = (*parents, Path.cwd(), Path.home(), Path(tempfile.gettempdir()))
        self._folders = [each / self._name for each in dict.fromkeys(found)]

    @property
    def folders(self) -> tuple[str, ...]:
        """The directories that this one lies in."""
        return tuple(str(each.parent) for each in self._folders)

    def post(self, name: str, value: Any) -> None:
        """Add a notice, or replace the one of this name."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                with contextlib.suppress(FileExistsError):
                    _remove_old(folder.parent)
                    folder.mkdir(mode=0o700)
                if _is_own(folder):
                    write_json(folder / f"{name}{_ENDING}", value)

    def names(self) -> set[str]:
        """Return the names of the notices."""
        found: set[str] = set()
        for folder in self._folders:
            if _is_own(folder):
                with contextlib.suppress(OSError):
                    found.update(
                        each.removesuffix(_ENDING) for each in os.listdir(folder) if each.endswith(_ENDING)
                    )
        return found

    def read(self, name: str) -> Any:
        """Return a notice, or None if it was removed or is damaged."""
        found = (read_json(each / f"{name}{_ENDING}") for each in self._folders if _is_own(each))
        return next((each for each in found if each is not None), None)

    def take_down(self, name: str) -> None:
        """Remove a notice."""
        for folder in self._folders:
            if _is_own(folder):
                with contextlib.suppress(OSError):
                    (folder / f"{name}{_ENDING}").unlink()

    def claim(self, name: str) -> bool:
        """Return whether no other process that shares one of the directories has claimed this name before."""
        first = True
        for folder in self._folders:
            with contextlib.suppress(OSError):
                if not _is_own(folder):
                    continue
                try:
                    os.close(os.open(folder / (_CLAIM + name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                except FileExistsError:
                    first = False
        return first

    def remove(self) -> None:
        """Remove the directories of this job."""
        for folder in self._folders:
            if _is_own(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    """Return whether a directory exists that other users cannot write to."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _remove_old(parent: Path) -> None:
    end = time.time() - _KEPT
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_own(folder) and folder.stat().st_mtime < end:
                shutil.rmtree(folder, ignore_errors=True)
