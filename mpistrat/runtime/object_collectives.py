"""Collectives of Python objects and flags, which the topology of a communicator has."""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from mpistrat.process import mpi
from mpistrat.runtime.agreement.collective_lock import CollectiveLock
from mpistrat.runtime.agreement.operation import MismatchError, Operation, Remark, operation
from mpistrat.runtime.agreement.whole_call import whole

_BARRIER = operation("barrier")
_AGREE = operation("agree")
_ALL_GATHER_OBJECT = operation("all_gather_object")
_ON_FIRST = operation("on_first")
_whole = whole(lambda ranks: ranks)


class ObjectCollectives:
    """The collectives of a `Topology` that move pickled objects, compare flags, or only wait."""

    lock: CollectiveLock
    rank: int
    size: int
    world: Any

    def barrier(self) -> None:
        """Wait for all ranks."""
        sequence = self.lock.sequence
        try:  # as `whole`, without its cost
            self.lock.compare(_BARRIER)
        except MismatchError:
            raise
        except BaseException as error:
            self.lock.left_call("barrier", error, sequence)
            raise

    @_whole
    def all_gather_object(self, value: Any, timeout_seconds: float | None = None) -> list[Any]:
        """Return every rank's (pickled) object, in the order of ranks, on every rank."""
        if self.size == 1:
            with self.lock.turn(_ALL_GATHER_OBJECT):
                return [value]
        mine = self.pickled("all_gather_object", value)
        with self.lock.turn(_ALL_GATHER_OBJECT, timeout_seconds=timeout_seconds):
            told = self.world.allgather(mine)
        return [mpi.start().pickle.loads(each) for each in told]

    def pickled(self, name: str, value: Any) -> bytes:
        """Return a value pickled for the next collective, ``name``. If that fails on a rank, all ranks raise."""
        try:
            return bytes(mpi.start().pickle.dumps(value))
        except Exception as error:
            if self.size > 1:
                self.lock.compare(operation(name, "refused:", type(error).__name__, Remark(str(error))))
            raise

    @_whole
    def broadcast_object(
        self, value: Any, root: int = 0, name: str = "broadcast_object", timeout_seconds: float | None = None
    ) -> Any:
        """Return the (pickled) object of rank ``root`` on every rank. Messages call the collective ``name``."""
        what = operation(name, root)
        if self.size == 1:
            with self.lock.turn(what):
                return value
        mine = self.pickled(name, value) if self.rank == root else None
        with self.lock.turn(what, timeout_seconds=timeout_seconds):
            told = self.world.bcast(mine, root)
        return mpi.start().pickle.loads(told)

    @_whole
    def on_first(self, fn: Callable[[], Any], what: Operation = _ON_FIRST) -> Any:
        """Call ``fn()`` on rank 0 alone, once all ranks are here, and return its (pickled) result on every rank.

        The ranks compare ``what``. A limit of time is for them to come, not for ``fn``. What it raises is raised on
        rank 0, and elsewhere as a builtin class of it, or RuntimeError.
        """
        self.lock.compare(what)
        tell = partial(self.broadcast_object, timeout_seconds=math.inf)
        if self.rank:
            result, error = tell(None)
            if error is not None:
                raise _error(*error)
            return result
        sequence = self.lock.sequence
        try:
            result = fn()
        except BaseException as error:
            if self.lock.sequence != sequence:  # `fn` made a collective: the others met it in theirs, and have raised
                raise
            names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            tell((None, (names, str(error))))
            raise
        tell((result, None))
        return result

    def all_true(self, flag: Any) -> bool:
        """Return whether the flag is true on all ranks."""
        own = bool(flag)  # before the collective: a failure here leaves no rank waiting
        sequence = self.lock.sequence
        try:  # as `whole`, without its cost
            with self.lock.turn(_AGREE):
                if self.size == 1:
                    return own
                return bool(self.world.allreduce(own, mpi.start().LAND))
        except MismatchError:
            raise
        except BaseException as error:
            self.lock.left_call("agree", error, sequence)
            raise


def _error(names: list[str], text: str) -> Exception:
    """Return an error of the first of the builtin classes that is made of a text alone."""
    for name in names:
        kind = getattr(builtins, name)
        if issubclass(kind, Exception):
            with contextlib.suppress(TypeError):
                return kind(f"rank 0: {text}")
    return RuntimeError(f"rank 0: {text}")
