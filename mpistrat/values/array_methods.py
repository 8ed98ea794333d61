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


#: What to call in place of a method that changes an array where it is.
_INSTEAD = {
    "fill": "call v.assign(np.full_like(v, value))",
    "sort": "call v.assign(np.sort(v))",
    "partition": "call v.assign(np.partition(v, kth))",
    "put": "set v[indices] = values",
    "resize": "the shape of a variable is fixed; np.resize(v, shape) returns an array",
}


class NotProvided:
    """Methods that raise NotImplementedError and name the call to make instead."""

    __slots__ = ()


def _refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    def method(self: NotProvided, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not provided: {instead}")

    method.__name__ = name
    method.__qualname__ = f"NotProvided.{name}"
    method.__doc__ = f"Raise NotImplementedError: {instead}."
    return method


for _name, _instead in _INSTEAD.items():
    setattr(NotProvided, _name, _refusing(_name, _instead))
