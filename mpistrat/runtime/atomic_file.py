"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def appearing(path: str | os.PathLike[str], replace: bool) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, and rename it to ``path`` after the block.

    The file is synced to disk before the rename. It is removed if the block raises.

    Raises
    ------
    FileExistsError
        If ``path`` exists after the block and ``replace`` is false; before the block if it is a device, a pipe or a
        socket, which a rename would remove.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise FileExistsError(
            errno.EEXIST, "it is a device, a pipe or a socket: choose another name", os.fspath(path)
        )
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        to_disk(temporary)
        publish(temporary, path, replace)
        to_disk(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def publish(temporary: Path, path: Path, replace: bool) -> None:
    """Give a temporary file its final name; the temporary name may remain.

    Raises
    ------
    FileExistsError
        If ``path`` exists and ``replace`` is false.
    """
    if not replace:
        try:
            os.link(temporary, path)  # unlike a rename, it fails if another process was faster
            return
        except FileExistsError:
            raise FileExistsError(f"{path} exists already: choose another name, or remove it") from None
        except OSError:  # a file system without hard links
            if path.exists():
                raise FileExistsError(f"{path} exists already: choose another name, or remove it") from None
    os.replace(temporary, path)


def to_disk(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
