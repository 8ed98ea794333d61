"""Values with one component per replica, sparse rows, and the enums that name reductions."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import arrays
from mpistrat.values.array_like import ArrayLike


class IndexedSlices:
    """Some rows of an array whose other rows are zero or unchanged.

    Parameters
    ----------
    values : array, shape (n, ...)
        The rows.
    indices : array of int, shape (n,)
        Index on axis 0 of each row. Rows of equal index add up.
    dense_shape : tuple of int, optional
        Shape of the whole array.

    Raises
    ------
    ValueError
        If the numbers of indices and rows differ, or an index is outside ``dense_shape``.
    TypeError
        If the indices are not integers on one axis.

    Examples
    --------
    >>> IndexedSlices([[1.0, 2.0]], [2], (4, 2)).to_dense()
    array([[0., 0.],
           [0., 0.],
           [1., 2.],
           [0., 0.]])
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: tuple[int, ...] | None = None):
        self.values = arrays.numpy_or_cupy(values) if arrays.on_gpu(values) else arrays.as_numpy(values)
        self.indices = arrays.numpy_or_cupy(indices) if arrays.on_gpu(indices) else arrays.as_numpy(indices)
        self.dense_shape = None if dense_shape is None else tuple(int(n) for n in dense_shape)
        if self.indices.ndim != 1 or (self.indices.size and self.indices.dtype.kind not in "iu"):
            raise TypeError(f"indices are integers on one axis, not {self.indices.dtype} of shape {self.indices.shape}")
        if self.values.ndim == 0 or len(self.values) != len(self.indices):
            raise ValueError(f"{len(self.indices)} indices need as many rows, not values of shape {self.values.shape}")
        self.indices = self.indices.astype(np.int64, copy=False)
        if self.dense_shape is not None:
            if not self.dense_shape or self.values.shape[1:] != self.dense_shape[1:]:
                raise ValueError(f"rows of shape {self.values.shape[1:]} do not fit an array of {self.dense_shape}")
            if self.indices.size and not 0 <= self.indices.min() <= self.indices.max() < self.dense_shape[0]:
                raise ValueError(
                    f"indices from {self.indices.min()} to {self.indices.max()} are outside axis 0 of an array of "
                    f"shape {self.dense_shape}"
                )

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the rows."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the whole array; None if unknown."""
        return self.dense_shape

    def to_dense(self) -> np.ndarray:
        """Return the whole array, with the sum of rows of equal index.

        Raises
        ------
        ValueError
            If ``dense_shape`` was left out.
        """
        if self.dense_shape is None:
            raise ValueError("to_dense() needs the shape of the whole array: give IndexedSlices a dense_shape")
        dense = np.zeros(self.dense_shape, self.values.dtype)
        # On the host: a GPU adds rows of equal index in any order.
        np.add.at(dense, arrays.to_host(self.indices), arrays.to_host(self.values))
        return arrays.from_host(dense, self.values)

    def __repr__(self) -> str:
        return f"IndexedSlices({len(self.indices)} rows of {self.dtype}, dense_shape={self.dense_shape})"


# --- values of replicas ---------------------------------------------------------


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
        components = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(self._components))
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
        value = component(self)
        array = arrays.as_numpy(value, dtype)
        if copy is False and array is not value:
            raise ValueError(f"a copy is needed for an array of {array.dtype} from {value!r}")
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
        value = self._components[0]
        return arrays.to_cupy(value) if arrays.on_gpu(value) else arrays.as_numpy(value)

    def __getattr__(self, name: str) -> Any:
        # Copies ask before __init__, where the lookup below would recurse.
        if name.startswith("__") or name in ("_component", "_components", "values"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        try:
            return getattr(self.values[0], name)
        except AttributeError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    __hash__ = object.__hash__  # by identity, since == compares elements


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
    """Return the operand of this process in a reduction: a value's component or components, or the value.

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


# --- enums ----------------------------------------------------------------------


_NAMES = "'SUM', 'MEAN', 'MAX', 'MIN' or 'PROD'"  # the last three are not of ``tf.distribute``, nor of its enum


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are synchronized.

    Attributes
    ----------
    AUTO
        Same as ON_WRITE.
    NONE
        Never. Not allowed for variables of a strategy.
    ON_WRITE
        At every write, which reaches all copies: the copies are always equal.
    ON_READ
        At a read in cross-replica context, which combines the copies. Each replica writes its own copy.

    Examples
    --------
    >>> VariableSynchronization.ON_READ.name
    'ON_READ'
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values that replicas write to a variable are combined.

    Attributes
    ----------
    NONE
        Not combined: a write in a replica context is an error.
    SUM, MEAN
        Sum or mean of the replicas' values.
    ONLY_FIRST_REPLICA
        Value of replica 0, for all replicas.

    Examples
    --------
    >>> VariableAggregation.SUM.name
    'SUM'
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class ReduceOp(enum.Enum):
    """How the values of all replicas are combined into one.

    Attributes
    ----------
    SUM, MEAN
        Sum or mean of the replicas' values. The mean of integers is float64.

    Examples
    --------
    >>> ReduceOp.parse("mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    __hash__ = object.__hash__  # Enum's is in Python, slow for a key of hot tables

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Return the reduction of a variable's aggregation.

        Raises
        ------
        ValueError
            For NONE and ONLY_FIRST_REPLICA, which are not reductions.

        Examples
        --------
        >>> ReduceOp.from_variable_aggregation(VariableAggregation.SUM).name
        'SUM'
        """
        if aggregation is VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation is VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise ValueError(f"{aggregation} is not a reduction: use SUM or MEAN")

    @staticmethod
    def parse(op: ReduceOp | VariableAggregation | str) -> ReduceOp:
        """Return the reduction of a name, in upper or lower case, or of a variable's aggregation.

        Raises
        ------
        ValueError
            If ``op`` is not the name of a reduction.
        TypeError
            If ``op`` is not a name, a ``ReduceOp`` or a ``VariableAggregation``.

        Examples
        --------
        >>> ReduceOp.parse("sum") is ReduceOp.SUM
        True
        """
        if type(op) is ReduceOp:
            return op
        if isinstance(op, str):
            known = OPS.get(op) or OPS.get(op.upper())
            if known is None:
                raise ValueError(f"{op!r} is not a reduction: use {_NAMES}")
            return known
        if isinstance(op, VariableAggregation):
            return ReduceOp.from_variable_aggregation(op)
        raise TypeError(f"a reduction is a ReduceOp, {_NAMES}, not {op!r}")


# The reductions by themselves and by name, for callers that cannot afford a call of `ReduceOp.parse`.
OPS: dict[object, ReduceOp] = {name: op for op in ReduceOp for name in (op, op.name)}
