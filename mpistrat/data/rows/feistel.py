"""Keyed permutation of 0..n-1, computed number by number, without a table.

A generalised Feistel network permutes pairs (left, right) of small numbers. Results of n or more are permuted
again (cycle walking): Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002). The round
function is the finaliser of MurmurHash3, which mixes well but is not cryptographic.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

_FEWEST_ROUNDS, _MOST_ROUNDS = 6, 12

_C1, _C2, _GOLDEN = (np.uint32(c) for c in (0x85EBCA6B, 0xC2B2AE35, 0x9E3779B9))
_U13, _U16 = np.uint32(13), np.uint32(16)


def round_keys(*what: Any) -> np.ndarray:
    """Return the keys of all rounds, derived from the values that identify a permutation."""
    text = "/".join(map(str, what)).encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=4 * _MOST_ROUNDS).digest(), "<u4").astype(
        np.uint32
    )


class Feistel:
    """A permutation of 0..n-1, or a family of them, one for each tweak.

    Parameters
    ----------
    n : int
        How many numbers are permuted, below 2**62.
    keys : array of uint32
        What `round_keys` returned.

    Examples
    --------
    >>> permuted = Feistel(6, round_keys("seed", 0))(np.arange(6))
    >>> sorted(permuted.tolist())
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, n: int, keys: np.ndarray):
        self._n = n
        bits = max(2, (n - 1).bit_length())
        self._low = np.uint64(bits // 2)
        self._masks = [np.uint32((1 << width) - 1) for width in (bits // 2, bits - bits // 2)]
        # Halves of few bits mix less in a round, so they get more rounds.
        self._keys = keys[: min(max(_FEWEST_ROUNDS, 16 - bits), _MOST_ROUNDS)]

    def __call__(self, numbers: np.ndarray, tweaks: Any = None) -> np.ndarray:
        """Return the images of these numbers (int64), with one tweak (uint32) for all or one for each."""
        if self._n < 2 or not len(numbers):
            return numbers.copy()
        tweak = None
        if tweaks is not None:
            tweak = np.atleast_1d(tweaks).astype(np.uint32) + _GOLDEN
            _mix(tweak, np.empty_like(tweak))
        found = self._once(numbers, tweak)
        astray = np.flatnonzero(found >= self._n)
        while len(astray):
            again = self._once(found[astray], tweak if tweak is None or len(tweak) == 1 else tweak[astray])
            found[astray] = again
            astray = astray[again >= self._n]
        return found

    def _once(self, numbers: np.ndarray, tweak: Any) -> np.ndarray:
        wide = numbers.astype(np.uint64)
        low = wide.astype(np.uint32) & self._masks[0]
        high = (wide >> self._low).astype(np.uint32)
        mixed, shifted = np.empty_like(low), np.empty_like(low)
        for number, key in enumerate(self._keys):
            into, other = (low, high) if number % 2 == 0 else (high, low)
            if tweak is None:
                np.add(other, key, out=mixed)
            else:
                np.bitwise_xor(other, tweak, out=mixed)
                mixed += key
            _mix(mixed, shifted)
            mixed &= self._masks[number % 2]
            into ^= mixed
        wide = high.astype(np.uint64)
        wide <<= self._low
        wide |= low
        return wide.astype(np.int64)


def _mix(h: np.ndarray, shifted: np.ndarray) -> None:
    """Apply the finaliser of MurmurHash3 in place. ``shifted`` is a scratch array like ``h``."""
    np.right_shift(h, _U16, out=shifted)
    h ^= shifted
    h *= _C1
    np.right_shift(h, _U13, out=shifted)
    h ^= shifted
    h *= _C2
    np.right_shift(h, _U16, out=shifted)
    h ^= shifted
