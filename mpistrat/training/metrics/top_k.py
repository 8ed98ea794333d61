"""How often the label is among the k largest predictions."""

from __future__ import annotations

import numpy as np

from mpistrat.training.metrics.accuracy import Accuracy, require_same_shape, sparse_labels


class SparseTopKCategoricalAccuracy(Accuracy):
    """How often fewer than k predictions of shape (..., classes) exceed that of the integer label.

    A label that is no class, such as -1 for padding, is not among them.

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
    """As `SparseTopKCategoricalAccuracy`, for one-hot labels of the predictions' shape.

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
