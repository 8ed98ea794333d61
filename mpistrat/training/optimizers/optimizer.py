"""The base class of optimizers, which reduces gradients and updates variables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import strategy as strategies
from mpistrat.collectives import structures
from mpistrat.runtime import arrays
from mpistrat.runtime.agreement.whole_call import whole
from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.gpu.kernels import FLOATS, EachElement
from mpistrat.runtime.record import flight_record
from mpistrat.runtime.topology import Topology
from mpistrat.values import IndexedSlices, ReduceOp, component
from mpistrat.variables import GpuVariable, LocalVariable, Variable

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy


def _current_ranks(optimizer: Optimizer) -> Topology:
    return strategies.get_strategy().extended.engine.topology


class Optimizer(ABC):
    """The base class of optimizers.

    A subclass names the state it keeps for each variable in `slots`, and changes a variable in `update`.

    Parameters
    ----------
    learning_rate : float or callable
        A number, or a function that takes the number of completed steps and returns a number.
    name : str, optional
        Prefix of the names of the optimizer's variables.

    Raises
    ------
    ValueError
        If the learning rate is negative.

    Examples
    --------
    >>> import mpistrat
    >>> class Sign(Optimizer):
    ...     def update(self, weights, gradient, step, rate, *state):
    ...         weights -= rate * np.sign(gradient)
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     v = mpistrat.Variable([1.0, 2.0])
    >>> optimizer = Sign(0.5)
    >>> strategy.run(lambda: optimizer.apply_gradients([(np.array([3.0, -4.0]), v)]))
    >>> v.read_value()
    array([0.5, 2.5])
    """

    slots: tuple[str, ...] = ()

    def __init__(self, learning_rate: float | Callable[[int], float], name: str | None = None):
        self.learning_rate = learning_rate
        self._name = name or type(self).__name__
        self._iterations: Variable | None = None
        self._slots: dict[int, tuple[Variable, tuple[Variable, ...]]] = {}

    @property
    def learning_rate(self) -> Any:
        """The learning rate, or the function that returns it. Can be set."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float | Callable[[int], float]) -> None:
        if not callable(value) and not value >= 0:
            raise ValueError(f"learning_rate must not be negative, not {value!r}")
        self._learning_rate = value

    @property
    def iterations(self) -> int:
        """The number of completed steps."""
        return 0 if self._iterations is None else int(self._iterations.own_copy())

    @property
    def variables(self) -> list[Variable]:
        """The optimizer's state, to be saved with the weights. Empty before the first step or `build`."""
        own = [] if self._iterations is None else [self._iterations]
        return own + [slot for _, slots in self._slots.values() for slot in slots]

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the state of variables now, not at the first step: for example before a `load`.

        Collective.
        """
        variables = list(variables)
        if not variables:
            raise ValueError("there are no variables")
        strategy = variables[0].distribute_strategy
        for variable in variables:
            strategy.extended.check_variable(variable, f"{self._name}.build")
        if strategies.get_strategy() is strategy:
            self._create(variables)
        else:
            with strategy.scope():
                self._create(variables)

    @whole(_current_ranks)
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> None:
        """Sum the gradients over the replicas and update the variables. Call it in a replica context.

        All gradients travel in one reduction. The variables are changed in place. The gradients are *summed*:
        compute each replica's gradient from the sum of its losses divided by the global batch size. The step
        is then the step of the mean loss over all examples.

        Parameters
        ----------
        grads_and_vars : iterable of (gradient, Variable)
            This replica's gradients, in the same order on all replicas. None leaves its variable unchanged;
            IndexedSlices hold rows of a gradient.
        name : str, optional
            Ignored. Accepted for programs written for Keras.
        experimental_aggregate_gradients : bool
            Whether to sum over the replicas. Give False if the gradients are already reduced.

        Raises
        ------
        RuntimeError
            In cross-replica context.
        ValueError
            If there are no gradients, one does not fit its variable, or a variable belongs to another strategy.
            On every replica, if the replicas give gradients of different variables, kinds, shapes or dtypes.
        """
        replica = strategies.get_replica_context()
        if replica is None:
            raise RuntimeError(
                "apply_gradients() adds up the gradients of replicas: call it in the function that strategy.run runs"
            )
        extended = replica.strategy.extended
        telling = (
            structures.refusals("all_reduce", extended.engine.topology)
            if experimental_aggregate_gradients
            else nullcontext()
        )
        with telling:
            given = list(grads_and_vars)
            pairs = [(gradient, variable) for gradient, variable in given if gradient is not None]
            if not pairs:
                raise ValueError("No gradients provided for any variable")
            variables = [variable for _, variable in pairs]
            for variable in variables:
                extended.check_variable(variable, "apply_gradients")
            gradients = [_fitting(gradient, variable) for gradient, variable in pairs]
            form = _form(given) if experimental_aggregate_gradients else None
        replica.merge_call(self._apply, (gradients, variables, form))
        flight_record.step(flight_record.UPDATE)

    def _apply(
        self, strategy: Strategy, gradients: list[Any], variables: list[Variable], form: Hashable
    ) -> None:
        """Update the variables. Sum the gradients first if ``form`` is given."""
        extended = strategy.extended
        step = self.iterations
        # The user's function may fail. Here no rank waits yet.
        rate = float(self._learning_rate(step) if callable(self._learning_rate) else self._learning_rate)
        if form is not None:
            gradients = extended.engine.all_reduce(ReduceOp.SUM, gradients, None, form)
        self._create(variables)
        assert self._iterations is not None
        if extended.engine.device.kind == "cuda":
            gradients, variables = self._apply_on_gpu(extended, gradients, variables, step + 1, rate)
        for gradient, variable in zip(gradients, variables, strict=True):
            slots = self._slots[id(variable)][1]
            extended.update(variable, self._update, (gradient, step + 1, rate, *slots), group=False)
        extended.update(self._iterations, LocalVariable.assign_add, (1,), group=False)

    def _create(self, variables: list[Variable]) -> None:
        new = [variable for variable in variables if id(variable) not in self._slots]
        if new:  # each creation is a collective of its own
            topology = new[0].distribute_strategy.extended.engine.topology
            names = tuple(variable.name for variable in new)
            structures.agree(topology, "the state of an optimizer", self._name, "for", names)
        if self._iterations is None:
            with variables[0].distribute_strategy.extended.engine.variables_on_host():
                self._iterations = Variable(np.int64(0), trainable=False, name=f"{self._name}/iterations")
        for variable in new:
            if id(variable) not in self._slots:
                made = tuple(
                    Variable(
                        np.zeros(variable.shape, variable.dtype),
                        trainable=False,
                        name=f"{self._name}/{variable.name}/{slot}",
                    )
                    for slot in self.slots
                )
                self._slots[id(variable)] = (variable, made)

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]] | None:
        """Return the GPU kernel of `update` and its numbers, or None if only `update` exists.

        The lists of the kernel are the gradients, the weights, and the state of each of `slots`.
        """
        return None

    def _apply_on_gpu(
        self,
        extended: Any,
        gradients: Sequence[Any],
        variables: Sequence[Variable],
        step: int,
        rate: float,
    ) -> tuple[list[Any], list[Variable]]:
        """Update variables on the GPU by one launch per dtype. Return the gradients and variables left to update."""
        kernel = self.on_gpu(step, rate)
        left: list[tuple[Any, Variable]] = []
        groups: dict[Any, list[list[Any]]] = {}
        for gradient, variable in zip(gradients, variables, strict=True):
            weights = variable.own_copy()
            fused = (
                kernel is not None and weights.dtype.name in FLOATS and not isinstance(weights, np.ndarray)
            )
            if not fused or isinstance(gradient, IndexedSlices):
                left.append((gradient, variable))
                continue
            placed = arrays.placed(gradient, extended.engine.device).astype(weights.dtype, copy=False)
            slots = [slot.own_copy() for slot in self._slots[id(variable)][1]]
            row = [cupy_for("an optimizer").ascontiguousarray(placed), weights, *slots]
            groups.setdefault(weights.dtype, []).append(row)
        if kernel is not None:
            with cupy_for("an optimizer").cuda.Device(extended.engine.device.index):
                for rows in groups.values():
                    kernel[0]([list(each) for each in zip(*rows, strict=True)], kernel[1])
        done = {id(variable) for _, variable in left}
        for variable in variables:
            if id(variable) not in done:
                variable.after_local_write("update")
        return [gradient for gradient, _ in left], [variable for _, variable in left]

    def _update(
        self, variable: LocalVariable, gradient: Any, step: int, rate: float, *slots: LocalVariable
    ) -> None:
        state = [slot.array for slot in slots]
        if isinstance(variable, GpuVariable):
            self._update_alone(variable, gradient, step, rate, state)
        elif isinstance(gradient, IndexedSlices):
            gradient = IndexedSlices(
                arrays.to_host(gradient.values), arrays.to_host(gradient.indices), gradient.dense_shape
            )
            self.update_rows(variable.array, gradient, step, rate, *state)
        else:
            self.update(variable.array, np.ascontiguousarray(arrays.to_host(gradient)), step, rate, *state)

    def _update_alone(
        self, variable: GpuVariable, gradient: Any, step: int, rate: float, state: list[Any]
    ) -> None:
        """Update on the host without a kernel, and for rows: GPUs add rows in another order on each replica."""
        weights, *held = [arrays.to_host(each) for each in (variable.array, *state)]
        if isinstance(gradient, IndexedSlices):
            rows = IndexedSlices(
                arrays.to_host(gradient.values), arrays.to_host(gradient.indices), gradient.dense_shape
            )
            self.update_rows(weights, rows, step, rate, *held)
        else:
            self.update(weights, np.ascontiguousarray(arrays.to_host(gradient)), step, rate, *held)
        for target, result in zip((variable.array, *state), (weights, *held), strict=True):
            target[...] = arrays.from_host(result, target)

    @abstractmethod
    def update(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        """Change ``weights`` and ``state`` in place.

        Parameters
        ----------
        weights, gradient : numpy.ndarray
            Contiguous arrays of one shape. Do not change the gradient.
        step : int
            Number of this step, counted from 1.
        rate : float
            The learning rate.
        *state : numpy.ndarray
            The state of this variable, one array for each of `slots`.
        """

    def update_rows(
        self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray
    ) -> None:
        """Change ``weights`` and ``state`` in place for a gradient that is zero outside ``rows``."""
        dense = np.zeros_like(weights)
        np.add.at(dense, rows.indices, rows.values)
        self.update(weights, dense, step, rate, *state)


def _form(pairs: Iterable[tuple[Any, Variable]]) -> tuple[str, ...]:
    """Return the names of the variables with and without gradients, for the ranks to compare."""
    return tuple(
        [
            f"no gradient of {getattr(variable, 'name', '')}" if gradient is None else variable.name
            for gradient, variable in pairs
        ]
    )


def _fitting(gradient: Any, variable: Variable) -> Any:
    gradient = component(gradient)
    if isinstance(gradient, IndexedSlices):
        variable.check_rows(gradient)
        return gradient
    array = arrays.numpy_or_cupy(gradient)
    if array.shape != variable.shape:
        raise ValueError(
            f"variable {variable.name!r} has shape {variable.shape}, and its gradient {array.shape}"
        )
    if not np.can_cast(array.dtype, variable.dtype, "same_kind"):
        raise ValueError(
            f"variable {variable.name!r} has dtype {variable.dtype}, and its gradient {array.dtype}: cast it"
        )
    return gradient
