"""Collectives of Python objects and flags, which the topology of a communicator has."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from mpistrat.process import mpi
from mpistrat.runtime.agreement.collective_lock import CollectiveLock, collective_call
from mpistrat.runtime.agreement.operation import MismatchError, Operation, UncomparedText, operation

_BARRIER = operation("barrier")
_AGREE = operation("agree")
_ALL_GATHER_OBJECT = operation("all_gather_object")
_ON_FIRST = operation("on_first")
_LONGEST = 4096  # characters of an attribute of an error that other ranks get: the path of a file, not a document
_collective_call = collective_call(lambda ranks: ranks)


class ObjectCollectives:
    """The collectives of a `Topology` that move pickled objects, compare flags, or only wait."""

    lock: CollectiveLock
    rank: int
    size: int
    world: Any

    def barrier(self) -> None:
        """Wait for all ranks."""
        sequence = self.lock.sequence
        try:  # as `collective_call`, without its cost
            self.lock.compare(_BARRIER)
        except MismatchError:
            raise
        except BaseException as error:
            self.lock.left_call("barrier", error, sequence)
            raise

    @_collective_call
    def all_gather_object(self, value: Any, timeout_seconds: float | None = None) -> list[Any]:
        """Return every rank's (pickled) object, in the order of ranks, on every rank."""
        if self.size == 1:
            with self.lock.collective(_ALL_GATHER_OBJECT):
                return [value]
        pickled = self.pickled("all_gather_object", value)
        with self.lock.collective(_ALL_GATHER_OBJECT, timeout_seconds=timeout_seconds):
            objects = self.world.allgather(pickled)
        return [mpi.start().pickle.loads(item) for item in objects]

    def pickled(self, name: str, value: Any) -> bytes:
        """Return a value pickled for the next collective, ``name``. If that fails on a rank, all ranks raise."""
        try:
            return bytes(mpi.start().pickle.dumps(value))
        except Exception as error:
            if self.size > 1:
                self.lock.compare(operation(name, "refused:", type(error).__name__, UncomparedText(str(error))))
            raise

    @_collective_call
    def broadcast_object(
        self, value: Any, root: int = 0, name: str = "broadcast_object", timeout_seconds: float | None = None
    ) -> Any:
        """Return the (pickled) object of rank ``root`` on every rank. Messages call the collective ``name``."""
        description = operation(name, root)
        if self.size == 1:
            with self.lock.collective(description):
                return value
        message = self.pickled(name, value) if self.rank == root else None
        with self.lock.collective(description, timeout_seconds=timeout_seconds):
            pickled = self.world.bcast(message, root)
        return mpi.start().pickle.loads(pickled)

    @_collective_call
    def on_first(self, fn: Callable[[], Any], description: Operation = _ON_FIRST) -> Any:
        """Call ``fn()`` on rank 0 alone, once all ranks are here, and return its (pickled) result on every rank.

        The ranks compare ``description``. A limit of time is for them to come, not for ``fn``. An error of ``fn`` is
        raised on rank 0, and elsewhere as the nearest of its classes that other ranks have.
        """
        self.lock.compare(description)
        tell = partial(self.broadcast_object, timeout_seconds=math.inf)
        if self.rank:
            result, error = tell(None)
            if error is not None:
                raise _error_of(0, *error)
            return result
        sequence = self.lock.sequence
        try:
            result = fn()
        except BaseException as error:
            if self.lock.sequence != sequence:  # `fn` made a collective: the others met it in theirs, and have raised
                raise
            tell((None, _portable(error)))
            raise
        tell((result, None))
        return result

    def on_all_ranks(self, fn: Callable[[], Any]) -> list[Any]:
        """Call ``fn()`` on each rank, and return the (pickled) results of all, in the order of ranks.

        If it raises on a rank, every rank raises: that one its own error, and others the first, as the nearest of its
        classes that they have. Ranks whose function returns early wait without a limit of time.
        """
        result: Any = None
        failure: Exception | None = None
        try:
            result = fn()
        except Exception as error:
            failure = error
        outcomes = self.all_gather_object((result, failure and _portable(failure)), math.inf)
        if failure is not None:
            raise failure
        for rank, (_, reported) in enumerate(outcomes):
            if reported is not None:
                raise _error_of(rank, *reported)
        return [result for result, _ in outcomes]

    def all_true(self, flag: Any) -> bool:
        """Return whether the flag is true on all ranks."""
        truth = bool(flag)  # before the collective: a failure here leaves no rank waiting
        sequence = self.lock.sequence
        try:  # as `collective_call`, without its cost
            with self.lock.collective(_AGREE):
                if self.size == 1:
                    return truth
                return bool(self.world.allreduce(truth, mpi.start().LAND))
        except MismatchError:
            raise
        except BaseException as error:
            self.lock.left_call("agree", error, sequence)
            raise


def _portable(error: BaseException) -> tuple[list[type], str, dict[str, str]]:
    """Return the classes of an error that all ranks have, the nearest first, its text, and its short attributes."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__.partition(".")[0] in ("builtins", "mpistrat")]
    return kinds, str(error), {k: v for k, v in vars(error).items() if type(v) is str and len(v) <= _LONGEST}


def _error_of(rank: int, kinds: list[type], text: str, attributes: dict[str, str]) -> Exception:
    """Return an error of another rank, of the first of these classes that is made of a text alone."""
    for kind in kinds:
        if issubclass(kind, Exception):
            with contextlib.suppress(TypeError):
                error = kind(f"rank {rank}: {text}")
                vars(error).update(attributes)
                return error
    return RuntimeError(f"rank {rank}: {text}")
