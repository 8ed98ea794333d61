"""The RMSprop optimizer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrat.arrays.gpu.kernels import EachElement
from mpistrat.training.optimizers.arguments import OptimizerOptions, Unpack
from mpistrat.training.optimizers.optimizer import Optimizer
from mpistrat.training.optimizers.rule import blocks


class RMSprop(Optimizer):
    """Gradient descent divided by a running mean of the gradient's size (Tieleman and Hinton 2012; Graves 2013).

    A step is ``v = rho * v + (1 - rho) * g**2``, then ``w -= rate * g / sqrt(v + epsilon)``. With ``centered``, the
    square of the running mean of ``g`` is subtracted from ``v`` under the root. With a momentum, ``m = momentum * m +
    change`` is subtracted in place of the change.

    Parameters
    ----------
    learning_rate : float or callable
    rho : float
        Decay of the running means, in [0, 1).
    momentum : float
        In [0, 1).
    epsilon : float
    centered : bool
    name, weight_decay, clipnorm, clipvalue, global_clipnorm, ...
        These and the remaining parameters are as for `Optimizer`.

    Raises
    ------
    ValueError
        If a decay or the momentum is out of range.

    Examples
    --------
    >>> import mpistrat
    >>> v = mpistrat.Variable(1.0)
    >>> RMSprop(learning_rate=0.1).apply_gradients([(2.0, v)])
    >>> round(float(v), 4)
    0.6838
    """

    elementwise = True

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        name: str | None = None,
        *,
        weight_decay: float | None = None,
        **options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, name, weight_decay=weight_decay, **options)
        for what, value in (("rho", rho), ("momentum", momentum)):
            if not 0 <= value < 1:
                raise ValueError(f"{what} must be in [0, 1), not {value!r}")
        self._rho, self._momentum, self._epsilon, self._centered = rho, momentum, epsilon, bool(centered)
        self.slots = ("velocity", *(["momentum"] if momentum else []), *(["mean"] if centered else []))
        self._kernel = _kernel(momentum > 0, self._centered)
        self._config |= {"rho": rho, "momentum": momentum, "epsilon": epsilon, "centered": self._centered}

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None:
        for w, g, v, *rest in blocks(weights, gradient, *state):
            change = np.multiply(g, g)
            change -= v
            change *= 1 - self._rho
            v += change
            if self._centered:
                mean = rest[-1]
                np.subtract(g, mean, out=change)
                change *= 1 - self._rho
                mean += change
                np.multiply(mean, mean, out=change)
                np.subtract(v, change, out=change)
                change += self._epsilon
            else:
                np.add(v, self._epsilon, out=change)
            np.sqrt(change, out=change)
            np.divide(g, change, out=change)
            change *= rate
            if self._momentum:
                rest[0] *= self._momentum
                rest[0] += change
                change = rest[0]
            w -= change

    update_consuming = update

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]]:
        return self._kernel, (rate, 1 - self._rho, self._epsilon, self._momentum)


def _kernel(with_momentum: bool, centered: bool) -> EachElement:
    state = ["v", *(["m"] if with_momentum else []), *(["mean"] if centered else [])]
    variance = "v - mean * mean" if centered else "v"
    body = "v += (g * g - v) * fresh; "
    body += "mean += (g - mean) * fresh; " if centered else ""
    body += f"const R change = g / sqrt({variance} + epsilon) * rate; "
    body += "m = m * momentum + change; w -= m;" if with_momentum else "w -= change;"
    name = f"mpistrat_rmsprop{'_momentum' * with_momentum}{'_centered' * centered}"
    return EachElement(name, ["g", "w", *state], ["w", *state], ["rate", "fresh", "epsilon", "momentum"], body)
