"""The step of an optimizer over flat arrays, prepared once for the same variables and kinds of gradients."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat.training.optimizers.rule import Rule, for_update
from mpistrat.values import ReduceOp
from mpistrat.variables import Variable
from mpistrat.variables.storage import follows, joined

if TYPE_CHECKING:
    from mpistrat.collectives.reduction import Reduction
    from mpistrat.engine import Engine
    from mpistrat.strategy import StrategyExtended

_SHOWN = 4
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class Stretch(NamedTuple):
    """Variables that are updated by one call.

    Attributes
    ----------
    where : slice or None
        Their gradients in the message; None for all of it.
    weights : numpy.ndarray
        Their values, a flat array on the memory of the variables.
    state : list of numpy.ndarray
        The same for each of the optimizer's slots.
    """

    where: slice | None
    weights: np.ndarray
    state: list[np.ndarray]


class Message(NamedTuple):
    """Gradients of one dtype that are reduced as one array.

    Attributes
    ----------
    members : list of int
        The indices of the gradients.
    buffer : numpy.ndarray or None
        Where the gradients are joined. None if a large gradient is sent as it is.
    stretches : list of Stretch
    """

    members: list[int]
    buffer: np.ndarray | None
    stretches: list[Stretch]


class FlatStep:
    """The step of an elementwise optimizer for these variables and gradients of these dtypes.

    The ranks must give equal arguments, except for the arrays in the variables.

    Parameters
    ----------
    variables : sequence of Variable
        Each once, with its value on the host. The object keeps them alive.
    slots : sequence of tuple of Variable
        The optimizer's state of each variable.
    dtypes : sequence of numpy.dtype
        Those of the gradients.
    names : tuple
        What the ranks compare besides dtypes and shapes.
    completed : Variable
        The number of completed steps.
    least_alone : int
        From this number of bytes on a gradient is not joined with others.

    Attributes
    ----------
    variables : list of Variable
    dtypes, shapes : list
        Those of the gradients.
    form : str
        What the ranks compare: a string, since the hash of many names and shapes would take as long as a message.
    completed : numpy.ndarray
        The number of completed steps, in the memory of its variable.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        slots: Sequence[Sequence[Variable]],
        dtypes: Sequence[np.dtype],
        names: tuple[Hashable, ...],
        completed: Variable,
        least_alone: int,
    ):
        self.variables = list(variables)
        self.completed = completed.own_copy()
        self._values = [variable.own_copy() for variable in variables]
        self._state = [[slot.own_copy() for slot in each] for each in slots]
        self.dtypes = list(dtypes)
        self.shapes = [value.shape for value in self._values]
        self.form = _in_words([*names, *zip(map(str, self.dtypes), self.shapes, strict=True)])
        groups: dict[Hashable, list[int]] = {}
        for i, (value, dtype) in enumerate(zip(self._values, dtypes, strict=True)):
            alone = value.size * dtype.itemsize >= least_alone
            groups.setdefault((value.dtype, dtype, i if alone else None), []).append(i)
        self._messages = [self._message(members, least_alone) for members in groups.values()]
        self._reduction: Reduction | None = None  # of all gradients into the buffer of the only message
        self._prepared = False

    def _message(self, members: list[int], least_alone: int) -> Message:
        size, dtype = sum(self._values[i].size for i in members), self.dtypes[members[0]]
        alone = len(members) == 1 and size * dtype.itemsize >= least_alone
        return Message(members, None if alone else np.empty(size, dtype), self._stretches(members))

    def _stretches(self, members: list[int]) -> list[Stretch]:
        runs: list[list[int]] = []
        before: list[np.ndarray] = []
        for i in members:
            arrays = [self._values[i], *self._state[i]]
            if not arrays[0].size:
                continue
            if before and all(map(follows, before, arrays)):
                runs[-1].append(i)
            else:
                runs.append([i])
            before = arrays
        stretches, start = [], 0
        for run in runs:
            weights, *state = map(
                joined, zip(*([self._values[i], *self._state[i]] for i in run), strict=True)
            )
            end = start + weights.size
            where = None if len(runs) == 1 else slice(start, end)
            stretches.append(Stretch(where, weights, state))
            start = end
        return stretches

    def fits(self, gradients: Sequence[np.ndarray]) -> bool:
        """Return whether the step was prepared for gradients of these dtypes and shapes."""
        return [*map(_dtype, gradients)] == self.dtypes and [*map(_shape, gradients)] == self.shapes

    def summed(self, gradients: Sequence[np.ndarray], engine: Engine) -> Sequence[np.ndarray]:
        """Return the gradients summed over the replicas, joined as by `join`. Collective."""
        if not self._prepared:
            self._prepare(engine)
        if self._reduction is None:
            return engine.all_reduce(ReduceOp.SUM, self.join(gradients), None, self.form)
        return self._reduction.run(gradients, engine.options.timeout_seconds)

    def _prepare(self, engine: Engine) -> None:
        """Prepare the reduction into the buffer: a result of its own would be copied from there and back."""
        if (
            len(self._messages) == 1
            and self._messages[0].buffer is not None
            and self._messages[0].buffer.size
        ):
            key = tuple(zip(self.dtypes, self.shapes, strict=True))
            buffer = self._messages[0].buffer
            self._reduction = engine.joined_all_reduce(ReduceOp.SUM, key, buffer, self.form)
        self._prepared = True

    def join(self, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays to reduce."""
        messages = []
        for members, buffer, _ in self._messages:
            if buffer is None:
                messages.append(gradients[members[0]])
                continue
            mine = gradients if len(members) == len(gradients) else [gradients[i] for i in members]
            messages.append(np.concatenate(mine, None, buffer))
        return messages

    def split(self, messages: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the gradients that are in reduced messages, as views where possible."""
        found: dict[int, np.ndarray] = {}
        for (members, _, _), total in zip(self._messages, messages, strict=True):
            flat, start = total.reshape(-1), 0
            for i in members:
                end = start + self._values[i].size
                found[i], start = flat[start:end].reshape(self.shapes[i]), end
        return [found[i] for i in range(len(found))]

    def update(self, rule: Rule, messages: Sequence[np.ndarray], step: int, rate: float) -> None:
        """Update the variables with the reduced messages, which may change."""
        for (_, buffer, stretches), total in zip(self._messages, messages, strict=True):
            update = rule.update if buffer is None else rule.update_consuming
            gradient = total if total.ndim == 1 else np.ascontiguousarray(total).reshape(-1)
            for where, weights, state in stretches:
                mine = gradient if where is None else gradient[where]
                if mine.dtype is not weights.dtype:
                    mine = for_update(mine, weights.dtype)
                update(weights, mine, step, rate, *state)


class FlatSteps(dict[Hashable, FlatStep]):
    """Steps by their strategies and variables. A copy of an optimizer prepares its own.

    Attributes
    ----------
    last : FlatStep or None
        The last step of variables that all had gradients.
    owner : StrategyExtended or None
        That of the last step.
    """

    __slots__ = ("last", "owner")

    def __init__(self) -> None:
        super().__init__()
        self.last: FlatStep | None = None
        self.owner: StrategyExtended | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatSteps:
        return FlatSteps()


def _in_words(parts: Sequence[Hashable]) -> str:
    """Return a text that differs where the parts differ, and shows the first ones."""
    shown = ", ".join(map(str, parts[:_SHOWN]))
    more = ", ..." if len(parts) > _SHOWN else ""
    return f"{shown}{more} ({len(parts)} in all, checksum {zlib.crc32(repr(parts).encode()):08x})"
