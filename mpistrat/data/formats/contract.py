"""What a format of files must provide. A new format is a new file with a subclass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from mpistrat.data.hdf5.records import FileRecord


class Format(Protocol):
    """A format of files.

    Attributes
    ----------
    name : str
        What the files are, for messages.
    named : str
        What the program names in a file, for messages.
    folders : bool
        Whether a "file" is a folder.
    """

    name: ClassVar[str]
    named: ClassVar[str] = "datasets"
    folders: ClassVar[bool] = False

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of some columns of a file, without reading its rows if possible.

        Raises
        ------
        DataFileError, DatasetNotFoundError, DatasetMismatchError
            If something is wrong with the file. The message names it.
        """

    def reader(self, most_decoded: int) -> Any:
        """Return a reader of rows, with the methods of `data.hdf5.reader.Reader`, that keeps so many decoded bytes."""

    def __str__(self) -> str:
        return self.name
