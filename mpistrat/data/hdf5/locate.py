"""Location of the rows of an HDF5 dataset in its files, with a check that all rows are there.

The index of chunks in a file of HDF5's default format has no checksum. HDF5 follows a damaged one and takes whatever
lies at the places it names for rows. Most damage contradicts the shape of the dataset, or other entries of the index.
"""

from __future__ import annotations

import math
import os
from array import array
from typing import Any, NamedTuple

import h5py
import numpy as np

from mpistrat.data import limits
from mpistrat.data.errors import DataFileError
from mpistrat.data.hdf5 import codecs as codecs_hdf5
from mpistrat.data.hdf5 import virtual as virtual_hdf5
from mpistrat.data.hdf5.codecs import SHUFFLE
from mpistrat.data.hdf5.records import Chunked, Contiguous, Extent, Layout, OtherFile, ThroughHdf5
from mpistrat.data.hdf5.virtual import never_written
from mpistrat.runtime.environment import rc

_WHOLE_FILE = h5py.h5f.UNLIMITED


class ChunkIndex(NamedTuple):
    """The chunks in the file: numbers in C order of the grid of all, ascending, and which filters were skipped."""

    numbers: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    masks: np.ndarray


def chunk_index(dataset: h5py.Dataset, where: str) -> ChunkIndex:
    """Return the index of a dataset. Raise DataFileError if it contradicts the shape of the dataset or itself."""
    shape, chunk = np.array(dataset.shape, np.uint64), np.array(dataset.chunks, np.uint64)
    grid = -(-np.array(dataset.shape) // dataset.chunks)
    possible = math.prod(grid.tolist())
    found = _chunks(dataset, min(possible, rc.data_blocks))
    limits.check_blocks(min(len(found), possible), where)
    if len(found) > possible:
        raise _damaged(where, f"it has more than the {possible} chunks that shape {dataset.shape} allows")
    corners, (masks, offsets, sizes) = found[:, : len(grid)], found[:, len(grid) :].T
    _check_corners(where, corners, shape, chunk)
    numbers = np.ravel_multi_index(tuple((corners // chunk).astype(np.int64).T), tuple(grid))
    order = np.argsort(numbers)
    index = ChunkIndex(numbers[order], offsets[order], sizes[order], masks[order])
    twice = np.flatnonzero(index.numbers[1:] == index.numbers[:-1])
    if len(twice):
        corner = corners[order[twice[0]]].tolist()
        raise _damaged(where, f"it has two chunks that begin at element {corner}")
    _check_filters(where, index, dataset)
    return index


def check_places(where: str, index: ChunkIndex, file_bytes: int) -> None:
    """Raise DataFileError unless all chunks lie inside of a file of this size, no byte in two of them."""
    order = np.argsort(index.offsets, kind="stable")
    starts, sizes = index.offsets[order], index.sizes[order]
    # Compared without a sum, which might wrap around.
    end = np.uint64(file_bytes)
    outside = np.flatnonzero((starts > end) | (sizes > end - np.minimum(starts, end)))
    if len(outside):
        raise _damaged(
            where, f"it has a chunk of {sizes[outside[0]]} bytes at byte {starts[outside[0]]} of a file of {file_bytes}"
        )
    common = np.flatnonzero(sizes[:-1] > starts[1:] - starts[:-1])
    if len(common):
        raise _damaged(where, f"its chunks at bytes {starts[common[0]]} and {starts[common[0] + 1]} overlap")


def _chunks(dataset: h5py.Dataset, most: int) -> np.ndarray:
    """Return a line of numbers for each chunk, or for ``most + 1``: its corner, filter mask, offset and size."""
    # One object for all: 100,000 tuples take 39 MB, and time of the garbage collector.
    numbers = array("Q")
    width = dataset.ndim + 3

    def take(chunk: Any) -> bool | None:
        corner, mask, offset, size = chunk
        numbers.extend((*corner, mask, offset, size))
        return True if len(numbers) > most * width else None  # anything but None ends it

    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(take)
    else:  # h5py on HDF5 1.10; seventy times as slow
        for i in range(min(dataset.id.get_num_chunks(), most + 1)):
            take(dataset.id.get_chunk_info(i))
    return np.array(numbers, np.uint64).reshape(-1, width)


def _check_corners(where: str, corners: np.ndarray, shape: np.ndarray, chunk: np.ndarray) -> None:
    wrong = np.flatnonzero(((corners >= shape) | (corners % chunk != 0)).any(axis=1))
    if len(wrong):
        corner = corners[wrong[0]].tolist()
        raise _damaged(
            where,
            f"it has a chunk that begins at element {corner}, where none of shape {tuple(chunk.tolist())} can in a "
            f"dataset of shape {tuple(shape.tolist())}",
        )


def _check_filters(where: str, index: ChunkIndex, dataset: h5py.Dataset) -> None:
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]
    all_skipped = np.uint64((1 << len(filters)) - 1)
    if (index.masks > all_skipped).any():
        raise _damaged(where, f"it has a chunk that skips filters which the dataset, with {len(filters)}, lacks")
    element = dataset.id.get_type().get_size()
    whole = math.prod(dataset.chunks) * element
    wrong = np.flatnonzero((index.masks == all_skipped) & (index.sizes != whole))
    if len(wrong) and not dataset.dtype.hasobject:  # a string of variable length has another size in the file
        raise _damaged(where, f"it has a chunk of {index.sizes[wrong[0]]} bytes where unfiltered chunks have {whole}")
    if SHUFFLE in filters:
        # A chunk that another filter made smaller was shuffled before, as all others: HDF5 never fails in that.
        number = filters.index(SHUFFLE)
        shuffled = plist.get_filter(number)[2]
        # HDF5 sets it, but not for types of variable length. It would mix the bytes of several elements.
        if shuffled != (element,) and not dataset.dtype.hasobject:
            raise _damaged(where, f"its shuffle filter has parameters {shuffled} for elements of {element} bytes")
        skips = (index.masks >> np.uint64(number) & np.uint64(1)).astype(bool)
        if (skips & (index.masks != all_skipped)).any() and not skips.all():
            raise _damaged(where, "it has a chunk that skips the shuffle filter, and another that does not")


def _damaged(where: str, what: str) -> DataFileError:
    return DataFileError(f"{where}: its index of chunks is damaged, as {what}; fix: copy or write the file again")


class Locator:
    """Locator of the rows of one dataset of a file, which has number 0. It collects the other files with rows."""

    def __init__(self, path: str):
        self._path = path
        self._numbers = {os.path.abspath(path): 0}
        self._virtual: list[tuple[str, str | None]] = []  # those that are being located, from the outer one on
        self.others: list[OtherFile] = []

    def locate(self, path: str, dataset: h5py.Dataset, where: str) -> Layout:
        """Return the layout of a dataset in a file, or linked from it. Raise DataFileError if rows are missing."""
        home = dataset.file.filename
        number = self.number(home)
        found: Layout
        if dataset.is_virtual:
            key = os.path.realpath(home), dataset.name
            if key in self._virtual:
                raise DataFileError(f"{where}: its rows would lie in itself; fix: write it again")
            self._virtual.append(key)
            found = virtual_hdf5.locate(self.locate, home, dataset, where)
            self._virtual.pop()
            return found
        kind = dataset.id.get_create_plist().get_layout()
        if dataset.shape[0] == 0 or dataset.size == 0:
            found = ThroughHdf5("it is empty")
        elif kind == h5py.h5d.CONTIGUOUS:
            found = self._contiguous(number, dataset, where)
        elif kind == h5py.h5d.CHUNKED:
            found = _chunked(number, home, dataset, where)
        else:
            found = ThroughHdf5("its layout is compact")
        return _why_not_as_it_is(dataset) or found

    def number(self, path: str) -> int:
        """Return the number of a file; the next number if it is new."""
        key = os.path.abspath(path)
        if key not in self._numbers:
            found = os.stat(path)
            folder = os.path.dirname(os.path.abspath(self._path))
            inside = os.path.commonpath([key, folder]) == folder
            name = os.path.relpath(key, folder) if inside else key
            self.others.append(OtherFile(name, found.st_size, found.st_mtime_ns))
            self._numbers[key] = len(self.others)
        return self._numbers[key]

    def _contiguous(self, number: int, dataset: h5py.Dataset, where: str) -> Layout:
        plist = dataset.id.get_create_plist()
        nbytes = dataset.id.get_type().get_size() * dataset.size
        if not plist.get_external_count():
            if dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED:
                return never_written(plist, where, "its rows were never written")
            return Contiguous((Extent(0, number, dataset.id.get_offset(), nbytes),))
        extents, start = [], 0
        for i in range(plist.get_external_count()):
            name, offset, size = plist.get_external(i)
            if start == nbytes:
                break
            path = _external_path(dataset.file.filename, os.fsdecode(name))
            limits.check_path(path, where)
            if not os.path.exists(path):
                raise DataFileError(
                    f"{where}: its rows lie in {os.fsdecode(name)!r}, which does not exist; fix: bring it back"
                )
            size = nbytes - start if size == _WHOLE_FILE else min(size, nbytes - start)
            if os.path.getsize(path) < offset + size:
                raise DataFileError(
                    f"{where}: its rows lie in {os.fsdecode(name)!r}, which is truncated "
                    f"({os.path.getsize(path)} bytes instead of {offset + size}); fix: copy it again"
                )
            extents.append(Extent(start, self.number(path), offset, size))
            start += size
        return Contiguous(tuple(extents))


def _external_path(home: str, name: str) -> str:
    # As in HDF5, the name is relative to the current folder unless a prefix is given.
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "")
    if prefix.startswith("${ORIGIN}"):
        prefix = os.path.dirname(os.path.abspath(home)) + prefix.removeprefix("${ORIGIN}")
    return os.path.join(prefix, name)


def _why_not_as_it_is(dataset: h5py.Dataset) -> ThroughHdf5 | None:
    """Return the layout `ThroughHdf5` if NumPy cannot use the stored bytes as they are, otherwise None."""
    if dataset.dtype.hasobject:
        return ThroughHdf5("its type has variable length")
    if not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True)):
        return ThroughHdf5("its stored type is not one of NumPy's")
    return None


def _chunked(number: int, home: str, dataset: h5py.Dataset, where: str) -> Layout:
    plist = dataset.id.get_create_plist()
    chunk = np.array(dataset.chunks)
    grid = -(-np.array(dataset.shape) // chunk)
    index = chunk_index(dataset, where)
    shift = _shift(home, dataset, index)
    check_places(where, index._replace(offsets=index.offsets + np.uint64(shift or 0)), os.path.getsize(home))
    count = math.prod(grid.tolist())
    if len(index.numbers) < count:
        gaps = np.flatnonzero(index.numbers != np.arange(len(index.numbers)))
        missing = int(gaps[0]) if len(gaps) else len(index.numbers)
        first = missing // math.prod(grid[1:].tolist()) * dataset.chunks[0]
        last = min(first + dataset.chunks[0], dataset.shape[0]) - 1
        return never_written(plist, where, f"some of its rows were never written, rows {first} to {last} first")
    filters = tuple((code, tuple(values)) for code, _, values, _ in map(plist.get_filter, range(plist.get_nfilters())))
    reason = codecs_hdf5.missing([code for code, _ in filters])
    if reason:
        return ThroughHdf5(reason)
    if shift is None:
        return ThroughHdf5("HDF5 does not say where its chunks are")
    whole = tuple(map(int, chunk)) + (dataset.dtype.subdtype[1] if dataset.dtype.subdtype else ())
    offsets, sizes = index.offsets.astype(np.int64), index.sizes.astype(np.int64)
    return Chunked.of(number, whole, filters, offsets + shift, sizes, index.masks)


def _shift(home: str, dataset: h5py.Dataset, index: ChunkIndex) -> int | None:
    """Return what to add to the offsets of chunks, or None if neither 0 nor the size of the user block fits.

    Some versions of HDF5 count offsets from the end of the user block.
    """
    block = dataset.file.userblock_size
    if not block or not len(index.numbers):
        return 0
    grid = -(-np.array(dataset.shape) // dataset.chunks)
    corner = np.array(np.unravel_index(index.numbers[0], tuple(grid))) * dataset.chunks
    _, stored = dataset.id.read_direct_chunk(tuple(corner.tolist()))
    with open(home, "rb") as file:
        for shift in (0, block):
            file.seek(int(index.offsets[0]) + shift)
            if file.read(int(index.sizes[0])) == stored:
                return shift
    return None
