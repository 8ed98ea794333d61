"""Location of the rows of an HDF5 dataset in its files, with a check that all rows are there."""

from __future__ import annotations

import math
import os

import h5py
import numpy as np

from mpistrat.data import named_files
from mpistrat.data.errors import DataFileError
from mpistrat.data.hdf5 import codecs as codecs_hdf5
from mpistrat.data.hdf5 import virtual as virtual_hdf5
from mpistrat.data.hdf5.chunk_index import ChunkIndex, check_places, chunk_index
from mpistrat.data.hdf5.records import Chunked, Contiguous, Extent, Layout, OtherFile, ThroughHdf5
from mpistrat.data.hdf5.unwritten import never_written

_WHOLE_FILE = h5py.h5f.UNLIMITED


class Locator:
    """Locator of the rows of one dataset of a file. It collects the other files that hold some of them.

    Parameters
    ----------
    path : str
        The file. It has number 0.
    """

    def __init__(self, path: str):
        self._path = path
        self._numbers = {os.path.abspath(path): 0}
        self._virtual: list[
            tuple[str, str | None]
        ] = []  # those that are being located, from the outer one on
        self.others: list[OtherFile] = []

    def locate(self, path: str, dataset: h5py.Dataset, where: str) -> Layout:
        """Return the layout of a dataset that is in the file ``path``, or linked from it.

        Raises
        ------
        DataFileError
            If rows were never written, or are missing. The message begins with ``where``.
        """
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
            named_files.check(path, where)
            if not os.path.exists(path):
                raise DataFileError(
                    f"{where}: its rows lie in {os.fsdecode(name)!r}, which does not exist; "
                    "fix: bring it back"
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
        return never_written(
            plist, where, f"some of its rows were never written, rows {first} to {last} first"
        )
    filters = tuple(
        (code, tuple(values)) for code, _, values, _ in map(plist.get_filter, range(plist.get_nfilters()))
    )
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
