"""Permutation of an epoch, computed from a key: the same on all ranks and machines."""

from __future__ import annotations

import hashlib

import numpy as np


def permutation(n: int, seed: int, iteration: int, window: int = 0) -> np.ndarray:
    """Return the numbers 0..n-1 in an order that depends only on the key (seed, iteration, window).

    Raw words of a bit generator are sorted, because NumPy keeps them equal in all versions. It does not
    promise that for ``Generator.permutation``.
    """
    key = hashlib.blake2b(f"{seed}/{iteration}/{window}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(n)
    order = np.argsort(words, kind="stable")
    return order.astype(np.int32) if n < 2**31 else order


class Permutations:
    """A cache of the last two permutations, since a batch may lie across two epochs."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int, int], np.ndarray] = {}

    def __call__(self, n: int, seed: int, iteration: int, window: int = 0) -> np.ndarray:
        key = (n, seed, iteration, window)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            found = self._kept[key] = permutation(n, seed, iteration, window)
        return found
