"""The step of an optimizer that updates its variables one by one, or on a GPU those of one dtype together."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.arrays.device import cupy_for, on_device
from mpistrat.arrays.gpu.kernels import FLOATS
from mpistrat.strategy import StrategyExtended
from mpistrat.training.optimizers.rule import Rule, for_update
from mpistrat.values import IndexedSlices, component
from mpistrat.variables import GpuVariable, LocalVariable, Variable

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
        held = [component(each) for each in itertools.chain.from_iterable(members)]
        arrays_of = [each.array for each in held if isinstance(each, LocalVariable)]
        return [array for array in arrays_of if isinstance(array, np.ndarray)]

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
                    kernel[0]([list(each) for each in zip(*rows, strict=True)], kernel[1])
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
    weights, *held = [arrays.to_host(each) for each in (variable.array, *state)]
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
