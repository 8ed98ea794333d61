"""HDF5 files, and netCDF-4 files, which are HDF5 files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mpistrat.data.errors import DataFileError
from mpistrat.data.formats.contract import Format
from mpistrat.data.hdf5.reader import Reader
from mpistrat.data.hdf5.records import FileRecord

_PACKED = ("scale_factor", "add_offset")


class Hdf5(Format):
    """HDF5 files: a column is a dataset."""

    name: ClassVar[str] = "HDF5"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of some datasets of a file."""
        from mpistrat.data.hdf5.describe import describe

        return describe(path, names)

    def reader(self, most_decoded: int) -> Reader:
        """Return a reader of HDF5 files."""
        return Reader(most_decoded=most_decoded)


class NetCdf(Hdf5):
    """netCDF-4 files: a column is a variable, which is an HDF5 dataset. Packed variables are refused."""

    name: ClassVar[str] = "netCDF"
    named: ClassVar[str] = "variables"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of some variables of a file."""
        from mpistrat.data.hdf5.open_file import opened

        try:
            with open(path, "rb") as raw:
                classic = raw.read(3) == b"CDF"
        except OSError:
            classic = False  # described below, with a message that says what is wrong
        if classic:
            raise DataFileError.of_file(
                path, "it is a netCDF file of the classic format; fix: nccopy -k nc4 OLD.nc NEW.nc"
            )
        found = super().describe(path, names)
        with opened(path) as file:
            for name in names:
                packed = [each for each in _PACKED if each in file[name].attrs]
                if packed:
                    raise DataFileError(
                        f"file {path!r}, variable {name!r}: it is packed ({', '.join(packed)}), and values would be "
                        "read as they are stored; fix: read it with Dataset.from_hdf5() and unpack it in map()"
                    )
        return found
