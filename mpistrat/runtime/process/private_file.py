"""New files for ranks of this node, which no other user opens."""

from __future__ import annotations

import os


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
