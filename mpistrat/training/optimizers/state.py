"""The variables of an optimizer: its counters, and its slots for each variable, whole or a part on each rank."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays.arrays import as_bytes, as_numpy, numpy_or_cupy
from mpistrat.collectives import structures
from mpistrat.collectives.movement.moves import all_gather_parts, broadcast
from mpistrat.data.write.blocks import Block, boxes_of
from mpistrat.engine import Engine
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.training.optimizers.gradients import BLOCK, Clipping, Pairs, fitting_pairs
from mpistrat.training.optimizers.rule import comparable_text
from mpistrat.values import IndexedSlices, VariableAggregation, VariableSynchronization, component
from mpistrat.variables import CutVariable, DistributedVariable, LocalVariable, Variable, read_together
from mpistrat.variables.local import placed_beside
from mpistrat.variables.mirrored import ranks_of
from mpistrat.variables.on_server import ServerVariable

if TYPE_CHECKING:
    from mpistrat.strategy import ReplicaContext, Strategy, StrategyExtended

Ends = Sequence[int]  # the flat elements at which the parts of the ranks begin, and at which the last one ends


def cut(variables: Sequence[Variable], ranks: int, unit: Callable[[Variable], int]) -> list[Ends]:
    """Return the ends of each variable's parts. A rank's parts are contiguous, and hold ``1 / ranks`` of the bytes.

    A part begins at a multiple of the variable's ``unit`` of elements.
    """
    total, before = sum(_size(variable) * variable.dtype.itemsize for variable in variables), 0
    divided: list[Ends] = []
    for variable in variables:
        size, step, itemsize = _size(variable), max(1, unit(variable)), variable.dtype.itemsize
        # Where the run of each rank begins, counted from this variable; clipped to it below.
        wanted = [(total * rank // ranks - before) // itemsize for rank in range(ranks)]
        divided.append([*(min(max((end + step // 2) // step * step, 0), size) for end in wanted), size])
        before += size * itemsize
    return divided


def unit_of(variable: Variable, elementwise: bool, clipping: Clipping | None) -> int:
    """Return the elements of a variable that one rank must have together.

    All elements if the rule is not elementwise. With a norm, a block of its sum, so that the order of additions stays.
    """
    if not elementwise:
        return _size(variable)
    return 1 if clipping is None or not clipping.by_norm else BLOCK


def refuse_cut(variables: Sequence[Variable], name: str, elementwise: bool, by_parts: bool) -> None:
    """Raise ValueError if a variable is cut, and the optimizer of this name needs more than each element by itself.

    ``elementwise`` says whether its rule does, and ``by_parts`` whether its options do, too.
    """
    for variable in variables:
        if isinstance(variable, CutVariable) and not (elementwise and by_parts):
            raise ValueError(
                f"variable {variable.name!r} is cut over ranks, and {name} needs whole gradients: use an elementwise "
                "optimizer without clipnorm, global_clipnorm, gradient_accumulation_steps and shard_state"
            )
        if isinstance(variable, ServerVariable) and len(variable.shards) > 1 and not elementwise:
            raise ValueError(
                f"variable {variable.name!r} is cut over {len(variable.shards)} parameter servers, and {name} needs "
                "whole gradients: create it without variable_partitioner, or use an elementwise optimizer"
            )


def require_shardable(engine: Engine, variables: Sequence[Variable], gradients: Sequence[Any] = ()) -> None:
    """Raise ValueError if the state of variables cannot be shared out, or a gradient has sparse rows."""
    for variable in variables:
        if not variable.each_replica_writes:
            raise ValueError(
                f"variable {variable.name!r}: shard_state=True needs a copy of each variable on each rank: use "
                "MultiWorkerMirroredStrategy, or shard_state=False"
            )
        if engine.device.kind != "cpu" or not isinstance(variable.own_copy(), np.ndarray):
            raise ValueError(
                f"variable {variable.name!r} is on a GPU, and shard_state=True shares out state on the host: use "
                "shard_state=False, or ZeroRedundancyOptimizer of torch over mpistrat's backend"
            )
    for variable, gradient in zip(variables, gradients, strict=False):
        if isinstance(component(gradient), IndexedSlices):
            raise ValueError(
                f"variable {variable.name!r}: shard_state=True takes no sparse rows (IndexedSlices): train it by "
                "another optimizer, with shard_state=False, or give a dense gradient"
            )


class ShardedVariable(DistributedVariable):
    """A variable of which each rank keeps the flat elements ``ends[rank]`` to ``ends[rank + 1]``.

    `own_copy` is this rank's part, a flat array. A read gathers the whole value, and is collective. A write in
    cross-replica context takes this rank's part of a whole value.
    """

    ends: Ends
    _whole_shape: tuple[int, ...]

    @classmethod
    def of(cls, variable: Variable, name: str, initial: Any, ends: Ends) -> ShardedVariable:
        """Return the state of a variable, with the initial value of rank 0. Collective."""
        whole, sharded = as_numpy(initial), cls.without_value(variable, None, 0)
        # A rule that is not elementwise may keep another number of elements than the variable has.
        sharded.ends = [end * whole.size // max(1, _size(variable)) for end in ends]
        sharded._hold_part(name, whole)
        return sharded

    def _hold_part(self, name: str, initial: np.ndarray) -> None:
        self._name, self._trainable, self._whole_shape = name, False, initial.shape
        engine = self._engine
        if engine.sends_initial_values:
            (initial,) = broadcast(engine.topology, [initial], "of the variable", name)
        # A copy: a view would keep the whole in memory.
        part = placed_beside(self._part_of(initial).copy(), self._trainable)
        self._component = LocalVariable.copy_of(self, part, weakref.ref(self), engine.replicas.first)

    def _part_of(self, value: np.ndarray) -> np.ndarray:
        first, last = self.ends[self._engine.topology.rank :][:2]
        return value.reshape(-1)[first:last]

    def blocks(self) -> list[Block]:
        """Return this rank's part as boxes of the whole value, which are views of it. Not collective."""
        first, last = self.ends[self._engine.topology.rank :][:2]
        blocks, rest = [], self.own_copy()
        for box in boxes_of(first, last, self._whole_shape):
            size = math.prod(box.shape)
            blocks.append(Block(rest[:size].reshape(box.shape), box.offset, self._whole_shape))
            rest = rest[size:]
        return blocks

    def _shape_and_dtype(self) -> tuple[tuple[int, ...], np.dtype]:
        return self._whole_shape, self.own_copy().dtype

    @collective_call(ranks_of)
    def _read(self) -> np.ndarray:
        whole, engine = np.empty(self._whole_shape, self.dtype), self._engine
        self._part_of(whole)[...] = self.own_copy()
        parts = parts_of([as_bytes(whole)], scaled([self.ends], [whole.itemsize]))
        all_gather_parts(engine.topology, parts, self._name, engine.options.timeout_seconds)
        return whole

    def _update_in_replica(self, method: str, value: Any) -> None:
        raise RuntimeError(f"variable {self.name!r} is shared out over the ranks: call {method} outside of run")

    def _update_across_replicas(self, method: str, value: Any) -> None:
        array = as_numpy(component(value))
        if array.shape != self._whole_shape or method.startswith("scatter"):
            raise ValueError(
                f"variable {self.name!r} is shared out over the ranks, with shape {self._whole_shape}: assign an array "
                f"of this shape, instead of {method} with shape {array.shape}"
            )
        self._component.write(method, self._part_of(array))


def parts_of(flat: Sequence[np.ndarray], ends: Sequence[Ends]) -> list[list[np.ndarray]]:
    """Return the parts of flat arrays that belong to each rank, without empty ones."""
    return [
        [array[of[rank] : of[rank + 1]] for array, of in zip(flat, ends, strict=True) if of[rank] < of[rank + 1]]
        for rank in range(len(ends[0]) - 1)
    ]


def scaled(ends: Sequence[Ends], factors: Sequence[int]) -> list[Ends]:
    """Return the ends of parts in bytes. ``factors`` has the itemsize of each array."""
    return [[end * factor for end in array_ends] for array_ends, factor in zip(ends, factors, strict=True)]


def _size(variable: Variable) -> int:
    return math.prod(variable.shape)


Initial = Callable[[str, Variable], np.ndarray]
NameOf = Callable[[Variable], str]


class State:
    """The variables of an optimizer. They are created when a variable is first seen.

    ``name`` is a prefix of their names. ``iterations`` counts the completed steps. ``slots`` has, by the identity of a
    variable, the variable and its slots. ``ends`` has the parts of variables whose slots are shared out.
    ``learning_rate`` is the rate, unless the program's is a function. ``first_rate`` holds its value until it is
    created, and a checkpoint fills it; None for a function.
    """

    def __init__(self, name: str):
        self._name = name
        self.iterations: Any = None  # a Variable, once there is state
        self.learning_rate: Variable | None = None
        self.first_rate: np.ndarray | None = None
        self.slots: dict[int, tuple[Variable, tuple[Variable, ...]]] = {}
        self.ends: dict[int, Ends] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Keys are identities, which a copy of the variables does not have.
        self.slots = {id(variable): (variable, slots) for variable, slots in self.slots.values()}
        self.ends = dict(zip(self.slots, self.ends.values(), strict=False))  # all or none have parts

    @property
    def variables(self) -> list[Variable]:
        """The number of steps and the learning rate, as in Keras, then the slots of each variable."""
        return [variable for variable in (self.iterations, self.learning_rate) if variable is not None] + self.all_slots

    @property
    def all_slots(self) -> list[Variable]:
        """The slots of each variable."""
        return [slot for _, slots in self.slots.values() for slot in slots]

    @property
    def lacks_rate(self) -> bool:
        """Whether the learning rate is a number that no variable holds yet."""
        return self.learning_rate is None and self.first_rate is not None

    def named(self, slots: Sequence[str], name_of: NameOf) -> dict[str, Any]:
        """Return `variables` by slot and by the name of the variable that they belong to.

        Raise ValueError if two trained variables have one name.
        """
        rate = self.first_rate if self.lacks_rate else self.learning_rate
        scalars: dict[str, Any] = {"iterations": self.iterations, "learning_rate": rate}
        named = {name: variable for name, variable in scalars.items() if variable is not None}
        for variable, of_variable in self.slots.values():
            for slot, slot_variable in zip(slots, of_variable, strict=True):
                add_named(named, slot, variable, slot_variable, name_of)
        return named

    def create(
        self,
        variables: list[Variable],
        slots: Sequence[str],
        initial: Initial,
        are_equal: bool,
        options: Mapping[str, Any],
        parts: Callable[[list[Variable]], list[Ends]] | None = None,
    ) -> None:
        """Create the slots of new variables, with the values that ``initial`` returns. Collective for new ones.

        ``are_equal`` says that ``initial`` returns the same on all ranks. Then the values are not sent. The ranks
        compare the numbers and texts in ``options``, and the learning rate. With ``parts``, which cuts variables, the
        slots are sharded.
        """
        new = [*{id(variable): variable for variable in variables if id(variable) not in self.slots}.values()]
        if not new and not self.lacks_rate:
            return
        engine = variables[0].distribute_strategy.extended.engine
        names = tuple(variable.name for variable in new)
        values = "not sent" if are_equal else "sent"
        first = self.first_rate if self.lacks_rate else options["learning_rate"]
        rate = "" if self.learning_rate is not None else f"learning_rate {comparable_text(first)}"
        known = {"name", "learning_rate"}
        kinds = float, int, str, np.generic
        # Options of other types have no text that is equal on all ranks.
        compared = [f"{k}={v}" for k, v in options.items() if v and k not in known and isinstance(v, kinds)]
        facts = self._name, tuple(slots), "for", names, values, rate, *compared
        shared = () if parts is None else ["shared out"]
        structures.agree(engine.topology, "the state of an optimizer", *facts, *shared)
        if parts is not None:
            self.ends |= zip(map(id, new), parts(new), strict=True)
        with engine.equal_initial_values() if are_equal else nullcontext():
            self._create(engine, new, slots, initial)

    def _create(self, engine: Engine, new: list[Variable], slots: Sequence[str], initial: Initial) -> None:
        with engine.variables_on_host():
            if self.iterations is None:
                self.iterations = Variable(np.int64(0), trainable=False, name=f"{self._name}/iterations")
            if self.lacks_rate:
                rate = np.float64(self.first_rate)
                self.learning_rate = Variable(rate, trainable=False, name=f"{self._name}/learning_rate")
        # Slot by slot, so that the values of one slot lie side by side.
        created: dict[tuple[int, str], Variable] = {}
        for slot in slots:
            for variable in new:
                key, name = id(variable), f"{self._name}/{variable.name}/{slot}"
                if key in self.ends:
                    value = initial(slot, variable)
                    created[key, slot] = ShardedVariable.of(variable, name, value, self.ends[key])
                    continue
                with variable.distribute_strategy.extended.colocate_vars_with(variable):
                    value = initial(slot, variable.part)
                    whole = variable.of_part(value) if isinstance(variable, CutVariable) else value
                    created[key, slot] = Variable(whole, trainable=False, name=name)
        for variable in new:
            self.slots[id(variable)] = variable, tuple(created[id(variable), slot] for slot in slots)


def add_named(named: dict[str, Any], slot: str, variable: Variable, state: Variable, name_of: NameOf) -> None:
    """Add what an optimizer keeps in a slot for a variable, under the name that it has in a checkpoint.

    Raise ValueError if there is another variable of this name.
    """
    name = f"{slot}/{name_of(variable)}"
    if name in named:
        raise ValueError(
            f"an optimizer trains two variables of the name {variable.name!r}: give them to the checkpoint too, under "
            "names of their own"
        )
    named[name] = state


class Accumulation:
    """The sums of gradients over calls, for each replica, until a step is made of them.

    The replicas do not communicate before the last call of a step, except where a variable is new. ``name`` is a prefix
    of the names of the variables. Raise ValueError if the number of calls is not a whole number above 1.
    """

    def __init__(self, calls: int, name: str):
        if not isinstance(calls, int) or calls < 2:
            raise ValueError(f"gradient_accumulation_steps must be a whole number above 1, or None, not {calls!r}")
        self.calls, self._name = calls, name
        self._done: Any = None  # a Variable, once there are sums
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
            # Sums of 16-bit numbers would lose the digits of the later calls.
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
        self, replica: ReplicaContext, all_pairs: Pairs, aggregate: bool, create: Callable[[list[Variable]], None]
    ) -> Pairs:
        """Add this replica's gradients to its sums. Return the mean gradients at the last call of a step, else none.

        ``replica`` is the current one. At the last call of a step, each variable of ``all_pairs`` that has a sum gets
        a gradient, and ``aggregate`` says whether to add up the sums of the replicas. ``create`` creates the state of
        variables, in cross-replica context. Raise as `Optimizer.apply_gradients`.
        """
        extended = replica.strategy.extended
        last = self.calls_of_this_step() + 1 >= self.calls
        try:
            pairs = fitting_pairs(extended, all_pairs)
            for _, variable in pairs:
                if not variable.each_replica_writes:
                    raise ValueError(
                        f"variable {variable.name!r}: gradient_accumulation_steps needs a copy of each variable on "
                        "each replica: use MultiWorkerMirroredStrategy"
                    )
        except (TypeError, ValueError, NotImplementedError):
            if replica.meeting is not None or not (last and aggregate):
                raise
            # The other ranks may be in the all-reduce of the last call: they raise instead of waiting.
            with structures.refusals("all_reduce", extended.engine.topology):
                raise
        variables = [variable for _, variable in pairs]
        if not all(id(variable) in self._sums for variable in variables):
            replica.merge_call(lambda strategy: create(variables))
            last = self.calls_of_this_step() + 1 >= self.calls  # a restored checkpoint may have had calls
        for gradient, variable in pairs:
            total = self._sums[id(variable)][1]
            (total.scatter_add if isinstance(gradient, IndexedSlices) else total.assign_add)(gradient)
        if not last:
            replica.merge_call(self._count)
            return []
        held = list({id(variable): variable for _, variable in all_pairs if id(variable) in self._sums}.values())
        return list(zip(replica.merge_call(self._means, (held, aggregate)), held, strict=True))

    def calls_of_this_step(self) -> int:
        """Return the number of calls since the last step."""
        return 0 if self._done is None else self._done.own_copy().item()

    def _count(self, strategy: Strategy) -> None:
        """Count a call that is not the last of its step, in cross-replica context."""
        strategy.extended.update(self._done, LocalVariable.assign_add, (1,), group=False)

    def _means(self, strategy: Strategy, variables: Sequence[Variable], aggregate: bool) -> list[Any]:
        """Return the mean over the calls, summed over the replicas if asked to. Cross-replica context; collective."""
        totals = [self._sums[id(variable)][1] for variable in variables]
        sums = read_together(totals) if aggregate else [total.own_copy() for total in totals]
        return [numpy_or_cupy(total / self.calls) for total in sums]

    def clear(self, extended: StrategyExtended) -> None:
        """Begin another step: set the number of calls and each replica's sums to zero."""
        extended.update(self._done, LocalVariable.assign, (0,), group=False)
        for _, total in self._sums.values():
            for sums in total.own_copies():
                sums[...] = 0
