"""Metrics of accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.runtime import arrays
from mpistrat.training.metrics.mean import Mean


class Accuracy(Mean):
    """The fraction of predictions that equal their label.

    Parameters
    ----------
    name : str

    Examples
    --------
    >>> metric = Accuracy()
    >>> metric.update_state([1, 2, 3, 4], [0, 2, 3, 4])
    >>> float(metric.result())
    0.75
    """

    def __init__(self, name: str = "accuracy"):
        super().__init__(name)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]  # as in Keras
        """Count predictions of this replica.

        Parameters
        ----------
        y_true, y_pred : array
            Labels and predictions. The class says which shapes they have.
        sample_weight : array or number, optional

        Raises
        ------
        ValueError
            If the shapes do not fit together.
        """
        super().update_state(self._right(*(arrays.as_numpy(y) for y in (y_true, y_pred))), sample_weight)

    def _right(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        require_same_shape(y_true, y_pred)
        return y_true == y_pred


class BinaryAccuracy(Accuracy):
    """The fraction of predictions on the correct side of a threshold.

    Labels are 0 or 1, predictions are in [0, 1].

    Parameters
    ----------
    name : str
    threshold : float

    Examples
    --------
    >>> metric = BinaryAccuracy()
    >>> metric.update_state([1, 1, 0, 0], [0.98, 1.0, 0.0, 0.6])
    >>> float(metric.result())
    0.75
    """

    def __init__(self, name: str = "binary_accuracy", threshold: float = 0.5):
        super().__init__(name)
        self._threshold = threshold

    def _right(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        require_same_shape(y_true, y_pred)
        return y_true == (y_pred > self._threshold)


class CategoricalAccuracy(Accuracy):
    """The fraction of examples whose largest prediction is at the largest value of the label.

    Labels and predictions have the shape (..., classes).

    Parameters
    ----------
    name : str

    Examples
    --------
    >>> metric = CategoricalAccuracy()
    >>> metric.update_state([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]])
    >>> float(metric.result())
    0.5
    """

    def __init__(self, name: str = "categorical_accuracy"):
        super().__init__(name)

    def _right(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        require_same_shape(y_true, y_pred)
        return y_true.argmax(-1) == y_pred.argmax(-1)


class SparseCategoricalAccuracy(Accuracy):
    """The fraction of examples whose largest prediction is at the integer label.

    Predictions have the shape (..., classes), labels the shape (...).

    Parameters
    ----------
    name : str

    Examples
    --------
    >>> metric = SparseCategoricalAccuracy()
    >>> metric.update_state([2, 1], [[0.1, 0.6, 0.3], [0.05, 0.95, 0]])
    >>> float(metric.result())
    0.5
    """

    def __init__(self, name: str = "sparse_categorical_accuracy"):
        super().__init__(name)

    def _right(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return sparse_labels(y_true, y_pred) == y_pred.argmax(-1)


def require_same_shape(y_true: np.ndarray, y_pred: np.ndarray) -> None:
    """Raise ValueError unless the shapes are equal."""
    if y_true.shape != y_pred.shape:
        raise ValueError(f"y_true has shape {y_true.shape}, and y_pred {y_pred.shape}")


def sparse_labels(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    """Return integer labels in the shape of the predictions without the axis of classes.

    Raises
    ------
    ValueError
        If the labels have another shape. A last axis of length 1 is removed.
    """
    if y_true.shape == (*y_pred.shape[:-1], 1):
        y_true = y_true[..., 0]
    if y_pred.ndim == 0 or y_true.shape != y_pred.shape[:-1]:
        raise ValueError(
            f"y_true of shape {y_true.shape} must be that of y_pred without its classes, {y_pred.shape[:-1]}"
        )
    return y_true
