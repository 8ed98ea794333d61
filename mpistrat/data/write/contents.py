"""Which datasets of an HDF5 file are rows, and what stands beside them."""

from __future__ import annotations

import math
from typing import NamedTuple

import h5py

from mpistrat.data.errors import EmptyDatasetError, naming
from mpistrat.data.hdf5.open_file import opened


class Contents(NamedTuple):
    """The datasets of a file.

    Attributes
    ----------
    rows : tuple of str
        Those that are as long as the largest of the file: axis 0 is the samples.
    single : dict of str
        Those that hold a single value or none, which concern all rows, and which of these they do.
    others : dict of str
        Those of another length, and why they are no rows of the same samples.
    """

    rows: tuple[str, ...]
    single: dict[str, str]
    others: dict[str, str]


def contents(path: str) -> Contents:
    """What the datasets of a file are.

    Raises
    ------
    DataFileError
        If HDF5 cannot open it.
    EmptyDatasetError
        If no dataset has rows.
    """
    arrays: dict[str, tuple[int, int]] = {}
    single: dict[str, str] = {}

    def look(name: str, item: h5py.HLObject) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        if item.shape:
            arrays[name] = item.shape[0], math.prod(item.shape) * item.id.get_type().get_size()
        else:
            single[name] = "has no data space" if item.shape is None else "is a scalar"

    with opened(path) as file, naming(f"file {path!r}"):
        file.visititems(look)
    if not arrays:
        has = f"no dataset with rows, only the scalars {sorted(single)}" if single else "no dataset at all"
        raise EmptyDatasetError(f"file {path!r} has {has}; fix: check what wrote it")
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
