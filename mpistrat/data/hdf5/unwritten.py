"""Check of HDF5 datasets with rows that were never written."""

from __future__ import annotations

from typing import Any

import h5py

from mpistrat.data.errors import DataFileError
from mpistrat.data.hdf5.records import ThroughHdf5


def never_written(plist: Any, where: str, what: str) -> ThroughHdf5:
    """Return the layout of a dataset with unwritten rows, if the program that made the file chose a fill value.

    Raises
    ------
    DataFileError
        If the program did not choose a fill value.
    """
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        raise DataFileError(
            f"{where}: {what}; fix: write it again, or give it a fill value if that is meant to stand for "
            "unwritten rows"
        )
    return ThroughHdf5("a fill value stands for some of its rows")
