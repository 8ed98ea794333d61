"""Digests of bytes, by which ranks compare what must be equal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from mpistrat.arrays import arrays


def digest(data: Any, seed: int = 0) -> int:
    """Return the XXH3 digest of a buffer: 64 bits. The seed may be the digest of what lies before."""
    return xxhash.xxh3_64_intdigest(data, seed)


def digest_of_all(digests: Iterable[int]) -> int:
    """Return one digest of several."""
    return digest(np.array([*digests], np.uint64))


def section(array: Any, start: int, stop: int) -> np.ndarray:
    """Return some elements of an array of any library, in C order, on the host: a view where possible."""
    if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
        return array.flat[start:stop]
    return arrays.to_host(array.reshape(-1)[start:stop])
