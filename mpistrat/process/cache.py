"""A dictionary with a bound, for values that can be made again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Cache(dict[_K, _V]):
    """A dictionary that drops its oldest values when it has more than ``most``.

    A value is read as from any dictionary. `functools.lru_cache` would call a function, and needs arguments from which
    the value can be made.

    >>> squares = Cache(2)
    >>> [squares.keep(number, number**2) for number in (1, 2, 3)]
    [1, 4, 9]
    >>> squares
    {2: 4, 3: 9}
    """

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def keep(self, key: _K, value: _V) -> _V:
        """Keep a value, and return it."""
        if len(self) >= self._most and key not in self:
            # A copy of the keys, and no error for a missing one: other threads may change the dictionary meanwhile.
            for oldest in list(self)[: len(self) - self._most + 1]:
                self.pop(oldest, None)
        self[key] = value
        return value
