"""Methods of NumPy arrays that one other call replaces."""

from __future__ import annotations

from typing import Any, NoReturn


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
