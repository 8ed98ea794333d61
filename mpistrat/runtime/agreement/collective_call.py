"""Calls of several collectives that an error interrupts between two of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from mpistrat.runtime.agreement.collective_lock import CollectiveLock
from mpistrat.runtime.agreement.operation import MismatchError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def collective_call(ranks_of: Callable[[Any], Any], name: str | None = None) -> Callable[[_Function], _Function]:
    """Decorate a method that communicates. ``ranks_of`` returns the topology of its object; messages call it ``name``.

    A signal handler may raise between two collectives of a call, or after the last. If the program repeats the call,
    the sequence number of this rank must differ from the others', so that all ranks raise.
    """

    def decorate(method: _Function) -> _Function:
        called = name or method.__name__

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            lock: CollectiveLock = ranks_of(self).lock
            sequence = lock.sequence
            try:
                return method(self, *args, **kwargs)
            except MismatchError:  # before `left_call`: a signal handler may raise where a function begins
                raise
            except BaseException as error:
                lock.left_call(called, error, sequence)
                raise

        return call  # type: ignore[return-value]

    return decorate
