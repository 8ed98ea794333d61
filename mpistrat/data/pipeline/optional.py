"""Optional batches, and iterators that return them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

Element = TypeVar("Element")

_NOTHING = object()


class Optional:
    """A batch, or the end-of-epoch marker.

    Examples
    --------
    >>> Optional.from_value(3).get_value(), Optional.empty().has_value()
    (3, False)
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any = _NOTHING):
        self._value = value

    @classmethod
    def from_value(cls, value: Any) -> Optional:
        """Return an optional that holds ``value``."""
        return cls(value)

    @classmethod
    def empty(cls) -> Optional:
        """Return an empty optional."""
        return cls()

    def has_value(self) -> bool:
        """Return whether there is a value."""
        return self._value is not _NOTHING

    def get_value(self) -> Any:
        """Return the value.

        Returns
        -------
        object

        Raises
        ------
        ValueError
            If the optional is empty.
        """
        if self._value is _NOTHING:
            raise ValueError("this optional is empty, as the iterator has ended: call has_value() first")
        return self._value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self.has_value() else "Optional.empty()"


class NextAsOptional(Iterator[Element]):
    """An iterator with the methods of the iterators of tf.data.

    Examples
    --------
    >>> import mpistrat
    >>> iterator = iter(mpistrat.data.Dataset.range(1))
    >>> int(iterator.get_next())
    0
    >>> iterator.get_next_as_optional().has_value()
    False
    """

    def get_next(self) -> Element:
        """Return the next element.

        Raises
        ------
        StopIteration
            After the last.
        """
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an empty optional after the last.

        Raises
        ------
        ValueError
            If this is an iterator of a distributed dataset, and called inside a replica function.
        """
        try:
            return Optional(self.get_next())
        except StopIteration:
            return Optional()


class Elements(NextAsOptional[Any]):
    """The elements of an iterator, with `get_next` and `get_next_as_optional`."""

    def __init__(self, elements: Iterator[Any]):
        self._elements = elements

    def __next__(self) -> Any:
        return next(self._elements)
