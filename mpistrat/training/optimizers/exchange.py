"""The exchange of an optimizer between groups: gradients in each step, or weights after several steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays.arrays import as_bytes, fill, to_host
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.values import IndexedSlices, ReduceOp
from mpistrat.variables import LocalVariable, Variable
from mpistrat.verify import digest

if TYPE_CHECKING:
    from mpistrat.collectives.between_groups import BetweenGroups
    from mpistrat.collectives.compression import Memory
    from mpistrat.engine import Engine
    from mpistrat.training.optimizers.steps import Step

_ANCHOR = "anchor"  # the weights after the last exchange, equal in all groups


class GroupExchange:
    """The exchanges of one optimizer's variables, and this rank's state for the variables that it owns.

    It keeps the errors of compression, and the state of the outer optimizer. Each rank has arrays of its own. A
    `Checkpoint` of the optimizer has them; else ``save(weights, path, own=optimizer.exchange.state())``. ``groups`` are
    the groups of the engine. ``inner`` returns the variables of the optimizer that differ between groups if these
    exchange weights: they are a part of the state then.
    """

    def __init__(self, groups: BetweenGroups, inner: Callable[[], Sequence[Variable]]):
        self._groups, self._inner = groups, inner
        self.of_gradients = groups.sync_every == 1  # in each step; else weights after several
        self._variables: dict[int, Variable] = {}
        self._owners: dict[int, int] = {}
        self._kept: dict[int, Memory] = {}
        self._assignments: dict[int, int] = {}  # how many `before_step` has noted of each variable
        self._latest: dict[int, np.ndarray] = {}  # values that were assigned since the last exchange
        self._is_due = False  # whether there were steps since the last exchange

    def create(self, variables: Sequence[Variable]) -> None:
        """Create the state of new variables."""
        new = [*{id(variable): variable for variable in variables if id(variable) not in self._variables}.values()]
        values = [_wide(variable.own_copy()) for variable in new]
        owners = self._groups.owners([value.nbytes for value in values])
        outer, compression = self._groups.outer, self._groups.compression
        for variable, value, owner in zip(new, values, owners, strict=True):
            self._variables[id(variable)] = variable
            self._owners[id(variable)] = owner
            if owner != self._groups.group.rank:
                continue
            self._kept[id(variable)] = memory = {} if compression is None else compression.memory(value)
            if not self.of_gradients and (outer or compression):
                memory[_ANCHOR] = value.copy()
                memory |= {slot: np.array(outer.initial_state(slot, value)) for slot in outer.slots} if outer else {}

    def before_step(self) -> set[int]:
        """Note the values of the variables that were assigned or loaded since the last step. Return these variables."""
        new = {key: v.assignments for key, v in self._variables.items() if self._assignments.get(key) != v.assignments}
        for key in new.keys() & self._kept.keys():
            value = np.array(_wide(self._variables[key].own_copy()))
            if key in self._assignments:
                self._latest[key] = value
            elif _ANCHOR in self._kept[key]:  # it was created, equal in all groups
                self._kept[key][_ANCHOR][...] = value
        self._assignments |= new
        return {*new}

    def gradients(
        self, step: Step, gradients: list[Any], summing: Engine | None, number: int, rate: float
    ) -> list[np.ndarray]:
        """Return the mean over the groups, weighted by their ranks, of the gradients of step ``number``. Collective.

        Raise MismatchError if groups differ in its learning rate, since their variables would differ from then on.
        The engine ``summing`` sums them over this group first; None if that is done. Sparse ones become whole arrays.
        """
        if summing is not None:
            gradients = summing.all_reduce(ReduceOp.SUM, gradients, None, step.form)
        variables = step.variables
        owners = [self._owners[id(variable)] for variable in variables]
        dense = [
            IndexedSlices(g.values, g.indices, v.shape).to_dense() if isinstance(g, IndexedSlices) else g
            for g, v in zip(gradients, variables, strict=True)
        ]
        means = self._owned(dense, owners)
        with self._groups.refusal():
            self._require_same(number, variables, [f"learning_rate {rate}"])
            self._combine(means, variables)
        self._groups.share(means, owners)
        return means

    def after_step(self, done: int) -> None:
        """Exchange the weights if it is time after ``done`` steps. Collective then, in cross-replica context."""
        self._is_due = not self.of_gradients
        if self._is_due and done % self._groups.sync_every == 0:
            self._exchange_weights(done)

    def finish(self, done: int) -> None:
        """Exchange the weights if there were steps since the last time. Compare numbers of steps. Collective."""
        settled = self.before_step()
        if self._is_due:
            self._exchange_weights(done, settled)
        else:
            with self._groups.refusal():
                self._require_same(done, [*self._variables.values()])
            self._groups.share([], [])

    def _exchange_weights(self, done: int, settled: Set[int] = frozenset()) -> None:
        """Make the weights of all groups equal: their mean, or what the outer optimizer makes of it.

        ``settled`` are variables that were assigned after the last step. If all groups assigned the same, there is no
        change to combine.
        """
        self._is_due = False
        number = (done - 1) // self._groups.sync_every  # of exchanges before
        variables, owners, outer = [*self._variables.values()], [*self._owners.values()], self._groups.outer
        values = self._owned([variable.own_copy() for variable in variables], owners)
        own = [(i, key, self._kept[key]) for i, key in enumerate(self._variables) if _ANCHOR in self._kept.get(key, ())]
        with self._groups.refusal():
            rate = 1.0 if outer is None else outer.rate_after(number)
            same, _ = self._compare(done, variables, settled)
            settled = same & settled
            for i, key, memory in own:
                if key in same:  # else what a group assigned is a part of its change
                    memory[_ANCHOR][...] = self._latest[key]
                values[i] = np.asarray(memory[_ANCHOR] - values[i])
            self._combine(values, variables, settled)
            for i, key, memory in own:
                if outer is None:
                    memory[_ANCHOR] -= values[i]  # 0 if it is settled
                elif key not in settled:
                    outer.update(memory[_ANCHOR], values[i], number + 1, rate, *(memory[slot] for slot in outer.slots))
                values[i] = memory[_ANCHOR]
        self._groups.share(values, owners)
        self._latest.clear()
        for variable, value in zip(variables, values, strict=True):
            extended = variable.distribute_strategy.extended
            extended.update(variable, LocalVariable.assign, (value.astype(variable.dtype, copy=False),), group=False)

    def _owned(self, values: list[Any], owners: Sequence[int]) -> list[np.ndarray]:
        """Return the values that this rank owns, as they are, and memory for the others, which come from theirs."""
        wide, rank = map(_wide, values), self._groups.group.rank
        return [array if owner == rank else np.empty_like(array) for array, owner in zip(wide, owners, strict=True)]

    def _compare(
        self, number: int, variables: Sequence[Variable], settled: Set[int] = frozenset(), more: Sequence[str] = ()
    ) -> tuple[set[int], list[str]]:
        """Raise MismatchError unless groups have the same step, variables and ``more``. Collective over the rail.

        Return the variables to which all groups have assigned the same value, and the names of the others.
        """
        assigned = [
            f"{digest(as_bytes(self._latest[id(v)]).data)} {id(v) in settled}" if id(v) in self._latest else ""
            for v in variables
        ]
        names = [f"variable {variable.name!r} {[*variable.shape]}" for variable in variables]
        answers = [*zip(variables, self._groups.compare(number, [*names, *more], assigned), strict=False)]
        # Empty on a rank without a rail, which owns no variables.
        same = {id(v) for v, notes in answers if len(notes) == 1 and "" not in notes}
        return same, [v.name for v, notes in answers if len(notes) > 1]

    def _require_same(self, number: int, variables: Sequence[Variable], more: Sequence[str] = ()) -> None:
        """Raise MismatchError also if groups have assigned different values, which no exchange will make equal."""
        _, different = self._compare(number, variables, more=more)
        for variable in variables:
            self._latest.pop(id(variable), None)
        if different:
            raise MismatchError(f"groups have assigned different values to {different}: assign the same in all of them")

    def _combine(
        self, values: list[np.ndarray], variables: Sequence[Variable], settled: Set[int] = frozenset()
    ) -> None:
        """Replace the arrays that this rank owns by their weighted sums over the groups. Collective over its rail."""
        keys = self._kept.keys() - settled
        memories = {i: self._kept[id(variable)] for i, variable in enumerate(variables) if id(variable) in keys}
        # Of a variable that has two gradients, the first is sent whole: there is one error.
        thin = [*{id(variables[i]): i for i in memories if "error" in memories[i]}.values()]
        rest = [i for i in memories if i not in thin]
        sums = self._groups.sums([np.asarray(values[i] * self._groups.weight) for i in rest])
        if self._groups.compression is not None:
            same = [values[i].astype(memories[i]["error"].dtype, copy=False) for i in thin]
            sums += self._groups.compression.sums(same, [memories[i] for i in thin], self._groups)
        for i, total in zip(rest + thin, sums, strict=True):
            values[i] = np.asarray(total, values[i].dtype, order="C")

    def state(self) -> dict[str, np.ndarray]:
        """Return this rank's state: a flat array of each kind, with a length of its own on each rank."""
        return {
            kind: np.concatenate([to_host(array).reshape(-1) for array in arrays] or [np.empty(0, np.float32)])
            for kind, arrays in self.by_kind().items()
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Take what `state` returned, for the same variables and groups.

        Raise ValueError if it is of other kinds or lengths.
        """
        by_kind = self.by_kind()
        now = {kind: (sum(array.size for array in arrays),) for kind, arrays in by_kind.items()}
        shapes = {kind: np.shape(flat) for kind, flat in state.items()}
        if shapes != now:
            raise ValueError(
                f"a state of the shapes {shapes} is not that of these variables and groups, {now}: give what "
                "optimizer.exchange.state() returned on this rank"
            )
        # Notes the assignments of loading, which are no change to exchange.
        self.before_step()
        self._latest, self._is_due = {}, False
        for kind, flat in state.items():
            at = 0
            for array in by_kind[kind]:
                fill(array, flat[at : at + array.size].reshape(array.shape))
                at += array.size

    def by_kind(self) -> dict[str, list[Any]]:
        """Return the arrays that this rank keeps, by their kinds, which are the same on all ranks."""
        outer, compression = self._groups.outer, self._groups.compression
        kinds = [] if compression is None else [*compression.kinds]
        if not self.of_gradients and (outer or compression):
            kinds += [_ANCHOR, *(outer.slots if outer else ())]
        by_kind = {kind: [memory[kind] for memory in self._kept.values() if kind in memory] for kind in kinds}
        for variable in () if self.of_gradients else self._inner():
            by_kind.setdefault(f"inner/{variable.dtype}", []).append(variable.own_copy())
        return by_kind


def _wide(value: Any) -> np.ndarray:
    """Return an array as a contiguous one on the host, of at least 32 bits: sums of halves lose digits."""
    value = np.asarray(to_host(value), order="C")
    return value.astype(np.float32) if value.itemsize < 4 else value
