"""The metric of a confusion matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.training.metrics.metric import Metric, require_same_shape, weighted


class ConfusionMatrix(Metric):
    """The number of examples of each class (row) that are predicted to be of each class (column).

    Parameters
    ----------
    num_classes : int
    name : str

    Raises
    ------
    ValueError
        If the number of classes is not positive.

    Examples
    --------
    >>> metric = ConfusionMatrix(num_classes=3)
    >>> metric.update_state([0, 1, 2, 2], [0, 2, 2, 2])
    >>> metric.result()
    array([[1., 0., 0.],
           [0., 0., 1.],
           [0., 0., 2.]])
    """

    def __init__(self, num_classes: int, name: str = "confusion_matrix"):
        super().__init__(name)
        if num_classes < 1:
            raise ValueError(f"num_classes must be positive, not {num_classes!r}")
        self._classes = num_classes
        self._counts = self.add_weight("counts", (num_classes, num_classes))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count predictions of this replica.

        Parameters
        ----------
        y_true, y_pred : array of int, of one shape
            Numbers of classes.
        sample_weight : array or number, optional
            The shape is that of the labels, or of their first axes.

        Raises
        ------
        ValueError
            If the shapes differ, or a number is not that of a class.
        """
        labels, predictions = (arrays.as_numpy(y) for y in (y_true, y_pred))
        require_same_shape(labels, predictions)
        for name, classes in (("y_true", labels), ("y_pred", predictions)):
            if classes.size and classes.dtype.kind not in "iub":
                raise ValueError(f"{name} must be integers, not {classes.dtype}: give numbers of classes")
            if classes.size and not (classes.min() >= 0 and classes.max() < self._classes):
                raise ValueError(
                    f"{name} has classes from {classes.min()} to {classes.max()}, not from 0 to {self._classes - 1}"
                )
        _, weights = weighted(labels, sample_weight)
        where = labels.astype(np.int64).reshape(-1) * self._classes + predictions.astype(np.int64).reshape(-1)
        counts = np.bincount(where, weights.reshape(-1), self._classes**2)
        self._counts.assign_add(counts.reshape(self._classes, self._classes))

    def result(self) -> Any:
        """Return the matrix over the examples of all replicas."""
        return self._counts.read_value()
