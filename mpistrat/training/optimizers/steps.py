"""The steps of an optimizer: fused over flat arrays, over the parts of a rank (ZeRO-1), and one variable at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import numpy as np

from mpistrat import context, verify
from mpistrat.arrays import arrays
from mpistrat.arrays.arrays import as_bytes
from mpistrat.arrays.device import cupy_for, on_device
from mpistrat.arrays.gpu.kernels import FLOATS
from mpistrat.collectives import structures
from mpistrat.collectives.movement.moves import all_gather_parts
from mpistrat.collectives.ops.of_replicas import IncrementalAllReduce
from mpistrat.collectives.reduction import Reduction
from mpistrat.engine import Engine
from mpistrat.process.cache import Cache
from mpistrat.runtime.agreement.collective_lock import forbidden_threads, refuse_thread
from mpistrat.strategy import StrategyExtended
from mpistrat.training.optimizers.gradients import (
    BLOCK,
    Clipping,
    Pairs,
    added,
    checked,
    copy_overlapping,
    fitting_pairs,
    form_of,
    memory_spans,
    names_of,
    squares_of_blocks,
)
from mpistrat.training.optimizers.rule import Rule, blocks, for_update
from mpistrat.training.optimizers.state import State, parts_of, require_shardable, scaled
from mpistrat.values import IndexedSlices, ReduceOp, component, snapshot
from mpistrat.variables import GpuVariable, LocalVariable, Variable
from mpistrat.variables.local import follows, joined

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class WeightSpan(NamedTuple):
    """Variables side by side in memory, or a part of them, that one call updates.

    Their gradients are the slice ``section`` (None: all) of the message of the index ``message``. If ``joined``, the
    message is a buffer that the update may change. ``weights`` is a flat view of the variables, and ``state`` has flat
    views of the optimizer's slots.
    """

    message: int
    joined: bool
    section: slice | None
    weights: np.ndarray
    state: list[np.ndarray]


class JoinedGradients(NamedTuple):
    """Gradients of one dtype, by their indices, that are reduced as one array.

    ``buffer`` is where they are joined; None if a large gradient is sent without a copy.
    """

    members: list[int]
    buffer: np.ndarray | None


class FlatStep:
    """The step of an optimizer for these variables and gradients of these dtypes.

    The ranks must give equal arguments, except for the arrays in the variables. Each variable is given once, with its
    value on the host. The object keeps them alive. ``held`` has the memory of each, or of a part of it, and of the
    optimizer's state of it, and ``names`` what the ranks compare besides dtypes and shapes. ``completed`` counts the
    steps, and ``rate`` holds the learning rate; None where that is a function. From ``least_alone`` bytes on a gradient
    is not joined with others. Unless the rule is ``elementwise``, none is, and ``held`` keeps its shapes.

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
        elementwise: bool = True,
    ):
        self.variables = list(variables)
        self.completed = completed.own_copy()
        self._rate: Any = None if rate is None else rate.own_copy()
        self._values = [weights for weights, *_ in held]
        self._state = [state for _, *state in held]
        shapes: dict[Hashable, Any] = {}
        self.dtypes = list(dtypes)
        # Equal shapes are one object: cold, each object that a comparison reads costs 0.1 us.
        self.shapes = [shapes.setdefault(value.shape, value.shape) for value in self._values]
        self.form = form_of(names, self.dtypes, self.shapes)
        groups: dict[tuple[np.dtype, np.dtype, int | None], list[int]] = {}
        for i, (value, dtype) in enumerate(zip(self._values, dtypes, strict=True)):
            alone = not elementwise or value.size * dtype.itemsize >= least_alone
            groups.setdefault((value.dtype, dtype, i if alone else None), []).append(i)
        self._messages: list[JoinedGradients] = []
        for (_, dtype, large), members in groups.items():
            size = sum(self._values[i].size for i in members)
            self._messages.append(JoinedGradients(members, np.empty(size, dtype) if large is None else None))
        self._spans = [
            span
            for number, message in enumerate(self._messages)
            for span in self._of_message(number, message, elementwise)
        ]
        self._reduction: Reduction | None = None  # of all gradients into the buffer of the only message
        self._prepared = self._is_alone = False
        self._changed_spans: np.ndarray | None = None  # of what the step changes

    def _of_message(self, number: int, message: JoinedGradients, elementwise: bool) -> list[WeightSpan]:
        runs: list[list[int]] = []
        before: list[np.ndarray] = []
        for i in message.members:
            arrays = [self._values[i], *self._state[i]]
            if elementwise and not arrays[0].size:
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
            members = [[self._values[i], *self._state[i]] for i in run]
            flat = [*map(joined, zip(*members, strict=True))] if elementwise else members[0]
            for weights, *state in blocks(*flat) if is_joined else [flat]:
                end = start + weights.size
                spans.append(WeightSpan(number, is_joined, slice(start, end), weights, state))
                start = end
        return spans if len(spans) > 1 else [span._replace(section=None) for span in spans]

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
        ``engine`` first, or used as they are without one. Without a ``schedule``, the learning rate is in the state. A
        schedule is a function of the program, which may fail: it is called before the first collective.
        """
        number = self.completed.item()
        rate = self._rate.item() if schedule is None else float(schedule(number))
        messages: Sequence[np.ndarray]
        if engine is not None and not self._prepared:
            self._prepare(engine)
        if engine is None:
            messages = self._without_overlap(self._join(gradients))
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
            # Most steps exceed no limit: nothing is copied back to the buffer then.
            if any(map(is_not, clipped, parts)):
                messages = self._join(clipped)
        number += 1
        for message, is_joined, section, weights, state in self._spans:
            gradient = messages[message]
            if not is_joined:
                gradient = np.ascontiguousarray(gradient).reshape(weights.shape)
            if section is not None:
                gradient = gradient[section]
            # Identity, which is cheaper than ==: an equal dtype that is another object passes `for_update` unchanged.
            if gradient.dtype is not weights.dtype:
                gradient = for_update(gradient, weights.dtype)
            # A buffer of the step may be overwritten, a gradient of the program may not.
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
            operands = gradients if len(members) == len(gradients) else [gradients[i] for i in members]
            messages.append(np.concatenate(operands, None, buffer))
        return messages

    def _without_overlap(self, messages: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Return messages that do not change with the variables. Messages in buffers are copies already."""
        if all(buffer is not None for _, buffer in self._messages):
            return messages
        if self._changed_spans is None:
            self._changed_spans = memory_spans([*self._values, *itertools.chain.from_iterable(self._state)])
        return copy_overlapping(messages, self._changed_spans)

    def _split(self, messages: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the gradients that are in messages, as views where possible."""
        reduced: dict[int, np.ndarray] = {}
        for (members, _), total in zip(self._messages, messages, strict=True):
            flat, start = total.reshape(-1), 0
            for i in members:
                end = start + self._values[i].size
                reduced[i], start = flat[start:end].reshape(self.shapes[i]), end
        return [reduced[i] for i in range(len(reduced))]


class ShardedStep:
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
        self.dtypes, self.shapes = [g.dtype for g in gradients], [g.shape for g in gradients]
        self.form = form_of(names, self.dtypes, self.shapes)
        self._elementwise, self._is_prepared = elementwise, False

    def _prepare(self) -> None:
        """Create the state, if this is the first step of a variable, and find this rank's parts. Collective then."""
        variables, state, topology = self.variables, self._state, self._engine.topology
        self._create(variables)
        self.completed = state.iterations.own_copy()
        self._rate: Any = None if state.learning_rate is None else state.learning_rate.own_copy()
        self._ends = ends = [state.ends[id(variable)] for variable in variables]
        weights = [variable.own_copy().reshape(-1) for variable in variables]
        self._bytes = parts_of([*map(as_bytes, weights)], scaled(ends, [weight.itemsize for weight in weights]))
        # The gradients of each dtype, by their indices, and this rank's part of them in this order.
        self._messages = [
            [i for i, other in enumerate(self.dtypes) if other == dtype] for dtype in dict.fromkeys(self.dtypes)
        ]
        slices = [(i, slice(*ends[i][topology.rank :][:2])) for i in itertools.chain(*self._messages)]
        self._slices = slices = [(i, span) for i, span in slices if span.start < span.stop]
        slots = [state.slots[id(variables[i])][1] for i, _ in slices]
        held = [
            [weights[i][span], *(slot.own_copy() for slot in own)] for (i, span), own in zip(slices, slots, strict=True)
        ]
        if not self._elementwise:
            # From the parts of all ranks, so that all raise.
            if any(0 < b - a < of_array[-1] for of_array in ends for a, b in itertools.pairwise(of_array)):
                raise ValueError("shard_state=True: set `update` of an optimizer before its state is created")
            shapes = [[array.shape for array in (variables[i], *of)] for (i, _), of in zip(slices, slots, strict=True)]
            held = [[*map(np.reshape, *pair)] for pair in zip(held, shapes, strict=True)]
        self._of_parts = FlatStep(
            [variables[i] for i, _ in slices],
            held,
            [self.dtypes[i] for i, _ in slices],
            (),
            state.iterations,
            state.learning_rate,
            topology.limits.alone_bytes,
            self._elementwise,
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
        parts = self._reduced([np.ascontiguousarray(gradient).reshape(-1) for gradient in gradients], engine)
        norms = [] if clipping is None or not clipping.by_norm else self._norms(parts, clipping)
        try:
            if clipping is not None:
                parts = clipping.clipped(parts, norms)
            self._of_parts.take(rule, parts, None if schedule is None else lambda number: rate, None, None)
        except Exception as error:
            # The others are in the gather below.
            structures.refuse("apply_gradients", topology, error, self._engine.options.timeout_seconds)
            raise
        all_gather_parts(topology, self._bytes, self.form, self._engine.options.timeout_seconds)
        verify.count_reduction(topology)
        if topology.compares_variables:
            for variable in self.variables:
                variable.after_local_write("update")

    def _reduced(self, flat: Sequence[np.ndarray], engine: Engine | None) -> list[np.ndarray]:
        """Return this rank's parts of the gradients, summed over the replicas of ``engine`` if it is given."""
        totals: list[np.ndarray] = []
        for members in self._messages:
            parts = parts_of([flat[i] for i in members], [self._ends[i] for i in members])
            like = ReduceOp.SUM, self.dtypes[members[0]], parts
            total = None if engine is None else engine.ops.reduce_parts(*like, engine.options, self.form)
            # Hooks of the program see whole gradients only.
            if total is None:
                if engine is not None:
                    flat = engine.all_reduce(ReduceOp.SUM, [*flat], None, self.form)
                return [flat[i][span] for i, span in self._slices]
            ends = [*itertools.accumulate(map(len, parts[self._engine.topology.rank]))]
            totals += np.split(total, ends)[:-1]
        return totals

    def _norms(self, parts: Sequence[np.ndarray], clipping: Clipping) -> list[float]:
        """Return the norms of the gradients of this rank's parts, added in the order of `Clipping`."""
        squares = [np.empty(ends[-1]) for ends in self._square_ends]
        for (i, span), part in zip(self._slices, parts, strict=True):
            first = span.start // _norm_block(part.dtype)
            of_blocks = [*squares_of_blocks(part.view(part.real.dtype))]
            squares[i][first : first + len(of_blocks)] = of_blocks
        # All blocks on all ranks: each adds them in the same order, as a step without shards does.
        of_ranks = parts_of([*map(as_bytes, squares)], scaled(self._square_ends, [8] * len(squares)))
        all_gather_parts(self._engine.topology, of_ranks, self.form, self._engine.options.timeout_seconds)
        norms = clipping.norms([added(block_squares.tolist()) for block_squares in squares])
        return [norms[i] for i, _ in self._slices]


def _norm_block(dtype: np.dtype) -> int:
    """Return the elements of a dtype whose squares a norm adds first."""
    return BLOCK // (2 if dtype.kind == "c" else 1)


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
        held = map(component, itertools.chain.from_iterable(members))
        return [v.array for v in held if isinstance(v, LocalVariable) and isinstance(v.array, np.ndarray)]

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
                    kernel[0]([list(column) for column in zip(*rows, strict=True)], kernel[1])
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
    weights, *held = [arrays.to_host(array) for array in (variable.array, *state)]
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

    ``last`` is the last step in which all variables had gradients, and ``owner`` the extended strategy that made it.
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
        all_pairs: Pairs,
        state: State,
        elementwise: bool,
        create: Callable[[list[Variable]], None] | None,
    ) -> tuple[Step, list[Any]]:
        """Return the step for these variables, and the gradients that are not None.

        ``elementwise`` says whether the rule is. With ``create``, which creates the ``state``, the state is sharded.
        """
        pairs = fitting_pairs(extended, all_pairs)
        engine, variables = extended.engine, [variable for _, variable in pairs]
        gradients = [gradient for gradient, _ in pairs]
        if create is not None:
            require_shardable(engine, variables, gradients)
        known, completed, names = state.slots, state.iterations, names_of(all_pairs)
        joins = completed is not None and not state.lacks_rate and may_join(engine, known, gradients, variables)
        if create is None and not joins:
            return SeparateStep(extended, variables, known, names), gradients
        gradients = [*map(arrays.to_host, gradients)]
        key = (extended, *[None if gradient is None else id(variable) for gradient, variable in all_pairs])
        step, kinds = self.get(key), ([*map(_dtype, gradients)], [*map(_shape, gradients)])
        if step is None or (step.dtypes, step.shapes) != kinds:
            if create is not None:
                step = ShardedStep(engine, variables, gradients, names, state, create, elementwise)
            else:
                held = [[variable.own_copy() for variable in (v, *known[id(v)][1])] for v in variables]
                how = completed, state.learning_rate, engine.topology.limits.alone_bytes, elementwise
                step = FlatStep(variables, held, kinds[0], names, *how)
            self.keep(key, step)
        if len(pairs) == len(all_pairs):
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
        and not any(isinstance(gradient, IndexedSlices) or arrays.on_gpu(gradient) for gradient in gradients)
        and not engine.holds_buffer(gradients)
    )


_ARRAYS = {np.ndarray}


class ReplicasStep:
    """The call of ``apply_gradients`` by all replicas of a rank. Each gives its gradients, which are added at once.

    ``update`` gets the reduced gradients with their variables, and updates these. ``number`` returns the step's number.
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

    def give(self, operands: tuple[Pairs, bool]) -> None:
        """Add the gradients of the next replica. With False they are reduced, and equal on all replicas.

        Raise as `Optimizer.apply_gradients`.
        """
        all_pairs, aggregate = operands
        trained = [None if gradient is None else variable for gradient, variable in all_pairs]
        gradients = [gradient for gradient, _ in all_pairs if gradient is not None]
        if self._checks:
            replica, self._next = self._next, self._next + 1
            variables = [variable for variable in trained if variable is not None]
            checked(variables, gradients, replica, self._extended.engine.replicas.size, self._number(), aggregate)
        # Fast path: the variables are checked, and the sums compare dtypes and shapes with the first replica.
        known = self._total is not None and aggregate and len(trained) == len(self._trained)
        if known and all(map(is_, trained, self._trained)) and {*map(type, gradients)} == _ARRAYS:
            assert self._total is not None
            self._total.add(gradients)
            return
        pairs = fitting_pairs(self._extended, all_pairs)
        gradients = [gradient for gradient, _ in pairs]
        names = names_of(all_pairs)
        called = names, aggregate
        if not self._called:
            self._called, self._trained = called, trained
            self._variables = [variable for _, variable in pairs]
            if aggregate:
                engine = self._extended.engine
                self._total = IncrementalAllReduce(engine.ops, ReduceOp.SUM, engine.options, names)
            else:
                # Copies: they are used after the other replicas of the rank have run, which may reuse the memory.
                self._reduced = [*map(snapshot, gradients)]
        elif called != self._called:
            raise ValueError(
                f"a replica gives gradients of {names}, and the first one of its rank of {self._called[0]}: they must "
                "be of the same variables"
            )
        if self._total is not None:
            self._total.add(gradients)

    def make(self) -> list[None]:
        """Reduce the gradients, and update the variables once."""
        with context.entered(self._extended.cross_replica_mode):
            reduced = self._reduced if self._total is None else self._total.result()
            self._update([*zip(reduced, self._variables, strict=True)])
        return [None] * self._extended.engine.replicas.count
