"""Decoupled weight decay."""

from __future__ import annotations

import functools

import numpy as np

from mpistrat.arrays.gpu.kernels import EachElement
from mpistrat.training.optimizers.rule import Rule
from mpistrat.values import IndexedSlices


class WeightDecay:
    """A rule that shrinks the weights before another rule changes them.

    Each step subtracts ``rate * weight_decay * w``. Raise ValueError if the weight decay is negative.
    """

    def __init__(self, rule: Rule, weight_decay: float):
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, not {weight_decay!r}")
        self._rule, self._weight_decay = rule, weight_decay

    def _kept(self, rate: float) -> float:
        return 1 - rate * self._weight_decay

    def update(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        weights *= self._kept(rate)
        self._rule.update(weights, gradient, step, rate, *state)

    def update_consuming(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        weights *= self._kept(rate)
        self._rule.update_consuming(weights, gradient, step, rate, *state)

    def update_rows(
        self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray
    ) -> None:
        weights *= self._kept(rate)
        self._rule.update_rows(weights, rows, step, rate, *state)

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]] | None:
        found = self._rule.on_gpu(step, rate)
        if found is None:
            return None
        kernel, numbers = found
        return _with_decay(kernel), (*numbers, self._kept(rate))


@functools.cache
def _with_decay(kernel: EachElement) -> EachElement:
    weights = kernel.reads[1]
    return kernel.extended("decay", scalars=["decay_kept"], before=f"{weights} *= decay_kept;")
