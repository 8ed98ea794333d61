"""The model for measurements of training steps: its arithmetic, without any distribution."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

SIZES = (784, 1024, 1024, 10)
SHAPES = [shape for rows, columns in pairwise(SIZES) for shape in ((rows, columns), (columns,))]


def initial_parameters() -> list[np.ndarray]:
    """Return weights and biases of all layers: the same at each call."""
    rng = np.random.default_rng(0)
    values = []
    for shape in SHAPES:
        spread = np.sqrt(2 / shape[0]) if len(shape) == 2 else 0.0
        values.append((spread * rng.standard_normal(shape)).astype(np.float32))
    return values


def random_batch(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random images and labels."""
    rng = np.random.default_rng(seed)
    images = rng.random((rows, SIZES[0]), np.float32)
    return images, rng.integers(SIZES[-1], size=rows)


class Perceptron:
    """A perceptron with two hidden layers (ReLU, softmax, cross-entropy).

    Parameters
    ----------
    rows : int
        Examples per batch. Memory for intermediate results is allocated once.
    gradients : sequence of numpy.ndarray
        Arrays for the gradients, in the order of `SHAPES`.
    """

    def __init__(self, rows: int, gradients: Sequence[np.ndarray]):
        self.gradients = gradients
        self._activations = [np.empty((rows, n), np.float32) for n in SIZES[1:]]
        self._deltas = [np.empty((rows, n), np.float32) for n in SIZES[1:-1]]
        self._active = [np.empty((rows, n), bool) for n in SIZES[1:-1]]
        self._rows = np.arange(rows)

    def differentiate(
        self, parameters: Sequence[np.ndarray], images: np.ndarray, labels: np.ndarray, examples: int
    ) -> float:
        """Return the summed loss of a batch divided by ``examples``, and write its gradients."""
        weights, biases = parameters[0::2], parameters[1::2]
        inputs = [images, *self._activations[:-1]]
        last = len(weights) - 1
        for i, (x, out) in enumerate(zip(inputs, self._activations, strict=True)):
            np.matmul(x, weights[i], out=out)
            out += biases[i]
            if i < last:
                np.maximum(out, 0, out=out)
        delta = self._activations[last]
        delta -= delta.max(axis=1, keepdims=True)
        np.exp(delta, out=delta)
        delta /= delta.sum(axis=1, keepdims=True)
        loss = -float(np.log(delta[self._rows, labels]).sum()) / examples
        delta[self._rows, labels] -= 1
        delta *= np.float32(1 / examples)
        for i in range(last, -1, -1):
            np.matmul(inputs[i].T, delta, out=self.gradients[2 * i])
            np.sum(delta, axis=0, out=self.gradients[2 * i + 1])
            if i:
                before = self._deltas[i - 1]
                np.matmul(delta, weights[i].T, out=before)
                np.greater(inputs[i], 0, out=self._active[i - 1])
                np.multiply(before, self._active[i - 1], out=before)
                delta = before
        return loss
