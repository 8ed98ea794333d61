"""The moving average of the weights."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mpistrat.arrays.gpu.kernels import EachElement
from mpistrat.training.optimizers.rule import Rule, blocks

AVERAGE = "average"  # the name of the slot


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
            raise ValueError(
                f"ema_overwrite_frequency must be a whole number above 0, or None, not {overwrite_frequency!r}"
            )
        self._rule, self._momentum, self._frequency = rule, momentum, overwrite_frequency

    def _kept(self, step: int) -> float:
        return self._momentum if step > 1 else 0.0

    def _overwrites(self, step: int) -> bool:
        return self._frequency is not None and step % self._frequency == 0

    def _update(
        self, method: str, weights: np.ndarray, gradient: Any, step: int, rate: float, *state: np.ndarray
    ) -> None:
        *own, average = state
        getattr(self._rule, method)(weights, gradient, step, rate, *own)
        kept = self._kept(step)
        for mean, w in blocks(average, weights):
            mean *= kept
            mean += w * (1 - kept)
        if self._overwrites(step):
            weights[...] = average

    update = functools.partialmethod(_update, "update")
    update_consuming = functools.partialmethod(_update, "update_consuming")
    update_rows = functools.partialmethod(_update, "update_rows")

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
