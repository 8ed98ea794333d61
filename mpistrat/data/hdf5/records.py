"""What is known of an HDF5 file before its rows are read, the places of its rows included.

Everything here is small, plain and without HDF5: it is sent to all ranks.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpistrat.data.rows.blocks import WholeChunks


class OtherFile(NamedTuple):
    """A file that holds rows of another one; ``path`` is relative to the folder of that one, or absolute."""

    path: str
    size: int
    mtime_ns: int


class Extent(NamedTuple):
    """Consecutive bytes of a dataset, from its byte ``start`` on, in one of the column's files."""

    start: int
    file: int
    offset: int
    size: int


class Contiguous(NamedTuple):
    """Rows one after another, in one extent or (external storage) in several."""

    extents: tuple[Extent, ...]


class Chunked(NamedTuple):
    """Rows in chunks; chunks are numbered in C order of the grid that they make.

    Most chunks follow each other in the file, so their offsets are kept as runs: from chunk
    ``run_starts[i]`` on, each begins where the one before ends, the first at ``run_offsets[i]``.

    Attributes
    ----------
    file : int
        Which of the column's files.
    chunk : tuple of int
        Shape of a chunk, dimensions of an array type included.
    filters : tuple of (int, tuple of int)
        Number and parameters of each filter, as they were applied when writing.
    chunks : int
        How many there are.
    sizes : numpy.ndarray
        Stored bytes of each chunk; a single number if all are equal.
    masks : numpy.ndarray
        Which filters were skipped, bit by bit, for each chunk; empty if none ever was.
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
        """From the offset, size and mask of every chunk."""
        starts = np.concatenate([[0], np.flatnonzero(offsets[1:] != offsets[:-1] + sizes[:-1]) + 1])
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
        """Offset and size of every chunk."""
        sizes = np.broadcast_to(self.sizes, self.chunks).astype(np.int64)
        before = np.cumsum(sizes) - sizes
        lengths = np.diff(self.run_starts, append=self.chunks)
        return np.repeat(self.run_offsets - before[self.run_starts], lengths) + before, sizes


class Part(NamedTuple):
    """Some rows of a virtual dataset: ``rows`` from ``first`` on are those of a source from ``source`` on.

    The source has ``layout_rows`` rows.
    """

    first: int
    rows: int
    source: int
    layout_rows: int
    layout: Contiguous | Chunked | Joined


class Joined(NamedTuple):
    """Rows of several datasets, one after another: a virtual dataset."""

    parts: tuple[Part, ...]


class ThroughHdf5(NamedTuple):
    """Rows that only HDF5 can read."""

    reason: str


Layout = Contiguous | Chunked | Joined | ThroughHdf5


class Column(NamedTuple):
    """One HDF5 dataset: the type of a row and how rows are stored.

    Attributes
    ----------
    shape, dtype : tuple of int, numpy.dtype
        Of a row, in the byte order of this machine.
    chunk_rows, chunk_bytes : int
        Rows of a chunk, and its bytes when decoded; 0 for a dataset that is not chunked.
    filtered : bool
        Whether a row can only be had by decoding its whole chunk.
    checksum : bool
        Whether chunks carry one.
    stored : numpy.dtype
        ``dtype`` as it is in the file.
    layout : Contiguous, Chunked, Joined or ThroughHdf5
        Where the rows lie.
    others : tuple of OtherFile
        The other files that hold rows. Extents and chunks name file 0, the one that has the dataset, or
        file ``i + 1``, which is ``others[i]``.
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

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def decoded(self) -> frozenset[WholeChunks]:
        """The kinds of chunks that are read as wholes, whichever of their rows are wanted."""
        if isinstance(self.layout, ThroughHdf5):
            kept = self.filtered and self.chunk_rows and not self.dtype.hasobject
            return frozenset([WholeChunks(self.chunk_rows, self.chunk_rows * self.row_bytes)] if kept else [])
        return frozenset(_decoded(self.layout, self.shape, self.stored.itemsize))


class FileRecord(NamedTuple):
    """One file of the manifest; ``mtime_ns`` is when it was last written, on the node that described it."""

    size: int
    mtime_ns: int
    rows: int
    columns: tuple[Column, ...]


def _decoded(
    layout: Contiguous | Chunked | Joined, shape: tuple[int, ...], itemsize: int
) -> Iterator[WholeChunks]:
    if isinstance(layout, Joined):
        for part in layout.parts:
            yield from _decoded(part.layout, shape, itemsize)
    elif isinstance(layout, Chunked) and (layout.filters or layout.chunk[1:] != shape):
        across = math.prod(-(-size // step) for size, step in zip(shape, layout.chunk[1:], strict=True))
        yield WholeChunks(layout.chunk[0], math.prod(layout.chunk) * across * itemsize)


def joined_path(path: str, other: str) -> str:
    """Where the other file of a file is."""
    return os.path.join(os.path.dirname(path), other)


# --- as JSON ------------------------------------------------------------------------------


def to_json(record: FileRecord) -> Any:
    """A record in dicts, lists, strings and numbers; `from_json` makes it a record again."""
    return _plain(record)


def from_json(plain: Any) -> FileRecord:
    """The record of such dicts.

    Raises
    ------
    ValueError
        If they are none.
    """
    try:
        record = _from_plain(plain)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no record of an HDF5 file ({error!r})") from error
    if not isinstance(record, FileRecord):
        raise ValueError("this is no record of an HDF5 file")
    return record


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (FileRecord, Column, OtherFile, Contiguous, Extent, Chunked, Joined, Part, ThroughHdf5)
}


def _plain(value: Any) -> Any:
    if type(value).__name__ in _KINDS:
        return {"kind": type(value).__name__, **{key: _plain(each) for key, each in value._asdict().items()}}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.dtype):
        return {"kind": "dtype", "type": _plain_dtype(value)}
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return {"kind": "array", "dtype": data.dtype.str, "base64": base64.b64encode(data.tobytes()).decode()}
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_plain(each) for each in value)
    if not isinstance(value, dict):
        return value
    fields = {key: each for key, each in value.items() if key != "kind"}
    if value["kind"] == "dtype":
        return _dtype(fields["type"])
    if value["kind"] == "array":
        raw = np.frombuffer(base64.b64decode(fields["base64"]), fields["dtype"])
        return raw.astype(raw.dtype.newbyteorder("="))
    return _KINDS[value["kind"]](**{key: _from_plain(each) for key, each in fields.items()})


def _plain_dtype(dtype: np.dtype) -> Any:
    if dtype.subdtype is not None:
        return [_plain_dtype(dtype.subdtype[0]), list(dtype.shape)]
    if dtype.names is None:
        return dtype.str
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
    if isinstance(plain, dict):
        formats = [_dtype(each) for each in plain["formats"]]
        places, itemsize = plain["offsets"], plain["itemsize"]
        return np.dtype(
            {"names": plain["names"], "formats": formats, "offsets": places, "itemsize": itemsize}
        )
    return np.dtype(plain)
