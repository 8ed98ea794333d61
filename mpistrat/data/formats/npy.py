"""Files of NumPy arrays, of one (``.npy``) or several (``.npz``): rows are read where they lie."""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, ClassVar

import numpy as np

from mpistrat.data.errors import DataFileError, DatasetMismatchError, DatasetNotFoundError, not_of_format
from mpistrat.data.formats.contract import Format
from mpistrat.data.hdf5.reader import FileReader
from mpistrat.data.hdf5.records import Column, ColumnMajor, Contiguous, Extent, FileRecord
from mpistrat.data.rows.spec import native

_MOST_HEADER = 64 << 10  # NumPy takes 10,000 characters


class Npy(Format):
    """Files that ``numpy.save`` wrote, of one column, and archives of ``numpy.savez``, of one for each array."""

    name: ClassVar[str] = "npy"
    named: ClassVar[str] = "arrays"

    def columns(self, path: str) -> list[str]:
        """Return the names of all arrays of an archive."""
        with _opened(path) as (file, _):
            return [*_members(path, file)]

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of the array of a file, or of arrays of an archive, from their headers."""
        with _opened(path) as (file, status):
            members = {names[0]: (0, status.st_size)}  # an .npy file is one array
            if file.read(4) == b"PK\x03\x04":
                members = _members(path, file)
            columns, lengths = [], {}
            for name in names:
                if name not in members:
                    raise DatasetNotFoundError(
                        f"file {path!r} has no array {name!r}; it has {', '.join(map(repr, members))}; fix: name one"
                    )
                lengths[name], column = _column(path, file, name, *members[name])
                columns.append(column)
        if len({*lengths.values()}) > 1:
            raise DatasetMismatchError(f"file {path!r}: its arrays have different lengths {lengths}; fix: name others")
        return FileRecord(status.st_size, status.st_mtime_ns, lengths[names[0]], tuple(columns))

    def reader(self, most_decoded: int) -> FileReader:
        return FileReader(most_decoded=most_decoded, describe=self.describe)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """Open a file, and yield it with its status. Raise DataFileError, which says what it is, for other errors."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            yield file, status
    except OSError as error:
        raise DataFileError.unreadable(path, error) from None
    except (DatasetMismatchError, DatasetNotFoundError):
        raise
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        message = f"it is not an npy file or zip archive ({error})" if status.st_size else "it is empty (0 bytes)"
        raise not_of_format(path, "from_npy", f"{message}; fix: copy or write it again") from None


def _members(path: str, file: BinaryIO) -> dict[str, tuple[int, int]]:
    """Return offset and size of the arrays of an archive."""
    members = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                message = f"its array {info.filename!r} is compressed, so rows have no place in it"
                fix = "write it by numpy.savez, or use from_arrays(dict(numpy.load(path)))"
                raise DataFileError.of_file(path, f"{message}; fix: {fix}")
            file.seek(info.header_offset + 26)
            sizes = struct.unpack("<2H", file.read(4))  # of the name and of what follows it
            members[info.filename.removesuffix(".npy")] = info.header_offset + 30 + sum(sizes), info.file_size
    return members


def _column(path: str, file: BinaryIO, name: str, offset: int, nbytes: int) -> tuple[int, Column]:
    """Return the number of rows of an array at a place of a file, and its column."""
    file.seek(offset)
    head = io.BytesIO(file.read(_MOST_HEADER))
    shape, columns_first, dtype = header(head)
    begin = head.tell()
    if min(shape, default=0) < 0:
        raise DataFileError.of_file(path, f"its header has the shape {shape}; fix: copy or write it again")
    if not shape:
        which = f"its array {name!r}" if path.endswith(".npz") else "its array"
        raise DatasetMismatchError(
            f"file {path!r}: {which} is a scalar, and axis 0 must be that of the samples; fix: name others by arrays="
        )
    if dtype.hasobject:
        raise DataFileError.of_file(path, "it holds Python objects; fix: save an array of numbers or strings")
    size = math.prod(shape) * dtype.itemsize
    if begin + size > nbytes:
        raise DataFileError.of_file(
            path, f"it is truncated ({nbytes} bytes of {begin + size}); fix: copy or write it again"
        )
    layout: Contiguous | ColumnMajor = Contiguous((Extent(0, 0, offset + begin, size),) if size else ())
    # Both orders are the same if only one axis is longer than 1.
    if size and columns_first and sum(length > 1 for length in shape) > 1:
        layout = ColumnMajor(offset + begin, shape[0])
    return shape[0], Column(name, tuple(shape[1:]), native(dtype), 0, 0, False, False, dtype, layout, ())


def header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the shape, whether columns come first, and the dtype. Raise ValueError for any other header."""
    version = np.lib.format.read_magic(file)
    read = getattr(np.lib.format, f"read_array_header_{version[0]}_{version[1]}", None)
    if read is None:
        raise ValueError(f"version {version} of the format is not known")
    return read(file)
