"""Methods of ``tf.Variable`` and of NumPy arrays that one other call replaces."""

from __future__ import annotations

from typing import Any, NoReturn


def _refuse(method: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{method} is not provided: {instead}")


class NotProvided:
    """Methods that raise NotImplementedError and name the call to make instead."""

    __slots__ = ()

    def batch_scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> NoReturn:
        """Raise NotImplementedError: set ``v[batch, index] = rows`` instead."""
        _refuse("batch_scatter_update", "set v[np.arange(batches)[:, None], indices] = values")

    def scatter_nd_add(self, indices: Any, updates: Any, name: str | None = None) -> NoReturn:
        """Raise NotImplementedError: call ``np.add.at`` instead."""
        _refuse("scatter_nd_add", "call np.add.at(v, tuple(np.moveaxis(indices, -1, 0)), updates)")

    def scatter_nd_sub(self, indices: Any, updates: Any, name: str | None = None) -> NoReturn:
        """Raise NotImplementedError: call ``np.subtract.at`` instead."""
        _refuse("scatter_nd_sub", "call np.subtract.at(v, tuple(np.moveaxis(indices, -1, 0)), updates)")

    def scatter_nd_min(self, indices: Any, updates: Any, name: str | None = None) -> NoReturn:
        """Raise NotImplementedError: call ``np.minimum.at`` instead."""
        _refuse("scatter_nd_min", "call np.minimum.at(v, tuple(np.moveaxis(indices, -1, 0)), updates)")

    def scatter_nd_max(self, indices: Any, updates: Any, name: str | None = None) -> NoReturn:
        """Raise NotImplementedError: call ``np.maximum.at`` instead."""
        _refuse("scatter_nd_max", "call np.maximum.at(v, tuple(np.moveaxis(indices, -1, 0)), updates)")

    def scatter_nd_update(self, indices: Any, updates: Any, name: str | None = None) -> NoReturn:
        """Raise NotImplementedError: set ``v[indices] = updates`` instead."""
        _refuse("scatter_nd_update", "set v[tuple(np.moveaxis(indices, -1, 0))] = updates")

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
