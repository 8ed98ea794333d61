"""HDF5 files, and netCDF-4 files, which are HDF5 files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import h5py

from mpistrat.data.errors import DataFileError
from mpistrat.data.formats.contract import Format
from mpistrat.data.hdf5.describe import describe
from mpistrat.data.hdf5.open_file import opened
from mpistrat.data.hdf5.reader import FileReader
from mpistrat.data.hdf5.records import FileRecord

_PACKED = ("scale_factor", "add_offset")


class Hdf5(Format):
    """HDF5 files: a column is a dataset."""

    name: ClassVar[str] = "HDF5"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        return describe(path, names)

    def reader(self, most_decoded: int) -> FileReader:
        return FileReader(most_decoded=most_decoded, describe=self.describe)


class NetCdf(Hdf5):
    """netCDF-4 files: a column is a variable, which is an HDF5 dataset. Packed variables are refused.

    An unlimited dimension is as long as the longest of its variables. Others have fill values for the rest.
    """

    name: ClassVar[str] = "netCDF"
    named: ClassVar[str] = "variables"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        try:
            with open(path, "rb") as raw:
                classic = raw.read(3) == b"CDF"
        except OSError:
            classic = False  # described below, with a message that says what is wrong
        if classic:
            raise DataFileError.of_file(path, "it is a classic netCDF file; fix: nccopy -k nc4 OLD.nc NEW.nc")
        found = describe(path, names, _length_of_dimension)
        with opened(path) as file:
            for name in names:
                packed = [each for each in _PACKED if each in file[name].attrs]
                axes = range(1, file[name].ndim)
                short = [it for it in axes if _length_of_dimension(file[name], it) > file[name].shape[it]]
                if short:
                    raise DataFileError(
                        f"file {path!r}, variable {name!r}: it is shorter than its unlimited dimension along axis "
                        f"{short[0]}; fix: write all of it"
                    )
                if packed:
                    raise DataFileError(
                        f"file {path!r}, variable {name!r}: it is packed ({', '.join(packed)}), and values would be "
                        "read as they are stored; fix: read it with Dataset.from_hdf5() and unpack it in map()"
                    )
        return found


def _length_of_dimension(variable: h5py.Dataset, axis: int = 0) -> int:
    """Return the number of rows that netCDF gives a variable: the length of its first dimension."""
    own = int(variable.shape[axis])
    if variable.maxshape[axis] is not None:
        return own
    scales = [variable] if variable.is_scale else variable.dims[axis].values()
    lengths = [own]
    for scale in scales:  # one, or none in a file that netCDF did not write
        lengths.append(int(scale.shape[0]))
        for user, of_user in scale.attrs.get("REFERENCE_LIST", ()):
            lengths.append(int(variable.file[user].shape[of_user]))
    return max(lengths)
