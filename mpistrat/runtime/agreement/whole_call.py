"""Calls of the program that an error leaves behind a collective, before the program has their result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from mpistrat.runtime.agreement.collective_lock import Turns

_Function = TypeVar("_Function", bound=Callable[..., Any])


def whole(ranks_of: Callable[[Any], Turns]) -> Callable[[_Function], _Function]:
    """Decorate a method that communicates, of an object whose ranks ``ranks_of`` returns.

    `Turns` notices an error in the middle of a collective. A signal handler may also raise between two collectives of a
    call, or after the last one. The program then repeats the call, and this rank is a call behind: its number must not
    be that of the others. Errors that all ranks raise leave them in step.
    """

    def decorate(method: _Function) -> _Function:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            ranks = ranks_of(self)
            sequence = ranks.sequence
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                ranks.left_call(method.__name__, type(error), sequence)
                raise

        return call  # type: ignore[return-value]

    return decorate
