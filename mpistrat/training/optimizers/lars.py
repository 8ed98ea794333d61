"""The LARS optimizer, for large batches."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpistrat.training.optimizers.arguments import OptimizerOptions, Unpack
from mpistrat.training.optimizers.optimizer import Optimizer
from mpistrat.training.optimizers.options.clipping import squared_norms
from mpistrat.training.optimizers.rule import blocks


class LARS(Optimizer):
    """Momentum with a rate for each variable that follows the size of its weights (You, Gitman and Ginsburg 2017).

    A step is ``m = momentum * m - rate * trust * (g + weight_decay * w)``, then ``w += m``. The trust ratio is
    ``eta * |w| / (|g| + weight_decay * |w| + epsilon)``, and 1 where ``|w|`` or ``|g|`` is zero. Variables of fewer
    than two axes (biases, scales of normalization layers) are stepped without ratio and decay, as in the authors'
    code.

    Parameters
    ----------
    learning_rate : float or callable
    momentum : float
        In [0, 1).
    weight_decay : float
        Part of the gradient and of the trust ratio, unlike that of other optimizers.
    eta : float
        The trust coefficient.
    epsilon : float
    nesterov : bool
    name, clipnorm, clipvalue, global_clipnorm, ...
        These and the remaining parameters are as for `Optimizer`.

    Raises
    ------
    ValueError
        If the momentum is out of range, the weight decay is negative, or eta is not positive.

    Examples
    --------
    >>> import mpistrat
    >>> v = mpistrat.Variable([[3.0, 4.0]])
    >>> LARS(learning_rate=1.0, eta=0.1).apply_gradients([(np.array([[1.0, 0.0]]), v)])
    >>> v.read_value()
    array([[2.5, 4. ]])
    """

    slots = ("momentum",)

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 0.001,
        epsilon: float = 0.0,
        nesterov: bool = False,
        name: str | None = None,
        **options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, name, **options)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum!r}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, not {weight_decay!r}")
        if not eta > 0:
            raise ValueError(f"eta must be positive, not {eta!r}")
        self._momentum, self._decay, self._eta, self._epsilon = momentum, weight_decay, eta, epsilon
        self._nesterov = bool(nesterov)
        self._config |= {"momentum": momentum, "weight_decay": weight_decay, "eta": eta, "epsilon": epsilon}
        self._config["nesterov"] = self._nesterov

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None:
        decay = self._decay if weights.ndim > 1 else 0.0
        scaled = rate * self._trust(weights, gradient) if weights.ndim > 1 else rate
        for w, g, m in blocks(weights, gradient, *state):
            change = w * decay
            change += g
            change *= -scaled
            m *= self._momentum
            m += change
            w += change + m * self._momentum if self._nesterov else m

    def _trust(self, weights: np.ndarray, gradient: np.ndarray) -> float:
        of_weights, of_gradient = map(math.sqrt, squared_norms([weights, gradient]))
        if not (of_weights and of_gradient):
            return 1.0
        return self._eta * of_weights / (of_gradient + self._decay * of_weights + self._epsilon)
