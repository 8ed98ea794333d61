"""The base class of all variables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpistrat import context
from mpistrat.arrays import arrays
from mpistrat.collectives.operations import has_mean
from mpistrat.engine import Engine
from mpistrat.values import ArrayLike, IndexedSlices, VariableAggregation, VariableSynchronization, component, reducible
from mpistrat.values.array_like import ArrayMethods, NotProvided
from mpistrat.variables.parts import Reference, ScatterNd, Slice, as_table, as_text, assign_follows

if TYPE_CHECKING:
    from typing_extensions import Self

_frame_of = sys._getframe


class Variable(ArrayLike, ArrayMethods, ScatterNd, NotProvided):
    """An array whose content may change, with rules for how replicas share it.

    The current strategy decides which subclass is made.

    Parameters
    ----------
    initial_value : array, number, or callable without arguments that returns one
        All replicas take the value of replica 0. Values of the other replicas must have the same shape and dtype. With
        a `mpistrat.ShardedArray` the variable is cut as it is, over the ranks of a replica.
    trainable : bool, optional
        Whether an optimizer should train it; by default yes, but not where ``synchronization`` is ON_READ.
    name : str, optional
    dtype : dtype, optional
        By default the dtype of the initial value.
    synchronization : VariableSynchronization, optional
        ON_WRITE (also AUTO and None): all copies are equal at all times. ON_READ: every replica has its own copy,
        and reading the variable in cross-replica context combines them.
    aggregation : VariableAggregation, optional
        How the values that replicas assign (ON_WRITE) or hold (ON_READ) are combined. None means NONE.

    Raises
    ------
    ValueError
        For synchronization NONE, for MEAN of a dtype that is not floating point or complex, and for an array of
        Python objects. For a ``ShardedArray`` over another mesh than the strategy's. On every replica, if shapes or
        dtypes differ between replicas.
    TypeError
        If ``synchronization`` or ``aggregation`` is not a member of its enum.

    Examples
    --------
    >>> import mpistrat
    >>> with mpistrat.MultiWorkerMirroredStrategy().scope():
    ...     v = mpistrat.Variable([1.0, 2.0], name="v")
    >>> v.assign_add([1.0, 1.0])
    <MirroredVariable 'v' shape=(2,) dtype=float64, this replica: [2. 3.]>
    >>> v * 2
    array([4., 6.])
    """

    each_replica_writes = True  # its own copy, an array of this process
    assignments = 0  # how often a value was assigned, or loaded, in cross-replica context
    _container: Any = None  # in a component: a weak reference to its distributed variable

    def __new__(
        cls,
        initial_value: Any = None,
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
    ) -> Variable:
        if cls is Variable:
            cls = context.current().strategy.extended.variable_class_for(initial_value, synchronization)
        return object.__new__(cls)

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
    ):
        strategy = context.current().strategy
        self._strategy: context.AnyStrategy = strategy
        self._synchronization = _checked_synchronization(synchronization)
        if aggregation is None:
            aggregation = VariableAggregation.NONE
        if not isinstance(aggregation, VariableAggregation):
            raise TypeError(f"aggregation must be a VariableAggregation, not {aggregation!r}")
        self._aggregation = aggregation
        on_read = self._synchronization is VariableSynchronization.ON_READ
        self._trainable = not on_read if trainable is None else bool(trainable)
        self._engine: Engine = strategy.extended.engine
        self._name = self._engine.name_of_variable(name)
        value = _initial_array(initial_value, dtype, self._name)
        if aggregation is VariableAggregation.MEAN and not has_mean(value.dtype):
            raise ValueError(f"variable {self._name!r}: MEAN needs floating point or complex values, not {value.dtype}")
        self._initialize(value)

    @classmethod
    def without_value(cls, variable: Variable, container: Any, replica: int) -> Self:
        """Return a component of a distributed variable. ``container`` is a weak reference to ``variable``."""
        copy = object.__new__(cls)
        copy._strategy = variable._strategy
        copy._engine = variable._engine
        copy._synchronization = variable._synchronization
        copy._aggregation = variable._aggregation
        copy._trainable = variable._trainable
        copy._name = f"{variable.name}/replica_{replica}" if replica else variable.name
        copy._container = container
        return copy

    def _initialize(self, value: np.ndarray) -> None:
        """Keep ``value`` as the variable's value, without a copy."""
        raise NotImplementedError

    # --- properties ------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the variable."""
        return self._name

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should train the variable."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies of the replicas are combined."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the values of the replicas are combined."""
        return self._aggregation

    @property
    def distribute_strategy(self) -> context.AnyStrategy:
        """The strategy that was current when the variable was created."""
        return self._strategy

    @property
    def device(self) -> str:
        """The device of this replica's copy."""
        return self._engine.devices[0]

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape of the variable."""
        return self.shape

    def set_shape(self, shape: Sequence[int | None]) -> None:
        """Check the shape of the variable, which is fixed: None fits any length.

        Raises
        ------
        ValueError
            If the variable has another shape.
        """
        if len(shape) != len(self.shape) or any(
            wanted not in (None, length) for wanted, length in zip(shape, self.shape, strict=True)
        ):
            raise ValueError(f"variable {self.name!r} has shape {self.shape}, not {tuple(shape)}")

    def ref(self) -> Reference[Variable]:
        """Return a hashable reference to this variable, for dicts and sets.

        References are equal if they refer to the same variable.

        Examples
        --------
        >>> import mpistrat
        >>> v, w = mpistrat.Variable([1.0]), mpistrat.Variable([1.0])
        >>> v.ref() == v.ref(), v.ref() == w.ref(), v.ref().deref() is v
        (True, False, True)
        """
        return Reference(self)

    # --- reading and writing ---------------------------------------------------------

    def read_value(self) -> np.ndarray:
        """Return a copy of the value on its device; in cross-replica context the combined value of all replicas."""
        return self._read().copy()

    def value(self) -> np.ndarray:
        """Return a copy of the value, as `read_value` does."""
        return self.read_value()

    def numpy(self) -> np.ndarray:
        """Return a copy of the value on the host, as a NumPy array."""
        value = self._read()
        return value.copy() if type(value) is np.ndarray else arrays.to_host(value)

    def sparse_read(self, indices: Any, name: str | None = None) -> np.ndarray:
        """Return a copy of the rows at ``indices``, an array of any shape, along axis 0.

        Raises
        ------
        ValueError
            If an index is negative or too large.
        TypeError
            If the indices are not integers.

        Examples
        --------
        >>> import mpistrat
        >>> mpistrat.Variable([[1, 2], [3, 4]]).sparse_read([1, 1])
        array([[3, 4],
               [3, 4]])
        """
        checked = self._checked_indices(indices, 1)
        array = self._read()
        return array[arrays.placed(checked, arrays.device_of(array))].copy()

    def gather_nd(self, indices: Any, name: str | None = None) -> np.ndarray:
        """Return a copy of the elements or slices at ``indices``, whose last axis numbers the variable's axes.

        Raises
        ------
        ValueError, TypeError
            As `sparse_read`. ValueError also if there are more indices than axes.

        Examples
        --------
        >>> import mpistrat
        >>> mpistrat.Variable([[1, 2], [3, 4]]).gather_nd([[0, 1], [1, 0]])
        array([2, 3])
        """
        index = arrays.as_numpy(indices)
        axes = index.shape[-1] if index.ndim else 1
        index = self._checked_indices(index.reshape(*index.shape[:-1], axes), axes)
        array = self._read()
        by_axis = arrays.placed(np.moveaxis(index, -1, 0), arrays.device_of(array))
        return array[tuple(by_axis)].copy()

    def _checked_indices(self, indices: Any, axes: int) -> np.ndarray:
        """Return indices as an int64 array, checked against the lengths of the first ``axes`` axes."""
        index = arrays.as_numpy(indices)
        if index.size and index.dtype.kind not in "iu":
            raise TypeError(f"variable {self.name!r}: indices must be integers, not {index.dtype}")
        shape = self.shape[:axes]
        if len(shape) < axes:
            raise ValueError(f"variable {self.name!r} has shape {self.shape}: it cannot take {axes} indices")
        index = index.astype(np.int64)
        if index.size and not ((index >= 0) & (index < (np.array(shape) if axes > 1 else shape[0]))).all():
            raise ValueError(
                f"variable {self.name!r} has shape {self.shape}: indices from {index.min()} to {index.max()} do not fit"
            )
        return index

    def write(self, method: str, value: Any) -> None:
        """Write by a method of `LocalVariable`, to the copies that the subclass and the context choose."""
        raise NotImplementedError

    def assign(
        self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Set the value of the variable.

        Parameters
        ----------
        value : array or number
            Must have the variable's shape, and a dtype that NumPy casts to the variable's (``"same_kind"``).
        use_locking, name
            Ignored. Accepted for compatibility with ``tf.Variable``.
        read_value : bool
            Whether to return the variable (for chaining) rather than None.

        Raises
        ------
        ValueError
            If the shape differs, or if the aggregation cannot combine the replicas' values.
        TypeError
            If the dtype cannot be cast.
        RuntimeError
            While another strategy is current.
        """
        self.write("assign", value)
        return self if read_value else None  # type: ignore[return-value]  # as in tf.Variable

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Add ``delta`` to the value. Parameters and errors as for `assign`."""
        self.write("assign_add", delta)
        return self if read_value else None  # type: ignore[return-value]  # as in tf.Variable

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Subtract ``delta`` from the value. Parameters and errors as for `assign`."""
        self.write("assign_sub", delta)
        return self if read_value else None  # type: ignore[return-value]  # as in tf.Variable

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Add rows to the variable. Rows with equal indices are all added."""
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Subtract rows from the variable. Rows with equal indices are all subtracted."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Multiply rows of the variable. Rows with equal indices are all multiplied in."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Divide rows of the variable. Rows with equal indices all divide."""
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Set rows to the element-wise minimum of old and new values."""
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Set rows to the element-wise maximum of old and new values."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Set rows of the variable. Of rows with equal indices the last one is kept."""
        return self._scatter("scatter_update", sparse_delta)

    def _scatter(self, method: str, rows: IndexedSlices) -> Variable:
        if not isinstance(rows, IndexedSlices):
            raise TypeError(f"{method} takes IndexedSlices, not {type(rows).__name__}")
        self.write(method, rows)
        return self

    def _check_value(self, array: Any) -> None:
        """Raise ValueError or TypeError unless an array fits this variable. Never communicates."""
        shape, dtype = self._shape_and_dtype()
        if array.shape != shape:
            raise ValueError(f"variable {self.name!r} has shape {shape}: a value of shape {array.shape} does not fit")
        if array.dtype is not dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(f"variable {self.name!r} has dtype {dtype}: values of {array.dtype} do not fit; cast them")

    def _require_own_strategy(self, verb: str) -> None:
        """Raise RuntimeError while another strategy is current."""
        mode = context.current()
        if mode.strategy is not self._strategy and not context.is_default():
            raise RuntimeError(
                f"variable {self.name!r} belongs to {self._strategy!r}, and {mode.strategy!r} is current: {verb} it in "
                "its own strategy's scope, or in none"
            )

    def check_rows(self, rows: IndexedSlices) -> None:
        """Raise unless rows fit this variable. Never communicates.

        Raises
        ------
        ValueError
            If the shape does not fit, or an index is out of range.
        TypeError
            If the dtype cannot be cast.
        """
        shape, dtype = self._shape_and_dtype()
        values, indices = rows.values, rows.indices
        if not shape or values.shape[1:] != shape[1:]:
            raise ValueError(f"variable {self.name!r} has shape {shape}: rows of shape {values.shape[1:]} do not fit")
        if not np.can_cast(values.dtype, dtype, "same_kind"):
            raise TypeError(f"variable {self.name!r} has dtype {dtype}: rows of {values.dtype} do not fit; cast them")
        if indices.size and not 0 <= indices.min() <= indices.max() < shape[0]:
            raise ValueError(
                f"variable {self.name!r} has {shape[0]} rows: indices {indices.min()} to {indices.max()} do not fit"
            )

    def _write_result(self, result: Any) -> None:
        self.assign(result)

    def __getitem__(self, key: Any) -> Any:
        # `v[key].assign(value)`, as in TensorFlow, needs an object that is not an array: see `assign_follows`.
        frame = _frame_of(1)
        if "assign" in frame.f_code.co_names and assign_follows(frame):
            return Slice(self, key)
        return self._item(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        arrays.refuse_masked(key)
        value = arrays.numpy_or_cupy(value)
        whole = self.read_value()
        whole[key] = arrays.placed(value, arrays.device_of(whole))
        self.assign(whole)

    __hash__ = object.__hash__  # by identity, since == compares elements

    def __eq__(self, other: object) -> Any:  # element-wise, as for arrays
        return self.__array_ufunc__(np.equal, "__call__", self, other)

    def after_local_write(self, method: str) -> None:
        """Check the copies after ``method`` wrote this replica's without communication. Does nothing by default."""

    def own_copy(self) -> np.ndarray:
        """Return this replica's copy, not a copy of it. Never communicates."""
        raise NotImplementedError

    @property
    def part(self) -> Variable:
        """This rank's part of a variable that is cut, or this variable. Never communicates."""
        return self

    def own_copies(self) -> list[np.ndarray]:
        """Return the copies of all replicas of this rank, not copies of them. Never communicates."""
        return [self.own_copy()]

    def _shape_and_dtype(self) -> tuple[tuple[int, ...], np.dtype]:
        array = self.own_copy()
        return array.shape, array.dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Return another variable of this strategy with the same value. Never communicates.

        Raises
        ------
        RuntimeError
            While another strategy is current.
        """
        self._require_own_strategy("copy")
        copy = memo[id(self)] = self.copied_for(None)
        return copy

    def copied_for(self, container: Any) -> Self:
        """Return a variable with the same value, the component of ``container``, a weak reference, if not None."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._container = container
        copy._hold_copy_of(self)
        return copy

    def _hold_copy_of(self, variable: Any) -> None:
        """Copy this replica's value of ``variable``, a variable of the same class."""
        raise NotImplementedError

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"variable {self.name!r} cannot be pickled or copied shallowly: use copy.deepcopy, take read_value(), or "
            "write it to a file by mpistrat.training.save"
        )

    def __format__(self, spec: str) -> str:
        return format(arrays.to_host(self.own_copy())[()], spec) if spec else str(self)

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_table(self)


def operand(op: Any, value: Any) -> Any:
    """Return what this replica gives to a reduction: its copy of a variable, else as `reducible`.

    Without an op, return its component.
    """
    return component(value) if op is None or isinstance(value, Variable) else reducible(op, value)


def _checked_synchronization(synchronization: VariableSynchronization | None) -> VariableSynchronization:
    if synchronization in (None, VariableSynchronization.AUTO):
        return VariableSynchronization.ON_WRITE
    if not isinstance(synchronization, VariableSynchronization):
        raise TypeError(f"synchronization must be a VariableSynchronization, not {synchronization!r}")
    if synchronization is VariableSynchronization.NONE:
        raise ValueError("synchronization NONE: copies that are never brought together make no variable")
    return synchronization


def _initial_array(initial_value: Any, dtype: Any, name: str) -> np.ndarray:
    if callable(initial_value):
        initial_value = initial_value()
    if initial_value is None:
        raise ValueError(f"variable {name!r}: initial_value is needed")
    array = np.array(arrays.as_numpy(initial_value, dtype), order="C")  # a copy: the caller keeps its array
    if array.dtype.hasobject:
        raise ValueError(f"variable {name!r}: initial_value {initial_value!r} is not an array of numbers")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
