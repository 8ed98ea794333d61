"""The iterators of version 1, which the program starts and advances by calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class InputIterator:
    """An iterator over a distributed dataset that can be started again.

    Parameters
    ----------
    dataset : DistributedDataset or Dataset
        Dataset to iterate over.

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
        """Start a new epoch. Return an empty list: no operations are left to run."""
        self._iterator = iter(self._dataset)
        return []

    @property
    def initializer(self) -> list[Any]:
        """Result of `initialize`. Reading it starts a new epoch."""
        return self.initialize()

    def get_next(self) -> Any:
        """Return the next batch.

        Raises
        ------
        StopIteration
            At the end of the epoch.
        """
        return next(self._iterator)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)


class Calls:
    """The results of a function, one per call, until it raises StopIteration.

    Parameters
    ----------
    fn : callable
        Function without arguments.

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
