"""The directory for reports of hangs and for the records of jobs that failed."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from mpistrat.process.atomic_file import appearing
from mpistrat.runtime.environment import rc


def folder() -> Path:
    """Return the directory, which exists and belongs to this user.

    It is ``MPISTRAT_RECORD_DIR``, or one of this user below the directory for temporary files. Raise OSError if no
    directory can be written by this user.
    """
    if rc.record_dir:
        chosen = Path(rc.record_dir)  # is taken as it is: a group may share it
        with contextlib.suppress(FileExistsError):
            chosen.mkdir(mode=0o700, parents=True)
        if not chosen.is_dir():
            raise NotADirectoryError(f"MPISTRAT_RECORD_DIR={chosen} is not a directory: choose another")
        return chosen
    path = Path(tempfile.gettempdir()) / f"mpistrat-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    # All users write to this place: one may have made a directory or a link of this name, to read reports or to let
    # them overwrite a file. The name is not secret, so that `mpistrat top --last` finds it.
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} belongs to another user, or others can write to it: set MPISTRAT_RECORD_DIR")
    return path


def write_new(name: str, text: str) -> Path:
    """Write a new file, which other users cannot read, and which appears complete and synced to disk.

    Raise FileExistsError if there is such a file: another rank of this node has written it. Raise OSError if the
    directory cannot be made, or is full.
    """
    path = folder() / name
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with appearing(path, replace=False) as temporary, open(os.open(temporary, flags, 0o600), "wb") as file:
        # Names of files need not be UTF-8, and the locale need not be able to write lines of the program.
        file.write(text.encode(errors="backslashreplace"))
    return path
