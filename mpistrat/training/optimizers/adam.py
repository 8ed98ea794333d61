"""The Adam optimizer, and AdamW, whose weights decay apart from the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpistrat.arrays.gpu.kernels import EachElement
from mpistrat.training.optimizers.arguments import OptimizerOptions, Unpack
from mpistrat.training.optimizers.optimizer import Optimizer
from mpistrat.training.optimizers.rule import blocks

_NUMBERS = ["rate", "rest_1", "rest_2", "epsilon"]
_MOMENTS = "m += (g - m) * rest_1; v += (g * g - v) * rest_2;"
_ADAM = EachElement(
    "mpistrat_adam", ["g", "w", "m", "v"], ["w", "m", "v"], _NUMBERS, f"{_MOMENTS} w -= m / (sqrt(v) + epsilon) * rate;"
)
_AMSGRAD = EachElement(
    "mpistrat_amsgrad",
    ["g", "w", "m", "v", "vhat"],
    ["w", "m", "v", "vhat"],
    _NUMBERS,
    f"{_MOMENTS} vhat = vhat < v ? v : vhat; w -= m / (sqrt(vhat) + epsilon) * rate;",
)


class Adam(Optimizer):
    """Gradient descent with adaptive moments (Kingma and Ba 2015).

    The update is the efficient form of their section 2, which scales the rate by both bias corrections.

    Parameters
    ----------
    learning_rate : float or callable
    beta_1, beta_2 : float
        Decay of the first and the second moment, in [0, 1).
    epsilon : float
    amsgrad : bool
        Use the largest second moment so far (Reddi et al. 2018).
    name, weight_decay, clipnorm, clipvalue, global_clipnorm, ...
        These and the remaining parameters are as for `Optimizer`.

    Raises
    ------
    ValueError
        If a decay is out of range.

    Examples
    --------
    >>> import mpistrat
    >>> v = mpistrat.Variable(1.0)
    >>> Adam(learning_rate=0.1).apply_gradients([(3.0, v)])
    >>> round(float(v), 6)
    0.9
    """

    elementwise = True

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str | None = None,
        *,
        weight_decay: float | None = None,
        **options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, name, weight_decay=weight_decay, **options)
        for what, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= beta < 1:
                raise ValueError(f"{what} must be in [0, 1), not {beta!r}")
        self._beta_1, self._beta_2, self._epsilon = beta_1, beta_2, epsilon
        self.slots = ("m", "v", "vhat") if amsgrad else ("m", "v")
        self._config |= {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon, "amsgrad": bool(amsgrad)}

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]]:
        scaled = rate * math.sqrt(1 - self._beta_2**step) / (1 - self._beta_1**step)
        numbers = (float(scaled), 1 - self._beta_1, 1 - self._beta_2, self._epsilon)
        return (_AMSGRAD if len(self.slots) == 3 else _ADAM), numbers

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None:
        for w, g, *moments in blocks(weights, gradient, *state):
            self._update_block(w, g, step, rate, *moments)

    def _update_block(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        m, v, *vhat = state
        part = np.subtract(gradient, m)
        part *= 1 - self._beta_1
        m += part
        np.multiply(gradient, gradient, out=part)
        part -= v
        part *= 1 - self._beta_2
        v += part
        if vhat:
            v = np.maximum(vhat[0], v, out=vhat[0])
        np.sqrt(v, out=part)
        part += self._epsilon
        np.divide(m, part, out=part)
        part *= float(rate * math.sqrt(1 - self._beta_2**step) / (1 - self._beta_1**step))
        weights -= part

    update_consuming = _update_block


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Parameters
    ----------
    learning_rate : float or callable
    weight_decay : float
        Each step subtracts ``rate * weight_decay * w``.
    beta_1, beta_2, epsilon, amsgrad, name, ...
        These and the remaining parameters are as for `Adam`.

    Raises
    ------
    ValueError
        If the weight decay is negative, or a decay of the moments is out of range.

    Examples
    --------
    >>> import mpistrat
    >>> v = mpistrat.Variable(1.0)
    >>> AdamW(learning_rate=0.1, weight_decay=0.5).apply_gradients([(3.0, v)])
    >>> round(float(v), 6)
    0.85
    """

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str | None = None,
        **options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, name, weight_decay=weight_decay, **options)
