"""What `small.py` works on: the network of the example ``train_digits``, data for it, and single arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

LAYERS = (64, 128, 64, 10)
BATCH = 128  # rows of all replicas
FILES = (200, 537, 300, 400)  # rows of each file


class Digits(NamedTuple):
    """Images of 64 pixels from 0 to 16, and their labels."""

    images: np.ndarray
    labels: np.ndarray


def random_digits() -> Digits:
    """Return images with labels that a linear map decides: the same at each call."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 17, (sum(FILES), LAYERS[0])).astype(np.uint8)
    labels = ((images - 8.0) @ rng.standard_normal((LAYERS[0], LAYERS[-1]))).argmax(axis=1)
    return Digits(images, labels.astype(np.int64))


def write_files(digits: Digits, folder: Path) -> None:
    """Write the digits to HDF5 files ``train-0.h5``, ``train-1.h5``, ..."""
    import h5py

    start = 0
    for i, rows in enumerate(FILES):
        with h5py.File(folder / f"train-{i}.h5", "w") as file:
            file["images"] = digits.images[start : start + rows]
            file["labels"] = digits.labels[start : start + rows]
        start += rows


def scaled(images: np.ndarray) -> np.ndarray:
    """Return images as the network takes them."""
    return images.reshape(len(images), LAYERS[0]).astype(np.float32) / 16


def initial_weights() -> list[np.ndarray]:
    """Return the matrix and the bias of each layer: the same at each call."""
    rng = np.random.default_rng(0)
    values = []
    for inputs, outputs in itertools.pairwise(LAYERS):
        values.append((rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)).astype(np.float32))
        values.append(np.zeros(outputs, np.float32))
    return values


def loss_and_gradients(
    weights: Sequence[np.ndarray], images: np.ndarray, labels: np.ndarray
) -> tuple[float, list[np.ndarray]]:
    """Return the cross entropy summed over the rows, and its gradient by each weight."""
    inputs = [images]
    for matrix, bias in zip(weights[0:-2:2], weights[1:-2:2], strict=True):
        inputs.append(np.maximum(inputs[-1] @ matrix + bias, 0))
    log_odds = inputs[-1] @ weights[-2] + weights[-1]
    rows = np.arange(len(labels))
    log_odds -= log_odds.max(axis=1, keepdims=True)
    log_odds -= np.log(np.exp(log_odds).sum(axis=1, keepdims=True))
    delta = np.exp(log_odds)
    delta[rows, labels] -= 1
    gradients: list[np.ndarray] = []
    for matrix, x in zip(weights[-2::-2], reversed(inputs), strict=True):
        gradients = [x.T @ delta, delta.sum(axis=0), *gradients]
        delta = (delta @ matrix.T) * (x > 0)
    return -float(log_odds[rows, labels].sum(dtype=np.float64)), gradients


class Work(NamedTuple):
    """What the calls work on, and where the files of the loops are.

    ``values`` are reduced as they are, given to a metric, or summed. ``few`` and ``many`` are gradients of the
    variables of the loop, and of 200 variables. ``array`` has 64 KiB, and ``arrays`` are 60 vectors of 16 to 4,096
    floats.
    """

    values: np.ndarray
    few: list[np.ndarray]
    many: list[np.ndarray]
    array: np.ndarray
    arrays: list[np.ndarray]
    folder: Path
    epochs: int


Call: TypeAlias = "Callable[[int], Any]"  # of k: repeats the call k times, and returns what the last one returned
