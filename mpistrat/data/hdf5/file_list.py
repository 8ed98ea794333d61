"""List of files, given by paths and glob patterns."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from typing import Any

from mpistrat.data import limits
from mpistrat.data.hdf5.signatures import told
from mpistrat.process.local_path import local_path

_ENDS = {"HDF5": "h5", "netCDF": "nc"}  # of other formats, the name in small letters


class FileList:
    """The files of a path, a glob pattern, or an iterable of those. They are searched when first needed.

    They keep this order, but the matches of a pattern are sorted. ``format`` says in messages what they are, and
    ``folders`` whether a "file" is a folder. Raise TypeError or ValueError for what is not a path.
    """

    def __init__(self, files: Any, format: str = "HDF5", folders: bool = False):
        self._format, self._folders = format, folders
        if isinstance(files, (str, bytes, os.PathLike)):
            files = [files]
        self.given: list[str] = []
        for each in files:
            if not isinstance(each, (str, bytes, os.PathLike)):
                raise TypeError(f"files are named by strings or paths, not {each!r}")
            self.given.append(os.path.abspath(local_path(each)))
        if not self.given:
            raise ValueError("a dataset needs at least one file, but the list of files is empty")
        self._found: Sequence[str] | None = None

    def paths(self) -> Sequence[str]:
        """Return the absolute paths. Raise FileNotFoundError for a missing file, IsADirectoryError for a folder."""
        if self._found is None:
            self._found = [path for name in self.given for path in _matches(name, self._folders, self._format)]
        return self._found

    def found(self, paths: Sequence[str]) -> None:
        """Take the paths that another rank has found."""
        self._found = paths

    def names(self) -> str:
        """Return the number of given names and a hash of them, without folders, which may differ between nodes."""
        text = "/".join(os.path.basename(name) for name in self.given)
        digest = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=6).hexdigest()
        return f"files of {len(self.given)} names (which hash to {digest})"

    def __len__(self) -> int:
        return len(self.given if self._found is None else self._found)

    def __repr__(self) -> str:
        return self.given[0] if self._found is None and len(self.given) == 1 else f"{len(self)} {self._format} files"


def _once(paths: list[str]) -> list[str]:
    """Return each file once, if links to folders lead to it again. Paths without links, and short ones, win."""
    real = {folder: os.path.realpath(folder) for folder in set(map(os.path.dirname, paths))}
    ways: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        folder, name = os.path.split(path)
        ways.setdefault((real[folder], name), []).append(path)

    def worse(path: str) -> tuple[bool, int, str]:
        folder = os.path.dirname(path)
        return real[folder] != folder, path.count(os.sep), path

    return sorted(min(each, key=worse) for each in ways.values())


def _matches(name: str, folders: bool, form: str) -> list[str]:
    if os.path.isdir(name) and not folders:
        if what := told(name):
            raise IsADirectoryError(f"{name!r}: {what}")
        pattern = os.path.join(name, f"*.{_ENDS.get(form, form.lower())}")
        raise IsADirectoryError(f"{name!r} is a directory: give a pattern such as {pattern!r}")
    if os.path.exists(name):
        limits.check_path(name)
        return [name]
    if not glob.has_magic(name):
        raise FileNotFoundError(f"file {name!r} does not exist: check the path, also on the other nodes")
    found = sorted(path for path in glob.glob(name, recursive=True) if os.path.isdir(path) == folders)
    for path in found:
        limits.check_path(path)
    if "**" in name:
        found = _once(found)
    if not found:
        raise FileNotFoundError(f"pattern {name!r} matches no file: check the path, also on the other nodes")
    return found
