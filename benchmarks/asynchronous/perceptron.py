"""The network of the comparison, 64-256-10 for images of 8 x 8 pixels, in plain NumPy."""

from __future__ import annotations

import numpy as np

INPUTS, HIDDEN, CLASSES = 64, 256, 10
BATCH, BATCHES, RATE = 64, 16, 0.1
Arrays = list[np.ndarray]


def initial_weights() -> Arrays:
    """Return matrix and bias of both layers: the same at each call."""
    rng = np.random.default_rng(0)
    weights = []
    for rows, columns in ((INPUTS, HIDDEN), (HIDDEN, CLASSES)):
        matrix = rng.standard_normal((rows, columns)) * np.sqrt(2 / rows)
        weights += [matrix.astype(np.float32), np.zeros(columns, np.float32)]
    return weights


def synthetic_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of an epoch: a random image for each class, with noise."""
    rng = np.random.default_rng(1)
    labels = rng.integers(CLASSES, size=BATCH * BATCHES)
    images = rng.random((CLASSES, INPUTS))[labels] + rng.normal(0, 0.5, (len(labels), INPUTS))
    return images.astype(np.float32), labels


def loss_and_gradients(weights: Arrays, images: np.ndarray, labels: np.ndarray) -> tuple[float, Arrays]:
    """Return the mean cross entropy of a batch, and its gradient by each weight."""
    matrix, bias, matrix_out, bias_out = weights
    hidden = np.maximum(images @ matrix + bias, 0)
    outputs = hidden @ matrix_out + bias_out
    rows = np.arange(len(labels))
    log_odds = outputs - outputs.max(axis=1, keepdims=True)
    log_odds -= np.log(np.exp(log_odds).sum(axis=1, keepdims=True))
    loss = -float(log_odds[rows, labels].mean())
    delta = np.exp(log_odds)
    delta[rows, labels] -= 1
    delta /= len(labels)
    delta_hidden = (delta @ matrix_out.T) * (hidden > 0)
    return loss, [images.T @ delta_hidden, delta_hidden.sum(axis=0), hidden.T @ delta, delta.sum(axis=0)]
