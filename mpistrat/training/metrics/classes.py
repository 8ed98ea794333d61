"""Metrics of classes: the accuracy of the best prediction or of the k best, and cross entropies."""

from __future__ import annotations

import numpy as np

from mpistrat.training.metrics.mean_and_sum import MeanOfExamples
from mpistrat.training.metrics.metric import as_float64, require_same_shape

_NEAREST = 1e-7  # to 0 and to 1, of probabilities: as in Keras


class Accuracy(MeanOfExamples):
    """The fraction of predictions that equal their label.

    Examples
    --------
    >>> metric = Accuracy()
    >>> metric.update_state([1, 2, 3, 4], [0, 2, 3, 4])
    >>> float(metric.result())
    0.75
    """

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
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

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        require_same_shape(y_true, y_pred)
        return y_true == (y_pred > self._threshold)


class CategoricalAccuracy(Accuracy):
    """The fraction of examples whose largest prediction is at the largest value of the label.

    Labels and predictions have the shape (..., classes).

    Examples
    --------
    >>> metric = CategoricalAccuracy()
    >>> metric.update_state([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]])
    >>> float(metric.result())
    0.5
    """

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        require_same_shape(y_true, y_pred)
        return y_true.argmax(-1) == y_pred.argmax(-1)


class SparseCategoricalAccuracy(Accuracy):
    """The fraction of examples whose largest prediction is at the integer label.

    Predictions have the shape (..., classes), labels the shape (...).

    Examples
    --------
    >>> metric = SparseCategoricalAccuracy()
    >>> metric.update_state([2, 1], [[0.1, 0.6, 0.3], [0.05, 0.95, 0]])
    >>> float(metric.result())
    0.5
    """

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return sparse_labels(y_true, y_pred) == y_pred.argmax(-1)


def sparse_labels(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    """Return integer labels in the shape of the predictions without the axis of classes.

    A last axis of length 1 is removed. Raise ValueError if the labels have another shape.
    """
    if y_true.shape == (*y_pred.shape[:-1], 1):
        y_true = y_true[..., 0]
    if y_pred.ndim == 0 or y_true.shape != y_pred.shape[:-1]:
        raise ValueError(f"y_true of shape {y_true.shape} must be that of y_pred without classes, {y_pred.shape[:-1]}")
    return y_true


class SparseTopKCategoricalAccuracy(Accuracy):
    """The fraction of examples whose integer label is among the k largest predictions.

    Fewer than k predictions exceed the prediction of the label then. Predictions have the shape (..., classes). A
    label outside the classes, such as -1 for padding, counts as wrong.

    Parameters
    ----------
    k : int
    name : str

    Raises
    ------
    ValueError
        If k is below 1.

    Examples
    --------
    >>> metric = SparseTopKCategoricalAccuracy(k=2)
    >>> metric.update_state([2, 0], [[0.1, 0.6, 0.3], [0.05, 0.9, 0.06]])
    >>> float(metric.result())
    0.5
    """

    def __init__(self, k: int = 5, name: str = "sparse_top_k_categorical_accuracy"):
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        super().__init__(name)
        self._k = k

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels = sparse_labels(y_true, y_pred).astype(np.int64)
        known = (labels >= 0) & (labels < y_pred.shape[-1])
        own = np.take_along_axis(y_pred, np.where(known, labels, 0)[..., None], -1)
        return known & ((y_pred > own).sum(-1) < self._k) & np.isfinite(own[..., 0])


class TopKCategoricalAccuracy(SparseTopKCategoricalAccuracy):
    """`SparseTopKCategoricalAccuracy` for one-hot labels in the shape of the predictions.

    Parameters
    ----------
    k : int
    name : str

    Examples
    --------
    >>> metric = TopKCategoricalAccuracy(k=1)
    >>> metric.update_state([[0, 0, 1]], [[0.1, 0.6, 0.3]])
    >>> float(metric.result())
    0.0
    """

    def __init__(self, k: int = 5, name: str = "top_k_categorical_accuracy"):
        super().__init__(k, name)

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        require_same_shape(y_true, y_pred)
        return super()._values(y_true.argmax(-1), y_pred)


class _OfSmoothedLabels(MeanOfExamples):
    def __init__(self, name: str | None = None, from_logits: bool = False, label_smoothing: float = 0):
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be in [0, 1], not {label_smoothing!r}")
        super().__init__(name)
        self._from_logits, self._smoothing = from_logits, label_smoothing


class BinaryCrossentropy(_OfSmoothedLabels):
    """The mean cross entropy of labels of 0 and 1, over all elements.

    Parameters
    ----------
    name : str
    from_logits : bool
        Whether predictions are logarithms of odds, and not probabilities.
    label_smoothing : float
        The labels are taken to be so much nearer to 0.5: 0.1 makes 0.05 and 0.95 of them.

    Raises
    ------
    ValueError
        If ``label_smoothing`` is not in [0, 1].

    Examples
    --------
    >>> metric = BinaryCrossentropy()
    >>> metric.update_state([[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]])
    >>> round(float(metric.result()), 4)
    0.8149
    """

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        require_same_shape(y_true, y_pred)
        labels = as_float64(y_true) * (1 - self._smoothing) + self._smoothing / 2
        odds = as_float64(y_pred)
        if not self._from_logits:
            odds = np.clip(odds, _NEAREST, 1 - _NEAREST)
            odds = np.log(odds) - np.log1p(-odds)
        return np.logaddexp(0, odds) - labels * odds


class CategoricalCrossentropy(_OfSmoothedLabels):
    """The mean cross entropy of one-hot labels, over the examples.

    Labels and predictions have the shape (..., classes).

    Parameters
    ----------
    name : str
    from_logits : bool
        Whether predictions are logarithms, and not probabilities. Probabilities are divided by their sum.
    label_smoothing : float
        The labels are taken to be so much nearer to equal for all classes.

    Raises
    ------
    ValueError
        If ``label_smoothing`` is not in [0, 1].

    Examples
    --------
    >>> metric = CategoricalCrossentropy()
    >>> metric.update_state([[0, 1, 0], [0, 0, 1]], [[0.05, 0.95, 0], [0.1, 0.8, 0.1]])
    >>> round(float(metric.result()), 4)
    1.1769
    """

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        require_same_shape(y_true, y_pred)
        labels = as_float64(y_true) * (1 - self._smoothing) + self._smoothing / y_true.shape[-1]
        return -(labels * _logarithms(y_pred, self._from_logits)).sum(-1)


class SparseCategoricalCrossentropy(MeanOfExamples):
    """The mean cross entropy of integer labels, over the examples.

    Predictions have the shape (..., classes), labels the shape (...).

    Parameters
    ----------
    name : str
    from_logits : bool
        As for `CategoricalCrossentropy`.

    Raises
    ------
    ValueError
        By ``update_state``, if a label is not the number of a class.

    Examples
    --------
    >>> metric = SparseCategoricalCrossentropy()
    >>> metric.update_state([1, 2], [[0.05, 0.95, 0], [0.1, 0.8, 0.1]])
    >>> round(float(metric.result()), 4)
    1.1769
    """

    def __init__(self, name: str = "sparse_categorical_crossentropy", from_logits: bool = False):
        super().__init__(name)
        self._from_logits = from_logits

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels = sparse_labels(y_true, y_pred).astype(np.int64)
        if labels.size and not (labels.min() >= 0 and labels.max() < y_pred.shape[-1]):
            raise ValueError(
                f"y_true has classes from {labels.min()} to {labels.max()}, not from 0 to {y_pred.shape[-1] - 1}"
            )
        return -np.take_along_axis(_logarithms(y_pred, self._from_logits), labels[..., None], -1)[..., 0]


def _logarithms(predictions: np.ndarray, from_logits: bool) -> np.ndarray:
    """Return the logarithms of probabilities, which add up to 1 over the last axis."""
    values = as_float64(predictions)
    if from_logits:
        values = values - values.max(-1, keepdims=True)
        return values - np.log(np.exp(values).sum(-1, keepdims=True))
    return np.log(np.clip(values / values.sum(-1, keepdims=True), _NEAREST, 1 - _NEAREST))
