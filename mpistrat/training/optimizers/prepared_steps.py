"""The steps that an optimizer has prepared, and the choice of one for some variables and gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.engine import Engine
from mpistrat.process.cache import Cache
from mpistrat.strategy import StrategyExtended
from mpistrat.training.optimizers.flat_step import FlatStep
from mpistrat.training.optimizers.gradients import Pairs, fitting, names_of
from mpistrat.training.optimizers.parts import require
from mpistrat.training.optimizers.separate_step import SeparateStep
from mpistrat.training.optimizers.shared_out_step import SharedOutStep
from mpistrat.training.optimizers.state import State
from mpistrat.values import IndexedSlices
from mpistrat.variables import Variable

_MOST = 64  # steps that are kept
Step = FlatStep | SharedOutStep | SeparateStep


class PreparedSteps(Cache[Hashable, FlatStep | SharedOutStep]):
    """Steps by their strategies and variables. A copy of an optimizer prepares its own.

    ``last`` is the last step of variables that all had gradients, and ``owner`` the part of the strategy that made it.
    """

    __slots__ = ("last", "owner")

    def __init__(self) -> None:
        super().__init__(_MOST)
        self.last: FlatStep | SharedOutStep | None = None
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
        joins = completed is not None and elementwise and may_join(engine, known, gradients, variables)
        if create is None and not joins:
            return SeparateStep(extended, variables, known, names), gradients
        gradients = [*map(arrays.to_host, gradients)]
        key = (extended, *[None if gradient is None else id(variable) for gradient, variable in given])
        step = self.get(key)
        if step is None or not step.fits(gradients):
            if create is not None:
                step = SharedOutStep(engine, variables, gradients, names, state, create, elementwise)
            else:
                assert completed is not None
                held = [[each.own_copy() for each in (v, *known[id(v)][1])] for v in variables]
                dtypes = [gradient.dtype for gradient in gradients]
                least_alone = engine.topology.limits.alone_bytes
                step = FlatStep(variables, held, dtypes, names, completed, least_alone)
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
