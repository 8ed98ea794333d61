"""The state of a worker and of the call that it runs, and the values of which each worker has a part."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from mpistrat.messages.pickling import refer, refuse


class WorkerParts:
    """The parts of per-worker values on this worker."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Any, BaseException | None, Any]] = {}  # value, or error and traceback

    def make(self, key: int, function: Callable[[], Any]) -> None:
        """Keep the result of a function. If it fails, keep the error."""
        try:
            self._parts[key] = function(), None, None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() must not end the worker
            self._parts[key] = None, error, error.__traceback__

    def part(self, key: int) -> Any:
        """Return a part, or raise the error of its function."""
        part, error, traceback = self._parts[key]
        if error is not None:
            raise error.with_traceback(traceback)  # the first traceback: each raise adds frames to the error's own
        return part

    def free(self, key: int) -> None:
        self._parts.pop(key, None)


_parts: WorkerParts | None = None
_number: int | None = None
_comm: Any = None  # of the call that runs, if it has several ranks


@contextmanager
def worker(number: int) -> Iterator[WorkerParts]:
    """Make this process worker ``number`` in the block. It may be a worker of another executor outside of it."""
    global _parts, _number
    before = _parts, _number
    _parts, _number = WorkerParts(), number
    try:
        yield _parts
    finally:
        _parts, _number = before


@contextmanager
def call_on(comm: Any) -> Iterator[None]:
    """Note that the block is a call of the ranks of ``comm``; with None, of this rank alone."""
    global _comm
    before, _comm = _comm, comm
    try:
        yield
    finally:
        _comm = before


def call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that an executor or a coordinator was given. An error gets a note with the arguments."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            shown = [reprlib.repr([*args])[1:-1]] if args else []  # of a chunk of calls, the first ones
            shown += [f"{name}={reprlib.repr(value)}" for name, value in kwargs.items()]
            error.add_note(f"the call: {getattr(function, '__qualname__', function)}({', '.join(shown)})")
        raise


def require_together(comm: Any) -> None:
    """Raise RuntimeError in a call that some ranks of a communicator do not take part in."""
    if _number is None:
        return
    group, ranks = comm.Get_group(), None if _comm is None else _comm.Get_group()
    here = ranks is not None and type(group).Intersection(group, ranks).size == group.size
    if not here:
        raise RuntimeError(
            f"a function that runs on a worker makes an Executor of {group.size} ranks, which do not all run the "
            "function: submit it with ranks=, and give the Executor the communicator that it gets"
        )


def is_worker() -> bool:
    return _number is not None


def part_of_this_worker(key: int) -> Any:
    assert _parts is not None
    return _parts.part(key)


def value_of_this_worker(values: tuple[Any, ...]) -> Any:
    assert _number is not None
    return values[_number]


def experimental_get_current_worker_index() -> int:
    """Return the number of the worker that runs the calling function.

    Raises
    ------
    RuntimeError
        Outside of scheduled functions and of functions that make the data of a worker.

    Examples
    --------
    >>> experimental_get_current_worker_index()
    Traceback (most recent call last):
        ...
    RuntimeError: experimental_get_current_worker_index() has an answer only in functions that run on a worker: ...
    """
    if _number is None:
        raise RuntimeError(
            "experimental_get_current_worker_index() has an answer only in functions that run on a worker: call it in "
            "a function that ClusterCoordinator.schedule sends, or in a dataset_fn"
        )
    return _number


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
            raise self._error.with_traceback(None)  # each raise would add its frames to the error's traceback
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
        return value_of_this_worker, (tuple(value.fetch() for value in self._values),)


class KeptOnWorkers(PerWorkerValue):
    """A value whose parts stay on the workers under the number ``key``. Its destructor appends that to ``freed``.

    ``kept`` lives as long as the value.
    """

    def __init__(self, key: int, freed: deque[int], kept: object):
        self._key, self._freed, self._kept = key, freed, kept

    def check(self, workers: int) -> None:
        pass

    def __reduce__(self) -> Any:
        if not refer(self):
            refuse("a PerWorkerValue")
        return part_of_this_worker, (self._key,)

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
