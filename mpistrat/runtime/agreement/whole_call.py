"""Calls of several collectives that an error interrupts between two of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from mpistrat.runtime.agreement.collective_lock import CollectiveLock

_Function = TypeVar("_Function", bound=Callable[..., Any])


def whole(
    ranks_of: Callable[[Any], CollectiveLock], name: str | None = None
) -> Callable[[_Function], _Function]:
    """Decorate a method that communicates. ``ranks_of`` returns the topology of its object; messages call it ``name``.

    `CollectiveLock` notices an error in the middle of a collective. A signal handler may also raise between two
    collectives of a call, or after the last one. If the program repeats the call, this rank is one call behind the
    other ranks. Its sequence number must then differ from theirs, so that all ranks raise. Errors that all ranks raise
    leave the ranks in step.
    """

    def decorate(method: _Function) -> _Function:
        called = name or method.__name__

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            ranks = ranks_of(self)
            sequence = ranks.sequence
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                try:
                    ranks.left_call(called, type(error), sequence)
                except BaseException as interrupt:  # of a signal handler, perhaps where `left_call` begins
                    ranks.left_call(called, type(interrupt), sequence)
                    raise
                raise

        return call  # type: ignore[return-value]

    return decorate
