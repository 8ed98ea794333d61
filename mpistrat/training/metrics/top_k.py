"""Metrics of top-k accuracy."""

from __future__ import annotations

import numpy as np

from mpistrat.training.metrics.accuracy import Accuracy, require_same_shape, sparse_labels


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

    def _right(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
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

    def _right(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        require_same_shape(y_true, y_pred)
        return super()._right(y_true.argmax(-1), y_pred)
