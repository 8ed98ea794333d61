"""Description of one HDF5 file: which datasets hold rows, their lengths, types and layouts, without reading rows."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import h5py

from mpistrat.data import errors
from mpistrat.data.hdf5 import chunks
from mpistrat.data.hdf5.locate import Locator
from mpistrat.data.hdf5.open_file import check_links, opened
from mpistrat.data.hdf5.records import Chunked, Column, FileRecord, Joined, Layout, ThroughHdf5
from mpistrat.data.rows.spec import native

_NAMES_SHOWN = 20
_UNITS = ("units", "calendar")  # attributes of numbers, as in netCDF and NeXus


def _length(dataset: h5py.Dataset) -> int:
    return int(dataset.shape[0])


def describe(path: str, names: Sequence[str], length_of: Callable[[h5py.Dataset], int] = _length) -> FileRecord:
    """Return the record of the datasets ``names`` of a file. Raise an error that names the file if something is wrong.

    ``length_of`` returns the number of rows of a dataset. Rows beyond its end have its fill value.
    """
    with opened(path) as file:
        status = os.stat(path)
        columns, lengths = [], []
        for name in names:
            with errors.naming(f"file {path!r}, dataset {name!r}"):
                column, length = _column(path, file, name, length_of)
            columns.append(column)
            lengths.append(length)
        for name, length in zip(names, lengths, strict=True):
            if length != lengths[0]:
                raise errors.DatasetMismatchError(
                    f"file {path!r}: dataset {names[0]!r} has {lengths[0]} rows and dataset {name!r} has "
                    f"{length}; fix: datasets that are read together must be equally long"
                )
    return FileRecord(status.st_size, status.st_mtime_ns, lengths[0], tuple(columns))


def _column(path: str, file: h5py.File, name: str, length_of: Callable[[h5py.Dataset], int]) -> tuple[Column, int]:
    dataset = _find(path, file, name)
    where = f"file {path!r}, dataset {name!r}"
    if not dataset.shape:
        kind = "has no data space" if dataset.shape is None else "is a scalar"
        raise errors.DatasetMismatchError(f"{where}: it {kind}; fix: axis 0 must be the axis of the samples")
    try:
        dtype = dataset.dtype
    except TypeError as error:
        raise errors.DataFileError(f"{where}: NumPy lacks its type ({error}); fix: store another type") from error
    filtered, checksum = _check_filters(where, dataset)
    locator = Locator(path)
    layout = locator.locate(path, dataset, where)
    rows = length_of(dataset)
    if rows > dataset.shape[0]:
        # A netCDF variable may be shorter than its unlimited dimension. HDF5 has no rows there.
        layout = ThroughHdf5("a fill value stands for rows that it lacks", rows - dataset.shape[0])
    # The axes of an array type become axes of the row.
    stored, inner = dtype.subdtype if dtype.subdtype is not None else (dtype, ())
    chunk = dataset.chunks
    column = Column(
        name=name,
        shape=tuple(dataset.shape[1:]) + tuple(inner),
        dtype=native(stored),
        chunk_rows=chunk[0] if chunk else 0,
        chunk_bytes=math.prod(chunk) * dtype.itemsize if chunk else 0,
        filtered=filtered,
        checksum=checksum,
        stored=stored,
        layout=layout,
        others=tuple(locator.others),
        meaning=", ".join([*_of_type(dataset.id.get_type()), *_of_attributes(dataset)]),
    )
    return column, rows


def _of_type(kind: h5py.h5t.TypeID) -> Iterator[str]:
    """Yield what NumPy's dtype for an HDF5 type lacks: the names of enumerations, and the tags of opaque types."""
    if isinstance(kind, h5py.h5t.TypeCompoundID):
        for i in range(kind.get_nmembers()):
            name = kind.get_member_name(i).decode(errors="replace")
            yield from (f"{name!r}: {text}" for text in _of_type(kind.get_member_type(i)))
    elif isinstance(kind, h5py.h5t.TypeEnumID):
        numbers = {kind.get_member_name(i): kind.get_member_value(i) for i in range(kind.get_nmembers())}
        names = [f"{name.decode(errors='replace')} = {number}" for name, number in numbers.items()]
        yield f"enumeration of {', '.join(sorted(names))}"
    elif isinstance(kind, h5py.h5t.TypeOpaqueID):
        yield f"opaque {kind.get_tag().decode(errors='replace')!r}"
    elif isinstance(kind, (h5py.h5t.TypeArrayID, h5py.h5t.TypeVlenID)):
        yield from _of_type(kind.get_super())


def _of_attributes(dataset: h5py.Dataset) -> Iterator[str]:
    for name in _UNITS:
        if name in dataset.attrs:
            value = dataset.attrs[name]
            yield f"{name} {value.decode(errors='replace') if isinstance(value, bytes) else value}"


def _find(path: str, file: h5py.File, name: str) -> h5py.Dataset:
    check_links(file, name, f"file {path!r}, dataset {name!r}")
    try:
        item = file[name]
    except Exception as error:  # RuntimeError: links form a circle. A damaged file: any class
        link = _link(file, name)
        if isinstance(link, h5py.ExternalLink):
            raise errors.DatasetNotFoundError(
                f"file {path!r}, dataset {name!r}: it is a link to {link.path!r} in {link.filename!r}, which "
                f"cannot be followed ({errors.reason_of(error)}); fix: put that file where the link points"
            ) from None
        if isinstance(link, h5py.HardLink):
            raise
        raise errors.DatasetNotFoundError(
            f"file {path!r} has no dataset {name!r}; it has {_names(file)}; fix: name one of these"
        ) from None
    if isinstance(item, h5py.Dataset):
        return item
    raise errors.DatasetNotFoundError(
        f"file {path!r}: {name!r} is a {type(item).__name__.lower()}, not a dataset; "
        f"the file has {_names(file)}; fix: name one of these"
    )


def _link(file: h5py.File, name: str) -> Any:
    try:
        return file.get(name, getlink=True)
    except (KeyError, OSError, ValueError):
        return None


def _names(file: h5py.File) -> str:
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    if not names:
        return "no dataset at all"
    shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _check_filters(where: str, dataset: h5py.Dataset) -> tuple[bool, bool]:
    plist = dataset.id.get_create_plist()
    checksum = False
    for number in range(plist.get_nfilters()):
        code, _, _, label = plist.get_filter(number)
        checksum = checksum or code == h5py.h5z.FILTER_FLETCHER32
        if h5py.h5z.filter_avail(code):
            continue
        with contextlib.suppress(ImportError):
            importlib.import_module("hdf5plugin")  # registers its filters with HDF5
        if not h5py.h5z.filter_avail(code):
            label = label.decode(errors="replace") if isinstance(label, bytes) else label
            raise errors.FilterUnavailableError(
                f"{where}: it is stored with HDF5 filter {code} ({label or 'no name'}), which is not "
                "installed; fix: pip install hdf5plugin, or set HDF5_PLUGIN_PATH to where the filter is"
            )
    return plist.get_nfilters() > 0, checksum


def way_of_reading(column: Column) -> str:
    """Return in one line how the rows of a dataset are read, and why: ``"direct: ..."`` or ``"h5py: ..."``."""
    if isinstance(column.layout, ThroughHdf5):
        return f"h5py: {column.layout.reason}"
    return f"direct: {_words(column.layout)}"


def _words(layout: Layout) -> str:
    if isinstance(layout, Joined):
        kinds = sorted({_words(part.layout) for part in layout.parts})
        return f"virtual, of {len(layout.parts)} sources: {'; '.join(kinds)}"
    if isinstance(layout, Chunked):
        names = [chunks.name_of(number) for number, _ in layout.filters]
        return f"chunks of {layout.chunk[0]} rows" + (f", {' + '.join(names)}" if names else "")
    return "contiguous"


class Contents(NamedTuple):
    """The datasets of a file.

    ``rows`` are as long as the largest one along axis 0, the axis of samples. ``single`` have one value or none, for
    all rows, and ``others`` have another length; their values are texts that say so.
    """

    rows: tuple[str, ...]
    single: dict[str, str]
    others: dict[str, str]


def contents(path: str) -> Contents:
    """Return the contents of a file. Raise EmptyDatasetError if it has no dataset with rows."""
    arrays: dict[str, tuple[int, int]] = {}
    single: dict[str, str] = {}

    def look(name: str, item: h5py.HLObject) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        if item.shape:
            # Not `item.nbytes`, which fails for types that NumPy lacks.
            arrays[name] = item.shape[0], math.prod(item.shape) * item.id.get_type().get_size()
        else:
            single[name] = "has no data space" if item.shape is None else "is a scalar"

    with opened(path) as file, errors.naming(f"file {path!r}"):
        file.visititems(look)
    if not arrays:
        has = f"no dataset with rows, only the scalars {sorted(single)}" if single else "no dataset at all"
        raise errors.EmptyDatasetError(f"file {path!r} has {has}; fix: check the program that wrote it")
    largest = max(arrays, key=lambda name: arrays[name][1])
    rows = arrays[largest][0]
    return Contents(
        tuple(name for name, (length, _) in arrays.items() if length == rows),
        single,
        {
            name: f"has {length} rows and dataset {largest!r} has {rows}"
            for name, (length, _) in arrays.items()
            if length != rows
        },
    )
