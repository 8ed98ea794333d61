"""A batch normalization with the statistics of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from mpistrat.integrations.keras import hooks
from mpistrat.integrations.keras.hooks import BACKEND
from mpistrat.integrations.keras.step import RankStep, current

_MARK = "of_all_ranks"


class SyncBatchNormalization(hooks.BatchNormalization):
    """Keras' ``BatchNormalization`` with the mean and the variance of the rows of all ranks.

    It has the arguments of Keras' layer, and is saved as that. A step makes two all-reduces for each of these layers in
    its forward part and two in its backward part.

    Examples
    --------
    >>> import mpistrat.integrations.keras  # doctest: +SKIP
    >>> layer = mpistrat.integrations.keras.SyncBatchNormalization()  # doctest: +SKIP
    """

    of_all_ranks = True  # its moving statistics need no averages

    def get_build_config(self) -> dict[str, Any]:
        """Return what Keras keeps of a built layer, and a mark, which Keras alone skips, for files."""
        return {**super().get_build_config(), _MARK: True}

    def _moments(self, inputs: Any, mask: Any) -> Any:
        step = current()
        if step is None:
            return super()._moments(inputs, mask)
        axes = [axis for axis in range(len(inputs.shape)) if axis != self.axis % len(inputs.shape)]
        if mask is None:
            weight = ops.ones_like(ops.take(inputs, [0], axis=self.axis))
            summed, count = self._total(step, ops.sum(inputs, axes), ops.sum(weight)[None])
        else:
            weight = ops.cast(ops.expand_dims(mask, -1), inputs.dtype)
            summed, count = self._total(step, ops.sum(inputs * weight, axes), ops.sum(weight)[None])
            count += ops.cast(1e-7, count.dtype)  # Keras' epsilon
        mean = summed / count
        # A second all-reduce, of squared deviations: the mean of squares less the square of the mean has no digit left
        # in float32 where values are around 1e4 and differ by 1.
        deviations = ops.square((inputs - ops.reshape(mean, self._broadcast_shape(inputs))) * weight)
        (squares,) = self._total(step, ops.sum(deviations, axes))
        return mean, squares / count

    def _broadcast_shape(self, inputs: Any) -> list[int]:
        shape = [1] * len(inputs.shape)
        shape[self.axis] = inputs.shape[self.axis]
        return shape

    @staticmethod
    def _total(step: RankStep, *vectors: Any) -> list[Any]:
        """Return the sums of vectors over ranks."""
        total = _sum(step)(ops.concatenate(vectors))
        out, start = [], 0
        for vector in vectors:
            out.append(total[start : start + vector.shape[0]])
            start += vector.shape[0]
        return out


def _sum(step: RankStep) -> Callable[[Any], Any]:
    """Return a function that adds a vector over ranks, as its derivative does.

    A rank's gradients are multiplied by its weight after the backward pass. Gradients from other ranks must have the
    weights of those ranks, so they are multiplied by these and divided by the weight of this rank.
    """

    def backward(gradient: Any) -> Any:
        if step.scaled:  # the loss has the weight already
            return step.total(gradient)
        weight = ops.cast(step.weight, gradient.dtype)
        return step.total(gradient * weight) * ops.cast(step.inverse_weight, gradient.dtype)

    if BACKEND == "torch":
        import torch

        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, vector: Any) -> Any:
                return step.total(vector)

            @staticmethod
            def backward(context: Any, gradient: Any) -> Any:
                return backward(gradient)

        return Sum.apply
    if BACKEND == "jax":
        import jax

        summed = jax.custom_vjp(step.total)
        summed.defvjp(lambda vector: (step.total(vector), None), lambda _, gradient: (backward(gradient),))
        return summed
    import tensorflow as tf

    return tf.custom_gradient(lambda vector: (step.total(vector), backward))


# The name under which files keep the layer. Keras alone then loads its own, which is the same on one process.
SyncBatchNormalization.__name__ = "BatchNormalization"
SyncBatchNormalization.__module__ = "keras.layers"
hooks.replace_loaded_class(SyncBatchNormalization, _MARK)
