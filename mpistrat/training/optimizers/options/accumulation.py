"""Accumulation of gradients: one step for several calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.collectives import structures
from mpistrat.training.optimizers.gradients import Pairs, fitting
from mpistrat.training.optimizers.state import NameOf, add_named
from mpistrat.values import IndexedSlices, VariableAggregation, VariableSynchronization
from mpistrat.variables import LocalVariable, Variable, read_together

if TYPE_CHECKING:
    from mpistrat.strategy import ReplicaContext, Strategy, StrategyExtended


class Accumulation:
    """The sums of gradients over calls, for each replica, until a step is made of them.

    The replicas do not communicate before the last call of a step, except where a variable is new. ``name`` is a prefix
    of the names of the variables. Raise ValueError if the number of calls is not a whole number above 1.
    """

    def __init__(self, calls: int, name: str):
        if not isinstance(calls, int) or calls < 2:
            raise ValueError(f"gradient_accumulation_steps must be a whole number above 1, or None, not {calls!r}")
        self._calls, self._name = calls, name
        self._done: Variable | None = None
        self._sums: dict[int, tuple[Variable, Variable]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sums = {id(variable): (variable, total) for variable, total in self._sums.values()}

    @property
    def variables(self) -> list[Variable]:
        """The number of calls since the last step, and the sums."""
        return ([] if self._done is None else [self._done]) + [total for _, total in self._sums.values()]

    def named(self, name_of: NameOf) -> dict[str, Variable]:
        """Return `variables` by the names that they have in a checkpoint; see `State.named`."""
        named = {} if self._done is None else {"accumulated_calls": self._done}
        for variable, total in self._sums.values():
            add_named(named, "gradients", variable, total, name_of)
        return named

    def create(self, variables: Iterable[Variable]) -> None:
        """Create the sums of variables, in the cross-replica context of their strategy. Collective for new ones."""
        for variable in variables:
            engine = variable.distribute_strategy.extended.engine
            if self._done is None:
                with engine.variables_on_host():
                    self._done = Variable(np.int64(0), trainable=False, name=f"{self._name}/accumulated_calls")
            if id(variable) in self._sums:
                continue
            wide = np.float32 if variable.dtype.itemsize < 4 else variable.dtype
            with variable.distribute_strategy.extended.colocate_vars_with(variable):
                total = Variable(
                    np.zeros(variable.shape, wide),
                    trainable=False,
                    name=f"{self._name}/{variable.name}/gradients",
                    synchronization=VariableSynchronization.ON_READ,
                    aggregation=VariableAggregation.SUM,
                )
            self._sums[id(variable)] = variable, total

    def step_of(
        self, replica: ReplicaContext, given: Pairs, aggregate: bool, create: Callable[[list[Variable]], None]
    ) -> Pairs:
        """Add this replica's gradients to its sums. Return the mean gradients at the last call of a step, else none.

        ``replica`` is the current one. At the last call of a step, each of the ``given`` variables that has a sum gets
        a gradient, and ``aggregate`` says whether to add up the sums of the replicas. ``create`` creates the state of
        variables, in cross-replica context. Raise as `Optimizer.apply_gradients`.
        """
        extended = replica.strategy.extended
        last = self._calls_of_this_step() + 1 >= self._calls
        try:
            pairs = [(fitting(gradient, variable), variable) for gradient, variable in given if gradient is not None]
            if not pairs:
                raise ValueError("No gradients provided for any variable")
            for _, variable in pairs:
                extended.check_variable(variable, "apply_gradients")
                _require_copies(variable)
        except (TypeError, ValueError, NotImplementedError):
            if replica.meeting is not None or not (last and aggregate):
                raise
            with structures.refusals("all_reduce", extended.engine.topology):
                raise
        variables = [variable for _, variable in pairs]
        if not all(id(variable) in self._sums for variable in variables):
            replica.merge_call(lambda strategy: create(variables))
            last = self._calls_of_this_step() + 1 >= self._calls  # a restored checkpoint may have had calls
        for gradient, variable in pairs:
            total = self._sums[id(variable)][1]
            (total.scatter_add if isinstance(gradient, IndexedSlices) else total.assign_add)(gradient)
        if not last:
            replica.merge_call(self._count)
            return []
        held = list({id(variable): variable for _, variable in given if id(variable) in self._sums}.values())
        return list(zip(replica.merge_call(self._means, (held, aggregate)), held, strict=True))

    def _calls_of_this_step(self) -> int:
        return 0 if self._done is None else self._done.own_copy().item()

    def _count(self, strategy: Strategy) -> None:
        """Count a call that is not the last of its step, in cross-replica context."""
        assert self._done is not None
        strategy.extended.update(self._done, LocalVariable.assign_add, (1,), group=False)

    def _means(self, strategy: Strategy, variables: Sequence[Variable], aggregate: bool) -> list[Any]:
        """Return the mean over the calls, summed over the replicas if asked to. Cross-replica context; collective."""
        totals = [self._sums[id(variable)][1] for variable in variables]
        sums = read_together(totals) if aggregate else [total.own_copy() for total in totals]
        return [arrays.numpy_or_cupy(each / self._calls) for each in sums]

    def clear(self, extended: StrategyExtended) -> None:
        """Begin another step: set the number of calls to zero, and the sums, of which each replica has its own."""
        assert self._done is not None
        extended.update(self._done, LocalVariable.assign, (0,), group=False)
        for _, total in self._sums.values():
            for sums in total.own_copies():
                sums[...] = 0


def _require_copies(variable: Variable) -> None:
    if not variable.each_replica_writes:
        raise ValueError(
            f"variable {variable.name!r}: gradient_accumulation_steps needs a copy of each variable on each replica: "
            "use MultiWorkerMirroredStrategy"
        )
