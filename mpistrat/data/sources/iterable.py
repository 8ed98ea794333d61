"""What an iterable yields, from its beginning on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpistrat.data.rows import elements
from mpistrat.data.rows.contracts import Peers


class IterableSource:
    """Elements whose number nobody knows."""

    def __init__(self, iterable: Iterable[Any] | Callable[[], Iterable[Any]]):
        if not isinstance(iterable, Iterable) and not callable(iterable):
            raise TypeError(
                f"from_iterable() needs an iterable, or a function that makes one, not {iterable!r}"
            )
        self._iterable = iterable
        self._once = isinstance(iterable, Iterator)
        self._begun = False
        self._first: Any = None

    def open(self) -> Iterator[Any]:
        """All elements, their leaves as NumPy arrays or scalars.

        Raises
        ------
        ValueError
            If the iterable is an iterator that was gone through already.
        """
        if self._once:
            if self._begun:
                raise ValueError(
                    f"a {type(self._iterable).__name__} can be gone through only once: give from_iterable() the "
                    "function that makes it"
                )
            self._begun = True
        return map(elements.of_arrays, self._raw())

    def first(self) -> Any:
        """The first element.

        Raises
        ------
        ValueError
            If there is none.
        """
        if self._first is None:
            raw = self._raw()
            for element in raw:
                self._first = elements.of_arrays(element)
                if self._once:
                    self._iterable = itertools.chain([element], raw)
                break
            else:
                raise ValueError(f"{self} yields nothing, so nobody knows what its elements are like")
        return self._first

    def fingerprint(self) -> Any:
        """The kind of iterable."""
        return str(self)

    def identity(self) -> dict[str, Any]:
        """The kind of iterable: what it yields is not known beforehand."""
        return {"source": str(self)}

    def agree(self, peers: Peers) -> None:
        """Nothing can be found out."""

    def _raw(self) -> Iterator[Any]:
        if isinstance(self._iterable, Iterable):
            return iter(self._iterable)
        return iter(self._iterable())

    def __repr__(self) -> str:
        return f"an iterable ({getattr(self._iterable, '__name__', type(self._iterable).__name__)})"
