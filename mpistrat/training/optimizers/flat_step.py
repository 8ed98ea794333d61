"""The step of an optimizer over flat arrays, prepared once for the same variables and kinds of gradients."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import numpy as np

from mpistrat.collectives.reduction import Reduction
from mpistrat.engine import Engine
from mpistrat.runtime.agreement import threads
from mpistrat.runtime.agreement.operation import Checksum
from mpistrat.training.optimizers.gradients import apart, places
from mpistrat.training.optimizers.options.clipping import Clipping
from mpistrat.training.optimizers.rule import Rule, blocks, for_update
from mpistrat.values import ReduceOp
from mpistrat.variables import Variable
from mpistrat.variables.storage import follows, joined

_SHOWN = 4
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class WeightStretch(NamedTuple):
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


class FlatStep:
    """The step of an elementwise optimizer for these variables and gradients of these dtypes.

    The ranks must give equal arguments, except for the arrays in the variables. Each variable is given once, with its
    value on the host. The object keeps them alive. ``held`` has the memory of each, or of a part of it, and of the
    optimizer's state of it, and ``names`` what the
    ranks compare besides dtypes and shapes. ``completed`` counts the steps. From ``least_alone`` bytes on a gradient is
    not joined with others.

    The attribute ``form`` is what the ranks compare, see `form_of`, and ``completed`` the memory of the variable.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        held: Sequence[Sequence[np.ndarray]],
        dtypes: Sequence[np.dtype],
        names: tuple[Hashable, ...],
        completed: Variable,
        least_alone: int,
    ):
        self.variables = list(variables)
        self.completed = completed.own_copy()
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
        self._stretches = [
            each for number, message in enumerate(self._messages) for each in self._of_message(number, message)
        ]
        self._reduction: Reduction | None = None  # of all gradients into the buffer of the only message
        self._prepared = self._is_alone = False
        self._places: np.ndarray | None = None  # of what the step changes

    def _of_message(self, number: int, message: JoinedGradients) -> list[WeightStretch]:
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
        stretches: list[WeightStretch] = []
        start = 0
        for run in runs:
            flat = [*map(joined, zip(*([self._values[i], *self._state[i]] for i in run), strict=True))]
            for weights, *state in blocks(*flat) if is_joined else [flat]:
                end = start + weights.size
                stretches.append(WeightStretch(number, is_joined, slice(start, end), weights, state))
                start = end
        return stretches if len(stretches) > 1 else [each._replace(where=None) for each in stretches]

    def fits(self, gradients: Sequence[np.ndarray]) -> bool:
        """Return whether the step was prepared for gradients of these dtypes and shapes."""
        return [*map(_dtype, gradients)] == self.dtypes and [*map(_shape, gradients)] == self.shapes

    def take(
        self,
        rule: Rule,
        gradients: Sequence[np.ndarray],
        rate: float | Callable[[int], float],
        engine: Engine | None,
        clipping: Clipping | None,
    ) -> None:
        """Update the variables together, and count the step.

        One function, which enters few others: each costs 3 us if its code has left the caches.

        The gradients have the dtypes and shapes that the step was prepared for. They are summed over the replicas of
        ``engine`` first, or used as they are without one. A learning rate that is a function of the program may fail,
        so it is called before the first collective.
        """
        number = self.completed.item()
        rate = float(rate(number) if callable(rate) else rate)
        messages: Sequence[np.ndarray]
        if engine is not None and not self._prepared:
            self._prepare(engine)
        if engine is None:
            messages = self._kept_apart(self._join(gradients))
        elif self._is_alone:  # without a reduction, whose lock and record take 6 us, cold
            if threads.without:
                threads.refuse("apply_gradients")
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
        for message, is_joined, where, weights, state in self._stretches:
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
