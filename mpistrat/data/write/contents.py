"""Contents of an HDF5 file: which datasets hold rows, and which do not."""

from __future__ import annotations

import math
from typing import NamedTuple

import h5py

from mpistrat.data.errors import EmptyDatasetError, naming
from mpistrat.data.hdf5.open_file import opened


class Contents(NamedTuple):
    """The datasets of a file.

    ``rows`` are as long as the largest one along axis 0, that of the samples. ``single`` have one value or none, which
    concerns all rows, and ``others`` another length; both are said in words.
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
            arrays[name] = item.shape[0], math.prod(item.shape) * item.id.get_type().get_size()
        else:
            single[name] = "has no data space" if item.shape is None else "is a scalar"

    with opened(path) as file, naming(f"file {path!r}"):
        file.visititems(look)
    if not arrays:
        has = f"no dataset with rows, only the scalars {sorted(single)}" if single else "no dataset at all"
        raise EmptyDatasetError(f"file {path!r} has {has}; fix: check the program that wrote it")
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
