"""Rows of an HDF5 dataset that were never written."""

from __future__ import annotations

from typing import Any

import h5py

from mpistrat.data.errors import DataFileError
from mpistrat.data.hdf5.records import ThroughHdf5


def never_written(plist: Any, where: str, what: str) -> ThroughHdf5:
    """A fill value stands for rows only if the program that made the file chose one."""
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        raise DataFileError(
            f"{where}: {what}; fix: write it again, or give it a fill value if that is meant to stand for "
            "what is not written"
        )
    return ThroughHdf5("a fill value stands for some of its rows")
