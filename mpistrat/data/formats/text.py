"""Files of lines, plain or compressed by gzip: text, of which a row is a line, and CSV."""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import itertools
import os
import re
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, BinaryIO, ClassVar

import numpy as np

from mpistrat.data.errors import DataFileError, DatasetNotFoundError, check_bytes, not_of_format, what_it_is
from mpistrat.data.formats.block_reader import BlockFormat, blocks_of, column_in_blocks
from mpistrat.data.formats.contract import left_out, needed, reason, skips
from mpistrat.data.hdf5.records import Column, FileRecord, InBlocks
from mpistrat.process.cache import Cache
from mpistrat.runtime.environment import rc

BLOCK_ROWS = 4096
"""Most rows of a block."""
_PIECE = 1 << 20  # lines may be long: a block has no more bytes than this, and a line


class LineFormat(BlockFormat):
    """A format of lines, in UTF-8 or in an encoding of one byte for each character, also in gzip.

    The places of a layout are where blocks begin, the end of the last one, ``self.extra(record)`` numbers of the
    format, and where rows that are left out begin and end.
    """

    columns_apart: ClassVar[bool] = False

    def __init__(self, encoding: str, on_bad_row: str):
        self._skips = skips(on_bad_row)
        self.filtered = self._skips
        self._encoding = codecs.lookup(encoding).name
        one_byte = len(bytes(range(256)).decode(encoding, "replace")) == 256
        if self._encoding != "utf-8" and not (one_byte and bytes(range(128)).decode(encoding).isascii()):
            raise ValueError(
                f"encoding must be UTF-8, or one byte for each character, not {encoding!r}: convert the files"
            )
        self._unpacked = Cache[tuple[str, int, int], bytes](1)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[tuple[BinaryIO, os.stat_result]]:
        """Open a file, unpacked if gzip has packed it, and yield it with its status."""
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if file.read(2) != b"\x1f\x8b":
                file.seek(0)
                yield file, status
                return
            key = path, status.st_mtime_ns, status.st_size
            if key not in self._unpacked:
                file.seek(0)
                try:
                    # A byte more shows that it is too long.
                    text = gzip.GzipFile(fileobj=file).read(rc.data_block_bytes + 1)
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    message = f"gzip cannot unpack it ({error}); fix: copy or write it again"
                    raise DataFileError.of_file(path, message) from None
                check_bytes(len(text), f"file {path!r}", "its text")
                self._unpacked.keep(key, text)
            yield io.BytesIO(self._unpacked[key]), status

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unpacked": Cache[tuple[str, int, int], bytes](1)}  # not the text, which may be long

    @abstractmethod
    def rows_of(self, path: str, record: FileRecord, text: bytes, first: int, count: int) -> list[np.ndarray]:
        """Return an array for each column, of lines that have about ``count`` rows from row ``first`` on."""

    @abstractmethod
    def row_ends(self, text: bytes) -> np.ndarray:
        """Return where each row of lines ends, its end included."""

    def extra(self, record: FileRecord) -> int:
        """Return how many numbers of its own the format keeps with the places of blocks."""
        return 0

    def block(self, path: str, record: FileRecord, number: int) -> list[np.ndarray]:
        layout = blocks_of(record)
        begin, end = layout.places[number : number + 2].tolist()
        first, last = layout.starts[number : number + 2].tolist()
        spans = layout.places[len(layout.starts) + self.extra(record) :].reshape(-1, 2)
        bad = spans[(spans[:, 0] >= begin) & (spans[:, 1] <= end)].tolist()
        while bad and bad[-1][1] == end:  # of blocks without a good row, which belong to this one
            end = bad.pop()[0]
        parts = []
        with self._opened(path) as (file, _):
            for start, stop in pairwise([begin, *itertools.chain(*bad), end]):
                file.seek(start)
                parts.append(file.read(stop - start))
        # An end of "\r" would take an empty line of "\n" after it for its own; as "\r\n" it cannot.
        text = b"".join(part + b"\n" if part.endswith(b"\r") and bad else part for part in parts[::2])
        return self.rows_of(path, record, text, first, last - first)

    def checked(self, path: str, record: FileRecord) -> FileRecord:
        """Return the record without the rows that cannot be read, if these are to be left out."""
        if not self._skips or not record.rows:
            return record
        layout = blocks_of(record)
        blocks = len(layout.starts) - 1
        offsets, bad, reasons = layout.places[: blocks + 1], [], []
        with self._opened(path) as (file, _):
            line = 1 + _line_ends(file.read(int(offsets[0])))
            for first, (begin, end) in zip(layout.starts.tolist(), pairwise(offsets.tolist()), strict=False):
                file.seek(begin)
                text = file.read(end - begin)
                ends = [0, *self.row_ends(text).tolist()]
                left = [(0, len(ends) - 1)]
                while left:  # halves, until each is without errors or of one row
                    low, high = left.pop()
                    try:
                        self.rows_of(path, record, text[ends[low] : ends[high]], first + low, high - low)
                    except (DataFileError, ValueError, ArithmeticError) as error:
                        if high - low > 1:
                            left += [((low + high) // 2, high), (low, (low + high) // 2)]
                            continue
                        bad.append((begin + ends[low], begin + ends[high]))
                        cause = reason(error).removeprefix(f"file {path!r}").lstrip(",: ")
                        reasons.append(f"line {line + _line_ends(text[: ends[low]])} ({cause})")
                line += _line_ends(text)
        spans = np.array(bad, np.int64).reshape(-1, 2)
        counts = np.diff(layout.starts) - np.histogram(spans[:, 0], offsets)[0]
        filled = np.flatnonzero(counts)  # an empty block belongs to the one before it
        begins = np.cumsum([0, *counts[filled]])
        offsets = np.concatenate([offsets[filled], offsets[-1:], layout.places[blocks + 1 :], spans.ravel()])
        columns = tuple(column._replace(layout=InBlocks(begins, offsets)) for column in record.columns)
        return record._replace(rows=int(begins[-1]), columns=columns, left_out=left_out(reasons))


class Text(LineFormat):
    """Files whose rows are lines of text, without their ends: ``\\n``, ``\\r\\n`` or ``\\r``, as Python reads them."""

    name: ClassVar[str] = "text"
    named: ClassVar[str] = "columns"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of a file. Reads the file once, to find the lines."""
        require_text(path, "from_text")
        most = rc.data_block_bytes
        try:
            with self._opened(path) as (file, status):
                offset = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
                file.seek(offset)
                rows = 0
                starts: list[int] = []
                offsets: list[int] = []
                while text := file.read(_PIECE):
                    rest = file.readline(most + 1)
                    text += rest
                    ends = _ends(text)
                    begins = np.append(0, ends[:-1])
                    longest = max(len(rest), int((ends - begins).max()))
                    check_bytes(longest, f"file {path!r}", f"a line from row {rows} on")
                    # A block ends where a read ends, so it may have fewer rows.
                    starts += range(rows, rows + len(ends), BLOCK_ROWS)
                    offsets += (offset + begins[::BLOCK_ROWS]).tolist()
                    rows, offset = rows + len(ends), offset + len(text)
        except OSError as error:
            raise DataFileError.unreadable(path, error) from None
        layout = InBlocks(np.array([*starts, rows], np.int64), np.array([*offsets, offset], np.int64))
        column = column_in_blocks(names[0], np.dtype(object), (), layout, BLOCK_ROWS)
        return self.checked(path, FileRecord(status.st_size, status.st_mtime_ns, rows, (column,)))

    def rows_of(self, path: str, record: FileRecord, text: bytes, first: int, count: int) -> list[np.ndarray]:
        try:
            decoded = text.decode(self._encoding)
        except UnicodeDecodeError as error:
            row = first + int(_ends(text).searchsorted(error.start, side="right"))
            raise DataFileError.of_file(
                path, f"row {row} is not {self._encoding} ({error.reason}); fix: give encoding=, or convert it"
            ) from None
        lines = np.empty(count, object)
        lines[:] = decoded.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
        return [lines]

    def row_ends(self, text: bytes) -> np.ndarray:
        return _ends(text)

    def __str__(self) -> str:
        return f"text in {self._encoding}" + (", without bad rows" if self._skips else "")


def _ends(text: bytes) -> np.ndarray:
    """Return where each line ends, its end included. The last line may have none."""
    raw = np.frombuffer(text, np.uint8)
    is_end = raw == ord("\n")
    is_end |= (raw == ord("\r")) & (np.append(raw[1:], 0) != ord("\n"))
    ends = np.flatnonzero(is_end) + 1
    return ends if len(ends) and ends[-1] == len(raw) else np.append(ends, len(raw))


def _line_ends(text: bytes) -> int:
    return text.count(b"\n") + text.count(b"\r") - text.count(b"\r\n")


def require_text(path: str, method: str) -> None:
    """Raise if a file is of another known format than text, or text in gzip."""
    description = what_it_is(path)
    if description and "gzip" not in description:
        raise not_of_format(path, method, "")


# --- CSV: a block is some thousand lines, found when the file is described -------------------------------

_PIECE_OF_CSV = 1 << 18  # larger ones take new memory each time: a third more time
_WHITE = b" \t\r\f\v"
_STARTS_WHITE = np.isin(np.arange(256), [*_WHITE, *b"\n"])
_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_OTHER_WIDTH = re.compile(r"Row #([0-9]+): Expected [0-9]+ columns, got ([0-9]+)")
_UNFIT = (ValueError, OverflowError, FloatingPointError)
# Python and NumPy also take 1_000, digits of other scripts, control characters as white space, and "today".
_NUMBERS = re.compile(r"[0-9A-Za-z+\-.() \t\n]*")
_TIMES = re.compile(r"[0-9T:.+\-NaZ \t\n]*")


class Csv(LineFormat):
    """Files of lines of values. Columns have ``dtypes``; without ``header`` they are named ``0``, ``1``, ...

    ``na_values`` are texts of missing values, and ``comment`` begins lines that are left out.
    """

    name: ClassVar[str] = "CSV"
    named: ClassVar[str] = "columns"

    def __init__(
        self,
        dtypes: Mapping[str, Any],
        delimiter: str = ",",
        header: bool = True,
        na_values: Sequence[str] = (),
        comment: str | None = None,
        encoding: str = "utf-8",
        on_bad_row: str = "raise",
    ):
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
            raise ValueError(f"a delimiter must be one character, no quote and no line end, not {delimiter!r}")
        self._dtypes = {name: _dtype(kind) for name, kind in dtypes.items()}
        self._delimiter, self._header = delimiter, bool(header)
        if isinstance(na_values, str) or not all(isinstance(value, str) for value in na_values):
            raise ValueError(f"na_values must be a sequence of texts, not {na_values!r}")
        wrong = (
            not isinstance(comment, str) or len(comment) != 1 or not comment.isascii() or comment in f'{delimiter}"\n'
        )
        if comment is not None and wrong:
            raise ValueError(f"comment must be a character, no quote and no delimiter, not {comment!r}")
        self._na, self._comment = (*na_values,), comment
        self._seen: Any = (None, None)
        super().__init__(encoding, on_bad_row)
        blank = rb"[%s]+" % _WHITE.replace(delimiter.encode(), b"")
        also = b"" if comment is None else rb"|" + re.escape(comment.encode()) + rb"[^\n]*"
        self._blank_lines = re.compile(rb"^(?:%s%s)(?:\n|\Z)" % (blank, also), re.MULTILINE)

    def columns(self, path: str) -> list[str]:
        """Return the names of all columns of a file."""
        return self._head(path)[1]

    def _head(self, path: str) -> tuple[tuple[int, list[int], int, os.stat_result], list[str]]:
        """Return the number of rows, where blocks begin, the end and the state of a file, and the names of columns."""
        try:
            with self._opened(path) as (file, status):
                state = (path, status.st_ino, status.st_size, status.st_mtime_ns)
                if self._seen[0] == state:  # the names of all columns were asked for, and now the file is described
                    return self._seen[1]
                end = file.seek(0, os.SEEK_END)
                file.seek(0)
                first, rows, offsets = _lines(
                    file, self._header, self._delimiter.encode(), path, end, self._comment, BLOCK_ROWS
                )
        except OSError as error:
            raise DataFileError.unreadable(path, error) from None
        if not first:
            raise DataFileError.of_file(path, "it is empty; fix: copy or write it again")
        require_text(path, "from_csv")
        try:
            needed("pyarrow.csv", "CSV files")
            text = first.decode("utf-8-sig" if self._encoding == "utf-8" else self._encoding)
            (head,) = csv.reader([text], delimiter=self._delimiter, strict=True)
        except (ValueError, csv.Error) as error:
            raise DataFileError.of_file(
                path, f"its first line is not CSV in {self._encoding} ({error}); fix: give encoding=, or convert it"
            ) from None
        known = head if self._header else [str(number) for number in range(len(head))]
        self._seen = state, ((rows, offsets, end, status), known)
        return self._seen[1]

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of some columns of a file. Reads the file once, to find the lines."""
        (rows, offsets, end, status), known = self._head(path)
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
        # The places: where blocks begin, the end of the file, the numbers of the columns, and how many a line has.
        starts = np.array([*range(0, rows, BLOCK_ROWS), rows], np.int64)
        layout = InBlocks(starts, np.array([*offsets, end, *map(known.index, names), len(known)], np.int64))
        kinds = [self._dtypes.get(name, np.dtype(float)) for name in names]
        columns = [column_in_blocks(*column, (), layout, BLOCK_ROWS) for column in zip(names, kinds, strict=True)]
        return self.checked(path, FileRecord(status.st_size, status.st_mtime_ns, rows, tuple(columns)))

    def extra(self, record: FileRecord) -> int:
        return len(record.columns) + 1

    def rows_of(self, path: str, record: FileRecord, text: bytes, first: int, count: int) -> list[np.ndarray]:
        layout = blocks_of(record)
        *which, width = layout.places[len(layout.starts) :][: self.extra(record)].tolist()
        if self._encoding != "utf-8":
            text = text.decode(self._encoding).encode()
        # `_lines` counts no line of spaces, and pyarrow would take it for a value.
        # The pattern takes as long as pyarrow, so it is not tried where each line is a row.
        lines = np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n")) + (text[-1:] != b"\n")
        if self._comment or (lines != count and b'"' not in text):
            text = self._blank_lines.sub(b"", text)
        read = partial(self._columns, path, record, text, which, width, first)
        # pyarrow takes fewer texts for numbers, as +1, and takes 1e400 for an infinite one, 0x for the start of one.
        # One byte is found in a thirtieth of the time of two.
        if not (b"x" in text and b"0x" in text) and not (b"X" in text and b"0X" in text):
            with contextlib.suppress(*_UNFIT):
                return read(_arrow_type)
        return read(lambda dtype: "string")

    def row_ends(self, text: bytes) -> np.ndarray:
        begins = _lines(io.BytesIO(text), False, self._delimiter.encode(), "", len(text), self._comment, 1)[2]
        return np.array([*begins[1:], len(text)])

    def _columns(
        self,
        path: str,
        record: FileRecord,
        text: bytes,
        which: list[int],
        width: int,
        first: int,
        type_of: Callable[[np.dtype], str],
    ) -> list[np.ndarray]:
        """Return the columns ``which`` of lines, whose values pyarrow converts to ``type_of(dtype)``."""
        csv, pyarrow = needed("pyarrow.csv", "CSV files"), needed("pyarrow", "CSV files")
        kinds = {str(at): type_of(column.dtype) for at, column in zip(which, record.columns, strict=True)}
        try:
            # By numbers, since columns may share a name.
            table = csv.read_csv(
                pyarrow.BufferReader(text),
                csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=[*map(str, range(width))]),
                csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=b'"' in text),
                csv.ConvertOptions(column_types=kinds, include_columns=list(kinds), null_values=list(self._na)),
            )
        except ValueError as error:
            if wrong := _OTHER_WIDTH.search(str(error)):
                raise DataFileError(
                    f"file {path!r}: row {first + int(wrong[1]) - 1} has {wrong[2]} values, but the first line has "
                    f"{width}; fix: write the row again"
                ) from None
            raise
        return [
            _converted(table.column(str(at)), column, f"file {path!r}, column {column.name!r}", first, self._na)
            for at, column in zip(which, record.columns, strict=True)
        ]

    def __str__(self) -> str:
        kinds = {name: str(dtype) for name, dtype in self._dtypes.items()}
        read = {
            "on_bad_row": self._skips and "skip",
            "na_values": self._na,
            "comment": self._comment,
            "encoding": self._encoding.replace("utf-8", ""),
        }
        options = "".join(f", {name} {value!r}" for name, value in read.items() if value)
        return f"CSV, dtypes {kinds}, delimiter {self._delimiter!r}, header {self._header}{options}"


def _lines(
    file: Any, header: bool, delimiter: bytes, path: str, size: int, comment: str | None, step: int
) -> tuple[bytes, int, list[int]]:
    """Return the first line, the number of rows, and where each block of ``step`` rows begins."""
    start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
    file.seek(start)
    if comment is None and (lines := _unquoted_lines(file, header, delimiter, step)) is not None:
        return lines
    file.seek(start)
    first, rows, offset, begin = b"", 0, start, 0
    offsets: list[int] = []
    quoted, values = False, _quoted_values(delimiter)
    most = rc.data_block_bytes
    small, skipped = size <= most, None if comment is None else comment.encode()
    for line in file if small else iter(partial(file.readline, most + 1), b""):  # which takes a third more time
        if len(line) > most:
            check_bytes(len(line), f"file {path!r}", f"the line of row {rows}")
        begin = begin if quoted else offset
        offset += len(line)
        if skipped is not None:
            if quoted:
                raise DataFileError.of_file(
                    path, f"row {rows} has a line end in quotes, and comment= is given; fix: drop it"
                )
            if line.startswith(skipped):
                continue
        if quoted or b'"' in line:
            # A quote before the rest of a value that an earlier line has opened makes it match, too.
            ends = values.findall(b'"' + line if quoted else line)
            quoted = not all(closing for closing, _ in ends)
            if any(more for _, more in ends):
                raise DataFileError.of_file(
                    path,
                    f"in row {rows} a text follows a closing quote; fix: write quotes in values twice, not after \\",
                )
        if quoted or not (line.strip() or delimiter in line or begin < offset - len(line)):
            continue  # a line end in quotes, or an empty line
        if not first:
            first = line
            if header:
                continue
        if rows % step == 0:
            offsets.append(begin)
        rows += 1
    if quoted:
        raise DataFileError.of_file(
            path, f"a quote in row {rows} is not closed (from byte {begin} on); fix: close it, or write it twice"
        )
    return first, rows, offsets


def _unquoted_lines(file: Any, header: bool, delimiter: bytes, step: int) -> tuple[bytes, int, list[int]] | None:
    """Return as `_lines`, in a tenth of its time. Return None if a value may be quoted, or a line is too long."""
    first, rows, offset, most = b"", 0, file.tell(), rc.data_block_bytes
    offsets: list[int] = []
    head = file.readline(most + 1) if header else b""
    if b'"' in head and all(closing and not more for closing, more in _quoted_values(delimiter).findall(head)):
        first, header, offset = head, False, offset + len(head)  # pyarrow quotes names, and no numbers
    file.seek(offset)
    while text := file.read(_PIECE_OF_CSV) + file.readline(most + 1):  # up to the end of a line
        raw = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero(raw == ord("\n")) + 1
        if not len(ends) or ends[-1] < len(text):
            ends = np.append(ends, len(text))
        starts = np.append(0, ends[:-1])
        if b'"' in text or (ends - starts).max() > most:
            return None
        filled = np.ones(len(starts), bool)
        for at in np.flatnonzero(_STARTS_WHITE[raw[starts]]).tolist():  # only these may be blank
            line = text[starts[at] : ends[at]]
            filled[at] = bool(line.strip()) or delimiter in line
        starts, ends = starts[filled], ends[filled]
        if not first and len(starts):
            first = text[starts[0] : ends[0]]
            starts = starts[int(header) :]
        offsets += (offset + starts[-rows % step :: step]).tolist()  # of rows 0, step, 2 * step ... of the file
        rows, offset = rows + len(starts), offset + len(text)
    return first, rows, offsets


def _quoted_values(delimiter: bytes) -> re.Pattern[bytes]:
    """Return a pattern of quoted values, in which two quotes stand for one. Group 1 is empty in one that is open.

    Group 2 is what should not follow on the closing quote.
    """
    # Only a quote at the start of a value opens quotes. The pattern never goes back, so its time is linear in the text.
    between = re.escape(delimiter)
    return re.compile(rb"(?:^|" + between + rb')"[^"]*(?:""[^"]*)*("?)([^\s' + between + rb"]?)")


def _dtype(kind: Any) -> np.dtype:
    dtype = np.dtype(kind)
    return np.dtype(object) if dtype.kind in "US" and not dtype.itemsize else dtype


def _arrow_type(dtype: np.dtype) -> str:
    """Return the type that pyarrow converts texts to. It is string where NumPy converts them."""
    return {"f": "double", "i": dtype.name, "u": dtype.name}.get(dtype.kind, "string")


def _converted(array: Any, column: Column, where: str, first: int, na: Sequence[str]) -> np.ndarray:
    if str(array.type) != "string":
        if array.null_count and column.dtype.kind != "f":
            raise ValueError("integers cannot be missing")
        with np.errstate(over="raise"):  # a number too large for float32 is an error, not infinite
            values = array.to_numpy().astype(column.dtype, copy=False)
        if column.dtype.kind == "f" and np.isinf(values).any():
            raise FloatingPointError("a number may be too large")
        return values
    texts = array.to_pylist()
    if column.dtype.hasobject:
        values = np.empty(len(texts), object)
        values[:] = texts
        return values
    if na and column.dtype.kind in "fcmM":
        missing = "NaT" if column.dtype.kind in "mM" else "nan"
        texts = [missing if text in na else text for text in texts]
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
        numbers = np.array(texts).astype(dtype)
    # Infinite though the text does not say so: the number is too large.
    if dtype.kind in "fc" and any("inf" not in texts[at].lower() for at in np.flatnonzero(np.isinf(numbers))):
        raise OverflowError("a number is too large")
    return numbers
