"""Files: local paths, files that appear complete or not at all, complete writes, results for later programs."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import select
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def local_path(path: str | bytes | os.PathLike[str]) -> Path:
    """Return a path of a file system.

    Raise ValueError for a URL. As a path, ``s3://bucket/a.h5`` is below the folder ``s3:`` of the working directory.

    >>> local_path("results/a.h5").name
    'a.h5'
    """
    name = os.fsdecode(path)
    if _URL.match(name):
        raise ValueError(
            f"{name!r} is a URL, and files are read and written in file systems: copy it to one, or mount it"
        )
    return Path(name)


@contextlib.contextmanager
def appearing(path: str | os.PathLike[str], replace: bool) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, and rename it to ``path`` after the block.

    The file is synced to disk before the rename. It is removed if the block raises. Raise FileExistsError if ``path``
    exists after the block and ``replace`` is false. Raise it before the block if ``path`` is a device, a pipe or a
    socket, which a rename would remove.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise FileExistsError(errno.EEXIST, "it is a device, a pipe or a socket: choose another name", os.fspath(path))
    with appearing_together([path], replace) as (temporary,):
        yield temporary


def require_space(path: Path, nbytes: int) -> None:
    """Raise OSError if the file system of a path says that it has less space than a new file of so many bytes needs."""
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and nbytes > free:  # file systems that keep nothing have no blocks
        text = f"{os.strerror(errno.ENOSPC)} for {nbytes} bytes: {free} are free"
        raise OSError(errno.ENOSPC, text, os.fspath(path))


@contextlib.contextmanager
def appearing_together(paths: Sequence[Path], replace: bool) -> Iterator[list[Path]]:
    """Yield temporary paths as `appearing` for several files, which get their names when all are on the disk.

    Without ``replace``, the block leaves no file with its final name if it raises.
    """
    token = secrets.token_hex(8)
    temporaries = [path.with_name(f".{path.name}.{token}.tmp") for path in paths]
    published: list[Path] = []
    try:
        yield temporaries
        for temporary in temporaries:
            to_disk(temporary)
        for temporary, path in zip(temporaries, paths, strict=True):
            publish(temporary, path, replace)
            published.append(path)
        for folder in {path.parent for path in paths}:
            to_disk(folder)
    except BaseException:
        if not replace:
            for path in published:
                path.unlink(missing_ok=True)
        raise
    finally:
        for temporary in temporaries:
            with contextlib.suppress(OSError):  # an error of the block says more
                temporary.unlink()


def publish(temporary: Path, path: Path, replace: bool) -> None:
    """Give a temporary file its final name, and the permissions of the file that it replaces.

    The temporary name may remain.

    Raise FileExistsError if ``path`` exists and ``replace`` is false.
    """
    if not replace:
        try:
            os.link(temporary, path)  # unlike a rename, it fails if another process was faster
            return
        except OSError as error:  # also of a file system without hard links
            if isinstance(error, FileExistsError) or path.exists():
                raise FileExistsError(f"{path} exists already: choose another name, or remove it") from None
    with contextlib.suppress(OSError):  # a private file stays private
        os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
    os.replace(temporary, path)


def to_disk(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write bytes: one call of the system may write only a part. Wait while a pipe is full.

    The descriptor may be a file's, a pipe's or a terminal's, and ``data`` a view of bytes. ``offset`` is the place in a
    file, by default behind the last write. Raise OSError if the disk is full, or the reader has ended.
    """
    written, data = 0, memoryview(data)
    while written < len(data):
        rest = data[written:]
        try:
            written += os.write(descriptor, rest) if offset is None else os.pwrite(descriptor, rest, offset + written)
        except BlockingIOError:
            select.select([], [descriptor], [])


def read_all(descriptor: int, into: memoryview, offset: int) -> bool:
    """Fill memory from a place in a file: one call of the system may read only a part. Return False at its end."""
    while len(into):
        count = os.preadv(descriptor, [into], offset)
        if count == 0:
            return False
        into, offset = into[count:], offset + count
    return True


def cache_path(kind: str, key: Sequence[object]) -> Path:
    """Return the path of a small file of results that later programs of this user read.

    JSON can hold ``key``. The file is in XDG_CACHE_HOME or ``~/.cache``.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache / "mpistrat" / f"{kind}-{name}.json"


def replace_text(path: Path, text: str) -> None:
    """Write a text file, which is replaced as a whole, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path, replace=True) as temporary:
        temporary.write_text(text, "utf-8")
