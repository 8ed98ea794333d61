"""Values with one component per replica. A process holds its own component."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.runtime.arrays import as_numpy, on_gpu, to_cupy
from mpistrat.values.array_like import ArrayLike


class DistributedValues:
    """A value with one component per replica.

    Parameters
    ----------
    values : tuple
        Components of this process: exactly one.

    Examples
    --------
    >>> import mpistrat
    >>> value = mpistrat.PerReplica((3.0,))
    >>> mpistrat.get_strategy().experimental_local_results(value)
    (3.0,)
    """

    __slots__ = ("__weakref__", "_component")

    def __init__(self, values: tuple[Any, ...] | list[Any]):
        if len(values) != 1:
            raise ValueError(f"a process holds one component of a distributed value, not {len(values)}")
        self._component = values[0]

    @property
    def values(self) -> tuple[Any, ...]:
        """Components of this process."""
        return (self._component,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}:{{\n  0: {self._component!r}\n}}"


class PerReplica(DistributedValues):
    """A value whose component differs from replica to replica.

    ``Strategy.run`` gives each replica its component. In a replica context, the value converts to an array of its
    component. In cross-replica context, the conversion raises ValueError.

    Examples
    --------
    >>> PerReplica((1.5,)).values
    (1.5,)
    """

    __slots__ = ()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        mode = None if context.is_default() else context.current()
        if mode is None or (mode.replica_context is None and mode.update_replica_id is None):
            raise ValueError(
                "It looks like you are using a PerReplica object while not inside a replica context. Its "
                "components differ between replicas: use it in strategy.run, or combine it by strategy.reduce, "
                "strategy.gather or strategy.experimental_local_results"
            )
        array = as_numpy(self._component, dtype)
        if copy is False and array is not self._component:
            raise ValueError(f"a copy is needed for an array of {array.dtype} from {self._component!r}")
        return array.copy() if copy else array


class Mirrored(ArrayLike, DistributedValues):
    """A value whose components are equal on all replicas. It behaves like its component.

    Examples
    --------
    >>> import numpy as np
    >>> total = Mirrored((np.array([1.0, 2.0]),))
    >>> total * 2
    array([2., 4.])
    """

    __slots__ = ()

    def _read(self) -> np.ndarray:
        return to_cupy(self._component) if on_gpu(self._component) else as_numpy(self._component)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_component":  # before __init__
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        try:
            return getattr(self._component, name)
        except AttributeError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    __hash__ = object.__hash__


def component(value: Any) -> Any:
    """Return this process's component of a distributed value, or any other value unchanged."""
    return value._component if isinstance(value, DistributedValues) else value


def reducible(op: Any, value: Any) -> Any:
    """Return the contribution of this process to the reduction of a value: its component, or the value.

    Raises
    ------
    ValueError
        For SUM or PROD of a mirrored value.
    """
    if op.name in ("SUM", "PROD") and isinstance(value, Mirrored):
        raise ValueError(
            f"{op.name} of a mirrored value: all replicas have the same value already, which would count "
            "num_replicas_in_sync times; use MEAN, or do so with the value itself"
        )
    return component(value)
