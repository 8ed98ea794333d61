"""Blocks of arrays that stay in the CPU cache between the operations of an update."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

ELEMENTS = 1 << 16


def blocks(*arrays: np.ndarray) -> Iterable[tuple[np.ndarray, ...]]:
    """Return the same flat block of each of several arrays of one shape.

    The blocks are views: a write to a block changes its array.

    Raises
    ------
    ValueError
        If an array is not contiguous, and not one short vector.
    """
    size = arrays[0].size
    if size <= ELEMENTS and arrays[0].ndim == 1:
        return (arrays,) if size else ()
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {array.shape} is not contiguous")
    flat = [array.reshape(-1) for array in arrays]
    return [tuple([each[at : at + ELEMENTS] for each in flat]) for at in range(0, size, ELEMENTS)]
