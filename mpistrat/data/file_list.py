"""Files named by paths and patterns."""

from __future__ import annotations

import glob
import os
from typing import Any


def expand(files: Any) -> list[str]:
    """The absolute paths that a path, a glob pattern, or a list of those stands for.

    Parameters
    ----------
    files : str, os.PathLike or iterable of those
        What a pattern matches is sorted; otherwise the order is kept.

    Returns
    -------
    list of str

    Raises
    ------
    FileNotFoundError
        If a file does not exist or a pattern matches none.
    IsADirectoryError
        If a path is that of a directory.
    ValueError
        If there is no file at all.
    """
    if isinstance(files, (str, bytes, os.PathLike)):
        files = [files]
    paths: list[str] = []
    for each in files:
        if not isinstance(each, (str, bytes, os.PathLike)):
            raise TypeError(f"files are named by strings or paths, not {each!r}")
        paths += _matches(os.fsdecode(each))
    if not paths:
        raise ValueError("a dataset needs at least one file, and the list of files is empty")
    return [os.path.abspath(path) for path in paths]


def _matches(name: str) -> list[str]:
    if os.path.isdir(name):
        raise IsADirectoryError(
            f"{name!r} is a directory: give a pattern such as {os.path.join(name, '*.h5')!r}"
        )
    if os.path.exists(name):
        return [name]
    if not glob.has_magic(name):
        raise FileNotFoundError(f"file {name!r} does not exist: check the path, also on the other nodes")
    found = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
    if not found:
        raise FileNotFoundError(f"pattern {name!r} matches no file: check the path, also on the other nodes")
    return found
