"""Handles of asynchronous calls. Every collective is complete when its call returns, and so is its handle."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

_P = ParamSpec("_P")


class Handle:
    """What an asynchronous call returns. ``output`` is the result."""

    __slots__ = ("output",)

    def __init__(self, output: Any):
        self.output = output


def with_handle(call: Callable[_P, Any]) -> Callable[_P, Handle]:
    """Return the form of a collective with ``_async`` in its name, which returns a handle."""

    @wraps(call)
    def begin(*args: _P.args, **kwargs: _P.kwargs) -> Handle:
        return Handle(call(*args, **kwargs))

    stem = call.__name__.rstrip("_")
    begin.__name__ = begin.__qualname__ = f"{stem}_async{call.__name__[len(stem) :]}"
    begin.__doc__ = f"""Make the collective `{call.__name__}`, and return a handle for `synchronize`.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> float(hvd.synchronize(hvd.allreduce_async(2.0)))
    2.0
    """
    return begin


def poll(handle: Handle) -> bool:
    """Return True: a collective is complete when its call returns.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> hvd.poll(hvd.allreduce_async(1.0))
    True
    """
    synchronize(handle)
    return True


def synchronize(handle: Handle) -> Any:
    """Return the result of an asynchronous call.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> float(hvd.synchronize(hvd.allreduce_async(3.0, op=hvd.Max)))
    3.0
    """
    if not isinstance(handle, Handle):
        raise TypeError(f"expected what an asynchronous call returned, not {handle!r}")
    return handle.output
