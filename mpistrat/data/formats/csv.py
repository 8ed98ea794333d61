"""CSV files: a block is some thousand lines, found when the file is described."""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from mpistrat.data import limits
from mpistrat.data.errors import DataFileError, DatasetNotFoundError
from mpistrat.data.formats.block_reader import BlockFormat, blocks_of, column_in_blocks
from mpistrat.data.hdf5.records import Column, FileRecord, InBlocks
from mpistrat.data.hdf5.signatures import not_of_format, told
from mpistrat.runtime.environment import rc

_BLOCK_ROWS = 4096
_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_UNFIT = (ValueError, OverflowError, FloatingPointError)
# Python and NumPy also take 1_000, digits of other scripts, control characters as white space, and "today".
_NUMBERS = re.compile(r"[0-9A-Za-z+\-.() \t\n]*")
_TIMES = re.compile(r"[0-9T:.+\-NaZ \t\n]*")


class Csv(BlockFormat):
    """Files of lines of values. Columns have ``dtypes``; without ``header`` they are named ``0``, ``1``, ..."""

    name: ClassVar[str] = "CSV"
    named: ClassVar[str] = "columns"

    def __init__(self, dtypes: Mapping[str, Any], delimiter: str = ",", header: bool = True):
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
            raise ValueError(f"a delimiter must be one character, no quote and no line end, not {delimiter!r}")
        self._dtypes = {name: _dtype(kind) for name, kind in dtypes.items()}
        self._delimiter, self._header = delimiter, bool(header)

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of some columns of a file. Reads the file once, to find the lines."""
        try:
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                first, rows, places = _lines(file, self._header, self._delimiter.encode(), path)
        except OSError as error:
            raise DataFileError.unreadable(path, error) from None
        if not first:
            raise DataFileError.of_file(path, "it is empty; fix: copy or write it again")
        if told(path):
            raise not_of_format(path, "from_csv", "")
        try:
            (head,) = csv.reader([first.decode("utf-8-sig")], delimiter=self._delimiter, strict=True)
        except (ValueError, csv.Error) as error:
            raise DataFileError.of_file(path, f"it is not a CSV file ({error}); fix: write it again") from None
        known = head if self._header else [str(number) for number in range(len(head))]
        for name in (*names, *self._dtypes):
            if name not in known:
                raise DatasetNotFoundError(
                    f"file {path!r} has no column {name!r}; it has {', '.join(map(repr, known))}; fix: name one"
                )
        for name in names:
            if known.count(name) > 1:
                raise DataFileError.of_file(
                    path, f"it has {known.count(name)} columns named {name!r}; fix: rename them, or header=False"
                )
        starts = np.array([*range(0, rows, _BLOCK_ROWS), rows], np.int64)
        layout = InBlocks(starts, np.array([*places, found.st_size, *map(known.index, names), len(known)], np.int64))
        kinds = [self._dtypes.get(name, np.dtype(float)) for name in names]
        columns = [column_in_blocks(*each, (), layout, _BLOCK_ROWS) for each in zip(names, kinds, strict=True)]
        return FileRecord(found.st_size, found.st_mtime_ns, rows, tuple(columns))

    def block(self, path: str, record: FileRecord, number: int) -> list[np.ndarray]:
        layout = blocks_of(record)
        blocks = len(layout.starts) - 1
        begin, end = layout.places[number : number + 2].tolist()
        *which, width = layout.places[blocks + 1 :].tolist()
        with open(path, "rb") as file:
            file.seek(begin)
            text = file.read(end - begin).decode()
        found = csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter)
        lines = [line for line in found if len(line) > 1 or (line and (not line[0] or line[0].strip()))]
        first = int(layout.starts[number])
        for row, line in enumerate(lines, first):
            if len(line) != width:
                raise DataFileError(
                    f"file {path!r}: row {row} has {len(line)} values, but the first line has {width}; fix: write the "
                    "row again"
                )
        return [
            _converted([line[at] for line in lines], column, f"file {path!r}, column {column.name!r}", first)
            for at, column in zip(which, record.columns, strict=True)
        ]

    def __str__(self) -> str:
        kinds = {name: str(dtype) for name, dtype in self._dtypes.items()}
        return f"CSV, dtypes {kinds}, delimiter {self._delimiter!r}, header {self._header}"


def _lines(file: Any, header: bool, delimiter: bytes, path: str) -> tuple[bytes, int, list[int]]:
    """Return the first line, the number of rows, and where each block of rows begins."""
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    first, rows, place, begin = b"", 0, file.tell(), 0
    places: list[int] = []
    quoted = False
    most = rc.data_block_bytes
    small = os.fstat(file.fileno()).st_size <= most
    for line in file if small else iter(partial(file.readline, most + 1), b""):  # which takes a third more time
        if len(line) > most:
            limits.check_bytes(len(line), f"file {path!r}", f"the line of row {rows}")
        begin = begin if quoted else place
        place += len(line)
        if quoted or b'"' in line:
            quoted = _in_quotes(line, quoted, delimiter)
        if quoted or not (line.strip() or delimiter in line or begin < place - len(line)):
            continue  # a line end in quotes, or an empty line
        if not first:
            first = line
            if header:
                continue
        if rows % _BLOCK_ROWS == 0:
            places.append(begin)
        rows += 1
    if quoted:
        raise DataFileError.of_file(
            path, f"a quote in row {rows} is not closed (from byte {begin} on); fix: close it, or write it twice"
        )
    return first, rows, places


def _in_quotes(line: bytes, quoted: bool, delimiter: bytes) -> bool:
    """Return whether the end of a line lies in quotes. Only a quote at the start of a value opens quotes."""
    place = 0
    if not quoted and line.startswith(b'"'):
        quoted, place = True, 1
    while True:
        if quoted:
            place = line.find(b'"', place) + 1
            if not place:
                return True
            if line.startswith(b'"', place):  # two quotes stand for one
                place += 1
            else:
                quoted = False
        else:
            found = line.find(delimiter + b'"', place)
            if found < 0:
                return False
            quoted, place = True, found + len(delimiter) + 1


def _dtype(kind: Any) -> np.dtype:
    dtype = np.dtype(kind)
    return np.dtype(object) if dtype.kind in "US" and not dtype.itemsize else dtype


def _converted(texts: list[str], column: Column, where: str, first: int) -> np.ndarray:
    if column.dtype.hasobject:
        made = np.empty(len(texts), object)
        made[:] = texts
        return made
    try:
        return _cast(texts, column.dtype)
    except _UNFIT:
        for row, text in enumerate(texts, first):
            try:
                _cast([text], column.dtype)
            except _UNFIT:
                raise DataFileError(
                    f"{where}: row {row} has {text!r}, which is not of {column.dtype}; fix: give another dtype in "
                    "dtypes=, or write the row again"
                ) from None
        raise


def _cast(texts: list[str], dtype: np.dtype) -> np.ndarray:
    """Return texts as an array. Raise one of `_UNFIT` if a value would be cut, or become another."""
    if dtype.kind == "b":
        try:
            return np.array([_BOOLS[text.strip().lower()] for text in texts], dtype)
        except KeyError as error:
            raise ValueError(f"{error} is not a truth value") from None
    if dtype.kind in "US":
        if max(map(len, texts), default=0) > dtype.itemsize // np.dtype(f"{dtype.kind}1").itemsize:
            raise ValueError("a text is too long")
        if any(text.endswith("\0") for text in texts):
            raise ValueError("NumPy drops zeros at the end of a text")
        return np.array(texts).astype(dtype)
    if not (_TIMES if dtype.kind in "mM" else _NUMBERS).fullmatch("\n".join(texts)):
        raise ValueError("a character does not belong to a number")
    if dtype.kind in "iu":
        values, limits = list(map(int, texts)), np.iinfo(dtype)
        if values and not limits.min <= min(values) <= max(values) <= limits.max:
            raise OverflowError("an integer is too large")  # NumPy 1 takes it modulo the size
        return np.array(values, dtype)
    with np.errstate(over="raise"):
        made = np.array(texts).astype(dtype)
    if dtype.kind in "fc" and any("inf" not in texts[at].lower() for at in np.flatnonzero(np.isinf(made))):
        raise OverflowError("a number is too large")
    return made
