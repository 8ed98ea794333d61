"""Stochastic gradient descent with momentum, and LARS, its form for large batches."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpistrat.arrays.gpu.kernels import EachElement
from mpistrat.training.optimizers.arguments import OptimizerOptions, Unpack
from mpistrat.training.optimizers.optimizer import Optimizer
from mpistrat.training.optimizers.options.clipping import squared_norms
from mpistrat.training.optimizers.rule import ELEMENTS, blocks
from mpistrat.values import IndexedSlices

_PLAIN = EachElement("mpistrat_sgd", ["g", "w"], ["w"], ["rate"], "w += g * -rate;")
_MOMENTUM = EachElement(
    "mpistrat_sgd_momentum", ["g", "w", "m"], ["w", "m"], ["rate", "momentum"], "m = m * momentum + g * -rate; w += m;"
)
_NESTEROV = EachElement(
    "mpistrat_sgd_nesterov",
    ["g", "w", "m"],
    ["w", "m"],
    ["rate", "momentum"],
    "const R change = g * -rate; m = m * momentum + change; w += change + m * momentum;",
)


class SGD(Optimizer):
    """Gradient descent with optional momentum (Polyak 1964; Nesterov 1983 as in Sutskever et al. 2013).

    Without momentum a step is ``w -= rate * g``. With momentum it is ``m = momentum * m - rate * g``, then ``w += m``.
    With ``nesterov`` the second part is ``w += momentum * m - rate * g``.

    Parameters
    ----------
    learning_rate : float or callable
    momentum : float
        In [0, 1).
    nesterov : bool
    name, weight_decay, clipnorm, clipvalue, global_clipnorm, ...
        These and the remaining parameters are as for `Optimizer`.

    Raises
    ------
    ValueError
        If the momentum is out of range, or ``nesterov`` is given without a momentum.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     v = mpistrat.Variable(1.0)
    >>> optimizer = SGD(learning_rate=0.5)
    >>> strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))
    >>> float(v)
    0.5
    """

    elementwise = True

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        name: str | None = None,
        *,
        weight_decay: float | None = None,
        **options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, name, weight_decay=weight_decay, **options)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum!r}")
        if nesterov and not momentum:
            raise ValueError("nesterov=True needs a momentum")
        self._momentum, self._nesterov = momentum, nesterov
        self.slots = ("momentum",) if momentum else ()
        self._config |= {"momentum": self._momentum, "nesterov": self._nesterov}

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None:
        scratch = np.empty(min(weights.size, ELEMENTS), weights.dtype)
        for w, g, *m in blocks(weights, gradient, *state):
            self._move(w, np.multiply(g, -rate, out=scratch[: len(w)], casting="same_kind"), *m)

    def update_consuming(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        if gradient.dtype is not weights.dtype:
            self.update(weights, gradient, step, rate, *state)
            return
        gradient *= -rate
        if state:
            self._move(weights, gradient, *state)
        else:
            weights += gradient

    def _move(self, w: np.ndarray, change: np.ndarray, *momentum: np.ndarray) -> None:
        if momentum:
            (velocity,) = momentum
            velocity *= self._momentum
            velocity += change
            if not self._nesterov:
                change = velocity
            else:
                change += velocity * self._momentum
        w += change

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]]:
        if not self._momentum:
            return _PLAIN, (rate,)
        return (_NESTEROV if self._nesterov else _MOMENTUM), (rate, self._momentum)

    def update_rows(self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray) -> None:
        if state:
            super().update_rows(weights, rows, step, rate, *state)
        else:
            np.subtract.at(weights, rows.indices, (rate * rows.values).astype(weights.dtype, copy=False))


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
