"""HDF5 files, and netCDF-4 files, which are HDF5 files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import h5py
import numpy as np

from mpistrat.data.errors import DataFileError, DatasetNotFoundError, naming
from mpistrat.data.formats import cf
from mpistrat.data.formats.contract import Format
from mpistrat.data.hdf5.describe import describe
from mpistrat.data.hdf5.open_file import check_links, opened
from mpistrat.data.hdf5.reader import FileReader
from mpistrat.data.hdf5.records import Column, FileRecord, ThroughHdf5
from mpistrat.data.rows.spec import native

_HIDDEN = "_nc4_non_coord_"  # before the name of a variable that is named as a dimension that it does not describe
_NO_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"


class Hdf5(Format):
    """HDF5 files: a column is a dataset."""

    name: ClassVar[str] = "HDF5"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        return describe(path, names)

    def reader(self, most_decoded: int) -> FileReader:
        return FileReader(most_decoded=most_decoded, describe=self.describe)


class NetCdf(Hdf5):
    """netCDF-4 files: a column is a variable, which is an HDF5 dataset, decoded as the CF conventions say.

    An unlimited dimension is as long as the longest of its variables. Others have fill values for the rest.
    """

    name: ClassVar[str] = "netCDF"
    named: ClassVar[str] = "variables"

    def __init__(self, decode: bool = True):
        self._decode = decode

    def __str__(self) -> str:
        return self.name if self._decode else f"{self.name} as stored"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        try:
            with open(path, "rb") as raw:
                classic = raw.read(3) == b"CDF"
        except OSError:
            classic = False  # described below, with a message that says what is wrong
        if classic:
            raise DataFileError.of_file(path, "it is a classic netCDF file; fix: nccopy -k nc4 OLD.nc NEW.nc")
        with opened(path) as file, naming(f"file {path!r}"):
            stored = [_stored_name(path, file, name) for name in names]
            record = describe(path, stored, _length_of_dimension)
            for group in {name.rpartition("/")[0] or "/" for name in stored}:
                _refuse_endless_coordinates(path, file[group])
            return record._replace(columns=tuple(self._described(path, file[it.name], it) for it in record.columns))

    def as_stored(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of what is stored, before it is decoded."""
        return _as_stored(self.describe(path, names))

    def reader(self, most_decoded: int) -> FileReader:
        return _DecodingReader(most_decoded=most_decoded, describe=self.as_stored)

    def _described(self, path: str, variable: h5py.Dataset, column: Column) -> Column:
        where = f"file {path!r}, variable {column.name!r}"
        short = [it for it in range(1, variable.ndim) if _length_of_dimension(variable, it) > variable.shape[it]]
        if short:
            raise DataFileError(
                f"{where}: it is shorter than its unlimited dimension along axis {short[0]}; fix: write all of it"
            )
        defined = variable.id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
        if isinstance(column.layout, ThroughHdf5) and column.layout.lacking and not defined:
            column = column._replace(layout=column.layout._replace(fill=_default_fill(column.dtype, where)))
        attributes = {name: variable.attrs[name] for name in variable.attrs if name in cf.USED}
        return cf.decoded(column, attributes, where) if self._decode else column


class _DecodingReader(FileReader):
    """Reader of variables of which some are decoded by their attributes."""

    def read_run(self, path: str, record: FileRecord, first: int, out: Sequence[np.ndarray]) -> None:
        with _decoding(path, record, out, slice(None)) as stored:
            super().read_run(path, _as_stored(record), first, stored)

    def read_rows(
        self, path: str, record: FileRecord, rows: np.ndarray, out: Sequence[np.ndarray], indices: np.ndarray
    ) -> None:
        with _decoding(path, record, out, indices) as stored:
            super().read_rows(path, _as_stored(record), rows, stored, indices)

    def will_need(self, path: str, record: FileRecord, first: int, last: int) -> None:
        super().will_need(path, _as_stored(record), first, last)


def _as_stored(record: FileRecord) -> FileRecord:
    if not any(it.attributes for it in record.columns):
        return record
    columns = [it._replace(dtype=native(it.stored)) if it.attributes else it for it in record.columns]
    return record._replace(columns=tuple(columns))


@contextlib.contextmanager
def _decoding(path: str, record: FileRecord, out: Sequence[np.ndarray], rows: Any) -> Iterator[list[np.ndarray]]:
    """Yield arrays for stored values: ``out`` itself where nothing is decoded. Decode the others at the end."""
    pairs = list(zip(record.columns, out, strict=True))
    stored = [np.empty(it.shape, native(column.stored)) if column.attributes else it for column, it in pairs]
    yield stored
    for (column, it), values in zip(pairs, stored, strict=True):
        if column.attributes:
            it[rows] = cf.decode(values[rows], column.attributes, f"file {path!r}, variable {column.name!r}")


def _stored_name(path: str, file: h5py.File, name: str) -> str:
    """Return the name of the dataset that has the values of a variable."""
    check_links(file, name, f"file {path!r}, variable {name!r}")
    group, slash, last = name.rpartition("/")
    hidden = f"{group}{slash}{_HIDDEN}{last}"
    if hidden in file:
        return hidden
    if name in file and bytes(np.bytes_(file[name].attrs.get("NAME", b""))).startswith(_NO_VARIABLE):
        raise DatasetNotFoundError(f"file {path!r} has no variable {name!r}, only a dimension; fix: name a variable")
    return name


def _refuse_endless_coordinates(path: str, group: h5py.Group) -> None:
    """Raise DataFileError if a coordinate has an unlimited axis other than the first."""
    for name in group:
        # A link may lead to any file.
        scale = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
        if isinstance(scale, h5py.Dataset) and scale.ndim > 1 and None in scale.maxshape[1:] and scale.is_scale:
            raise DataFileError(
                f"file {path!r}: the coordinate {scale.name!r} has several axes, one of them unlimited, and netCDF "
                "keeps no length of that; fix: give it another name than that of a dimension"
            )


def _default_fill(dtype: np.dtype, where: str) -> np.ndarray:
    """Return the value that netCDF gives for rows without a value, where the file does not say."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        inward = int(dtype.itemsize == 8)
        # NC_FILL_BYTE and so on, which lie near the limits of their types.
        return np.array([limits.min + 1 + inward if dtype.kind == "i" else limits.max - inward], dtype)
    if dtype.kind not in "fSO":
        raise DataFileError(f"{where}: it has rows without a value, and no fill value; fix: write all of it")
    # NC_FILL_FLOAT and NC_FILL_DOUBLE. Texts have none.
    return np.array([9.969209968386869e36], dtype) if dtype.kind == "f" else np.empty(0)


def _length_of_dimension(variable: h5py.Dataset, axis: int = 0) -> int:
    """Return the number of rows that netCDF gives a variable: the length of its first dimension."""
    length = int(variable.shape[axis])
    if variable.maxshape[axis] is not None:
        return length
    scales = [variable] if variable.is_scale else variable.dims[axis].values()
    lengths = [length]
    for scale in scales:  # one, or none in a file that netCDF did not write
        lengths.append(int(scale.shape[0]))
        # HDF5 lists here which axes of which datasets have this dimension.
        for user, of_user in scale.attrs.get("REFERENCE_LIST", ()):
            lengths.append(int(variable.file[user].shape[of_user]))
    return max(lengths)
