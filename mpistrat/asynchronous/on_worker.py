"""What a worker knows of itself: its number, its parts of per-worker values, and the call that it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class OwnParts:
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
        """Return a part, or raise the error that it met."""
        part, error, traceback = self._parts[key]
        if error is not None:
            raise error.with_traceback(traceback)  # the first one: each raise adds to that of the error
        return part

    def free(self, key: int) -> None:
        self._parts.pop(key, None)


_parts: OwnParts | None = None
_number: int | None = None
_comm: Any = None  # of the call that runs, if it has several ranks


@contextmanager
def worker(number: int) -> Iterator[OwnParts]:
    """Make this process worker ``number`` in the block. It may be one of another farm already, and is again later."""
    global _parts, _number
    before = _parts, _number
    _parts, _number = OwnParts(), number
    try:
        yield _parts
    finally:
        _parts, _number = before


@contextmanager
def call_on(comm: Any) -> Iterator[None]:
    """Note that the block is a call of these ranks; None: of this one."""
    global _comm
    before, _comm = _comm, comm
    try:
        yield
    finally:
        _comm = before


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


def part_here(key: int) -> Any:
    assert _parts is not None
    return _parts.part(key)


def own_of(values: tuple[Any, ...]) -> Any:
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
