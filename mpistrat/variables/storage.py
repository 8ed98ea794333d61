"""Memory in which small variables lie side by side, so that an optimizer updates several of them together."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

import numpy as np

LEAST_ALONE = 64 << 10  # bytes: from this size on the cost of a call does not matter
_BLOCK = 1 << 20  # bytes; pages that no variable uses stay unallocated

_lock = threading.Lock()
_blocks: dict[Hashable, tuple[np.ndarray, int]] = {}  # the block that is being filled, and its used elements


def placed_beside(value: np.ndarray, kind: Hashable) -> np.ndarray:
    """Return a copy of a small array behind the last one of its dtype and kind, or a large array itself.

    An array keeps its memory for life, so that views stay valid, and its block with it.
    """
    if not 0 < value.nbytes < LEAST_ALONE:
        return value
    key = value.dtype, kind
    with _lock:
        block, used = _blocks.get(key) or (np.empty(0, value.dtype), 0)
        if used + value.size > block.size:
            block, used = np.empty(_BLOCK // value.itemsize, value.dtype), 0
        _blocks[key] = block, used + value.size
    own = block[used : used + value.size].reshape(value.shape)
    own[...] = value
    return own


def follows(last: np.ndarray, array: np.ndarray) -> bool:
    """Return whether an array begins where ``last`` ends, in the same memory."""
    return last.base is not None and last.base is array.base and address(array) == address(last) + last.nbytes


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return contiguous arrays, each of which `follows` the one before, as one flat array on their memory."""
    first = arrays[0]
    if len(arrays) == 1:
        return first.reshape(-1)
    assert isinstance(first.base, np.ndarray)
    start = (address(first) - address(first.base)) // first.itemsize
    return first.base[start : start + sum(array.size for array in arrays)]


def address(array: np.ndarray) -> int:
    """Return the address of the first byte."""
    return array.__array_interface__["data"][0]
