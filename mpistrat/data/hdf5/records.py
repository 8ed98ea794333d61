"""Records of data files: types, lengths, and the places of the rows, known before rows are read.

Records are small, plain and without HDF5 objects, because they are sent to all ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpistrat.arrays.json_arrays import packed, unpacked
from mpistrat.data.errors import DataFileError, check_blocks, check_bytes
from mpistrat.data.rows.blocks import WholeChunks

_LINE = 64  # bytes of a cache line

Attributes: TypeAlias = tuple[tuple[str, Any], ...]
"""Attributes of a column that say what its stored values mean: texts, numbers, and arrays of one axis."""


class OtherFile(NamedTuple):
    """A file that holds rows of a dataset of another file. ``path`` is absolute, or relative to its folder."""

    path: str
    size: int
    mtime_ns: int


class Extent(NamedTuple):
    """Consecutive bytes of a dataset, from byte ``start`` of the dataset on, in one of the column's files."""

    start: int
    file: int
    offset: int
    size: int


class Contiguous(NamedTuple):
    """Layout of rows that lie one after another, in one extent or, with external storage, in several."""

    extents: tuple[Extent, ...]


class ColumnMajor(NamedTuple):
    """Layout of an array in Fortran order: from a byte of the file on, all ``rows`` of a value follow each other."""

    offset: int
    rows: int


class Chunked(NamedTuple):
    """Layout of rows in chunks, which are numbered in C order of their grid, in a column's file.

    Most chunks follow each other in the file, so their offsets are kept as runs. Chunk ``run_starts[i]`` begins at
    ``run_offsets[i]``. Each later chunk of the run begins where the chunk before it ends. ``sizes`` has the stored
    bytes of each chunk, or one number if all are equal, and ``masks`` the filters that were skipped, if any, as bits.
    """

    file: int
    chunk: tuple[int, ...]
    filters: tuple[tuple[int, tuple[int, ...]], ...]
    chunks: int
    run_starts: np.ndarray
    run_offsets: np.ndarray
    sizes: np.ndarray
    masks: np.ndarray

    @classmethod
    def of(
        cls,
        file: int,
        chunk: tuple[int, ...],
        filters: tuple[tuple[int, tuple[int, ...]], ...],
        offsets: np.ndarray,
        sizes: np.ndarray,
        masks: np.ndarray,
    ) -> Chunked:
        """Return the layout for the offset, size and mask of every chunk."""
        starts = np.concatenate([[0], np.flatnonzero(offsets[1:] != offsets[:-1] + sizes[:-1]) + 1])
        # Half the bytes: all ranks receive them, and manifests keep them.
        small = sizes.astype(np.uint32) if sizes.max() < 1 << 32 else sizes
        return cls(
            file,
            chunk,
            filters,
            len(offsets),
            starts,
            offsets[starts],
            small[:1] if (small == small[0]).all() else small,
            masks.astype(np.uint32) if masks.any() else np.empty(0, np.uint32),
        )

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Return offset and size of every chunk."""
        sizes = np.broadcast_to(self.sizes, self.chunks).astype(np.int64)
        before = np.cumsum(sizes) - sizes
        lengths = np.diff(self.run_starts, append=self.chunks)
        return np.repeat(self.run_offsets - before[self.run_starts], lengths) + before, sizes


class Part(NamedTuple):
    """A part of a virtual dataset: ``rows`` rows from ``first`` on, which the source has from its row ``source`` on."""

    first: int
    rows: int
    source: int
    layout_rows: int
    layout: Contiguous | ColumnMajor | Chunked | Joined


class Joined(NamedTuple):
    """Layout of a virtual dataset: rows of several datasets, one after another."""

    parts: tuple[Part, ...]


class ThroughHdf5(NamedTuple):
    """Layout of rows that only HDF5 can read, and why. ``lacking`` rows with the fill value follow.

    ``fill`` has the fill value, if it is not the one in the file.
    """

    reason: str
    lacking: int = 0
    fill: np.ndarray = np.empty(0)


class InBlocks(NamedTuple):
    """Layout of rows that the library of a format reads in blocks, for other formats than HDF5.

    ``starts`` has the first row of each block, and the number of rows. ``places`` is up to the format.
    """

    starts: np.ndarray
    places: np.ndarray

    @property
    def most_rows(self) -> int:
        """Number of rows of the longest block."""
        return int(np.diff(self.starts).max(initial=0))


Layout = Contiguous | ColumnMajor | Chunked | Joined | ThroughHdf5 | InBlocks


class Column(NamedTuple):
    """One HDF5 dataset: the type of its rows, and their layout. ``stored`` is the dtype in the file.

    A chunk has ``chunk_rows`` rows, and ``chunk_bytes`` when decoded; 0 without chunks. ``filtered`` says whether a row
    can be read only by decoding its whole chunk. ``meaning`` is what files must share beyond the dtype, as text: a time
    zone, or the names of an enumeration. File 0 of the layout is the file that has the dataset, and file ``i + 1`` is
    ``others[i]``. With ``attributes``, stored values are decoded to ``dtype``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_rows: int
    chunk_bytes: int
    filtered: bool
    checksum: bool
    stored: np.dtype
    layout: Layout
    others: tuple[OtherFile, ...]
    attributes: Attributes = ()
    meaning: str = ""

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def decoded(self) -> frozenset[WholeChunks]:
        """The kinds of chunks that are always read as wholes."""
        if isinstance(self.layout, ThroughHdf5):
            keeps_chunks = self.filtered and self.chunk_rows and not self.dtype.hasobject
            nbytes = self.chunk_rows * math.prod(self.shape) * self.stored.itemsize
            return frozenset([WholeChunks(self.chunk_rows, nbytes)] if keeps_chunks else [])
        if isinstance(self.layout, InBlocks):
            rows = self.layout.most_rows
            return frozenset([WholeChunks(rows, rows * self.row_bytes)] if rows else [])
        return frozenset(_decoded(self.layout, self.shape, self.stored.itemsize))


class FileRecord(NamedTuple):
    """One file of the manifest. ``mtime_ns`` is its time of writing, as seen on the node that described it.

    ``left_out`` says which rows were left out because they cannot be read.
    """

    size: int
    mtime_ns: int
    rows: int
    columns: tuple[Column, ...]
    left_out: str = ""


def _decoded(
    layout: Contiguous | ColumnMajor | Chunked | Joined, shape: tuple[int, ...], itemsize: int
) -> Iterator[WholeChunks]:
    if isinstance(layout, Joined):
        for part in layout.parts:
            yield from _decoded(part.layout, shape, itemsize)
    elif isinstance(layout, Chunked) and (layout.filters or layout.chunk[1:] != shape):
        across = math.prod(-(-size // step) for size, step in zip(shape, layout.chunk[1:], strict=True))
        yield WholeChunks(layout.chunk[0], math.prod(layout.chunk) * across * itemsize)


def without_times(record: FileRecord) -> FileRecord:
    """Return a record without the times of writing."""
    columns = [
        column._replace(others=tuple(other._replace(mtime_ns=0) for other in column.others))
        for column in record.columns
    ]
    return record._replace(mtime_ns=0, columns=tuple(columns))


def check_limits(path: str, record: FileRecord) -> None:
    """Refuse rows, or chunks that are decoded as wholes, that take too much memory.

    Raise DataFileError if one is larger than ``mpistrat.rc.data_block_bytes``, or the number of rows is negative.
    """
    if record.rows < 0:  # zarr 2 takes it from the metadata
        raise DataFileError.of_file(path, f"it has {record.rows} rows; fix: copy or write it again")
    for column in record.columns:
        where = f"file {path!r}, dataset {column.name!r}"
        check_bytes(column.row_bytes, where, "a row")
        if isinstance(column.layout, Chunked):
            check_blocks(column.layout.chunks, where)
        for block in column.decoded:
            check_bytes(block.nbytes, where, f"a block of {block.rows} rows")


def joined_path(path: str, other: str) -> str:
    """Return the path of another file that is named relative to the folder of a file."""
    return os.path.join(os.path.dirname(path), other)


def varying(dtype: np.dtype) -> Any:
    """Return what rows of variable length hold: ``str``, a dtype, or None if the dtype does not say.

    NumPy takes all object dtypes for equal. h5py's dtypes know the difference, in their metadata.
    """
    kind: Any = dict(dtype.metadata or {}).get("vlen")
    return str if kind in (str, bytes) else None if kind is None else np.dtype(kind)


# --- as JSON ------------------------------------------------------------------------------


def to_json(record: FileRecord) -> Any:
    """Return a record as dicts, lists, strings and numbers, for `from_json`."""
    return _plain(record)


def from_json(plain: Any) -> FileRecord:
    """Return the record that `to_json` converted. Raise ValueError if ``plain`` is not such a record."""
    try:
        record = _from_plain(plain)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is not a record of an HDF5 file ({error!r})") from error
    if not isinstance(record, FileRecord):
        raise ValueError("this is not a record of an HDF5 file")
    return record


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(FileRecord, Column, OtherFile, Contiguous, ColumnMajor, Extent, Chunked, InBlocks, Joined, Part),
        ThroughHdf5,
    )
}


def _plain(value: Any) -> Any:
    if type(value).__name__ in _KINDS:
        return {"kind": type(value).__name__, **{key: _plain(entry) for key, entry in value._asdict().items()}}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.dtype):
        return {"kind": "dtype", "type": _plain_dtype(value)}
    if isinstance(value, np.ndarray):
        array = packed(value)  # of one axis
        return {"kind": "array", "dtype": array["dtype"], "base64": array["array"]}
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_plain(entry) for entry in value)
    if not isinstance(value, dict):
        return value
    fields = {key: entry for key, entry in value.items() if key != "kind"}
    if value["kind"] == "dtype":
        return _dtype(fields["type"])
    if value["kind"] == "array":
        return unpacked({"array": fields["base64"], "dtype": fields["dtype"], "shape": [-1]})
    return _KINDS[value["kind"]](**{key: _from_plain(entry) for key, entry in fields.items()})


def _plain_dtype(dtype: np.dtype) -> Any:
    if dtype.subdtype is not None:
        return [_plain_dtype(dtype.subdtype[0]), list(dtype.shape)]
    if dtype.names is None:
        of_rows = varying(dtype)
        return dtype.str if of_rows is None else {"vlen": "str" if of_rows is str else _plain_dtype(of_rows)}
    fields = [dtype.fields[name] for name in dtype.names] if dtype.fields else []
    return {
        "names": list(dtype.names),
        "formats": [_plain_dtype(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }


def _dtype(plain: Any) -> np.dtype:
    if isinstance(plain, list):
        return np.dtype((_dtype(plain[0]), tuple(plain[1])))
    if isinstance(plain, dict) and "vlen" in plain:
        # As h5py.string_dtype() and h5py.vlen_dtype() make them. Importing h5py takes 60 ms.
        return np.dtype(object, metadata={"vlen": str if plain["vlen"] == "str" else _dtype(plain["vlen"])})
    if isinstance(plain, dict):
        formats = [_dtype(entry) for entry in plain["formats"]]
        offsets, itemsize = plain["offsets"], plain["itemsize"]
        return np.dtype({"names": plain["names"], "formats": formats, "offsets": offsets, "itemsize": itemsize})
    return np.dtype(plain)


def ends_of_columns(columns: Sequence[Column], rows: int) -> list[int]:
    """Return where columns of so many rows begin in one memory, each at a cache line, and where the last one ends."""
    return [0, *np.cumsum([-(-rows * column.row_bytes // _LINE) * _LINE for column in columns]).tolist()]


def columns_in(memory: np.ndarray, columns: Sequence[Column], ends: Sequence[int], rows: int) -> list[np.ndarray]:
    """Return the columns in a memory for which `ends_of_columns` returned ``ends``."""
    return [
        memory[start : start + rows * column.row_bytes].view(column.dtype).reshape(rows, *column.shape)
        for start, column in zip(ends, columns, strict=False)
    ]
