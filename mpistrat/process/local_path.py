"""Paths of files, which are not URLs."""

from __future__ import annotations

import os
import re
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
