"""Values with one component per replica. A process holds the components of the replicas that it plays."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import arrays
from mpistrat.values.array_like import ArrayLike
from mpistrat.values.indexed_slices import IndexedSlices


class DistributedValues:
    """A value with one component per replica.

    Parameters
    ----------
    values : tuple
        A component for each replica of this process, in the order of replicas: one where a rank plays one replica.

    Raises
    ------
    ValueError
        If ``values`` is empty.

    Examples
    --------
    >>> import mpistrat
    >>> value = mpistrat.PerReplica((3.0,))
    >>> mpistrat.get_strategy().experimental_local_results(value)
    (3.0,)
    """

    __slots__ = ("__weakref__", "_components")

    def __init__(self, values: tuple[Any, ...] | list[Any]):
        self._components = tuple(values)
        if not self._components:
            raise ValueError("a process holds a component of a distributed value for each of its replicas: give one")

    @property
    def values(self) -> tuple[Any, ...]:
        """Components of this process."""
        return self._components

    def __repr__(self) -> str:
        components = ",\n".join(f"  {i}: {each!r}" for i, each in enumerate(self._components))
        return f"{type(self).__name__}:{{\n{components}\n}}"


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
        own = component(self)
        array = arrays.as_numpy(own, dtype)
        if copy is False and array is not own:
            raise ValueError(f"a copy is needed for an array of {array.dtype} from {own!r}")
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
        own = self._components[0]
        return arrays.to_cupy(own) if arrays.on_gpu(own) else arrays.as_numpy(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_component", "_components", "values"):  # before __init__
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        try:
            return getattr(self.values[0], name)
        except AttributeError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    __hash__ = object.__hash__


def component(value: Any) -> Any:
    """Return this replica's component of a distributed value, or any other value unchanged.

    Raise ValueError for components of several replicas, outside of these.
    """
    if not isinstance(value, DistributedValues):
        return value
    components = value.values
    if len(components) > 1 and not isinstance(value, Mirrored):
        replica = None if context.is_default() else context.current().replica_context
        if replica is not None and len(components) == replica.played_here:
            return components[replica.number_here]
        raise ValueError(
            f"the value has {len(components)} components in this process, and one is needed here: use "
            "strategy.experimental_local_results for all of them"
        )
    return components[0]


def reducible(op: Any, value: Any) -> Any:
    """Return what this process gives to a reduction: a value's component or components, or the value.

    Raise ValueError for SUM or PROD of a mirrored value.
    """
    if op.name in ("SUM", "PROD") and isinstance(value, Mirrored):
        raise ValueError(
            f"{op.name} of a mirrored value: all replicas have the same value already, which would count "
            "num_replicas_in_sync times; use MEAN, or do so with the value itself"
        )
    return value if isinstance(value, PerReplica) and len(value.values) > 1 else component(value)


def snapshot(value: Any) -> Any:
    """Return a copy of this process's component of a value, or of the value itself: later writes do not change it."""
    value = component(value)
    if isinstance(value, IndexedSlices):
        return IndexedSlices(arrays.copied(value.values), arrays.copied(value.indices), value.dense_shape)
    return arrays.copied(value)


class ValueContext:
    """The replica that a value is made for.

    Parameters
    ----------
    replica_id_in_sync_group : int
        Number of the replica, counted over all processes.
    num_replicas_in_sync : int
        Number of replicas.

    Examples
    --------
    >>> ValueContext(1, 4)
    ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=4)
    """

    __slots__ = ("_num_replicas", "_replica_id")

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1):
        self._replica_id = replica_id_in_sync_group
        self._num_replicas = num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number of the replica that the value is for."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""
        return self._num_replicas

    def __repr__(self) -> str:
        return f"ValueContext(replica_id_in_sync_group={self._replica_id}, num_replicas_in_sync={self._num_replicas})"
