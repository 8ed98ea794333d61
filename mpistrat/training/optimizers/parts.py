"""Variables that are shared out: each rank keeps a part of the elements."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives.movement.broadcast import broadcast
from mpistrat.collectives.movement.gather import all_gather_parts
from mpistrat.data.write.boxes import Block, boxes_of
from mpistrat.engine import Engine
from mpistrat.runtime.agreement.whole_call import whole
from mpistrat.training.optimizers.options.clipping import BLOCK, Clipping
from mpistrat.values import IndexedSlices, component
from mpistrat.variables import CutVariable, DistributedVariable, LocalVariable, Variable
from mpistrat.variables.distributed import ranks_of
from mpistrat.variables.storage import placed_beside

Ends = Sequence[int]  # the flat elements at which the parts of the ranks begin, and at which the last one ends


def cut(variables: Sequence[Variable], ranks: int, unit: Callable[[Variable], int]) -> list[Ends]:
    """Return the parts of each variable. Together a rank's parts are one run, with ``1 / ranks`` of all bytes.

    A part begins at a multiple of the variable's ``unit`` of elements.
    """
    total, before = sum(_size(each) * each.dtype.itemsize for each in variables), 0
    found: list[Ends] = []
    for variable in variables:
        size, step, itemsize = _size(variable), max(1, unit(variable)), variable.dtype.itemsize
        wanted = [(total * rank // ranks - before) // itemsize for rank in range(ranks)]
        found.append([*(min(max((each + step // 2) // step * step, 0), size) for each in wanted), size])
        before += size * itemsize
    return found


def unit_of(variable: Variable, elementwise: bool, clipping: Clipping | None) -> int:
    """Return the elements of a variable that one rank must have together.

    All of them if the rule looks at several; those that a norm adds first, so that it adds in the same order.
    """
    if not elementwise:
        return _size(variable)
    return 1 if clipping is None or not clipping.by_norm else BLOCK


def refuse_cut(variables: Sequence[Variable], name: str, unit: Callable[[Variable], int] | None) -> None:
    """Raise ValueError if a variable is cut, and the optimizer of this name needs more than each element by itself."""
    for variable in variables:
        if isinstance(variable, CutVariable) and (unit is None or unit(variable) > 1):
            raise ValueError(
                f"variable {variable.name!r} is cut over ranks, and {name} needs whole gradients: use an elementwise "
                "optimizer without clipnorm, global_clipnorm, gradient_accumulation_steps and shard_state"
            )


def require(engine: Engine, variables: Sequence[Variable], gradients: Sequence[Any] = ()) -> None:
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


class SharedOutVariable(DistributedVariable):
    """A variable of which each rank keeps the flat elements ``ends[rank]`` to ``ends[rank + 1]``.

    `own_copy` is this rank's part, a flat array. A read gathers the whole value, and is collective. A write in
    cross-replica context takes this rank's part of a whole value.
    """

    ends: Ends
    _whole_shape: tuple[int, ...]

    @classmethod
    def of(cls, variable: Variable, name: str, initial: Any, ends: Ends) -> SharedOutVariable:
        """Return the state of a variable, with the initial value of rank 0. Collective."""
        whole, made = arrays.as_numpy(initial), cls.without_value(variable, None, 0)
        # A rule that is not elementwise may keep another number of elements than the variable has.
        made.ends = [end * whole.size // max(1, _size(variable)) for end in ends]
        made._hold_part(name, whole)
        return made

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
        found, rest = [], self.own_copy()
        for box in boxes_of(first, last, self._whole_shape):
            size = math.prod(box.shape)
            found.append(Block(rest[:size].reshape(box.shape), box.offset, self._whole_shape))
            rest = rest[size:]
        return found

    def _shape_and_dtype(self) -> tuple[tuple[int, ...], np.dtype]:
        return self._whole_shape, self.own_copy().dtype

    @whole(ranks_of)
    def _read(self) -> np.ndarray:
        found, engine = np.empty(self._whole_shape, self.dtype), self._engine
        self._part_of(found)[...] = self.own_copy()
        parts = parts_of([as_bytes(found)], scaled([self.ends], [found.itemsize]))
        all_gather_parts(engine.topology, parts, self._name, engine.options.timeout_seconds)
        return found

    def _update_in_replica(self, method: str, value: Any) -> None:
        raise RuntimeError(f"variable {self.name!r} is shared out over the ranks: call {method} outside of run")

    def _update_across_replicas(self, method: str, value: Any) -> None:
        array = arrays.as_numpy(component(value))
        if array.shape != self._whole_shape or method.startswith("scatter"):
            raise ValueError(
                f"variable {self.name!r} is shared out over the ranks, with shape {self._whole_shape}: assign an array "
                f"of this shape, instead of {method} with shape {array.shape}"
            )
        self._component.write(method, self._part_of(array))


def parts_of(flat: Sequence[np.ndarray], ends: Sequence[Ends]) -> list[list[np.ndarray]]:
    """Return the parts of flat arrays that belong to each rank, without those that are empty."""
    return [
        [array[of[rank] : of[rank + 1]] for array, of in zip(flat, ends, strict=True) if of[rank] < of[rank + 1]]
        for rank in range(len(ends[0]) - 1)
    ]


def scaled(ends: Sequence[Ends], factors: Sequence[int]) -> list[Ends]:
    """Return the places of parts in bytes, where ``factors`` has the bytes of an element of each array."""
    return [[end * factor for end in of] for of, factor in zip(ends, factors, strict=True)]


def _size(variable: Variable) -> int:
    return math.prod(variable.shape)
