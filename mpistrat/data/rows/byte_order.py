"""Numbers in the byte order of this machine."""

from __future__ import annotations

import numpy as np


def native(dtype: np.dtype) -> np.dtype:
    """The dtype in the byte order of this machine.

    ``dtype.isnative`` alone is no answer: it is true of every array type, also inside a compound one.

    Examples
    --------
    >>> native(np.dtype((">i2", (3,)))), native(np.dtype(">f4"))
    (dtype(('<i2', (3,))), dtype('float32'))
    """
    if dtype.isnative and dtype.fields is None and dtype.subdtype is None:
        return dtype
    other = dtype.newbyteorder("=")
    return dtype if other == dtype else other  # the first has metadata, too


def in_native_order(array: np.ndarray) -> np.ndarray:
    """The array itself, or a copy if its numbers are in another byte order.

    Examples
    --------
    >>> in_native_order(np.array([1, 2], ">i4"))
    array([1, 2], dtype=int32)
    """
    dtype = native(array.dtype)
    return array if dtype is array.dtype else array.astype(dtype)
