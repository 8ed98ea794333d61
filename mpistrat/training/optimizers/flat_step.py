"""Steps of an optimizer over flat arrays: each rank updates all elements, or its part of them (ZeRO-1)."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives import structures
from mpistrat.collectives.movement.moves import all_gather_parts
from mpistrat.collectives.reduction import Reduction
from mpistrat.engine import Engine
from mpistrat.runtime.agreement.collective_lock import forbidden_threads, refuse_thread
from mpistrat.runtime.agreement.operation import Checksum
from mpistrat.training.optimizers.gradients import BLOCK, Clipping, added, apart, places, squares_of_blocks
from mpistrat.training.optimizers.rule import Rule, blocks, for_update
from mpistrat.training.optimizers.state import State, parts_of, scaled
from mpistrat.values import ReduceOp
from mpistrat.variables import Variable
from mpistrat.variables.local import follows, joined

_SHOWN = 4
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class WeightSpan(NamedTuple):
    """Variables side by side in memory, or a part of them, that one call updates.

    Their gradients are the part ``where`` (None: all) of the message of the index ``message``. If that is ``joined``,
    it is a buffer, which the update may change. ``weights`` is a flat array on the memory of the variables, and so are
    the arrays in ``state`` for the optimizer's slots.
    """

    message: int
    joined: bool
    where: slice | None
    weights: np.ndarray
    state: list[np.ndarray]


class JoinedGradients(NamedTuple):
    """Gradients of one dtype, by their indices, that are reduced as one array.

    ``buffer`` is where they are joined; None if a large gradient is sent without a copy.
    """

    members: list[int]
    buffer: np.ndarray | None


class PreparedStep:
    """A step that was prepared for gradients of some dtypes and shapes."""

    dtypes: list[np.dtype]
    shapes: list[tuple[int, ...]]

    def fits(self, gradients: Sequence[np.ndarray]) -> bool:
        """Return whether the step was prepared for gradients of these dtypes and shapes."""
        return [*map(_dtype, gradients)] == self.dtypes and [*map(_shape, gradients)] == self.shapes


class FlatStep(PreparedStep):
    """The step of an elementwise optimizer for these variables and gradients of these dtypes.

    The ranks must give equal arguments, except for the arrays in the variables. Each variable is given once, with its
    value on the host. The object keeps them alive. ``held`` has the memory of each, or of a part of it, and of the
    optimizer's state of it, and ``names`` what the ranks compare besides dtypes and shapes. ``completed`` counts the
    steps, and ``rate`` holds the learning rate; None where that is a function. From ``least_alone`` bytes on a gradient
    is not joined with others.

    The attribute ``form`` is what the ranks compare, see `form_of`, and ``completed`` the memory of the variable.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        held: Sequence[Sequence[np.ndarray]],
        dtypes: Sequence[np.dtype],
        names: tuple[Hashable, ...],
        completed: Variable,
        rate: Variable | None,
        least_alone: int,
    ):
        self.variables = list(variables)
        self.completed = completed.own_copy()
        self._rate: Any = None if rate is None else rate.own_copy()
        self._values = [weights for weights, *_ in held]
        self._state = [state for _, *state in held]
        kept: dict[Hashable, Any] = {}
        self.dtypes = list(dtypes)
        # Equal shapes are one object: cold, each object that a comparison reads costs 0.1 us.
        self.shapes = [kept.setdefault(value.shape, value.shape) for value in self._values]
        self.form = form_of(names, self.dtypes, self.shapes)
        groups: dict[tuple[np.dtype, np.dtype, int | None], list[int]] = {}
        for i, (value, dtype) in enumerate(zip(self._values, dtypes, strict=True)):
            alone = value.size * dtype.itemsize >= least_alone
            groups.setdefault((value.dtype, dtype, i if alone else None), []).append(i)
        self._messages: list[JoinedGradients] = []
        for (_, dtype, large), members in groups.items():
            size = sum(self._values[i].size for i in members)
            self._messages.append(JoinedGradients(members, np.empty(size, dtype) if large is None else None))
        self._spans = [
            each for number, message in enumerate(self._messages) for each in self._of_message(number, message)
        ]
        self._reduction: Reduction | None = None  # of all gradients into the buffer of the only message
        self._prepared = self._is_alone = False
        self._places: np.ndarray | None = None  # of what the step changes

    def _of_message(self, number: int, message: JoinedGradients) -> list[WeightSpan]:
        runs: list[list[int]] = []
        before: list[np.ndarray] = []
        for i in message.members:
            arrays = [self._values[i], *self._state[i]]
            if not arrays[0].size:
                continue
            if before and all(map(follows, before, arrays)):
                runs[-1].append(i)
            else:
                runs.append([i])
            before = arrays
        is_joined = message.buffer is not None
        spans: list[WeightSpan] = []
        start = 0
        for run in runs:
            flat = [*map(joined, zip(*([self._values[i], *self._state[i]] for i in run), strict=True))]
            for weights, *state in blocks(*flat) if is_joined else [flat]:
                end = start + weights.size
                spans.append(WeightSpan(number, is_joined, slice(start, end), weights, state))
                start = end
        return spans if len(spans) > 1 else [each._replace(where=None) for each in spans]

    def take(
        self,
        rule: Rule,
        gradients: Sequence[np.ndarray],
        schedule: Callable[[int], float] | None,
        engine: Engine | None,
        clipping: Clipping | None,
    ) -> None:
        """Update the variables together, and count the step.

        One function, which enters few others: each costs 3 us if its code has left the caches.

        The gradients have the dtypes and shapes that the step was prepared for. They are summed over the replicas of
        ``engine`` first, or used as they are without one. Without a ``schedule``, the learning rate is that of the
        state. A schedule is a function of the program, which may fail: it is called before the first collective.
        """
        number = self.completed.item()
        rate = self._rate.item() if schedule is None else float(schedule(number))
        messages: Sequence[np.ndarray]
        if engine is not None and not self._prepared:
            self._prepare(engine)
        if engine is None:
            messages = self._kept_apart(self._join(gradients))
        elif self._is_alone:  # without a reduction, whose lock and record take 6 us, cold
            if forbidden_threads:
                refuse_thread("apply_gradients")
            messages = self._join(gradients)
        elif self._reduction is not None:
            messages = self._reduction.run(gradients, engine.options.timeout_seconds)
        else:
            messages = engine.all_reduce(ReduceOp.SUM, self._join(gradients), None, self.form)
        if clipping is not None:
            parts = self._split(messages)
            clipped = clipping(parts)
            if any(map(is_not, clipped, parts)):
                messages = self._join(clipped)
        number += 1
        for message, is_joined, where, weights, state in self._spans:
            gradient = messages[message]
            if not is_joined:
                gradient = np.ascontiguousarray(gradient).reshape(-1)
            if where is not None:
                gradient = gradient[where]
            if gradient.dtype is not weights.dtype:
                gradient = for_update(gradient, weights.dtype)
            update = rule.update_consuming if is_joined else rule.update
            update(weights, gradient, number, rate, *state)
        self.completed.fill(number)

    def _prepare(self, engine: Engine) -> None:
        """Prepare the reduction into the buffer: a result of its own would be copied from there and back.

        The sum over one rank is what the buffer has without a reduction. Raise TypeError on every rank if gradients of
        these dtypes cannot be summed.
        """
        buffer = self._messages[0].buffer
        if len(self._messages) == 1 and buffer is not None and buffer.size:
            key = tuple(zip(self.dtypes, self.shapes, strict=True))
            self._reduction = engine.joined_all_reduce(ReduceOp.SUM, key, buffer, self.form)
            self._is_alone = self._reduction is not None and engine.replicas.size == 1
        self._prepared = True

    def _join(self, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays to reduce."""
        messages = []
        for members, buffer in self._messages:
            if buffer is None:
                messages.append(gradients[members[0]])
                continue
            mine = gradients if len(members) == len(gradients) else [gradients[i] for i in members]
            messages.append(np.concatenate(mine, None, buffer))
        return messages

    def _kept_apart(self, messages: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Return messages of which none changes when the variables do. Those in buffers are copies already."""
        if all(buffer is not None for _, buffer in self._messages):
            return messages
        if self._places is None:
            self._places = places([*self._values, *itertools.chain.from_iterable(self._state)])
        return apart(messages, self._places)

    def _split(self, messages: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the gradients that are in messages, as views where possible."""
        found: dict[int, np.ndarray] = {}
        for (members, _), total in zip(self._messages, messages, strict=True):
            flat, start = total.reshape(-1), 0
            for i in members:
                end = start + self._values[i].size
                found[i], start = flat[start:end].reshape(self.shapes[i]), end
        return [found[i] for i in range(len(found))]


def form_of(
    names: Sequence[Hashable], dtypes: Sequence[np.dtype], shapes: Sequence[tuple[int, ...]]
) -> tuple[str, Checksum]:
    """Return what the ranks compare: a checksum, since the hash of many names would take as long as a message."""
    compared = repr([*names, *map(str, dtypes), *shapes])
    more = ", ..." if len(names) > _SHOWN else ""
    shown = f"of {', '.join(map(str, names[:_SHOWN]))}{more}"
    return shown, Checksum(f"{zlib.crc32(compared.encode()):08x}")


class ShardedStep(PreparedStep):
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
        self.completed = state.iterations.own_copy()
        self._rate: Any = None if state.learning_rate is None else state.learning_rate.own_copy()
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
            self._joined = FlatStep(
                [variables[i] for i, _ in own],
                self._separate,
                [self.dtypes[i] for i, _ in own],
                (),
                state.iterations,
                state.learning_rate,
                topology.limits.alone_bytes,
            )
        blocks = [_norm_block(dtype) for dtype in self.dtypes]
        self._square_ends = [[-(-end // block) for end in of] for of, block in zip(ends, blocks, strict=True)]
        self._is_prepared = True

    def take(
        self,
        rule: Rule,
        gradients: Sequence[np.ndarray],
        schedule: Callable[[int], float] | None,
        engine: Engine | None,
        clipping: Clipping | None,
    ) -> None:
        """Update this rank's parts, gather the weights, and count the step, as `FlatStep.take`. Collective.

        An error in the update of one rank raises on all: MismatchError on the others.
        """
        if not self._is_prepared:
            self._prepare()
        number, topology = self.completed.item(), self._engine.topology
        # A schedule may fail, so it is called before the first collective.
        rate: float = self._rate.item() if schedule is None else float(schedule(number))
        own = self._reduced([np.ascontiguousarray(each).reshape(-1) for each in gradients], engine)
        norms = [] if clipping is None or not clipping.by_norm else self._norms(own, clipping)
        try:
            if clipping is not None:
                own = clipping.clipped(own, norms)
            if self._joined is not None:
                self._joined.take(rule, own, None if schedule is None else lambda number: rate, None, None)
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
