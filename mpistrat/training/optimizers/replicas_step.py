"""The step of an optimizer whose gradients come from several replicas of a rank: one reduction and one update."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

import numpy as np

from mpistrat import context
from mpistrat.collectives.ops.of_replicas import GrowingTotal
from mpistrat.strategy import StrategyExtended
from mpistrat.training.optimizers.gradients import Pairs, checked, fitting, names_of
from mpistrat.values import ReduceOp, snapshot
from mpistrat.variables import Variable

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
        self._total: GrowingTotal | None = None
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
                assert engine.of_replicas is not None
                self._total = GrowingTotal(engine.of_replicas, ReduceOp.SUM, engine.options, names)
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
