"""Iterators that are started by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class InputIterator:
    """An iterator over a distributed dataset that can be started again.

    Parameters
    ----------
    dataset : DistributedDataset or Dataset

    Examples
    --------
    >>> iterator = InputIterator([1, 2])
    >>> _ = iterator.get_next(), iterator.initialize()
    >>> iterator.get_next()
    1
    """

    def __init__(self, dataset: Iterable[Any]):
        self._dataset = dataset
        self._iterator = iter(dataset)

    def initialize(self) -> list[Any]:
        """Start again, with a new epoch. Returns the operations left to run: none."""
        self._iterator = iter(self._dataset)
        return []

    @property
    def initializer(self) -> list[Any]:
        """As `initialize`."""
        return self.initialize()

    def get_next(self) -> Any:
        """The next batch.

        Raises
        ------
        StopIteration
            If there is none.
        """
        return next(self._iterator)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)


class Calls:
    """What a function returns, call by call, until it raises StopIteration.

    Parameters
    ----------
    fn : callable without arguments

    Examples
    --------
    >>> numbers = iter([1, 2])
    >>> list(Calls(lambda: next(numbers)))
    [1, 2]
    """

    def __init__(self, fn: Callable[[], Any]):
        self._fn = fn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._fn()
