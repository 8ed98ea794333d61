"""Location of the rows of an HDF5 dataset in its files, with a check that all rows are there.

The index of chunks in a file of HDF5's default format has no checksum. HDF5 follows a damaged one and takes whatever
lies at the places it names for rows. Most damage contradicts the shape of the dataset, or other entries of the index.

HDF5 returns fill values where a source of a virtual dataset is missing, so all sources are checked. Then rows are read
from the sources directly: through h5py an epoch takes 1.8 times as long in order and 2.0 times shuffled (16 files of 24
MiB).
"""

from __future__ import annotations

import glob
import math
import os
import re
from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import h5py
import numpy as np

from mpistrat.data.errors import DataFileError, DatasetNotFoundError, check_blocks, check_path
from mpistrat.data.hdf5 import chunks
from mpistrat.data.hdf5.chunks import NBIT, SHUFFLE, SZIP
from mpistrat.data.hdf5.open_file import check_links, opened
from mpistrat.data.hdf5.records import (
    Chunked,
    Contiguous,
    Extent,
    InBlocks,
    Joined,
    Layout,
    OtherFile,
    Part,
    ThroughHdf5,
)
from mpistrat.runtime.environment import rc

# `Locator.locate`: called with a path, a dataset, and the dataset's name for errors. Returns its layout.
Locate: TypeAlias = "Callable[[str, h5py.Dataset, str], Layout]"
# In names of files and datasets "%b" is the number of a block, and "%%" a percent sign.
_BLOCK = re.compile("%(%|[0-9]*b)")


def never_written(plist: Any, where: str, message: str) -> ThroughHdf5:
    """Return the layout of unwritten rows. Raise DataFileError if the program that wrote it chose no fill value."""
    # By default HDF5 reads rows that were never written as zeros, which look like data.
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        raise DataFileError(
            f"{where}: {message}; fix: write it again, or give it a fill value if that stands for unwritten rows"
        )
    return ThroughHdf5("a fill value stands for some of its rows")


class _Box(NamedTuple):
    """A box of elements, given by its first and its last corner (inclusive)."""

    first: np.ndarray
    last: np.ndarray

    @property
    def size(self) -> int:
        """Number of elements in the box."""
        return int(np.prod(self.last - self.first + 1))

    def is_rows_of(self, shape: tuple[int, ...]) -> bool:
        """Return whether the box consists of whole rows of an array of this shape."""
        return bool((self.first[1:] == 0).all() and (self.last[1:] + 1 == shape[1:]).all())


class _Mapping(NamedTuple):
    """A source of a virtual dataset: the box ``out_of`` of the source becomes the box ``into`` of the dataset.

    ``odd`` says why the selections are not boxes. ``elements`` is the number of elements that are mapped; None
    if the selection ``endless`` maps as many as the source has at the moment.
    """

    file: str
    dataset: str
    into: _Box
    out_of: _Box | None
    odd: str
    elements: int | None
    endless: Any = None


def locate_virtual(locate_source: Locate, file_path: str, dataset: h5py.Dataset, where: str) -> Layout:
    """Return the layout of a virtual dataset: `Joined` if it is the rows of its sources, one after another.

    Raise if a source is missing or too small, or sources leave gaps, where HDF5 would return fill values.
    """
    mappings = _mappings(file_path, dataset, where)
    covered = 0
    parts: list[Part] = []
    reason = ""
    for mapping in mappings:
        # "." is HDF5's name for the file of the virtual dataset.
        path = file_path if mapping.file == "." else _source_path(file_path, mapping.file)
        if path is None:
            raise DataFileError(f"{where}: its rows lie in {mapping.file!r}, which does not exist; fix: bring it back")
        check_path(path, where)
        with opened(path) as file:
            check_links(file, mapping.dataset, where)
            source = file.get(mapping.dataset)
            if not isinstance(source, h5py.Dataset):
                raise DatasetNotFoundError(
                    f"{where}: its rows lie in dataset {mapping.dataset!r} of {path!r}, which does not have that "
                    "dataset; fix: write it again"
                )
            # A source that was made anew may be smaller: HDF5 would give fill values for what it lacks.
            _check_inside(mapping, source, f"{where}: its rows lie in {path!r}")
            covered += _elements_now(mapping, source.shape)
            here = f"file {path!r}, dataset {mapping.dataset!r}"
            layout = locate_source(path, source, here)
            # Go on with a reason, too: HDF5 would give fill values for sources that are missing.
            reason = reason or _reason_not_direct(mapping, source, layout, dataset)
            if not reason:
                start = 0 if mapping.out_of is None else int(mapping.out_of.first[0])
                first, last = int(mapping.into.first[0]), int(mapping.into.last[0])
                assert not isinstance(layout, (ThroughHdf5, InBlocks))
                parts.append(Part(first, last - first + 1, start, source.shape[0], layout))
    if covered < dataset.size:
        return never_written(dataset.id.get_create_plist(), where, "it has rows without a source")
    _check_covered_once(mappings, dataset, where)
    parts.sort(key=lambda part: part.first)
    ends = np.cumsum([part.rows for part in parts])
    if not parts:
        reason = reason or "it is empty"
    if reason or any(part.first + part.rows != end for part, end in zip(parts, ends, strict=True)):
        return ThroughHdf5(reason or "its sources overlap")
    return Joined(tuple(parts))


def _mappings(file_path: str, dataset: h5py.Dataset, where: str) -> list[_Mapping]:
    """Return the sources; a file name pattern gives one source for each file."""
    plist = dataset.id.get_create_plist()
    everything = _Box(np.zeros(dataset.ndim, np.int64), np.array(dataset.shape) - 1)
    mappings = []
    for i in range(plist.get_virtual_count()):
        file, name = plist.get_virtual_filename(i), plist.get_virtual_dsetname(i)
        into = plist.get_virtual_vspace(i)
        if _is_empty(into):
            continue
        of_source = plist.get_virtual_srcspace(i)
        out_of = _selected(of_source)
        # One entry stands for any number of sources, as "part-%b.h5".
        if _is_pattern(file) or _is_pattern(name):
            blocks = _blocks(into, dataset, where)
            mappings += [
                _Mapping(_numbered(file, number), _numbered(name, number), block, *out_of, block.size)
                for number, block in enumerate(blocks)
            ]
            _check_no_gap(file_path, file, len(blocks), where)
            continue
        box, odd = _selected(into)
        elements = None if _is_endless(into) else into.get_select_npoints()
        names = _numbered(file, 0), _numbered(name, 0)
        mappings.append(_Mapping(*names, box or everything, out_of[0], odd or out_of[1], elements, of_source))
    return mappings


def _elements_now(mapping: _Mapping, shape: tuple[int, ...]) -> int:
    """Return the number of elements that a source of this shape provides."""
    if mapping.elements is not None:
        return mapping.elements
    if not _is_endless(mapping.endless):
        return int(np.prod(shape))
    selected = 1
    for start, stride, count, block, size in zip(*mapping.endless.get_regular_hyperslab(), shape, strict=True):
        room = max(0, size - start)
        if block == h5py.h5s.UNLIMITED:
            selected *= room
        elif count == h5py.h5s.UNLIMITED:
            selected *= room // stride * block + min(block, room % stride)  # whole blocks, and the begun one
        else:
            selected *= count * block
    return int(selected)


def _check_covered_once(mappings: list[_Mapping], dataset: h5py.Dataset, where: str) -> None:
    """Raise if sources overlap and leave a gap elsewhere. HDF5 only counts elements, and leaves memory as it was."""
    if any(mapping.elements is None for mapping in mappings):
        return
    rows = sorted((int(mapping.into.first[0]), int(mapping.into.last[0])) for mapping in mappings)
    # The usual case: no two sources share rows, so they cannot overlap.
    if all(last < first for (_, last), (first, _) in pairwise(rows)):
        return
    plist = dataset.id.get_create_plist()
    union = h5py.h5s.create_simple(dataset.shape)
    union.select_none()
    for i in range(plist.get_virtual_count()):
        into = plist.get_virtual_vspace(i)
        if _is_empty(into):
            continue
        if into.get_select_type() != h5py.h5s.SEL_HYPERSLABS or _is_endless(into):
            return  # the whole dataset, or a pattern with blocks that follow each other
        if into.is_regular_hyperslab():
            start, stride, count, block = into.get_regular_hyperslab()
            union.select_hyperslab(start, count, stride, block, op=h5py.h5s.SELECT_OR)
            continue
        for first, last in into.get_select_hyper_blocklist().tolist():
            size = tuple(b - a + 1 for a, b in zip(first, last, strict=True))
            union.select_hyperslab(tuple(first), (1,) * len(size), None, size, op=h5py.h5s.SELECT_OR)
    if union.get_select_npoints() < dataset.size:
        raise DataFileError(
            f"{where}: its sources overlap, and it has rows without a source, which HDF5 would leave "
            "uninitialized; fix: make it again"
        )


def _blocks(into: Any, dataset: h5py.Dataset, where: str) -> list[_Box]:
    """Return the blocks of an endless selection that lie in the dataset at its present size."""
    # Unsigned, as UNLIMITED is 2**64 - 1.
    start, stride, count, block = (np.array(values, np.uint64) for values in into.get_regular_hyperslab())
    endless = count == h5py.h5s.UNLIMITED
    axis = int(np.argmax(endless)) if endless.any() else 0
    number = int(count[axis])
    if endless.any():
        length = dataset.shape[axis] - int(start[axis])
        number = -(-length // int(stride[axis])) if length > 0 else 0
    check_blocks(number, where)
    size = np.where(np.arange(len(start)) == axis, block, count * block).astype(np.int64)
    boxes = []
    for i in range(number):
        first = start.astype(np.int64)
        first[axis] += i * int(stride[axis])
        boxes.append(_Box(first, np.minimum(first + size, dataset.shape) - 1))
    return boxes


def _is_pattern(name: str) -> bool:
    return any(match[1] != "%" for match in _BLOCK.finditer(name))


def _numbered(name: str, number: int) -> str:
    return _BLOCK.sub(lambda match: "%" if match[1] == "%" else str(number), name)


def _check_no_gap(file_path: str, pattern: str, count: int, where: str) -> None:
    """Raise if a file of a pattern is missing while a later one exists, since HDF5 would end the dataset there."""
    if not _is_pattern(pattern):
        return
    numbers = re.compile(_BLOCK.sub(r"(\\d+)", re.escape(pattern).replace(r"%%", "%")))
    any_number = _BLOCK.sub(lambda match: "%" if match[1] == "%" else "*", glob.escape(pattern))
    for path in glob.glob(os.path.join(glob.escape(os.path.dirname(file_path)), any_number)):
        match = numbers.search(path)
        if match and int(match[1]) >= count:
            raise DataFileError(
                f"{where}: its rows lie in {_numbered(pattern, count)!r}, which does not exist while "
                f"{os.path.basename(path)!r} does; fix: bring it back"
            )


def _source_path(file_path: str, name: str) -> str | None:
    """Return the path where HDF5 finds a source, or None if the file does not exist."""
    folder = os.path.dirname(os.path.abspath(file_path))
    prefix = os.environ.get("HDF5_VDS_PREFIX", "").replace("${ORIGIN}", folder)
    folders = [*([prefix] if prefix else []), folder, ""]
    return next((p for p in (os.path.join(parent, name) for parent in folders) if os.path.exists(p)), None)


def _is_endless(space: Any) -> bool:
    if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return False
    _, _, count, block = space.get_regular_hyperslab()
    return h5py.h5s.UNLIMITED in (*count, *block)


def _is_empty(space: Any) -> bool:
    return not _is_endless(space) and not space.get_select_npoints()


def _selected(space: Any) -> tuple[_Box | None, str]:
    """Return the selected box, or None for everything, and why the selection is not a box."""
    if space.get_select_type() == h5py.h5s.SEL_ALL:
        return None, ""
    if _is_endless(space):
        return None, "its sources may grow"
    box = _Box(*(np.array(corner, np.int64) for corner in space.get_select_bounds()))
    return box, "" if space.get_select_npoints() == box.size else "its sources have gaps"


def _check_inside(mapping: _Mapping, source: h5py.Dataset, where: str) -> None:
    box = mapping.out_of
    if box is None:
        fits = bool(mapping.odd) or source.size >= mapping.into.size
    else:
        fits = len(box.last) == len(source.shape) and bool((box.last < source.shape).all())
    if not fits:
        wanted = mapping.into if box is None else box
        raise DataFileError(
            f"{where}, where the shape is {source.shape}, too small for the {wanted.size} elements up to "
            f"{tuple(wanted.last.tolist())} that are needed; fix: write it again"
        )


def _reason_not_direct(mapping: _Mapping, source: h5py.Dataset, layout: Layout, dataset: h5py.Dataset) -> str:
    if mapping.odd:
        return mapping.odd
    if isinstance(layout, ThroughHdf5):
        return f"a source is not direct: {layout.reason}"
    if not (source.shape and dataset.shape):
        return "a source is a scalar"
    if not source.id.get_type().equal(dataset.id.get_type()):  # HDF5 also converts enumerations, by name
        return "a source has another type"
    out_of = mapping.out_of or _Box(np.zeros(source.ndim, np.int64), np.array(source.shape) - 1)
    alike = source.shape[1:] == dataset.shape[1:] and out_of.size == mapping.into.size
    whole = alike and mapping.into.is_rows_of(dataset.shape) and out_of.is_rows_of(source.shape)
    return "" if whole else "its sources are not whole rows"


_FEWEST_BOUND = 1 << 12  # of the chunks that are looked at
_WHOLE_FILE = h5py.h5f.UNLIMITED


class ChunkIndex(NamedTuple):
    """The chunks in the file, by ascending numbers in C order of the grid. ``masks`` are the skipped filters."""

    numbers: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    masks: np.ndarray


def chunk_index(dataset: h5py.Dataset, where: str) -> ChunkIndex:
    """Return the index of a dataset. Raise DataFileError if it contradicts the shape of the dataset or itself."""
    shape, chunk = np.array(dataset.shape, np.uint64), np.array(dataset.chunks, np.uint64)
    grid = -(-np.array(dataset.shape) // dataset.chunks)
    possible = math.prod(grid.tolist())
    most = min(max(2 * possible, _FEWEST_BOUND), rc.data_blocks)
    table = _chunks(dataset, most)  # a damaged index may go in circles, and have no end
    check_blocks(min(len(table), possible), where)
    if len(table) > most:
        raise _damaged(where, f"it has more than {most} chunks, where shape {dataset.shape} has {possible}")
    # HDF5 leaves chunks outside of the shape if one axis of a dataset shrinks while another one grows.
    table = table[(table[:, : len(grid)] < shape).all(axis=1)]
    corners, (masks, offsets, sizes) = table[:, : len(grid)], table[:, len(grid) :].T
    wrong = np.flatnonzero((corners % chunk != 0).any(axis=1))
    if len(wrong):
        raise _damaged(
            where,
            f"it has a chunk that begins at element {corners[wrong[0]].tolist()}, where none of shape {dataset.chunks} "
            f"can in a dataset of shape {dataset.shape}",
        )
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
    """Return a row for each chunk, or for ``most + 1`` of them: its corner, filter mask, offset and size."""
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


def _check_filters(where: str, index: ChunkIndex, dataset: h5py.Dataset) -> None:
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]
    all_skipped = np.uint64((1 << len(filters)) - 1)
    element = dataset.id.get_type().get_size()
    whole = math.prod(dataset.chunks) * element
    wrong = np.flatnonzero((index.masks & all_skipped == all_skipped) & (index.sizes != whole))
    if len(wrong) and not dataset.dtype.hasobject:  # a string of variable length has another size in the file
        raise _damaged(where, f"it has a chunk of {index.sizes[wrong[0]]} bytes where unfiltered chunks have {whole}")
    _check_szip(where, filters, index, dataset)
    if SHUFFLE in filters:
        number = filters.index(SHUFFLE)
        shuffled = plist.get_filter(number)[2]
        # HDF5 sets it, but not for types of variable length. It would mix the bytes of several elements.
        if shuffled != (element,) and not dataset.dtype.hasobject:
            raise DataFileError(
                f"{where}: its shuffle filter has parameters {shuffled}, but its elements have {element} bytes, and "
                "HDF5 stores no such dataset; fix: write it again"
            )


def _check_szip(where: str, filters: list[int], index: ChunkIndex, dataset: h5py.Dataset) -> None:
    """Raise DataFileError if szip lost values: HDF5 gives it a part of an element, and reads memory in its place."""
    if SZIP not in filters:
        return
    last = filters.index(SZIP)
    # nbit changes no length if all bits of a type are used.
    exact = {SHUFFLE} if _type_needs_hdf5(dataset) else {SHUFFLE, NBIT}
    before = [number for number in range(last) if filters[number] not in exact]
    by_szip = index.masks >> np.uint64(last) & np.uint64(1) == 0
    for number in before:
        if (by_szip & (index.masks >> np.uint64(number) & np.uint64(1) == 0)).any():
            raise DataFileError(
                f"{where}: its filter szip follows {chunks.name_of(filters[number])}, and HDF5 loses the last "
                "values of such chunks: each read gives others; fix: write it again with one of the two filters"
            )


def _damaged(where: str, message: str) -> DataFileError:
    return DataFileError(f"{where}: its index of chunks is damaged, as {message}; fix: copy or write the file again")


class Locator:
    """Locator of the rows of one dataset of a file, which has number 0. It collects the other files with rows."""

    def __init__(self, path: str):
        self._path = path
        self._numbers = {os.path.abspath(path): 0}
        self._virtual: list[tuple[str, str | None]] = []  # datasets that are being located, the outer one first
        self.others: list[OtherFile] = []

    def locate(self, path: str, dataset: h5py.Dataset, where: str) -> Layout:
        """Return the layout of a dataset in a file, or linked from it. Raise DataFileError if rows are missing."""
        file_path = dataset.file.filename
        number = self.number(file_path)
        layout: Layout
        if dataset.is_virtual:
            key = os.path.realpath(file_path), dataset.name
            if key in self._virtual:
                # HDF5 and this class would open it again and again until Python's stack ends.
                raise DataFileError(f"{where}: its rows would lie in itself; fix: write it again")
            self._virtual.append(key)
            layout = locate_virtual(self.locate, file_path, dataset, where)
            self._virtual.pop()
            return layout
        kind = dataset.id.get_create_plist().get_layout()
        if not dataset.size:  # None without a data space
            layout = ThroughHdf5("it is empty")
        elif kind == h5py.h5d.CONTIGUOUS:
            layout = self._contiguous(number, dataset, where)
        elif kind == h5py.h5d.CHUNKED:
            layout = _chunked(number, file_path, dataset, where)
        else:
            layout = ThroughHdf5("its layout is compact")
        return _type_needs_hdf5(dataset) or layout

    def number(self, path: str) -> int:
        """Return the number of a file; the next number if it is new."""
        key = os.path.abspath(path)
        if key not in self._numbers:
            status = os.stat(path)
            folder = os.path.dirname(os.path.abspath(self._path))
            inside = os.path.commonpath([key, folder]) == folder
            name = os.path.relpath(key, folder) if inside else key
            self.others.append(OtherFile(name, status.st_size, status.st_mtime_ns))
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
            check_path(path, where)
            lies = f"{where}: its rows lie in {os.fsdecode(name)!r}, which"
            if not os.path.exists(path):
                raise DataFileError(f"{lies} does not exist; fix: bring it back, or write these rows")
            size = nbytes - start if size == _WHOLE_FILE else min(size, nbytes - start)
            if os.path.getsize(path) < offset + size:
                raise DataFileError(
                    f"{lies} has {os.path.getsize(path)} bytes instead of {offset + size}: the rest was never written, "
                    "or is cut off; fix: copy it again, or write these rows"
                )
            extents.append(Extent(start, self.number(path), offset, size))
            start += size
        return Contiguous(tuple(extents))


def _external_path(file_path: str, name: str) -> str:
    # As in HDF5, the name is relative to the current folder unless a prefix is given.
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "")
    if prefix.startswith("${ORIGIN}"):
        prefix = os.path.dirname(os.path.abspath(file_path)) + prefix.removeprefix("${ORIGIN}")
    return os.path.join(prefix, name)


def _type_needs_hdf5(dataset: h5py.Dataset) -> ThroughHdf5 | None:
    """Return the layout `ThroughHdf5` if NumPy cannot use the stored bytes as they are, otherwise None."""
    if dataset.dtype.hasobject:
        return ThroughHdf5("its type has variable length")
    if not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True)):
        return ThroughHdf5("its stored type is not one of NumPy's")
    return None


def _chunked(number: int, path: str, dataset: h5py.Dataset, where: str) -> Layout:
    plist = dataset.id.get_create_plist()
    chunk = np.array(dataset.chunks)
    grid = -(-np.array(dataset.shape) // chunk)
    index = chunk_index(dataset, where)
    shift = _shift(path, dataset, index)
    check_places(where, index._replace(offsets=index.offsets + np.uint64(shift or 0)), os.path.getsize(path))
    count = math.prod(grid.tolist())
    if len(index.numbers) < count:
        # The first chunk whose number is not its position comes after the first missing one.
        gaps = np.flatnonzero(index.numbers != np.arange(len(index.numbers)))
        missing = int(gaps[0]) if len(gaps) else len(index.numbers)
        first = missing // math.prod(grid[1:].tolist()) * dataset.chunks[0]
        last = min(first + dataset.chunks[0], dataset.shape[0]) - 1
        return never_written(plist, where, f"some of its rows were never written, rows {first} to {last} first")
    filters = tuple((code, tuple(values)) for code, _, values, _ in map(plist.get_filter, range(plist.get_nfilters())))
    reason = chunks.missing([code for code, _ in filters])
    if reason:
        return ThroughHdf5(reason)
    if shift is None:
        return ThroughHdf5("HDF5 does not say where its chunks are")
    whole = tuple(map(int, chunk)) + (dataset.dtype.subdtype[1] if dataset.dtype.subdtype else ())
    offsets, sizes = index.offsets.astype(np.int64), index.sizes.astype(np.int64)
    return Chunked.of(number, whole, filters, offsets + shift, sizes, index.masks)


def _shift(path: str, dataset: h5py.Dataset, index: ChunkIndex) -> int | None:
    """Return what to add to the offsets of chunks, or None if neither 0 nor the size of the user block fits.

    Some versions of HDF5 count offsets from the end of the user block.
    """
    block = dataset.file.userblock_size
    if not block or not len(index.numbers):
        return 0
    grid = -(-np.array(dataset.shape) // dataset.chunks)
    corner = np.array(np.unravel_index(index.numbers[0], tuple(grid))) * dataset.chunks
    # What HDF5 reads as the first chunk is looked for at both places in the file.
    _, stored = dataset.id.read_direct_chunk(tuple(corner.tolist()))
    with open(path, "rb") as file:
        for shift in (0, block):
            file.seek(int(index.offsets[0]) + shift)
            if file.read(int(index.sizes[0])) == stored:
                return shift
    return None
