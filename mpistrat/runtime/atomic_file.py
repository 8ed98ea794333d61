"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def appearing(path: str | os.PathLike[str], replace: bool) -> Iterator[Path]:
    """A name beside ``path`` to write to; what was written there is ``path`` when the block has ended.

    It is brought to the disk before it is renamed, and removed if the block raises.

    Raises
    ------
    FileExistsError
        If ``path`` exists by then and is not to be replaced.
    """
    path = Path(path)
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
    """Give a file its name; the old name may remain.

    Raises
    ------
    FileExistsError
        If there is one of that name, and it is not to be replaced.
    """
    if not replace:
        try:
            os.link(temporary, path)  # unlike a rename, it fails if somebody else was faster
            return
        except FileExistsError:
            raise FileExistsError(f"{path} exists already: choose another name, or remove it") from None
        except OSError:  # a file system without hard links
            if path.exists():
                raise FileExistsError(f"{path} exists already: choose another name, or remove it") from None
    os.replace(temporary, path)


def to_disk(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
