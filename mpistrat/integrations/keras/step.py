"""The step of a rank: the correction of losses, the sums of gradients over ranks, and which rank calls callbacks.

A rank computes a batch of its own rows. Keras' loss is a mean over rows, so the loss of the whole batch is the mean
over ranks, weighted by their numbers of rows. That holds for own losses, regularizers and ``add_loss`` too. Where Keras
divides by another number (valid tokens, the sum of weights, 1), `reduced_over_ranks` corrects the loss of the rank, so
that the weighted mean is right.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from mpistrat.integrations.keras import hooks
from mpistrat.integrations.keras.hooks import BACKEND

if TYPE_CHECKING:
    from mpistrat.integrations.keras.ranks import TrainingRanks


def call_on_host(function: Callable[..., Sequence[Any]], like: Sequence[Any], *arguments: Any) -> list[Any]:
    """Return ``function(*arguments)``, a list of arrays of the dtypes and shapes of ``like``.

    ``function`` gets NumPy arrays on JAX and TensorFlow, and the arguments themselves on PyTorch.
    """
    if BACKEND == "torch":
        return list(function(*arguments))
    if BACKEND == "jax":
        import jax
        from jax.experimental import io_callback

        def on_arrays(*values: Any) -> Any:
            return tuple(function(*map(np.asarray, values)))

        results = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in like]
        stopped = [jax.lax.stop_gradient(argument) for argument in arguments]
        # Ordered: every rank must make its collectives in the same order.
        return list(io_callback(on_arrays, tuple(results), *stopped, ordered=True))
    import tensorflow as tf

    out = tf.numpy_function(lambda *values: tuple(function(*values)), list(arguments), [spec.dtype for spec in like])
    out = [out] if tf.is_tensor(out) else list(out)
    for tensor, spec in zip(out, like, strict=True):
        tensor.set_shape(spec.shape)
    return out


def wait_for_host() -> None:
    """Wait for all calls of steps that have been started."""
    if BACKEND == "jax":
        import jax

        jax.effects_barrier()


class RankStep:
    """The step that is computed or traced. This rank has ``own`` rows of the ``rows`` of the whole batch.

    ``info`` is an array of both numbers and a digest of the batch; or a dict with ``own``, which the ranks add up.
    Compiled steps distinguish a dict from an array, but not arrays of two shapes.
    """

    def __init__(self, ranks: TrainingRanks, info: Any):
        self.ranks = ranks
        self.info = info["own"] if isinstance(info, dict) else info
        self.held: list[Any] | None = None  # gradients, while XLA compiles them
        self.own: Any = float(self.info[0]) if BACKEND == "torch" else self.info[0]
        # Now: later it may be needed within the derivative of a layer, and numbers traced there are not valid outside.
        self.rows: Any = self.total(ops.convert_to_tensor(self.own)) if self.info is not info else info[1]
        if BACKEND == "torch":
            self.rows = float(self.rows)
        self.reducing = False
        self.scaled: list[Any] = []  # the optimizers whose loss has its weight already

    @property
    def weight(self) -> Any:
        """The part of the batch that this rank computes."""
        return self.own / self.rows

    @property
    def inverse_weight(self) -> Any:
        """The inverse of ``weight``, where that is not 0."""
        return self.rows / (max(self.own, 1) if BACKEND == "torch" else ops.maximum(self.own, 1))

    def if_rows(self, value: Any, otherwise: Any) -> Any:
        """Return ``value``, or ``otherwise`` on a rank without rows, whose batch holds a row of other ranks."""
        if BACKEND == "torch":
            return value if self.own else otherwise
        return ops.where(self.own > 0, value, otherwise)

    def total(self, number: Any) -> Any:
        """Return the sum of a number over the ranks that have rows."""
        if self.held is not None:
            raise _NeedsRanksError
        contribution = self.if_rows(number, ops.zeros_like(number))
        return call_on_host(self.ranks.totals, [contribution], contribution)[0]

    def by_total(self, weights: Any) -> Any:
        """Return the factor that corrects a loss divided by the sum of this rank's weights, not of all weights."""
        own = ops.sum(ops.cast(weights, "float32"))
        return ops.divide_no_nan(own * ops.cast(self.inverse_weight, "float32"), self.total(own))

    def all_reduce(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the gradients of the whole batch. None stays None where no rank has a gradient."""
        weight = None if any(other is optimizer for other in self.scaled) else self.weight
        if BACKEND == "torch":
            return self.ranks.tensors(self.info, weight, gradients, variables)
        if BACKEND == "tensorflow":
            gradients = self._gathered(gradients, weight)
        have = [gradient for gradient in gradients if _dense(gradient)]
        weighted = [self.if_rows(_times(gradient, weight), ops.zeros_like(gradient)) for gradient in have]
        total = iter(call_on_host(self.ranks.gradients, weighted, self.info, *weighted)) if weighted else iter(())
        return [next(total) if _dense(gradient) else gradient for gradient in gradients]

    def compiled(self, compute: Callable[[], Any]) -> Any:
        """Return ``compute()`` of TensorFlow, compiled by XLA in two functions: the gradients, and their use.

        XLA cannot call the host, so the ranks add the gradients between the two.
        """
        import tensorflow as tf

        by_xla = functools.partial(tf.function, jit_compile=True, autograph=False)

        def until_gradients() -> Any:
            self.held, self.scaled = [], []
            return compute(), [gradients for _, _, gradients, _ in self.held]

        try:
            logs, all_gradients = by_xla(until_gradients)()
            held = self.held
        except _NeedsRanksError:
            warnings.warn(
                "jit_compile has no effect: a mask, weights of a loss or SyncBatchNormalization add up over the ranks "
                "within the model, where XLA cannot call MPI",
                stacklevel=2,
            )
            self.held, self.scaled = None, []
            return compute()
        self.held, self.reducing = None, True
        for (apply, optimizer, _, variables), gradients in zip(held or (), all_gradients, strict=True):
            total = self.all_reduce(optimizer, gradients, variables)
            by_xla(functools.partial(apply, optimizer, total, variables))()
        self.reducing = False
        return logs

    def _gathered(self, gradients: list[Any], weight: Any) -> list[Any]:
        """Return the gradients; sparse gradients get the rows of all ranks, in the order of ranks.

        Keras does not add rows of one index before it updates a variable, so only the order of the whole batch gives
        the result of one process.
        """
        import tensorflow as tf

        out = []
        for gradient in gradients:
            if isinstance(gradient, tf.IndexedSlices):
                kept = tf.cast(self.own > 0, tf.int32)
                rows = tf.shape(gradient.indices)[0] * kept
                values = _times(gradient.values[:rows], weight)
                like = [
                    tf.TensorSpec([None, *gradient.values.shape[1:]], values.dtype),
                    tf.TensorSpec([None], gradient.indices.dtype),
                ]
                values, indices = call_on_host(self.ranks.slices, like, values, gradient.indices[:rows])
                gradient = tf.IndexedSlices(values, indices, gradient.dense_shape)
            out.append(gradient)
        return out


def _times(gradient: Any, weight: Any) -> Any:
    return gradient if weight is None else gradient * ops.cast(weight, gradient.dtype)


class _NeedsRanksError(Exception):
    """A collective is needed in what XLA compiles."""


def _dense(gradient: Any) -> bool:
    return gradient is not None and type(gradient).__name__ != "IndexedSlices"


_steps: list[RankStep] = []  # the step that is traced or computed, last


def current() -> RankStep | None:
    """Return the step that is computed or traced, if it is one of several ranks."""
    return _steps[-1] if _steps else None


@contextmanager
def computing(step: RankStep) -> Iterator[RankStep]:
    """Context in which ``step`` is current."""
    _steps.append(step)
    try:
        yield step
    finally:
        _steps.pop()


def reduced_over_ranks(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras' reduction of the values of a loss, corrected by the denominator of the whole batch."""

    @functools.wraps(reduce)
    def reduced(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        step = current()
        factor = None
        if step is not None and reduction == "sum":
            factor = step.inverse_weight
        elif step is not None and reduction == "mean_with_sample_weight" and not (sample_weight is mask is None):
            factor = step.by_total(hooks.apply_mask(sample_weight, mask, dtype="float32", reduction=reduction))
        elif step is not None and mask is not None and reduction not in (None, "none"):
            factor = step.by_total(mask)
        loss = reduce(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        return loss if factor is None else loss * ops.cast(factor, loss.dtype)

    return reduced


def averaged_over_ranks(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of `keras.metrics.Mean` or `Sum` in which a number weighs as this rank's part of the batch."""

    @functools.wraps(update)
    def updated(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        step = current()
        if step is not None and sample_weight is None and np.ndim(values) == 0:
            sample_weight = step.weight
        return update(metric, values, sample_weight)

    return updated


def applied_over_ranks(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of an optimizer that takes gradients, with gradients of the whole batch.

    The outermost optimizer reduces them: an optimizer that scales losses then sees the same infinities on all ranks.
    """
    if BACKEND == "jax":

        @functools.wraps(apply)
        def stateless(optimizer: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            with _reducing(optimizer) as step:
                if step is not None:
                    grads = step.all_reduce(optimizer, list(grads), trainable_variables)
                return apply(optimizer, optimizer_variables, grads, trainable_variables)

        return stateless

    @functools.wraps(apply)
    def stateful(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        with _reducing(optimizer) as step:
            if step is not None:
                variables = hooks.variables_of_gradients(optimizer, trainable_variables)
                if step.held is not None:
                    return step.held.append((apply, optimizer, list(grads), variables))
                grads = step.all_reduce(optimizer, list(grads), variables)
            return apply(optimizer, grads, trainable_variables)

    return stateful


def scaled_over_ranks(scale: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that scales a loss, with the weight of this rank in its scale.

    Weighting the gradients would take another pass over them. Also, the mean over a part of the batch has larger
    gradients, which overflow in half precision where the gradients of the whole batch do not.
    """

    @functools.wraps(scale)
    def scaled(optimizer: Any, loss: Any) -> Any:
        step = current()
        if step is not None:
            step.scaled.append(optimizer)
            loss = loss * ops.cast(step.weight, loss.dtype)
        return scale(optimizer, loss)

    return scaled


_STEP = "_mpistrat_step"  # the attribute of an optimizer that keeps its step outside of `DistributedTraining`


def combine_by(optimizer: Any, step: RankStep) -> None:
    """Let an optimizer take gradients from ``step`` where no other step is computed or traced."""
    vars(optimizer)[_STEP] = step


@contextmanager
def _reducing(optimizer: Any) -> Iterator[RankStep | None]:
    """Context of an optimizer. It yields the step if no outer optimizer has reduced the gradients."""
    step = current()
    while step is None and optimizer is not None:
        step, optimizer = vars(optimizer).get(_STEP), vars(optimizer).get("inner_optimizer")
    if step is None or step.reducing:
        yield None
        return
    step.reducing = True
    try:
        yield step
    finally:
        step.reducing = False


# --- callbacks ---------------------------------------------------------------------------

_WRITING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.OrbaxCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)


def is_chief_only(callback: Any) -> bool:
    """Return whether only the chief calls a callback: it writes, or its attribute ``chief_only`` is true."""
    return bool(getattr(callback, "chief_only", isinstance(callback, _WRITING)))


class LastCallback(keras.callbacks.Callback):
    """The last callback: it sends the chief's weights, and lets all ranks stop after the same step.

    A callback of one rank may ask for a stop. That rank goes on until the next all-reduce has sent this to the others.
    ``compare(when)`` is called at the end of the first, second, fourth, eighth ... epoch, and of `fit`.
    """

    def __init__(self, ranks: TrainingRanks, send: Callable[[], None] | None, compare: Callable[[str], None]):
        super().__init__()
        self._ranks, self._send, self._compare = ranks, send, compare
        self._epochs = 0

    def set_model(self, model: Any) -> None:
        """Take the model. On JAX, reading ``self.model`` after each batch would copy its weights to the variables."""
        super().set_model(model)
        self._trained = model

    def on_train_begin(self, logs: Any = None) -> None:
        """Send the weights and the epoch that a callback of the chief may have restored."""
        self._ranks.wants_stop = self._ranks.stop = False
        if self._send is not None:
            self._send()
            epoch = self._ranks.topology.broadcast_object(hooks.initial_epoch(self.model))
            hooks.set_initial_epoch(self.model, epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop if a rank has asked for it in this step, and remember whether this rank asks."""
        wait_for_host()  # on JAX the all-reduce of the step, which sets `stop`, may still be running
        self._ranks.wants_stop |= self._trained.stop_training
        self._trained.stop_training = self._ranks.stop

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop if a rank asks for it."""
        ranks = self._ranks
        self._epochs += 1
        stops = self.model.stop_training or ranks.stop or ranks.wants_stop
        self.model.stop_training = not ranks.topology.all_true(not stops)
        if self._epochs & (self._epochs - 1) == 0:
            self._compare(f"after epoch {epoch + 1}")
