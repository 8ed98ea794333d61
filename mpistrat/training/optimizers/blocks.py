"""Blocks of arrays that stay in the CPU cache between the operations of an update."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

ELEMENTS = 1 << 15


def blocks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the same flat block of each of several arrays of one shape.

    The blocks are views: a write to a block changes its array.

    Raises
    ------
    ValueError
        If an array is not contiguous.
    """
    flat = []
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {array.shape} is not contiguous")
        flat.append(array.reshape(-1))
    for start in range(0, flat[0].size, ELEMENTS):
        yield tuple(each[start : start + ELEMENTS] for each in flat)
