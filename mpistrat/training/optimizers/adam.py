"""Adam."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrat.training.optimizers.blocks import blocks
from mpistrat.training.optimizers.optimizer import Optimizer


class Adam(Optimizer):
    """Adaptive moments (Kingma and Ba 2015, in the form before section 2.1 that scales the rate).

    Parameters
    ----------
    learning_rate : float or callable
    beta_1, beta_2 : float
        Decay of the first and the second moment, in [0, 1).
    epsilon : float
    amsgrad : bool
        Use the largest second moment so far (Reddi et al. 2018).
    name : str, optional

    Raises
    ------
    ValueError
        If a decay is out of range.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     v = mpistrat.Variable(1.0)
    >>> optimizer = Adam(learning_rate=0.1)
    >>> strategy.run(lambda: optimizer.apply_gradients([(3.0, v)]))
    >>> round(float(v), 6)
    0.9
    """

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str | None = None,
    ):
        super().__init__(learning_rate, name)
        for what, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= beta < 1:
                raise ValueError(f"{what} must be in [0, 1), not {beta!r}")
        self._beta_1, self._beta_2, self._epsilon = beta_1, beta_2, epsilon
        self.slots = ("m", "v", "vhat") if amsgrad else ("m", "v")

    def update(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        scaled = rate * np.sqrt(1 - self._beta_2**step) / (1 - self._beta_1**step)
        for w, g, m, v, *vhat in blocks(weights, gradient, *state):
            part = np.subtract(g, m)
            part *= 1 - self._beta_1
            m += part
            np.multiply(g, g, out=part)
            part -= v
            part *= 1 - self._beta_2
            v += part
            if vhat:
                np.maximum(vhat[0], v, out=vhat[0])
            np.sqrt(vhat[0] if vhat else v, out=part)
            part += self._epsilon
            np.divide(m, part, out=part)
            part *= float(scaled)
            w -= part
