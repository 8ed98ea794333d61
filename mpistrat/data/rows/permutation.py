"""Permutations of an epoch, computed from a key: the same on all ranks and machines.

A permutation of few numbers is a table, sorted. One of many is computed number by number, without a table: a
generalised Feistel network permutes pairs (left, right) of small numbers. Results of n or more are permuted
again (cycle walking): Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002). The round
function is the finaliser of MurmurHash3, which mixes well but is not cryptographic.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

_FEWEST_ROUNDS, _MOST_ROUNDS = 6, 12
_FEW_PAIRS = 2048  # up to this number, the images of all pairs are computed at once
_C1, _C2, _GOLDEN = (np.uint32(c) for c in (0x85EBCA6B, 0xC2B2AE35, 0x9E3779B9))
_U13, _U16 = np.uint32(13), np.uint32(16)


def permutation(n: int, seed: int, iteration: int) -> np.ndarray:
    """Return the numbers 0..n-1 in an order that depends only on the key (seed, iteration).

    Raw words are sorted: NumPy keeps these equal in all versions, which it does not promise for permutations.
    """
    order = np.argsort(random_words(n, seed, iteration, 0), kind="stable")
    # Half the memory, of a table that an exact shuffle keeps for the epoch.
    return order.astype(np.int32) if n < 2**31 else order


def random_words(n: int, *parts: Any) -> np.ndarray:
    """Return n random words of 64 bits, derived from the values that identify them."""
    key = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(key, "little")).random_raw(n)


def round_keys(*parts: Any) -> np.ndarray:
    """Return the keys of all rounds, derived from the values that identify a permutation."""
    text = "/".join(map(str, parts)).encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=4 * _MOST_ROUNDS).digest(), "<u4").astype(np.uint32)


class Feistel:
    """A permutation of 0..n-1, or a family of them, one for each tweak. ``n`` is below 2**62."""

    def __init__(self, n: int, keys: np.ndarray):
        self._n = n
        # Each half needs a bit.
        bits = max(2, (n - 1).bit_length())
        self._low = bits // 2
        self._masks = [(1 << width) - 1 for width in (bits // 2, bits - bits // 2)]
        # Halves of few bits mix less in a round, so they get more rounds.
        self._keys = keys[: min(max(_FEWEST_ROUNDS, 16 - bits), _MOST_ROUNDS)]

    def __call__(self, numbers: np.ndarray, tweaks: Any = None) -> np.ndarray:
        """Return the images of these numbers (int64), with one tweak (uint32) for all or one for each."""
        if self._n < 2 or not len(numbers):
            return numbers.copy()
        tweak = None if tweaks is None else _mixed(tweaks)
        one = tweak is None or len(tweak) == 1
        # A table of all halves pays if it has fewer entries than there are numbers.
        tables = self._tables(tweak) if one and self._masks[1] < len(numbers) else None
        pairs = (self._masks[0] + 1) * (self._masks[1] + 1)
        if tables is not None and pairs <= _FEW_PAIRS:
            return self._walk_by_table(numbers, self._all_rounds(np.arange(pairs), tweak, tables))
        images = self._all_rounds(numbers, tweak, tables)
        astray = np.flatnonzero(images >= self._n)
        while len(astray):
            moved = self._all_rounds(images[astray], tweak if tweak is None or one else tweak[astray], tables)
            images[astray] = moved
            astray = astray[moved >= self._n]
        return images

    def _walk_by_table(self, numbers: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Return the images of numbers, from the images of all pairs, which are overwritten.

        Cycle walking takes 1, 2, 4, ... steps at a time. For an epoch of 1,437 numbers this saves 60 calls of NumPy.
        """
        values = images.take(numbers)
        images[: self._n] = np.arange(self._n)  # the end of a walk
        while values.max() >= self._n:
            values = images.take(values)
            images = images.take(images)
        return values

    def _all_rounds(self, numbers: np.ndarray, tweak: Any, tables: np.ndarray | None) -> np.ndarray:
        kind = np.uint32 if tables is None else np.int64  # to be mixed, or to be looked up
        low = (numbers & self._masks[0]).astype(kind, copy=False)
        high = (numbers >> self._low).astype(kind, copy=False)
        for number, key in enumerate(self._keys):
            # Rounds change the halves in turn.
            into, other = (low, high) if number % 2 == 0 else (high, low)
            if tables is None:
                mixed = self._round(other, key, tweak)
                mixed &= self._masks[number % 2]
            else:
                mixed = tables[number].take(other)
            into ^= mixed
        joined = high.astype(np.int64, copy=False)
        joined <<= self._low
        joined |= low
        return joined

    def _tables(self, tweak: Any) -> np.ndarray:
        """Return what each round makes of each value of a half, since halves are short and repeat."""
        halves = np.arange(self._masks[1] + 1, dtype=np.uint32)
        mixed = self._round(halves, self._keys[:, None], tweak)
        mixed[::2] &= self._masks[0]
        mixed[1::2] &= self._masks[1]
        return mixed.astype(np.int64)

    @staticmethod
    def _round(half: np.ndarray, key: Any, tweak: Any) -> np.ndarray:
        return _mix((half if tweak is None else half ^ tweak) + key)


def _mixed(tweaks: Any) -> np.ndarray:
    return _mix(np.atleast_1d(tweaks).astype(np.uint32) + _GOLDEN)


def _mix(h: np.ndarray) -> np.ndarray:
    """Apply the finaliser of MurmurHash3 in place, and return the array."""
    shifted = np.right_shift(h, _U16)
    h ^= shifted
    h *= _C1
    np.right_shift(h, _U13, out=shifted)
    h ^= shifted
    h *= _C2
    np.right_shift(h, _U16, out=shifted)
    h ^= shifted
    return h
