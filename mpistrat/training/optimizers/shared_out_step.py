"""The step of an optimizer whose state is shared out: each rank updates its part of the elements (ZeRO-1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives import structures
from mpistrat.collectives.movement.gather import all_gather_parts
from mpistrat.engine import Engine
from mpistrat.training.optimizers.flat_step import FlatStep, form_of
from mpistrat.training.optimizers.gradients import apart, places
from mpistrat.training.optimizers.options.clipping import BLOCK, Clipping, added, squares_of_blocks
from mpistrat.training.optimizers.parts import parts_of, scaled
from mpistrat.training.optimizers.rule import Rule, for_update, rate_of
from mpistrat.training.optimizers.state import State
from mpistrat.values import ReduceOp
from mpistrat.variables import Variable


class SharedOutStep:
    """The step of an optimizer whose state is shared out, for these variables and gradients of these dtypes.

    The ranks add up the gradients so that each gets the sum of its part, update it, and gather the weights. ``create``
    creates the ``state`` of variables. The other arguments and attributes are as of `FlatStep`. A variable may be given
    twice. Raise ValueError if a rule that is not ``elementwise`` would get a part of a variable.
    """

    def __init__(
        self,
        engine: Engine,
        variables: Sequence[Variable],
        gradients: Sequence[np.ndarray],
        names: tuple[Hashable, ...],
        state: State,
        create: Callable[[list[Variable]], None],
        elementwise: bool,
    ):
        self._engine, self.variables, self._state, self._create = engine, list(variables), state, create
        self.dtypes, self.shapes = [each.dtype for each in gradients], [each.shape for each in gradients]
        self.form = form_of(names, self.dtypes, self.shapes)
        self._elementwise, self._is_prepared = elementwise, False

    def _prepare(self) -> None:
        """Create the state, if this is the first step of a variable, and find this rank's parts. Collective then."""
        variables, state, topology = self.variables, self._state, self._engine.topology
        self._create(variables)
        assert state.iterations is not None
        self.completed = state.iterations.own_copy()
        self._ends = ends = [state.ends[id(variable)] for variable in variables]
        weights = [each.own_copy().reshape(-1) for each in variables]
        self._bytes = parts_of([*map(as_bytes, weights)], scaled(ends, [each.itemsize for each in weights]))
        # The gradients of each dtype, by their indices, and this rank's part of them in this order.
        self._messages = [
            [i for i, each in enumerate(self.dtypes) if each == dtype] for dtype in dict.fromkeys(self.dtypes)
        ]
        own = [(i, slice(*ends[i][topology.rank :][:2])) for i in itertools.chain(*self._messages)]
        self._own = own = [(i, where) for i, where in own if where.start < where.stop]
        slots = [state.slots[id(variables[i])][1] for i, _ in own]
        self._separate = [
            [weights[i][where], *(slot.own_copy() for slot in of)] for (i, where), of in zip(own, slots, strict=True)
        ]
        self._joined: FlatStep | None = None
        if not self._elementwise:
            # From the parts of all ranks, so that all raise.
            if any(0 < b - a < each[-1] for each in ends for a, b in itertools.pairwise(each)):
                raise ValueError("shard_state=True: set `update` of an optimizer before its state is created")
            for held, (i, _), of in zip(self._separate, own, slots, strict=True):
                shapes = [each.shape for each in (variables[i], *of)]
                held[:] = [each.reshape(shape) for each, shape in zip(held, shapes, strict=True)]
        elif len({*map(id, variables)}) == len(variables):
            dtypes = [self.dtypes[i] for i, _ in own]
            self._joined = FlatStep(
                [variables[i] for i, _ in own],
                self._separate,
                dtypes,
                (),
                state.iterations,
                topology.limits.alone_bytes,
            )
        blocks = [_norm_block(dtype) for dtype in self.dtypes]
        self._square_ends = [[-(-end // block) for end in of] for of, block in zip(ends, blocks, strict=True)]
        self._is_prepared = True

    def fits(self, gradients: Sequence[np.ndarray]) -> bool:
        """Return whether the step was prepared for gradients of these dtypes and shapes."""
        return [(each.dtype, each.shape) for each in gradients] == [*zip(self.dtypes, self.shapes, strict=True)]

    def take(
        self,
        rule: Rule,
        gradients: Sequence[np.ndarray],
        rate: float | Callable[[int], float],
        engine: Engine | None,
        clipping: Clipping | None,
    ) -> None:
        """Update this rank's parts, gather the weights, and count the step, as `FlatStep.take`. Collective.

        An error in the update of one rank raises on all: MismatchError on the others.
        """
        if not self._is_prepared:
            self._prepare()
        number, topology = self.completed.item(), self._engine.topology
        rate = rate_of(rate, number)  # may fail, so before the first collective
        own = self._reduced([np.ascontiguousarray(each).reshape(-1) for each in gradients], engine)
        norms = [] if clipping is None or not clipping.by_norm else self._norms(own, clipping)
        try:
            if clipping is not None:
                own = clipping.clipped(own, norms)
            if self._joined is not None:
                self._joined.take(rule, own, rate, None, None)
            else:
                self._update(rule, own, number + 1, rate)
        except Exception as error:
            structures.refuse("apply_gradients", topology, error, self._engine.options.timeout_seconds)
            raise
        all_gather_parts(topology, self._bytes, self.form, self._engine.options.timeout_seconds)
        self.completed.fill(number + 1)
        if topology.compares_variables:
            for variable in self.variables:
                variable.after_local_write("update")

    def _reduced(self, flat: Sequence[np.ndarray], engine: Engine | None) -> list[np.ndarray]:
        """Return this rank's parts of the gradients, summed over the replicas of ``engine`` if it is given."""
        found: list[np.ndarray] = []
        for members in self._messages:
            parts = parts_of([flat[i] for i in members], [self._ends[i] for i in members])
            like = ReduceOp.SUM, self.dtypes[members[0]], parts
            total = None if engine is None else engine.ops.reduce_parts(*like, engine.options, self.form)
            if total is None:
                if engine is not None:
                    flat = engine.all_reduce(ReduceOp.SUM, [*flat], None, self.form)
                return [flat[i][where] for i, where in self._own]
            ends = [*itertools.accumulate(map(len, parts[self._engine.topology.rank]))]
            found += np.split(total, ends)[:-1]
        return found

    def _norms(self, own: Sequence[np.ndarray], clipping: Clipping) -> list[float]:
        """Return the norms of the gradients of which this rank has parts, added in the order of `Clipping`."""
        squares = [np.empty(each[-1]) for each in self._square_ends]
        for (i, where), part in zip(self._own, own, strict=True):
            first = where.start // _norm_block(part.dtype)
            found = [*squares_of_blocks(part.view(part.real.dtype))]
            squares[i][first : first + len(found)] = found
        parts = parts_of([*map(as_bytes, squares)], scaled(self._square_ends, [8] * len(squares)))
        all_gather_parts(self._engine.topology, parts, self.form, self._engine.options.timeout_seconds)
        norms = clipping.norms([added(each.tolist()) for each in squares])
        return [norms[i] for i, _ in self._own]

    def _update(self, rule: Rule, own: Sequence[np.ndarray], number: int, rate: float) -> None:
        """Update the variables one after another."""
        own = apart(own, places(itertools.chain(*self._separate)))
        for part, (weights, *state) in zip(own, self._separate, strict=True):
            gradient = for_update(np.ascontiguousarray(part).reshape(weights.shape), weights.dtype)
            rule.update(weights, gradient, number, rate, *state)


def _norm_block(dtype: np.dtype) -> int:
    """Return the elements of a dtype whose squares a norm adds first."""
    return BLOCK // (2 if dtype.kind == "c" else 1)
