"""Source of the elements of an iterable, read from its beginning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpistrat.data.rows import elements
from mpistrat.data.rows.contracts import StreamSource


class IterableSource(StreamSource):
    """The elements of an iterable. Their number is unknown."""

    def __init__(self, iterable: Iterable[Any] | Callable[[], Iterable[Any]]):
        if not isinstance(iterable, Iterable) and not callable(iterable):
            raise TypeError(
                f"from_iterable() needs an iterable, or a function that returns one, not {iterable!r}"
            )
        self._iterable = iterable
        self._once = isinstance(iterable, Iterator)
        self._begun = False
        self._first: Any = None

    def open(self, iteration: int = 0) -> Iterator[Any]:
        """Return an iterator over all elements, with leaves as NumPy arrays or scalars.

        Arrays are copies: a generator may fill one array again and again.

        Raises
        ------
        ValueError
            If the iterable is an iterator that was used already.
        """
        if self._once:
            if self._begun:
                raise ValueError(
                    f"a {type(self._iterable).__name__} yields its elements only once: give from_iterable() the "
                    "function that makes it"
                )
            self._begun = True
        return map(elements.copied, self._raw())

    def first(self) -> Any:
        """Return the first element.

        Raises
        ------
        ValueError
            If the iterable is empty.
        """
        if self._first is None:
            raw = self._raw()
            for element in raw:
                self._first = elements.copied(element)
                if self._once:
                    self._iterable = itertools.chain([self._first], raw)
                break
            else:
                raise ValueError(f"{self} yields no elements, so their structure is unknown")
        return self._first

    def fingerprint(self) -> Any:
        """Return the kind of iterable."""
        return str(self)

    def _raw(self) -> Iterator[Any]:
        if isinstance(self._iterable, Iterable):
            return iter(self._iterable)
        return iter(self._iterable())

    def __repr__(self) -> str:
        return f"an iterable ({getattr(self._iterable, '__name__', type(self._iterable).__name__)})"
