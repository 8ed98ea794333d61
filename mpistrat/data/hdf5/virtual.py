"""Location of the rows of virtual datasets, with a check that no source is missing.

HDF5 returns fill values where a source is missing, so all sources are checked. Then rows are read from the sources
directly: through h5py an epoch takes 1.8 times as long in order and 2.0 times shuffled (16 files of 24 MiB).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import h5py
import numpy as np

from mpistrat.data import limits
from mpistrat.data.errors import DataFileError, DatasetNotFoundError
from mpistrat.data.hdf5 import links
from mpistrat.data.hdf5.open_file import opened
from mpistrat.data.hdf5.records import InBlocks, Joined, Layout, Part, ThroughHdf5

# `Locator.locate`: called with a path, a dataset, and the dataset's name for errors. Returns its layout.
Locate: TypeAlias = "Callable[[str, h5py.Dataset, str], Layout]"
_BLOCK = re.compile("%(%|[0-9]*b)")


def never_written(plist: Any, where: str, what: str) -> ThroughHdf5:
    """Return the layout of unwritten rows. Raise DataFileError if the program that wrote it chose no fill value."""
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        raise DataFileError(
            f"{where}: {what}; fix: write it again, or give it a fill value if that stands for unwritten rows"
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


def locate(locate_source: Locate, home: str, dataset: h5py.Dataset, where: str) -> Layout:
    """Return the layout of a virtual dataset: `Joined` if it is the rows of its sources, one after another.

    Raise if a source is missing or too small, or sources leave gaps, where HDF5 would return fill values.
    """
    mappings = _mappings(home, dataset, where)
    covered = 0
    parts: list[Part] = []
    reason = ""
    for mapping in mappings:
        path = home if mapping.file == "." else _source_path(home, mapping.file)
        if path is None:
            raise DataFileError(f"{where}: its rows lie in {mapping.file!r}, which does not exist; fix: bring it back")
        limits.check_path(path, where)
        with opened(path) as file:
            links.check(file, mapping.dataset, where)
            source = file.get(mapping.dataset)
            if not isinstance(source, h5py.Dataset):
                raise DatasetNotFoundError(
                    f"{where}: its rows lie in dataset {mapping.dataset!r} of {path!r}, which does not have that "
                    "dataset; fix: write it again"
                )
            _check_inside(mapping, source, f"{where}: its rows lie in {path!r}")
            covered += _elements_now(mapping, source.shape)
            here = f"file {path!r}, dataset {mapping.dataset!r}"
            layout = locate_source(path, source, here)
            reason = reason or _why_not(mapping, source, layout, dataset)
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
    if reason or any(part.first + part.rows != end for part, end in zip(parts, ends, strict=True)):
        return ThroughHdf5(reason or "its sources overlap")
    return Joined(tuple(parts))


def _mappings(home: str, dataset: h5py.Dataset, where: str) -> list[_Mapping]:
    """Return the sources; a file name pattern gives one source for each file."""
    plist = dataset.id.get_create_plist()
    everything = _Box(np.zeros(dataset.ndim, np.int64), np.array(dataset.shape) - 1)
    found = []
    for i in range(plist.get_virtual_count()):
        file, name = plist.get_virtual_filename(i), plist.get_virtual_dsetname(i)
        into, of_source = plist.get_virtual_vspace(i), plist.get_virtual_srcspace(i)
        out_of = _selected(of_source)
        if _is_pattern(file) or _is_pattern(name):
            blocks = _blocks(into, dataset, where)
            found += [
                _Mapping(_numbered(file, number), _numbered(name, number), block, *out_of, block.size)
                for number, block in enumerate(blocks)
            ]
            _check_no_gap(home, file, len(blocks), where)
            continue
        box, odd = _selected(into)
        elements = None if _is_endless(into) else into.get_select_npoints()
        names = _numbered(file, 0), _numbered(name, 0)
        found.append(_Mapping(*names, box or everything, out_of[0], odd or out_of[1], elements, of_source))
    return found


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
            selected *= room // stride * block + min(block, room % stride)
        else:
            selected *= count * block
    return int(selected)


def _check_covered_once(mappings: list[_Mapping], dataset: h5py.Dataset, where: str) -> None:
    """Raise if sources overlap and leave a gap elsewhere. HDF5 only counts elements, and leaves memory as it was."""
    if any(mapping.elements is None for mapping in mappings):
        return
    rows = sorted((int(mapping.into.first[0]), int(mapping.into.last[0])) for mapping in mappings)
    if all(last < first for (_, last), (first, _) in pairwise(rows)):
        return
    plist = dataset.id.get_create_plist()
    union = h5py.h5s.create_simple(dataset.shape)
    union.select_none()
    for i in range(plist.get_virtual_count()):
        into = plist.get_virtual_vspace(i)
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
    start, stride, count, block = (np.array(each, np.uint64) for each in into.get_regular_hyperslab())
    endless = count == h5py.h5s.UNLIMITED
    axis = int(np.argmax(endless)) if endless.any() else 0
    number = int(count[axis])
    if endless.any():
        length = dataset.shape[axis] - int(start[axis])
        number = -(-length // int(stride[axis])) if length > 0 else 0
    limits.check_blocks(number, where)
    size = np.where(np.arange(len(start)) == axis, block, count * block).astype(np.int64)
    found = []
    for i in range(number):
        first = start.astype(np.int64)
        first[axis] += i * int(stride[axis])
        found.append(_Box(first, np.minimum(first + size, dataset.shape) - 1))
    return found


def _is_pattern(name: str) -> bool:
    return any(match[1] != "%" for match in _BLOCK.finditer(name))


def _numbered(name: str, number: int) -> str:
    return _BLOCK.sub(lambda match: "%" if match[1] == "%" else str(number), name)


def _check_no_gap(home: str, pattern: str, count: int, where: str) -> None:
    """Raise if a file of a pattern is missing while a later one exists, since HDF5 would end the dataset there."""
    if not _is_pattern(pattern):
        return
    numbers = re.compile(_BLOCK.sub(r"(\\d+)", re.escape(pattern).replace(r"%%", "%")))
    any_number = _BLOCK.sub(lambda match: "%" if match[1] == "%" else "*", glob.escape(pattern))
    for path in glob.glob(os.path.join(glob.escape(os.path.dirname(home)), any_number)):
        match = numbers.search(path)
        if match and int(match[1]) >= count:
            raise DataFileError(
                f"{where}: its rows lie in {_numbered(pattern, count)!r}, which does not exist while "
                f"{os.path.basename(path)!r} does; fix: bring it back"
            )


def _source_path(home: str, name: str) -> str | None:
    """Return the path where HDF5 finds a source, or None if the file does not exist."""
    folder = os.path.dirname(os.path.abspath(home))
    prefix = os.environ.get("HDF5_VDS_PREFIX", "").replace("${ORIGIN}", folder)
    folders = [*([prefix] if prefix else []), folder, ""]
    return next((p for p in (os.path.join(each, name) for each in folders) if os.path.exists(p)), None)


def _is_endless(space: Any) -> bool:
    if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return False
    _, _, count, block = space.get_regular_hyperslab()
    return h5py.h5s.UNLIMITED in (*count, *block)


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


def _why_not(mapping: _Mapping, source: h5py.Dataset, layout: Layout, dataset: h5py.Dataset) -> str:
    if mapping.odd:
        return mapping.odd
    if isinstance(layout, ThroughHdf5):
        return f"a source is not direct: {layout.reason}"
    if source.dtype != dataset.dtype:
        return "a source has another type"
    out_of = mapping.out_of or _Box(np.zeros(source.ndim, np.int64), np.array(source.shape) - 1)
    alike = source.shape[1:] == dataset.shape[1:]
    if not (alike and mapping.into.is_rows_of(dataset.shape) and out_of.is_rows_of(source.shape)):
        return "its sources are not whole rows"
    if out_of.size != mapping.into.size:
        return "its sources are not whole rows"
    return ""
