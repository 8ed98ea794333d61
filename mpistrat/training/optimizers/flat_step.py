"""The step of an optimizer over flat arrays, prepared once for the same variables and kinds of gradients."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from mpistrat.training.optimizers.rule import Rule, for_update
from mpistrat.variables import Variable
from mpistrat.variables.storage import follows, joined

_SHOWN = 4
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class Stretch(NamedTuple):
    """Variables that are updated by one call.

    Attributes
    ----------
    where : slice
        Their gradients in the message.
    weights : numpy.ndarray
        Their values, a flat array on the memory of the variables.
    state : list of numpy.ndarray
        The same for each of the optimizer's slots.
    """

    where: slice
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
        self._variables = list(variables)
        self.completed = completed.own_copy()
        self._values = [variable.own_copy() for variable in variables]
        self._state = [[slot.own_copy() for slot in each] for each in slots]
        self._dtypes = list(dtypes)
        self._shapes = [value.shape for value in self._values]
        self.form = _in_words([*names, *zip(map(str, self._dtypes), self._shapes, strict=True)])
        groups: dict[Hashable, list[int]] = {}
        for i, (value, dtype) in enumerate(zip(self._values, dtypes, strict=True)):
            alone = value.size * dtype.itemsize >= least_alone
            groups.setdefault((value.dtype, dtype, i if alone else None), []).append(i)
        self._messages = [self._message(members, least_alone) for members in groups.values()]

    def _message(self, members: list[int], least_alone: int) -> Message:
        size, dtype = sum(self._values[i].size for i in members), self._dtypes[members[0]]
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
            where = slice(start, start + weights.size)
            start = where.stop
            stretches.append(Stretch(where, weights, state))
        return stretches

    def fits(self, gradients: Sequence[np.ndarray]) -> bool:
        """Return whether the step was prepared for gradients of these dtypes and shapes."""
        return [*map(_dtype, gradients)] == self._dtypes and [*map(_shape, gradients)] == self._shapes

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
                found[i], start = flat[start:end].reshape(self._shapes[i]), end
        return [found[i] for i in range(len(found))]

    def update(self, rule: Rule, messages: Sequence[np.ndarray], step: int, rate: float) -> None:
        """Update the variables with the reduced messages."""
        for (_, _, stretches), total in zip(self._messages, messages, strict=True):
            gradient = total if total.ndim == 1 else np.ascontiguousarray(total).reshape(-1)
            for where, weights, state in stretches:
                mine = gradient[where]
                if mine.dtype is not weights.dtype:
                    mine = for_update(mine, weights.dtype)
                rule.update(weights, mine, step, rate, *state)


def _in_words(parts: Sequence[Hashable]) -> str:
    """Return a text that differs where the parts differ, and shows the first ones."""
    shown = ", ".join(map(str, parts[:_SHOWN]))
    more = ", ..." if len(parts) > _SHOWN else ""
    return f"{shown}{more} ({len(parts)} in all, checksum {zlib.crc32(repr(parts).encode()):08x})"
