"""Opening of HDF5 files for reading, with errors that say what is wrong with a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import h5py

from mpistrat.data.errors import DataFileError, naming, reason_of
from mpistrat.data.hdf5.signatures import not_of_format


@contextlib.contextmanager
def opened(path: str) -> Iterator[h5py.File]:
    """Open a file as `open_file` does, and close it at the end of the ``with`` block."""
    file = open_file(path)
    try:
        yield file
    finally:
        with naming(f"file {path!r}"):
            file.close()


def open_file(path: str) -> h5py.File:
    """Return a file opened for reading. Raise DataFileError, which says why, if it cannot be opened."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise DataFileError.of_file(path, f"it can no longer be found ({error.strerror}); fix: bring it back") from None
    try:
        return _open_as_others_do(path)
    except PermissionError:
        raise DataFileError.of_file(path, "reading is not permitted; fix: chmod +r") from None
    except BlockingIOError:
        raise DataFileError.of_file(
            path, f"it is being written by {writer_of(path)}; fix: wait until that process has ended"
        ) from None
    except Exception as error:
        if size == 0:
            what = "it is empty (0 bytes)"
        elif "truncated" in str(error):
            what = f"it is truncated ({size} bytes: {reason_of(error)})"
        elif not h5py.is_hdf5(path):
            what = f"it is not an HDF5 file ({size} bytes); fix: copy or write it again"
            raise not_of_format(path, "from_hdf5", what) from error
        else:
            what = f"HDF5 cannot open it ({size} bytes: {reason_of(error)})"
        raise DataFileError.of_file(path, f"{what}; fix: copy or write it again") from error


def _open_as_others_do(path: str) -> h5py.File:
    # A file that is already open in this process must be opened with the same locking, usually "best-effort", the
    # default of HDF5. The other values serve file systems whose locks fail, and files opened with another choice.
    for locking in ("best-effort", False, None):
        try:
            return h5py.File(path, "r", locking=locking)
        except BlockingIOError:  # another process has the file open for writing
            raise
        except OSError as error:
            if "flag values don't match" not in str(error) and "unable to lock file" not in str(error):
                raise
    return h5py.File(path, "r", locking=True)


def writer_of(path: str) -> str:
    """Return a text that names the process of this node that has locked a file for writing, if it can be seen."""
    with contextlib.suppress(OSError):
        inode = os.stat(path).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            # 4: FLOCK  ADVISORY  WRITE 726 fe:00:2148707 0 EOF
            words = line.split()
            if "WRITE" in words and len(words) > 5 and words[5].endswith(f":{inode}") and int(words[4]) > 0:
                return f"process {words[4]}{_name(words[4])} of this node"
    return "a process on another node or in another container"


def _name(process: str) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f" ({command.strip()[:80]})"
    return ""
