"""Methods of NumPy arrays on values that behave like arrays, and those that another call replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

#: Methods that read the value, as those of ``numpy.ndarray``.
READING = (
    *("all", "any", "argmax", "argmin", "argsort", "astype", "clip", "conj", "copy", "cumprod", "cumsum"),
    *("diagonal", "dot", "flatten", "item", "max", "mean", "min", "nonzero", "prod", "ravel", "repeat"),
    *("reshape", "round", "squeeze", "std", "sum", "swapaxes", "take", "tobytes", "tolist", "trace"),
    *("transpose", "var"),
)


class ArrayMethods:
    """The methods of `READING`, each of the value that `_view` returns. They do what those of ``numpy.ndarray`` do."""

    __slots__ = ()

    def _view(self) -> Any:
        raise NotImplementedError

    def _write_result(self, result: Any) -> None:
        raise NotImplementedError


def _reading(name: str) -> Callable[..., Any]:
    def method(self: ArrayMethods, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        result = getattr(self._view(), name)(*args, **kwargs)
        if out is None:
            return result
        if isinstance(out, ArrayMethods):
            out._write_result(result)
        else:
            out[...] = result
        return out

    method.__name__ = name
    method.__qualname__ = f"ArrayMethods.{name}"
    method.__doc__ = f"Return what ``numpy.ndarray.{name}`` returns for the value."
    return method


for _name in READING:
    setattr(ArrayMethods, _name, _reading(_name))


def _refuse(method: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{method} is not provided: {instead}")


class NotProvided:
    """Methods that raise NotImplementedError and name the call to make instead."""

    __slots__ = ()

    def fill(self, value: Any) -> NoReturn:
        """Raise NotImplementedError: assign an array of equal elements instead."""
        _refuse("fill", "call v.assign(np.full_like(v, value))")

    def sort(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: assign the sorted array instead."""
        _refuse("sort", "call v.assign(np.sort(v))")

    def partition(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: assign the partitioned array instead."""
        _refuse("partition", "call v.assign(np.partition(v, kth))")

    def put(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: set elements instead."""
        _refuse("put", "set v[indices] = values")

    def resize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: the shape of a variable is fixed."""
        _refuse("resize", "the shape of a variable is fixed; np.resize(v, shape) returns an array")
