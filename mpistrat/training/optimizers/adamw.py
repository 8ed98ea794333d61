"""The Adam optimizer with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrat.training.optimizers.adam import Adam


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Parameters
    ----------
    learning_rate : float or callable
    weight_decay : float
        Each step subtracts ``rate * weight_decay * w``.
    beta_1, beta_2, epsilon, amsgrad, name
        As for `Adam`.

    Raises
    ------
    ValueError
        If the weight decay is negative, or a decay of the moments is out of range.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     v = mpistrat.Variable(1.0)
    >>> optimizer = AdamW(learning_rate=0.1, weight_decay=0.5)
    >>> strategy.run(lambda: optimizer.apply_gradients([(3.0, v)]))
    >>> round(float(v), 6)
    0.85
    """

    elementwise = True

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str | None = None,
    ):
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, name)
        if weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, not {weight_decay!r}")
        self._weight_decay = weight_decay

    def _decay(self, rate: float) -> float:
        return rate * self._weight_decay

    def update(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        weights *= 1 - self._decay(rate)
        super().update(weights, gradient, step, rate, *state)
