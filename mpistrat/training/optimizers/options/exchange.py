"""What an optimizer exchanges between groups: gradients in each step, or weights every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.training.optimizers.rule import rate_of
from mpistrat.values import IndexedSlices, ReduceOp
from mpistrat.variables import LocalVariable, Variable

if TYPE_CHECKING:
    from mpistrat.collectives.between_groups import BetweenGroups
    from mpistrat.collectives.compression import Memory
    from mpistrat.engine import Engine
    from mpistrat.training.optimizers.prepared_steps import Step

_ANCHOR = "anchor"  # the weights after the last exchange, equal in all groups


class GroupExchange:
    """The exchanges of the variables of one optimizer, and what this rank keeps for those that it owns.

    It keeps the errors of compression, and the state of the outer optimizer. Each rank has arrays of its own. A
    `Checkpoint` of the optimizer has them; else ``save(weights, path, own=optimizer.exchange.state())``. ``groups`` are
    those of the engine. ``inner`` returns the variables of the optimizer that differ between groups if these exchange
    weights: they are a part of the state then.
    """

    def __init__(self, groups: BetweenGroups, inner: Callable[[], Sequence[Variable]]):
        self._groups, self._inner = groups, inner
        self.of_gradients = groups.sync_every == 1  # in each step; else weights after several
        self._variables: dict[int, Variable] = {}
        self._owners: dict[int, int] = {}
        self._kept: dict[int, Memory] = {}
        self._assigned: dict[int, int] = {}  # how often each was, when its weights were an anchor last
        self._moved: set[int] = set()  # variables that were assigned since the last exchange
        self._is_due = False  # whether there were steps since the last exchange

    def create(self, variables: Sequence[Variable]) -> None:
        """Create what is kept of new variables."""
        new = [*{id(each): each for each in variables if id(each) not in self._variables}.values()]
        values = [_wide(each.own_copy()) for each in new]
        owners = self._groups.owners([each.nbytes for each in values])
        outer, compression = self._groups.outer, self._groups.compression
        for variable, value, owner in zip(new, values, owners, strict=True):
            self._variables[id(variable)] = variable
            self._owners[id(variable)] = owner
            if owner != self._groups.group.rank:
                continue
            self._kept[id(variable)] = kept = {} if compression is None else compression.memory(value)
            if not self.of_gradients and (outer or compression):
                kept[_ANCHOR] = value.copy()
                kept.update({slot: np.array(outer.initial_state(slot, value)) for slot in outer.slots} if outer else {})

    def before_step(self) -> None:
        """Let changes count from what variables were assigned since the last step, loaded or created with."""
        new = {key: v.assignments for key, v in self._variables.items() if self._assigned.get(key) != v.assignments}
        self._is_due &= len(new) < len(self._variables)
        self._moved |= new.keys() & self._assigned.keys()  # without new variables, which are equal in all groups
        self._assigned |= new
        for key in new:
            if _ANCHOR in self._kept.get(key, ()):
                self._kept[key][_ANCHOR][...] = _wide(self._variables[key].own_copy())

    def gradients(self, step: Step, gradients: list[Any], summing: Engine | None, number: int) -> list[np.ndarray]:
        """Return the mean over the groups, weighted by their ranks, of the gradients of step ``number``. Collective.

        The engine ``summing`` sums them over this group first; None if that is done. Sparse ones become whole arrays.
        """
        if summing is not None:
            gradients = summing.all_reduce(ReduceOp.SUM, gradients, None, step.form)
        variables = step.variables
        owners = [self._owners[id(each)] for each in variables]
        dense = [
            IndexedSlices(each.values, each.indices, v.shape).to_dense() if isinstance(each, IndexedSlices) else each
            for each, v in zip(gradients, variables, strict=True)
        ]
        means = self._owned(dense, owners)
        with self._groups.refusal():
            self._meet(number, variables)
            self._combine(means, variables)
        self._groups.share(means, owners)
        return means

    def after_step(self, done: int) -> None:
        """Exchange the weights if it is time after so many steps. Collective then, in cross-replica context."""
        self._is_due = not self.of_gradients
        if self._is_due and done % self._groups.sync_every == 0:
            self._exchange_weights(done)

    def finish(self, done: int) -> None:
        """Exchange the weights if there were steps since the last time. Compare numbers of steps. Collective."""
        self.before_step()
        if self._is_due:
            self._exchange_weights(done)
        else:
            with self._groups.refusal():
                self._meet(done, [*self._variables.values()])
            self._groups.share([], [])

    def _exchange_weights(self, done: int) -> None:
        """Make the weights of all groups equal: their mean, or what the outer optimizer makes of it."""
        self._is_due = False
        number = (done - 1) // self._groups.sync_every  # of exchanges before
        variables, owners, outer = [*self._variables.values()], [*self._owners.values()], self._groups.outer
        values = self._owned([each.own_copy() for each in variables], owners)
        own = [(i, key, self._kept[key]) for i, key in enumerate(self._variables) if _ANCHOR in self._kept.get(key, ())]
        with self._groups.refusal():
            rate = 1.0 if outer is None else rate_of(outer.learning_rate, number)
            self._meet(done, variables)
            for i, key, kept in own:
                if key in self._moved:  # to values that may differ between groups
                    kept[_ANCHOR][...] = self._groups.concatenated(kept[_ANCHOR][None])[0]
                values[i] = np.asarray(kept[_ANCHOR] - values[i])
            self._combine(values, variables)
            for i, _, kept in own:
                if outer is None:
                    kept[_ANCHOR] -= values[i]
                else:
                    outer.update(kept[_ANCHOR], values[i], number + 1, rate, *(kept[slot] for slot in outer.slots))
                values[i] = kept[_ANCHOR]
        self._groups.share(values, owners)
        self._moved.clear()
        for variable, value in zip(variables, values, strict=True):
            extended = variable.distribute_strategy.extended
            extended.update(variable, LocalVariable.assign, (value.astype(variable.dtype, copy=False),), group=False)

    def _owned(self, values: list[Any], owners: Sequence[int]) -> list[np.ndarray]:
        """Return the values that this rank owns, as they are, and memory for the others, which come from theirs."""
        wide, own = map(_wide, values), self._groups.group.rank
        return [each if owner == own else np.empty_like(each) for each, owner in zip(wide, owners, strict=True)]

    def _meet(self, number: int, variables: Sequence[Variable]) -> None:
        """Raise MismatchError if groups are not at the same step with the same variables. Collective over the rail."""
        names = [f"{v.name}{[*v.shape]}{' (assigned)' * (id(v) in self._moved)}" for v in variables]
        self._groups.compare(f"step {number} of {', '.join(names)}")

    def _combine(self, values: list[np.ndarray], variables: Sequence[Variable]) -> None:
        """Replace the arrays that this rank owns by their weighted sums over the groups. Collective over its rail."""
        kept = {i: self._kept[id(each)] for i, each in enumerate(variables) if id(each) in self._kept}
        # Of a variable that has two gradients, the first is sent whole: there is one error.
        thin = [*{id(variables[i]): i for i in kept if "error" in kept[i]}.values()]
        rest = [i for i in kept if i not in thin]
        sums = self._groups.sums([np.asarray(values[i] * self._groups.weight) for i in rest])
        if self._groups.compression is not None:
            same = [values[i].astype(kept[i]["error"].dtype, copy=False) for i in thin]
            sums += self._groups.compression.sums(same, [kept[i] for i in thin], self._groups)
        for i, total in zip(rest + thin, sums, strict=True):
            values[i] = np.asarray(total, values[i].dtype, order="C")

    def state(self) -> dict[str, np.ndarray]:
        """Return what this rank keeps, joined by its kinds into flat arrays of this rank's own lengths."""
        return {
            kind: np.concatenate([arrays.to_host(each).reshape(-1) for each in kept] or [np.empty(0, np.float32)])
            for kind, kept in self.by_kind().items()
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Take what `state` returned, for the same variables and groups.

        Raise ValueError if it is of other kinds or lengths.
        """
        by_kind = self.by_kind()
        now = {kind: (sum(each.size for each in kept),) for kind, kept in by_kind.items()}
        given = {kind: np.shape(flat) for kind, flat in state.items()}
        if given != now:
            raise ValueError(
                f"a state of the shapes {given} is not that of these variables and groups, {now}: give what "
                "optimizer.exchange.state() returned on this rank"
            )
        self.before_step()
        self._moved, self._is_due = set(), False
        for kind, flat in state.items():
            at = 0
            for each in by_kind[kind]:
                arrays.fill(each, flat[at : at + each.size].reshape(each.shape))
                at += each.size

    def by_kind(self) -> dict[str, list[Any]]:
        """Return the arrays that this rank keeps, by their kinds, which are the same on all ranks."""
        outer, compression = self._groups.outer, self._groups.compression
        kinds = [] if compression is None else [*compression.kinds]
        if not self.of_gradients and (outer or compression):
            kinds += [_ANCHOR, *(outer.slots if outer else ())]
        found = {kind: [kept[kind] for kept in self._kept.values() if kind in kept] for kind in kinds}
        for each in () if self.of_gradients else self._inner():
            found.setdefault(f"inner/{each.dtype}", []).append(each.own_copy())
        return found


def _wide(value: Any) -> np.ndarray:
    """Return an array as a contiguous one on the host, of at least 32 bits: sums of halves lose digits."""
    value = np.asarray(arrays.to_host(value), order="C")
    return value.astype(np.float32) if value.itemsize < 4 else value
