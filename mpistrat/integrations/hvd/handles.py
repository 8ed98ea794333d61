"""The forms of a collective that are made of it: with a handle, in place, and for several arrays in turn.

Every collective is complete when its call returns, and so is its handle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.integrations.hvd.examples import example

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
    begin.__doc__ = f"Make the collective `{call.__name__}`, and return a handle for `synchronize`."
    return example("float(hvd.synchronize(hvd.allreduce_async(2.0)))", "2.0")(begin)


def copy_into(target: Any, result: Any) -> Any:
    """Write a result into an array that can be written to, of NumPy or PyTorch, and return that.

    Raise TypeError if the arrays of the library do not change.
    """
    if hasattr(target, "copy_"):
        target.detach().copy_(arrays.from_host(result, target) if isinstance(result, np.ndarray) else result)
    elif isinstance(target, np.ndarray):
        np.copyto(target, result)
    else:
        raise TypeError(
            f"an array of {type(target).__name__} cannot be changed in place: use the call without an underscore at "
            "the end of its name"
        )
    return target


def in_place(call: Callable[_P, Any]) -> Callable[_P, Any]:
    """Return the form of a collective with an underscore at its end, which overwrites its first argument."""
    first = next(iter(inspect.signature(call).parameters))

    @wraps(call)
    def overwrite(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        target: Any = args[0] if args else kwargs[first]
        result = call(*args, **kwargs)
        if isinstance(result, list):
            return [copy_into(*each) for each in zip(target, result, strict=True)]
        return copy_into(target, result)

    overwrite.__name__ = overwrite.__qualname__ = f"{call.__name__}_"
    overwrite.__doc__ = f"""Make the collective `{call.__name__}`, write the result into its argument, and return that.

    Raises
    ------
    TypeError
        If arrays of its library cannot be changed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> total = np.ones(2)
    >>> hvd.allreduce_(total) is total
    True
    """
    return overwrite


def one_by_one(call: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return the form of a collective with ``grouped_`` before its name, which makes it for each of several arrays."""

    @wraps(call)
    def each_of(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [call(each, *args, **kwargs) for each in tensors]

    first, *others = inspect.signature(call).parameters.values()
    each_of.__signature__ = inspect.Signature([first.replace(name="tensors"), *others])  # type: ignore[attr-defined]
    each_of.__name__ = each_of.__qualname__ = f"grouped_{call.__name__}"
    each_of.__doc__ = f"Make the collective `{call.__name__}` for several arrays, one after the other. Return a list."
    return example("len(hvd.grouped_allgather([np.ones(2), np.zeros(3)]))", "2")(each_of)


@example("hvd.poll(hvd.allreduce_async(1.0))", "True")
def poll(handle: Handle) -> bool:
    """Return True: a collective is complete when its call returns."""
    synchronize(handle)
    return True


@example("float(hvd.synchronize(hvd.allreduce_async(3.0, op=hvd.Max)))", "3.0")
def synchronize(handle: Handle) -> Any:
    """Return the result of an asynchronous call."""
    if not isinstance(handle, Handle):
        raise TypeError(f"expected what an asynchronous call returned, not {handle!r}")
    return handle.output
