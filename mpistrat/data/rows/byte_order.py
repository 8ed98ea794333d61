"""Conversion to the byte order of this machine."""

from __future__ import annotations

import numpy as np


def native(dtype: np.dtype) -> np.dtype:
    """Return the dtype in the byte order of this machine.

    ``dtype.isnative`` alone is not sufficient: it is true for every array type, also inside a compound type.
    """
    if dtype.isnative and dtype.fields is None and dtype.subdtype is None:
        return dtype
    other = dtype.newbyteorder("=")
    return dtype if other == dtype else other  # newbyteorder() drops the metadata of the dtype


def in_native_order(array: np.ndarray) -> np.ndarray:
    """Return the array, or a copy if its numbers have another byte order."""
    dtype = native(array.dtype)
    return array if dtype is array.dtype else array.astype(dtype)
