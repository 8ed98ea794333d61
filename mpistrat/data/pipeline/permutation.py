"""The order of a shuffled epoch: a function of its key, the same on every rank and machine."""

from __future__ import annotations

import hashlib

import numpy as np


def permutation(n: int, seed: int, iteration: int, window: int = 0) -> np.ndarray:
    """The numbers 0..n-1 in an order that depends on the key (seed, iteration, window) alone.

    Raw words of a bit generator are sorted, because NumPy promises those for all versions, and
    promises no such thing for ``Generator.permutation``.
    """
    key = hashlib.blake2b(f"{seed}/{iteration}/{window}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(n)
    order = np.argsort(words, kind="stable")
    return order.astype(np.int32) if n < 2**31 else order


class Permutations:
    """Permutations by key; the last two are kept, as a batch may lie across two epochs."""

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
