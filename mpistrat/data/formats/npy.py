"""Files of one NumPy array (``.npy``): rows are read where they lie."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mpistrat.data.errors import DataFileError, DatasetMismatchError, not_of_format
from mpistrat.data.formats.contract import Format
from mpistrat.data.hdf5.reader import FileReader
from mpistrat.data.hdf5.records import Column, Contiguous, Extent, FileRecord
from mpistrat.data.rows.spec import native

_MOST_HEADER = 64 << 10  # NumPy takes 10,000 characters


class Npy(Format):
    """Files that ``numpy.save`` wrote: one column."""

    name: ClassVar[str] = "npy"
    named: ClassVar[str] = "arrays"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of the array of a file, from its header."""
        try:
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                head = io.BytesIO(file.read(_MOST_HEADER))
            shape, columns_first, dtype = header(head)
            begin = head.tell()
        except OSError as error:
            raise DataFileError.unreadable(path, error) from None
        except ValueError as error:
            what = "it is empty (0 bytes)" if not found.st_size else f"it is not an npy file ({error})"
            raise not_of_format(path, "from_npy", f"{what}; fix: copy or write it again") from None
        if min(shape, default=0) < 0:
            raise DataFileError.of_file(path, f"its header has the shape {shape}; fix: copy or write it again")
        if not shape:
            raise DatasetMismatchError(f"file {path!r}: its array is a scalar; fix: axis 0 must be that of the samples")
        if dtype.hasobject:
            raise DataFileError.of_file(path, "it holds Python objects; fix: save an array of numbers or strings")
        values = math.prod(shape)
        if columns_first and values and sum(size > 1 for size in shape) > 1:
            raise DataFileError.of_file(path, "its rows are in Fortran order; fix: save numpy.ascontiguousarray(x)")
        size = values * dtype.itemsize
        if begin + size > found.st_size:
            raise DataFileError.of_file(
                path, f"it is truncated ({found.st_size} bytes of {begin + size}); fix: copy or write it again"
            )
        extents = (Extent(0, 0, begin, size),) if size else ()
        column = Column(names[0], tuple(shape[1:]), native(dtype), 0, 0, False, False, dtype, Contiguous(extents), ())
        return FileRecord(found.st_size, found.st_mtime_ns, shape[0], (column,))

    def reader(self, most_decoded: int) -> FileReader:
        return FileReader(most_decoded=most_decoded, describe=self.describe)


def header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the shape, whether columns come first, and the dtype. Raise ValueError for any other header."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"version {version} of the format is not known")
