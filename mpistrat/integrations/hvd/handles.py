"""Handles of asynchronous calls. Every collective is complete when its call returns, and so is its handle."""

from __future__ import annotations

from typing import Any


class Handle:
    """What an asynchronous call returns.

    Parameters
    ----------
    output : Any
        The result.
    """

    __slots__ = ("output",)

    def __init__(self, output: Any):
        self.output = output


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(f"expected what an asynchronous call returned, not {handle!r}")
    return handle


def poll(handle: Handle) -> bool:
    """Return True: a collective is complete when its call returns.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> hvd.poll(hvd.allreduce_async(1.0))
    True
    """
    return bool(_checked(handle))


def synchronize(handle: Handle) -> Any:
    """Return the result of an asynchronous call.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> float(hvd.synchronize(hvd.allreduce_async(3.0, op=hvd.Max)))
    3.0
    """
    return _checked(handle).output
