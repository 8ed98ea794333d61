"""The steps of an optimizer: prepared ones, those of variables one by one, and those of several replicas of a rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import arrays
from mpistrat.arrays.device import cupy_for, on_device
from mpistrat.arrays.gpu.kernels import FLOATS
from mpistrat.collectives.ops.of_replicas import IncrementalAllReduce
from mpistrat.engine import Engine
from mpistrat.process.cache import Cache
from mpistrat.strategy import StrategyExtended
from mpistrat.training.optimizers.flat_step import FlatStep, ShardedStep
from mpistrat.training.optimizers.gradients import Pairs, checked, fitting, names_of
from mpistrat.training.optimizers.rule import Rule, for_update
from mpistrat.training.optimizers.state import State, require
from mpistrat.values import IndexedSlices, ReduceOp, component, snapshot
from mpistrat.variables import GpuVariable, LocalVariable, Variable

Slots = Mapping[int, tuple[Variable, tuple[Variable, ...]]]


class SeparateStep:
    """The step of any optimizer, for gradients of all kinds.

    The variables are in the order of the gradients. ``slots`` must have their state, by the identity of the variable,
    when `update` is called. ``names`` is what the ranks compare besides dtypes and shapes.
    """

    def __init__(
        self, extended: StrategyExtended, variables: list[Variable], slots: Slots, names: tuple[Hashable, ...]
    ):
        self._extended, self._slots = extended, slots
        self.variables, self.form = variables, names

    def changed(self) -> list[np.ndarray]:
        """Return the arrays of this process that `update` changes."""
        members = [(variable, *self._slots[id(variable)][1]) for variable in self.variables]
        held = [component(each) for each in itertools.chain.from_iterable(members)]
        arrays_of = [each.array for each in held if isinstance(each, LocalVariable)]
        return [array for array in arrays_of if isinstance(array, np.ndarray)]

    def update(self, rule: Rule, gradients: Sequence[Any], step: int, rate: float) -> None:
        """Update the variables with the reduced gradients."""
        variables: Sequence[Variable] = self.variables
        if self._extended.engine.device.kind == "cuda":
            gradients, variables = self._update_on_gpu(rule, gradients, step, rate)
        self._extended.batch_update(
            [
                (variable, _update_one, (rule, gradient, step, rate, *self._slots[id(variable)][1]))
                for gradient, variable in zip(gradients, variables, strict=True)
            ],
            group=False,
        )

    def _update_on_gpu(
        self, rule: Rule, gradients: Sequence[Any], step: int, rate: float
    ) -> tuple[list[Any], list[Variable]]:
        """Update variables on the GPU by one launch per dtype. Return the gradients and variables left to update."""
        kernel = rule.on_gpu(step, rate)
        device = self._extended.engine.device
        left: list[tuple[Any, Variable]] = []
        groups: dict[Any, list[list[Any]]] = {}
        for gradient, variable in zip(gradients, self.variables, strict=True):
            weights = variable.own_copy()
            fused = kernel is not None and weights.dtype.name in FLOATS and not isinstance(weights, np.ndarray)
            if not fused or isinstance(gradient, IndexedSlices):
                left.append((gradient, variable))
                continue
            placed = arrays.placed(gradient, device).astype(weights.dtype, copy=False)
            slots = [slot.own_copy() for slot in self._slots[id(variable)][1]]
            row = [cupy_for("an optimizer").ascontiguousarray(placed), weights, *slots]
            groups.setdefault(weights.dtype, []).append(row)
        if kernel is not None:
            with on_device(device.index):
                for rows in groups.values():
                    kernel[0]([list(each) for each in zip(*rows, strict=True)], kernel[1])
        done = {id(variable) for _, variable in left}
        for variable in self.variables:
            if id(variable) not in done:
                variable.after_local_write("update")
        return [gradient for gradient, _ in left], [variable for _, variable in left]


def _update_one(
    variable: LocalVariable, rule: Rule, gradient: Any, step: int, rate: float, *slots: LocalVariable
) -> None:
    state = [slot.array for slot in slots]
    if not isinstance(variable, GpuVariable):
        _update_on_host(variable.array, rule, gradient, step, rate, state)
        return
    # Without a kernel, and for rows: GPUs add rows in another order on each replica.
    weights, *held = [arrays.to_host(each) for each in (variable.array, *state)]
    _update_on_host(weights, rule, gradient, step, rate, held)
    for target, result in zip((variable.array, *state), (weights, *held), strict=True):
        target[...] = arrays.from_host(result, target)


def _update_on_host(
    weights: np.ndarray, rule: Rule, gradient: Any, step: int, rate: float, state: list[np.ndarray]
) -> None:
    if isinstance(gradient, IndexedSlices):
        values, indices = arrays.to_host(gradient.values), arrays.to_host(gradient.indices)
        rows = IndexedSlices(values, indices, gradient.dense_shape)
        rule.update_rows(weights, rows, step, rate, *state)
    else:
        dense = for_update(np.asarray(arrays.to_host(gradient), order="C"), weights.dtype)
        rule.update(weights, dense, step, rate, *state)


_MOST = 64  # steps that are kept
Step = FlatStep | ShardedStep | SeparateStep


class PreparedSteps(Cache[Hashable, FlatStep | ShardedStep]):
    """Steps by their strategies and variables. A copy of an optimizer prepares its own.

    ``last`` is the last step of variables that all had gradients, and ``owner`` the part of the strategy that made it.
    """

    __slots__ = ("last", "owner")

    def __init__(self) -> None:
        super().__init__(_MOST)
        self.last: FlatStep | ShardedStep | None = None
        self.owner: StrategyExtended | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedSteps:
        return PreparedSteps()

    def step_for(
        self,
        extended: StrategyExtended,
        given: Pairs,
        state: State,
        elementwise: bool,
        create: Callable[[list[Variable]], None] | None,
    ) -> tuple[Step, list[Any]]:
        """Return the step for these variables, and the gradients that are not None.

        ``elementwise`` is that of the rule. With ``create``, which creates the ``state``, this is shared out.
        """
        pairs = [pair for pair in given if pair[0] is not None]
        if not pairs:
            raise ValueError("No gradients provided for any variable")
        engine, variables = extended.engine, [variable for _, variable in pairs]
        for variable in variables:
            extended.check_variable(variable, "apply_gradients")
        if create is not None:
            require(engine, variables, [gradient for gradient, _ in pairs])
        gradients = [fitting(gradient, variable) for gradient, variable in pairs]
        known, completed, names = state.slots, state.iterations, names_of(given)
        joins = completed is not None and not state.lacks_rate and elementwise
        joins = joins and may_join(engine, known, gradients, variables)
        if create is None and not joins:
            return SeparateStep(extended, variables, known, names), gradients
        gradients = [*map(arrays.to_host, gradients)]
        key = (extended, *[None if gradient is None else id(variable) for gradient, variable in given])
        step = self.get(key)
        if step is None or not step.fits(gradients):
            if create is not None:
                step = ShardedStep(engine, variables, gradients, names, state, create, elementwise)
            else:
                held = [[each.own_copy() for each in (v, *known[id(v)][1])] for v in variables]
                dtypes = [gradient.dtype for gradient in gradients]
                least_alone = engine.topology.limits.alone_bytes
                step = FlatStep(variables, held, dtypes, names, completed, state.learning_rate, least_alone)
            self.keep(key, step)
        if len(pairs) == len(given):
            self.owner, self.last = extended, step
        return step, gradients


def may_join(engine: Engine, slots: Mapping[int, Any], gradients: Sequence[Any], variables: Sequence[Variable]) -> bool:
    """Return whether a `FlatStep` can make this step. Equal on all ranks if they give equal kinds of gradients."""
    return (
        engine.joins_arrays
        and not engine.topology.compares_variables
        and len(set(map(id, variables))) == len(variables)
        and all(id(variable) in slots for variable in variables)
        and all(variable.each_replica_writes for variable in variables)
        and all(isinstance(variable.own_copy(), np.ndarray) for variable in variables)
        and not any(isinstance(each, IndexedSlices) or arrays.on_gpu(each) for each in gradients)
        and not engine.holds_buffer(gradients)
    )


_ARRAYS = {np.ndarray}


class ReplicasStep:
    """The call of ``apply_gradients`` by all replicas of a rank. Each gives its gradients, which are added at once.

    ``update`` gets the reduced gradients with their variables, and updates these. ``number`` returns that of the step.
    """

    def __init__(self, update: Callable[[Pairs], None], extended: StrategyExtended, number: Callable[[], int]):
        self._update, self._extended, self._number = update, extended, number
        self._next = extended.engine.replicas.first
        self._checks = "gradients" in extended.engine.topology.checks
        self._variables: list[Variable] = []
        self._trained: list[Variable | None] = []  # in the order of the gradients, None without one
        self._called: tuple[object, ...] = ()
        self._total: IncrementalAllReduce | None = None
        self._reduced: list[object] = []

    def give(self, given: tuple[Pairs, bool]) -> None:
        """Add the gradients of the next replica. With False they are reduced, and equal on all replicas.

        Raise as `Optimizer.apply_gradients`.
        """
        all_pairs, aggregate = given
        trained = [None if gradient is None else variable for gradient, variable in all_pairs]
        gradients = [gradient for gradient, _ in all_pairs if gradient is not None]
        if self._checks:
            replica, self._next = self._next, self._next + 1
            variables = [variable for variable in trained if variable is not None]
            checked(variables, gradients, replica, self._extended.engine.replicas.size, self._number(), aggregate)
        # Fast path: the variables are checked, and the sums compare dtypes and shapes with those of the first replica.
        known = self._total is not None and aggregate and len(trained) == len(self._trained)
        if known and all(map(is_, trained, self._trained)) and {*map(type, gradients)} == _ARRAYS:
            assert self._total is not None
            self._total.give_arrays(gradients)
            return
        pairs = [pair for pair in all_pairs if pair[0] is not None]
        if not pairs:
            raise ValueError("No gradients provided for any variable")
        for _, variable in pairs:
            self._extended.check_variable(variable, "apply_gradients")
        gradients = [fitting(gradient, variable) for gradient, variable in pairs]
        names = names_of(all_pairs)
        called = names, aggregate
        if not self._called:
            self._called, self._trained = called, trained
            self._variables = [variable for _, variable in pairs]
            if aggregate:
                engine = self._extended.engine
                self._total = IncrementalAllReduce(engine.of_replicas, ReduceOp.SUM, engine.options, names)
            else:
                self._reduced = [*map(snapshot, gradients)]
        elif called != self._called:
            raise ValueError(
                f"a replica gives gradients of {names}, and the first one of its rank of {self._called[0]}: they must "
                "be of the same variables"
            )
        if self._total is not None:
            self._total.give(gradients)

    def make(self) -> list[None]:
        """Reduce the gradients, and update the variables once."""
        stack = context.stack()
        depth = len(stack)
        try:
            stack.append(self._extended.cross_replica_mode)
            reduced = self._reduced if self._total is None else self._total.result()
            self._update([*zip(reduced, self._variables, strict=True)])
        finally:
            del stack[depth:]
        return [None] * self._extended.engine.replicas.count
