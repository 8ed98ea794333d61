"""The results of scheduled functions, and values with a part on each worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mpistrat.asynchronous import on_worker
from mpistrat.messages.pickling import refer, refuse


class CancelledError(RuntimeError):
    """A scheduled function was cancelled, because another one failed before it began.

    Examples
    --------
    >>> issubclass(CancelledError, RuntimeError)
    True
    """


class RemoteValue:
    """The result of a scheduled function.

    `ClusterCoordinator.schedule` returns it.

    Examples
    --------
    With a chief, workers and parameter servers:

    >>> value = coordinator.schedule(pow, args=(2, 10))  # doctest: +SKIP
    >>> value.fetch()  # doctest: +SKIP
    1024
    """

    def fetch(self) -> Any:
        """Wait for the function, and return its result.

        Raises
        ------
        Exception
            The error of the function, each time. Its cause shows the traceback of the worker.
        CancelledError
            If the function was cancelled.
        """
        raise NotImplementedError("RemoteValue.fetch: ClusterCoordinator.schedule makes values that have it")

    def get(self) -> Any:
        """Return the result, as `fetch` does."""
        return self.fetch()


class ScheduledValue(RemoteValue):
    """The result of a function of a coordinator. ``wait`` makes progress until a condition holds."""

    __slots__ = ("_ended", "_error", "_value", "_wait")

    def __init__(self, wait: Callable[[Callable[[], bool]], None]):
        self._wait = wait
        self._ended = False
        self._value: Any = None
        self._error: BaseException | None = None

    def end(self, value: Any, error: BaseException | None) -> None:
        self._value, self._error, self._ended = value, error, True

    def fetch(self) -> Any:
        if not self._ended:
            self._wait(lambda: self._ended)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value

    def __reduce__(self) -> NoReturn:
        refuse("a RemoteValue")


class PerWorkerValue:
    """A value with a part for each worker. A scheduled function gets the part of its worker.

    Parameters
    ----------
    values : sequence of RemoteValue
        One for each worker, in the order of workers.

    Raises
    ------
    TypeError
        If a value is not a RemoteValue.

    Examples
    --------
    >>> PerWorkerValue([3])
    Traceback (most recent call last):
        ...
    TypeError: PerWorkerValue takes RemoteValues, not 3
    """

    def __init__(self, values: Sequence[RemoteValue]):
        for value in values:
            if not isinstance(value, RemoteValue):
                raise TypeError(f"PerWorkerValue takes RemoteValues, not {value!r}")
        self._values = tuple(values)

    def check(self, workers: int) -> None:
        """Raise ValueError unless there is a part for each worker."""
        if len(self._values) != workers:
            raise ValueError(f"a PerWorkerValue of {len(self._values)} parts is given to {workers} workers")

    def __reduce__(self) -> Any:
        if not refer(self):
            refuse("a PerWorkerValue")
        return on_worker.own_of, (tuple(value.fetch() for value in self._values),)


class KeptOnWorkers(PerWorkerValue):
    """A value whose parts stay on the workers, under a number that ``freed`` gets at its end. It holds ``kept``."""

    def __init__(self, key: int, freed: deque[int], kept: object):
        self._key, self._freed, self._kept = key, freed, kept

    def check(self, workers: int) -> None:
        pass

    def __reduce__(self) -> Any:
        if not refer(self):
            refuse("a PerWorkerValue")
        return on_worker.part_here, (self._key,)

    def __del__(self) -> None:
        self._freed.append(self._key)


class PerWorkerIterator(KeptOnWorkers):
    """The iterators of a per-worker dataset. ``next`` works in scheduled functions."""

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError("a per-worker iterator is read on the workers: call next() in a scheduled function")

    def get_next(self) -> NoReturn:
        """Raise NotImplementedError: call ``next`` in a scheduled function."""
        self.__next__()
