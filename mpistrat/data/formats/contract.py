"""What a format of files has to do, and the import of the libraries that some need."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from mpistrat.data.hdf5.records import FileRecord


class Format(Protocol):
    """A format of files.

    ``name`` says in messages what the files are, and ``named`` what the program names in a file. ``folders`` tells
    whether a "file" is a folder, ``columns_apart`` whether a column is read without others, ``in_blocks`` whether
    blocks of rows are decoded and kept, and ``filtered`` whether rows of files are left out.
    """

    name: ClassVar[str]
    named: ClassVar[str] = "datasets"
    folders: ClassVar[bool] = False
    columns_apart: ClassVar[bool] = True
    in_blocks: ClassVar[bool] = False
    filtered: bool = False

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of some columns of a file, if possible without its rows. Raise errors that name it."""

    def columns(self, path: str) -> list[str]:
        """Return the names in a file, for a `from_*` that can do without names."""
        raise TypeError(f"{self} needs the names of {self.named}")

    def reader(self, most_decoded: int) -> Any:
        """Return a reader with the methods of `data.hdf5.reader.FileReader` that keeps ``most_decoded`` bytes."""

    def __str__(self) -> str:
        return self.name


_MOST_NAMED = 3


def skips(on_bad_row: str) -> bool:
    """Return whether rows that cannot be read are left out. Raise ValueError for another word."""
    if on_bad_row not in ("raise", "skip"):
        raise ValueError(f"on_bad_row must be 'raise' or 'skip', not {on_bad_row!r}")
    return on_bad_row == "skip"


def reason(error: Exception) -> str:
    """Return the message of an error without what to do about it."""
    return str(error).partition("; fix: ")[0]


def left_out(rows: Sequence[str]) -> str:
    """Return a text about rows that are left out: how many they are, and where the first are."""
    if not rows:
        return ""
    many = "1 row cannot be read and is" if len(rows) == 1 else f"{len(rows)} rows cannot be read and are"
    more = f", and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    return f"{many} left out: {'; '.join(rows[:_MOST_NAMED])}{more}"


def needed(module: str, what: str) -> Any:
    """Return a module that not all formats need. Raise ImportError, which says how to install it, if it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        raise ImportError(f"{what} need the package {top} ({error}); fix: pip install {top}") from None
