"""The optimizers: one rate for all elements (SGD, LARS), and one for each (Adam, AdamW, RMSprop, Adagrad)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpistrat.arrays.gpu.kernels import EachElement
from mpistrat.representation import require
from mpistrat.training.optimizers.gradients import squared_norms
from mpistrat.training.optimizers.optimizer import Optimizer
from mpistrat.training.optimizers.rule import ELEMENTS, OptimizerOptions, Unpack, blocks
from mpistrat.values import IndexedSlices
from mpistrat.variables import Variable

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
        require(0 <= momentum < 1, "momentum must be in [0, 1)", momentum)
        if nesterov and not momentum:
            raise ValueError("nesterov=True needs a momentum")
        self._momentum, self._nesterov = momentum, nesterov
        self.slots = ("momentum",) if momentum else ()
        self._config |= {"momentum": self._momentum, "nesterov": self._nesterov}

    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None:
        # One scratch block for all: its memory stays in the cache.
        scratch = np.empty(min(weights.size, ELEMENTS), weights.dtype)
        for w, g, *m in blocks(weights, gradient, *state):
            self._move(w, np.multiply(g, -rate, out=scratch[: len(w)], casting="same_kind"), *m)

    def update_consuming(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        # A wider gradient, of a 16-bit variable: `update` rounds the change to the dtype of the weights.
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
            # With momentum rows without a gradient change, too.
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
        Part of the gradient and of the trust ratio, unlike in other optimizers.
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
        require(0 <= momentum < 1, "momentum must be in [0, 1)", momentum)
        require(weight_decay >= 0, "weight_decay must not be negative", weight_decay)
        require(eta > 0, "eta must be positive", eta)
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
_ADAGRAD_KERNEL = EachElement(
    "mpistrat_adagrad",
    ["g", "w", "total"],
    ["w", "total"],
    ["rate", "epsilon"],
    "total += g * g; w -= g / sqrt(total + epsilon) * rate;",
)


class Adam(Optimizer):
    """Gradient descent with adaptive moments (Kingma and Ba 2015).

    Both bias corrections are factors of the rate: the efficient form of their section 2.

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
        for option, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            require(0 <= beta < 1, f"{option} must be in [0, 1)", beta)
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
        # m += (g - m) * (1 - beta_1), and v alike, in one scratch array instead of a temporary for each operation.
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
        for option, value in (("rho", rho), ("momentum", momentum)):
            require(0 <= value < 1, f"{option} must be in [0, 1)", value)
        self._rho, self._momentum, self._epsilon, self._centered = rho, momentum, epsilon, bool(centered)
        self.slots = ("velocity", *(["momentum"] if momentum else []), *(["mean"] if centered else []))
        self._kernel = _rmsprop_kernel(momentum > 0, self._centered)
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


def _rmsprop_kernel(with_momentum: bool, centered: bool) -> EachElement:
    state = ["v", *(["m"] if with_momentum else []), *(["mean"] if centered else [])]
    variance = "v - mean * mean" if centered else "v"
    body = "v += (g * g - v) * fresh; "
    body += "mean += (g - mean) * fresh; " if centered else ""
    body += f"const R change = g / sqrt({variance} + epsilon) * rate; "
    body += "m = m * momentum + change; w -= m;" if with_momentum else "w -= change;"
    name = f"mpistrat_rmsprop{'_momentum' * with_momentum}{'_centered' * centered}"
    return EachElement(name, ["g", "w", *state], ["w", *state], ["rate", "fresh", "epsilon", "momentum"], body)


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
        require(
            initial_accumulator_value >= 0, "initial_accumulator_value must not be negative", initial_accumulator_value
        )
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
        return _ADAGRAD_KERNEL, (rate, self._epsilon)
