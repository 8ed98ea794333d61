"""Opening of HDF5 files for reading, with errors that say what is wrong with a file, or what else it is.

A process has one handle for each path. With two, the stored type of a dataset refers to the handle that opened it
first. After that one is closed, HDF5 crashes in members of variable length inside compound types (h5py issue 2920).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import h5py
from h5py._objects import phil  # h5py's lock of all of HDF5, which it also renews in forked children

from mpistrat.data.errors import DataFileError, check_path, naming, not_of_format, reason_of


class SharedFile(h5py.File):
    """The handle of all readers of a path in this process. Each reader calls `close` once, the last one closes it."""

    users = 0
    outlives_others = False  # whether to stay open while the program has a handle of its own

    def close(self) -> None:
        """Close the file if no other reader has it open."""
        with phil:
            self.users -= 1
            _close_unused()

    def close_for_all(self) -> None:
        """Close the file for all readers, which have to open it again."""
        with phil:
            for key in [key for key, file in _shared.items() if file is self]:
                del _shared[key]
            super().close()

    def others(self) -> frozenset[int]:
        """Return the identifiers of all other handles that this process has on the file."""
        number = h5py.h5o.get_info(self.id).fileno
        handles = h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)
        return frozenset(h.id for h in handles if h.id != self.id.id and h5py.h5o.get_info(h).fileno == number)


# By path and inode: another file may have taken the place of an open one.
_shared: dict[tuple[str, int, int], SharedFile] = {}


def _close_unused() -> None:
    for file in list(_shared.values()):
        # An h5py file is false once it is closed.
        if not (file and (file.users or (file.outlives_others and file.others()))):
            file.close_for_all()


@contextlib.contextmanager
def opened(path: str) -> Iterator[h5py.File]:
    """Open a file as `open_file` does, and close it at the end of the ``with`` block."""
    file = open_file(path)
    try:
        yield file
    finally:
        with naming(f"file {path!r}"):
            file.close()


def open_file(path: str) -> SharedFile:
    """Return a file opened for reading. Raise DataFileError, which says why, if it cannot be opened."""
    try:
        status = os.stat(path)
        size = status.st_size
    except OSError as error:
        raise DataFileError.of_file(path, f"it can no longer be found ({error.strerror}); fix: bring it back") from None
    key = path, status.st_dev, status.st_ino
    try:
        with phil:
            _close_unused()
            if key not in _shared:
                _shared[key] = _open_as_others_do(path)
            _shared[key].users += 1
            return _shared[key]
    except PermissionError:
        raise DataFileError.of_file(path, "reading is not permitted; fix: chmod +r") from None
    except BlockingIOError:
        raise DataFileError.of_file(
            path, f"it is being written by {writer_of(path)}; fix: wait until that process has ended"
        ) from None
    except Exception as error:
        fix = "copy or write it again"
        if size == 0:
            message = "it is empty (0 bytes)"
        elif "truncated" in str(error):  # HDF5 says so in the text only
            message = f"it is truncated ({size} bytes: {reason_of(error)})"
        elif not h5py.is_hdf5(path):
            message = f"it is not an HDF5 file ({size} bytes); fix: {fix}"
            raise not_of_format(path, "from_hdf5", message) from error
        else:
            # It may also be of a later version of HDF5.
            message, fix = (
                f"HDF5 cannot open it ({size} bytes: {reason_of(error)})",
                f"see the error, and {fix} if damaged",
            )
        raise DataFileError.of_file(path, f"{message}; fix: {fix}") from error


def _open_as_others_do(path: str) -> SharedFile:
    # A file that is already open in this process must be opened with the same locking, usually "best-effort", the
    # default of HDF5. The other values serve file systems whose locks fail, and files opened with another choice.
    for locking in ("best-effort", False, None):
        try:
            return SharedFile(path, "r", locking=locking)
        except BlockingIOError:  # another process has the file open for writing
            raise
        except OSError as error:
            if "flag values don't match" not in str(error) and "unable to lock file" not in str(error):
                raise
    return SharedFile(path, "r", locking=True)


def writer_of(path: str) -> str:
    """Return a text that names the process of this node that has locked a file for writing, if it can be seen."""
    with contextlib.suppress(OSError):
        inode = os.stat(path).st_ino
        for line in Path("/proc/locks").read_text("utf-8").splitlines():
            # 4: FLOCK  ADVISORY  WRITE 726 fe:00:2148707 0 EOF
            words = line.split()
            # The process is -1 for a lock of an open file description.
            if "WRITE" in words and len(words) > 5 and words[5].endswith(f":{inode}") and int(words[4]) > 0:
                return f"process {words[4]}{_name(words[4])} of this node"
    return "a process on another node or in another container"


def _name(process: str) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f" ({command.strip()[:80]})"
    return ""


_MOST_LINKS = 16  # that HDF5 follows


def check_links(file: h5py.File, name: str, where: str, left: int = _MOST_LINKS) -> None:
    """Check the files to which the links of a name lead, as `check_path`, before HDF5 opens them."""
    group, parts = file, _parts(name)
    while parts and left:
        part = parts.popleft()
        link = group.get(part, getlink=True)
        if isinstance(link, h5py.SoftLink):
            left -= 1
            group = file if link.path.startswith("/") else group
            parts.extendleft(reversed(_parts(link.path)))
        elif isinstance(link, h5py.ExternalLink):
            for path in _candidates(group.file.filename, link.filename):
                check_path(path, where)
                # HDF5 tries the next path if there is no such file.
                with contextlib.suppress(DataFileError), opened(path) as other:
                    check_links(other, "/".join([link.path, *parts]), where, left - 1)
            return
        else:
            group = group.get(part) if parts and link is not None else None
            if not isinstance(group, h5py.Group):
                return


def has_no_links(file: h5py.File, name: str) -> bool:
    """Return whether a name leads to nothing but objects of this file, without soft and external links."""
    group, parts = file, _parts(name)
    while parts and isinstance(group, h5py.Group):
        part = parts.popleft()
        if isinstance(group.get(part, getlink=True), (h5py.SoftLink, h5py.ExternalLink)):
            return False
        group = group.get(part) if parts else None
    return True


def _parts(name: str) -> deque[str]:
    return deque(part for part in name.split("/") if part not in ("", "."))


def _candidates(file_path: str, name: str) -> Iterator[str]:
    """Yield the paths at which HDF5 looks for the file of an external link, as `H5Lcreate_external` documents them."""
    if os.path.isabs(name):
        yield name
        name = os.path.basename(name)
    prefixes = os.environ.get("HDF5_EXT_PREFIX", "").split(":")
    folder = os.path.dirname(os.path.abspath(file_path))
    for prefix in (*filter(None, prefixes), folder, "", os.path.dirname(os.path.realpath(file_path))):
        yield os.path.join(prefix.replace("${ORIGIN}", folder), name)
