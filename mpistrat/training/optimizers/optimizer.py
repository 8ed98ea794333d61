"""What optimizers have in common: the four steps of an update."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import strategy as strategies
from mpistrat.runtime import arrays
from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.kernels import FLOATS, EachElement
from mpistrat.runtime.operation import Operation
from mpistrat.runtime.topology import Topology
from mpistrat.runtime.whole_call import whole
from mpistrat.values import IndexedSlices, ReduceOp, component
from mpistrat.variables import GpuVariable, LocalVariable, Variable

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy

_ADDRESS = re.compile(" at 0x[0-9a-f]+")


def _current_ranks(optimizer: Optimizer) -> Topology:
    return strategies.get_strategy().extended._topology


class Optimizer(ABC):
    """The base of optimizers.

    A method says by `slots` what it remembers of each variable, and by `update` how it changes one.

    Parameters
    ----------
    learning_rate : float or callable
        A number, or a function of the number of steps done that returns one.
    name : str, optional
        Prefix of the names of its variables.

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
        """The learning rate, or the function that says it. May be set."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float | Callable[[int], float]) -> None:
        if not callable(value) and not value >= 0:
            raise ValueError(f"learning_rate must not be negative, not {value!r}")
        self._learning_rate = value

    @property
    def iterations(self) -> int:
        """Number of steps done."""
        return 0 if self._iterations is None else int(self._iterations._own_copy())

    @property
    def variables(self) -> list[Variable]:
        """What it remembers, to be saved with the weights; empty before the first step or `build`."""
        own = [] if self._iterations is None else [self._iterations]
        return own + [slot for _, slots in self._slots.values() for slot in slots]

    def build(self, variables: Iterable[Variable]) -> None:
        """Create what it remembers of variables now rather than at the first step: before a `load`, say.

        Collective.
        """
        variables = list(variables)
        if not variables:
            raise ValueError("there are no variables")
        strategy = variables[0].distribute_strategy
        for variable in variables:
            strategy.extended._check_variable(variable, f"{self._name}.build")
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
        """Add up the replicas' gradients and update the variables. In a replica context.

        One reduction for all gradients; the variables are changed in place. The replicas' gradients are
        *summed*: where each is that of its examples' summed loss divided by the number of examples of the
        global batch, the step is that of the mean over all examples.

        Parameters
        ----------
        grads_and_vars : iterable of (gradient, Variable)
            This replica's gradients, in the same order on all. None leaves a variable as it is; IndexedSlices
            are rows of one.
        name : str, optional
            For programs that give one.
        experimental_aggregate_gradients : bool
            Whether to add up: not where the gradients were reduced already.

        Raises
        ------
        RuntimeError
            In cross-replica context.
        ValueError
            If there is no gradient, one does not fit its variable, or the variable is another strategy's; on every
            replica, if gradients differ in shape or dtype between replicas.
        """
        replica = strategies.get_replica_context()
        if replica is None:
            raise RuntimeError(
                "apply_gradients() adds up the gradients of replicas: call it in the function that strategy.run runs"
            )
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        variables = [variable for _, variable in pairs]
        try:
            if not pairs:
                raise ValueError("No gradients provided for any variable")
            for variable in variables:
                replica.strategy.extended._check_variable(variable, "apply_gradients")
            gradients = [_fitting(gradient, variable) for gradient, variable in pairs]
        except (TypeError, ValueError) as error:
            if experimental_aggregate_gradients:
                _tell(replica.strategy, error)
            raise
        replica.merge_call(self._apply, (gradients, variables, experimental_aggregate_gradients))

    def _apply(
        self, strategy: Strategy, gradients: list[Any], variables: list[Variable], aggregate: bool
    ) -> None:
        extended = strategy.extended
        step = self.iterations
        # The user's function may fail, here where nobody waits yet.
        rate = float(self._learning_rate(step) if callable(self._learning_rate) else self._learning_rate)
        if aggregate:
            gradients = extended._all_reduce(ReduceOp.SUM, gradients, None)
        self._create(variables)
        assert self._iterations is not None
        if extended._device.kind == "cuda":
            gradients, variables = self._apply_on_gpu(extended, gradients, variables, step + 1, rate)
        for gradient, variable in zip(gradients, variables, strict=True):
            slots = self._slots[id(variable)][1]
            extended.update(variable, self._update, (gradient, step + 1, rate, *slots), group=False)
        extended.update(self._iterations, LocalVariable.assign_add, (1,), group=False)

    def _create(self, variables: list[Variable]) -> None:
        if self._iterations is None:
            with variables[0].distribute_strategy.extended._variables_on_host():
                self._iterations = Variable(np.int64(0), trainable=False, name=f"{self._name}/iterations")
        for variable in variables:
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
        """The kernel that does what `update` does on a GPU, and its numbers; None if there is only `update`.

        The kernel's lists are the gradients, the weights, and the variables of each of `slots`.
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
        """Update what lives on the GPU in one launch for each dtype; returns what is left to do."""
        kernel = self.on_gpu(step, rate)
        left: list[tuple[Any, Variable]] = []
        groups: dict[Any, list[list[Any]]] = {}
        for gradient, variable in zip(gradients, variables, strict=True):
            weights = variable._own_copy()
            fused = (
                kernel is not None and weights.dtype.name in FLOATS and not isinstance(weights, np.ndarray)
            )
            if not fused or isinstance(gradient, IndexedSlices):
                left.append((gradient, variable))
                continue
            placed = arrays.placed(gradient, extended._device).astype(weights.dtype, copy=False)
            slots = [slot._own_copy() for slot in self._slots[id(variable)][1]]
            row = [cupy_for("an optimizer").ascontiguousarray(placed), weights, *slots]
            groups.setdefault(weights.dtype, []).append(row)
        if kernel is not None:
            with cupy_for("an optimizer").cuda.Device(extended._device.index):
                for rows in groups.values():
                    kernel[0]([list(each) for each in zip(*rows, strict=True)], kernel[1])
        done = {id(variable) for _, variable in left}
        for variable in variables:
            if id(variable) not in done:
                variable._after_local_write("update")
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
        """On the host, what no kernel does: rows, which a GPU adds up in another order on every replica."""
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
            Contiguous, of one shape. The gradient must not be changed.
        step : int
            Number of this step, from 1.
        rate : float
            The learning rate.
        *state : numpy.ndarray
            What is remembered of this variable, one array for each of `slots`.
        """

    def update_rows(
        self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray
    ) -> None:
        """As `update`, for a gradient that is zero but for some rows."""
        dense = np.zeros_like(weights)
        np.add.at(dense, rows.indices, rows.values)
        self.update(weights, dense, step, rate, *state)


def _tell(strategy: Strategy, error: Exception) -> None:
    """Tell the other replicas, which are about to add up their gradients, that this one cannot.

    Raises
    ------
    ValueMismatchError
        On every replica, if not all of them have this error.
    """
    text = _ADDRESS.sub("", str(error))  # of one strategy, say, which is elsewhere in every process
    strategy.extended._topology.compare(Operation("all_reduce", f"refused: {text}"))


def _fitting(gradient: Any, variable: Variable) -> Any:
    gradient = component(gradient)
    if isinstance(gradient, IndexedSlices):
        variable._check_rows(gradient)
        return gradient
    array = arrays.native(gradient)
    if array.shape != variable.shape:
        raise ValueError(
            f"variable {variable.name!r} has shape {variable.shape}, and its gradient {array.shape}"
        )
    if not np.can_cast(array.dtype, variable.dtype, "same_kind"):
        raise ValueError(
            f"variable {variable.name!r} has dtype {variable.dtype}, and its gradient {array.dtype}: cast it"
        )
    return gradient
