"""Batch normalization with moments of all replicas: a layer for programs that differentiate by hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import arrays
from mpistrat.strategy import Variable, get_replica_context, get_strategy
from mpistrat.values import VariableAggregation, VariableSynchronization


def global_moments(x: Any, axes: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return the count, mean and variance of values over axes and over all replicas, in one all-reduce.

    Call it in a replica context, on every replica, also on one without rows. Elsewhere the moments are of ``x``
    alone. A replica has the weight of its rows.

    Parameters
    ----------
    x : array of floating point numbers
        Only the lengths of ``axes`` may differ between replicas.
    axes : sequence of int
        The axes to average over, such as all but the axis of the channels.

    Returns
    -------
    count : float
        The number of values of a channel, over all replicas.
    mean, variance : array of float64
        Of the shape of the other axes. The variance is biased: divided by the count. 0 where there are no values.

    Examples
    --------
    >>> import mpistrat, numpy as np
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> x = np.array([[1.0, 10.0], [3.0, 20.0]], np.float32)
    >>> count, mean, variance = strategy.run(mpistrat.training.global_moments, args=(x, [0]))
    >>> mean, variance
    (array([ 2., 15.]), array([ 1., 25.]))

    Notes
    -----
    Each replica sends its sums of squared deviations from its *own* mean, and these are combined as Chan, Golub and
    LeVeque do ("Algorithms for computing the sample variance", 1983). The mean of squares less the square of the mean
    would give float32 values around 1e5 a negative variance. Sums are in float64: what the means of replicas differ by
    has an absolute error of 1e-16 of their squares.
    """
    return _combined(*_own_moments(arrays.numpy_or_cupy(x), tuple(axes)))


def _own_moments(x: Any, axes: tuple[int, ...]) -> tuple[float, Any, Any]:
    """Return the count, the mean and the sum of squared deviations of each channel, in float64."""
    count = float(np.prod([x.shape[axis] for axis in axes]))
    if not count:
        # A replica without rows takes part in the all-reduce. A mean of no rows would be NaN, for all replicas.
        empty = _wide(x).sum(axes, dtype=np.float64)  # zeros, on the device of ``x``
        return 0.0, empty, empty
    mean = x.mean(axes, dtype=np.float64, keepdims=True)
    deviations = ((_wide(x) - mean.astype(_wide(x).dtype)) ** 2).sum(axes, dtype=np.float64)
    return count, mean.reshape(deviations.shape), deviations


def _combined(count: float, mean: Any, deviations: Any) -> tuple[float, Any, Any]:
    """Return the count, mean and variance over the replicas of a replica context, else over the own values."""
    squares = count * mean**2
    if context.current().replica_context is not None:
        counts = arrays.from_host(np.array([count]), mean)
        total = _summed([counts, (count * mean).ravel(), squares.ravel(), deviations.ravel()])
        count = float(total[0])
        # The count is the same for all channels, so it is sent once, and not for each.
        weighted, squares, deviations = total[1:].reshape(3, *mean.shape)
        mean = weighted / max(count, 1.0)
    # Squared deviations of the means of replicas from the mean of all. Rounding makes them negative for equal means.
    between = (squares - count * mean**2).clip(0.0, None)
    return count, mean, (deviations + between) / max(count, 1.0)


def _summed(parts: list[Any]) -> Any:
    """Return the concatenation of float64 vectors, summed over the replicas."""
    return get_replica_context().all_reduce("SUM", np.concatenate(parts))  # of CuPy arrays CuPy's


def _wide(x: Any) -> Any:
    """Return an array in a dtype to compute in: at least float32."""
    return x if x.dtype.itemsize >= 4 and x.dtype.kind == "f" else x.astype(np.float32)


def _like(result: Any, like: Any) -> Any:
    """Return an array in the dtype and library of ``like``."""
    if arrays.on_gpu(like):
        return arrays.from_cupy(result.astype(arrays.to_cupy(like).dtype, copy=False), like)
    return arrays.from_host(result.astype(arrays.to_host(like).dtype, copy=False), like)


def _replica() -> int:
    """Return the number of this replica; 0 in cross-replica context."""
    replica = context.current().replica_context
    return 0 if replica is None else replica.replica_id_in_sync_group


class BatchNormalization:
    """Normalize each channel to mean 0 and variance 1 over the rows of a batch, then scale and shift it.

    In training, with ``synchronized``, the moments are over the rows of all replicas: a step then does not depend on
    how many replicas share the batch. Every replica must call the layer, also one without rows. A call makes one
    all-reduce, `backward` another. In inference the layer reads the moving mean and variance: without communication in
    a replica context; outside of `run` that is collective.

    Create it in the scope of a strategy. It has the arguments of Keras' layer.

    Parameters
    ----------
    axis : int
        The axis of the channels.
    momentum : float
        The weight of the former moving mean and variance in each step.
    epsilon : float
        Added to variances.
    center, scale : bool
        Whether channels are shifted by ``beta`` and scaled by ``gamma``, which are trained.
    synchronized : bool
        Whether the moments are over the rows of all replicas. Otherwise each replica has its own, and the moving mean
        and variance are averaged over the replicas when they are read.
    trainable : bool
        If False, the layer is always in inference.
    dtype : dtype
        Of its variables.
    name : str

    Raises
    ------
    ValueError
        If momentum is not between 0 and 1, or epsilon is negative. By a call, if the number of channels changes.
    RuntimeError
        By `backward` before a call in training.

    Examples
    --------
    >>> import mpistrat, numpy as np
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     layer = mpistrat.training.BatchNormalization(synchronized=True)
    ...     layer.build((None, 1))
    >>> def step(x):
    ...     y = layer(x, training=True)
    ...     dx, gradients = layer.backward(np.ones_like(y))  # of the sum of y
    ...     return y.round(3), gradients
    >>> y, gradients = strategy.run(step, args=(np.array([[1.0], [3.0]], np.float32),))
    >>> y.tolist(), [gradient.tolist() for gradient in gradients]
    ([[-1.0], [1.0]], [[0.0], [2.0]])

    Notes
    -----
    Ioffe and Szegedy, "Batch Normalization" (2015). Numbers of float16 and bfloat16 are computed in float32.
    """

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        *,
        synchronized: bool = False,
        trainable: bool = True,
        dtype: Any = np.float32,
        name: str = "batch_normalization",
    ):
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be between 0 and 1, not {momentum!r}")
        if not epsilon >= 0:
            raise ValueError(f"epsilon must not be negative, and is {epsilon!r}")
        self.axis, self.momentum, self.epsilon = axis, momentum, epsilon
        self.synchronized, self.trainable, self.name = synchronized, trainable, name
        self._center, self._scale, self._dtype = center, scale, np.dtype(dtype)
        self._strategy = get_strategy()
        self._channels: int | None = None
        self.gamma: Variable | None = None
        self.beta: Variable | None = None
        self._saved: dict[int, tuple[Any, Any, Any]] = {}  # for `backward`, by replica

    @property
    def trainable_variables(self) -> list[Variable]:
        """``gamma`` and ``beta``, as far as there are."""
        return [variable for variable in (self.gamma, self.beta) if variable is not None]

    @property
    def variables(self) -> list[Variable]:
        """All variables, to be saved."""
        built = [] if self._channels is None else [self.moving_mean, self.moving_variance]
        return [*self.trainable_variables, *built]

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Create the variables for the channels of an input shape. The first call does it, too.

        Collective the first time.
        """
        channels = input_shape[self.axis]
        if self._channels is None:
            if channels is None:
                raise ValueError(f"{self.name}: axis {self.axis} of {tuple(input_shape)} must have a length")
            self._channels = channels
            with (
                # The initial values are constants, equal on all ranks: none is sent.
                nullcontext() if get_strategy() is self._strategy else self._strategy.scope(),
                self._strategy.extended.engine.equal_initial_values(),
            ):
                if self._scale:
                    self.gamma = self._variable("gamma", 1.0)
                if self._center:
                    self.beta = self._variable("beta", 0.0)
                on_read = {
                    "trainable": False,
                    "synchronization": VariableSynchronization.ON_READ,
                    "aggregation": VariableAggregation.MEAN,
                }
                self.moving_mean = self._variable("moving_mean", 0.0, **on_read)
                self.moving_variance = self._variable("moving_variance", 1.0, **on_read)

    def _check(self, x: Any) -> None:
        if x.shape[self.axis] != self._channels:
            raise ValueError(
                f"{self.name} has {self._channels} channels, and got an array of shape {x.shape} with "
                f"{x.shape[self.axis]} along axis {self.axis}"
            )

    def _variable(self, name: str, value: float, **options: Any) -> Variable:
        initial = np.full(self._channels or 0, value, self._dtype)
        return Variable(initial, name=f"{self.name}/{name}", **options)

    def __call__(self, x: Any, training: bool = False) -> Any:
        """Return the normalized array, of the shape, dtype and library of ``x``. Collective in training, as above."""
        like, x = x, arrays.numpy_or_cupy(x)
        if self._channels is None:
            self.build(x.shape)
        if training and self.trainable:
            count, mean, deviations = _own_moments(x, self._axes(x))
            if self.synchronized:
                count, mean, variance = _combined(count, mean, deviations)
            else:
                variance = deviations / max(count, 1.0)
            self._check(x)  # not earlier: the reduction refuses on every rank what is wrong on one
            # Each replica moves its own copies: the copies of all are averaged only when they are read.
            for moving, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
                change = (value - moving.read_value()) * (1 - self.momentum)
                moving.assign_add(change.astype(self._dtype))
        else:
            self._check(x)
            mean, variance = self.moving_mean.read_value(), self.moving_variance.read_value()
        wide = _wide(x)
        inverse = self._along(wide, 1 / np.sqrt(variance + self.epsilon))
        normalized = (wide - self._along(wide, mean)) * inverse
        if training and self.trainable:
            self._saved[_replica()] = normalized, inverse, count
        y = normalized
        if self.gamma is not None:
            y = y * self._along(wide, self.gamma.read_value())
        if self.beta is not None:
            y = y + self._along(wide, self.beta.read_value())
        return _like(y, like)

    def backward(self, gradient: Any) -> tuple[Any, list[Any]]:
        """Return the gradients of the loss by the input and by `trainable_variables`. Collective if synchronized.

        Parameters
        ----------
        gradient : array
            Of this replica's loss by the output of the last call in training, of its shape.

        Returns
        -------
        dx : array
            Of the *sum* of the losses of all replicas: this replica's rows moved the moments of all.
        gradients : list of array
            By `trainable_variables`, over the own rows: an optimizer sums them over the replicas.
        """
        # Popped, so that the arrays of the batch are freed, and a second call raises.
        saved = self._saved.pop(_replica(), None)
        if saved is None:
            raise RuntimeError(f"{self.name}: call the layer with training=True before backward")
        normalized, inverse, count = saved
        wide = _wide(arrays.numpy_or_cupy(gradient))
        if wide.shape != normalized.shape:
            raise ValueError(f"{self.name}: the output has the shape {normalized.shape}, and the gradient {wide.shape}")
        axes = self._axes(wide)
        parts = [wide.sum(axes, dtype=np.float64), (wide * normalized).sum(axes, dtype=np.float64)]
        by_kind = [part.astype(self._dtype) for part in parts[::-1]]  # by gamma, by beta
        has = (self.gamma is not None, self.beta is not None)
        gradients = [value for value, is_there in zip(by_kind, has, strict=True) if is_there]
        total = parts
        if self.synchronized and context.current().replica_context is not None:
            total = _summed(parts).reshape(2, -1)
        mean, along = (self._along(wide, sums / max(count, 1.0)) for sums in total)
        dx = inverse * (wide - mean - normalized * along)
        if self.gamma is not None:
            dx = dx * self._along(wide, self.gamma.read_value())
        return _like(dx, gradient), gradients

    def _axes(self, x: Any) -> tuple[int, ...]:
        return tuple(axis for axis in range(x.ndim) if axis != self.axis % x.ndim)

    def _along(self, x: Any, channels: Any) -> Any:
        """Return a vector of the channels in the dtype of ``x``, shaped to broadcast along their axis."""
        shape = [1] * x.ndim
        shape[self.axis] = -1
        return channels.astype(x.dtype).reshape(shape)
