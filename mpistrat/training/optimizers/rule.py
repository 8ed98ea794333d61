"""How an optimizer changes arrays: the methods that say it, what options add to them, and the blocks of arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from mpistrat.arrays.gpu.kernels import EachElement
from mpistrat.values import IndexedSlices

ELEMENTS = 1 << 16
AVERAGE = "average"  # the name of the slot of `MovingAverage`


class Rule(Protocol):
    """The methods of `Optimizer` that say how it changes arrays."""

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None: ...

    def update_consuming(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None: ...

    def update_rows(
        self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray
    ) -> None: ...

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]] | None: ...


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

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None:
        weights *= self._kept(rate)
        self._rule.update(weights, gradient, step, rate, *state)

    def update_consuming(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        weights *= self._kept(rate)
        self._rule.update_consuming(weights, gradient, step, rate, *state)

    def update_rows(self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray) -> None:
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


class MovingAverage:
    """A rule that averages the weights after another rule has changed them.

    The average is the last slot, `AVERAGE`: ``average = momentum * average + (1 - momentum) * w``. After the first step
    it is the weights. After each ``overwrite_frequency`` steps, the weights become the average. Raise ValueError unless
    ``momentum`` is in [0, 1] and the frequency is positive.
    """

    def __init__(self, rule: Rule, momentum: float, overwrite_frequency: int | None):
        if not 0 <= momentum <= 1:
            raise ValueError(f"ema_momentum must be in [0, 1], not {momentum!r}")
        if overwrite_frequency is not None and (not isinstance(overwrite_frequency, int) or overwrite_frequency < 1):
            raise ValueError(f"ema_overwrite_frequency must be an int above 0, or None, not {overwrite_frequency!r}")
        self._rule, self._momentum, self._frequency = rule, momentum, overwrite_frequency

    def _kept(self, step: int) -> float:
        return self._momentum if step > 1 else 0.0

    def _overwrites(self, step: int) -> bool:
        return self._frequency is not None and step % self._frequency == 0

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None:
        self._rule.update(weights, gradient, step, rate, *state[:-1])
        self._average(state[-1], weights, step)

    def update_consuming(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        self._rule.update_consuming(weights, gradient, step, rate, *state[:-1])
        self._average(state[-1], weights, step)

    def update_rows(self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray) -> None:
        self._rule.update_rows(weights, rows, step, rate, *state[:-1])
        self._average(state[-1], weights, step)

    def _average(self, average: np.ndarray, weights: np.ndarray, step: int) -> None:
        kept = self._kept(step)
        for mean, w in blocks(average, weights):
            mean *= kept
            mean += w * (1 - kept)
        if self._overwrites(step):
            weights[...] = average

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]] | None:
        found = self._rule.on_gpu(step, rate)
        if found is None:
            return None
        kernel, numbers = found
        return _with_average(kernel), (*numbers, self._kept(step), float(self._overwrites(step)))


@functools.cache
def _with_average(kernel: EachElement) -> EachElement:
    weights = kernel.reads[1]
    return kernel.extended(
        "average",
        state=["average"],
        scalars=["average_kept", "average_now"],
        after=(
            f"average = average * average_kept + {weights} * ((R)1 - average_kept); "
            f"{weights} = average_now != (R)0 ? average : {weights};"
        ),
    )


def for_update(gradient: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a gradient in the dtype of its variable, as GPUs take it.

    A variable of 16 bits keeps a wider gradient: its own dtype has not the range of a gradient before it is scaled.
    """
    return gradient if dtype.itemsize < 4 else gradient.astype(dtype, copy=False)


def blocks(*arrays: np.ndarray) -> Iterable[tuple[np.ndarray, ...]]:
    """Return the same flat block of each of several arrays of one shape.

    The blocks are views: a write to a block changes its array. Raise ValueError if an array is not contiguous, and not
    one short vector.
    """
    size = arrays[0].size
    if size <= ELEMENTS and arrays[0].ndim == 1:
        return (arrays,) if size else ()
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {array.shape} is not contiguous")
    flat = [array.reshape(-1) for array in arrays]
    return [tuple([each[at : at + ELEMENTS] for each in flat]) for at in range(0, size, ELEMENTS)]


def rate_of(rate: float | Callable[[int], float], number: int) -> float:
    """Return the learning rate of a step after ``number`` others."""
    return float(rate(number) if callable(rate) else rate)


def place_of(kind: type, name: str) -> int:
    """Return the place of the class that defines an attribute, in the order in which Python looks it up."""
    return next(place for place, each in enumerate(kind.__mro__) if name in vars(each))
