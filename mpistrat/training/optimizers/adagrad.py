"""The Adagrad optimizer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrat.arrays.gpu.kernels import EachElement
from mpistrat.training.optimizers.arguments import OptimizerOptions, Unpack
from mpistrat.training.optimizers.optimizer import Optimizer
from mpistrat.training.optimizers.rule import blocks
from mpistrat.variables import Variable

_KERNEL = EachElement(
    "mpistrat_adagrad",
    ["g", "w", "total"],
    ["w", "total"],
    ["rate", "epsilon"],
    "total += g * g; w -= g / sqrt(total + epsilon) * rate;",
)


class Adagrad(Optimizer):
    """Gradient descent divided by the size of all gradients so far (Duchi, Hazan and Singer 2011).

    A step is ``total += g**2``, then ``w -= rate * g / sqrt(total + epsilon)``.

    Parameters
    ----------
    learning_rate : float or callable
    initial_accumulator_value : float
        What ``total`` begins with.
    epsilon : float
    name, weight_decay, clipnorm, clipvalue, global_clipnorm, ...
        These and the remaining parameters are as for `Optimizer`.

    Raises
    ------
    ValueError
        If the initial value is negative.

    Examples
    --------
    >>> import mpistrat
    >>> v = mpistrat.Variable(1.0)
    >>> Adagrad(learning_rate=0.1).apply_gradients([(3.0, v)])
    >>> round(float(v), 4)
    0.9006
    """

    elementwise = True
    slots = ("accumulator",)

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        name: str | None = None,
        *,
        weight_decay: float | None = None,
        **options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, name, weight_decay=weight_decay, **options)
        if not initial_accumulator_value >= 0:
            raise ValueError(f"initial_accumulator_value must not be negative, not {initial_accumulator_value!r}")
        self._initial, self._epsilon = initial_accumulator_value, epsilon
        self._config |= {"initial_accumulator_value": self._initial, "epsilon": self._epsilon}

    def initial_state(self, slot: str, variable: Variable) -> np.ndarray:
        return np.full(variable.shape, self._initial, variable.dtype)

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None:
        for w, g, total in blocks(weights, gradient, *state):
            change = np.multiply(g, g)
            total += change
            np.add(total, self._epsilon, out=change)
            np.sqrt(change, out=change)
            np.divide(g, change, out=change)
            change *= rate
            w -= change

    update_consuming = update

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]]:
        return _KERNEL, (rate, self._epsilon)
