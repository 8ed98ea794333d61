"""The metrics of a confusion matrix: its counts, and intersections over unions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.training.metrics.metric import Metric, quotient, require_same_shape, weighted


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
        """Count predictions of this replica, as `Accuracy.update_state`.

        ``y_true`` and ``y_pred`` are integers of one shape: numbers of classes. Another number raises ValueError.
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


class IoU(ConfusionMatrix):
    """The mean intersection over union of some classes: true positives over all that are or are taken for the class.

    Classes that are neither among the labels nor among the predictions do not count.

    Parameters
    ----------
    num_classes : int
    target_class_ids : sequence of int
        The classes whose mean is the result.
    name : str
    ignore_class : int, optional
        Examples with this label do not count. It may be outside of the classes, as 255 in masks.
    sparse_y_true, sparse_y_pred : bool
        Whether labels and predictions are numbers of classes; otherwise the largest value of ``axis`` is the class.
    axis : int

    Raises
    ------
    ValueError
        If ``num_classes`` is not positive, or a number in ``target_class_ids`` is not that of a class.

    Examples
    --------
    >>> metric = IoU(num_classes=2, target_class_ids=[0])
    >>> metric.update_state([0, 0, 1, 1], [0, 1, 0, 1])
    >>> round(float(metric.result()), 4)
    0.3333
    """

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str = "iou",
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ):
        super().__init__(num_classes, name)
        if not target_class_ids or not all(0 <= each < num_classes for each in target_class_ids):
            raise ValueError(f"target_class_ids must be from 0 to {num_classes - 1}, not {target_class_ids!r}")
        self._targets, self._ignored, self._axis = list(target_class_ids), ignore_class, axis
        self._sparse = sparse_y_true, sparse_y_pred

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count predictions of this replica, as `ConfusionMatrix.update_state`."""
        labels, predictions = (
            arrays.as_numpy(y) if sparse else arrays.as_numpy(y).argmax(self._axis)
            for y, sparse in zip((y_true, y_pred), self._sparse, strict=True)
        )
        if self._ignored is not None:
            require_same_shape(labels, predictions)
            counts = labels != self._ignored
            sample_weight = weighted(labels, sample_weight)[1][counts]
            labels, predictions = labels[counts], predictions[counts]
        super().update_state(labels, predictions, sample_weight)

    def result(self) -> Any:
        """Return the mean over the classes and the examples of all replicas; 0 without examples."""
        counts = super().result()
        right = counts.diagonal()
        either = (counts.sum(0) + counts.sum(1) - right)[self._targets]
        return quotient(right[self._targets], either).sum() / max((either > 0).sum(), 1)


class MeanIoU(IoU):
    """`IoU` of all classes.

    Parameters
    ----------
    num_classes, name, ignore_class, sparse_y_true, sparse_y_pred, axis
        As for `IoU`.

    Examples
    --------
    >>> metric = MeanIoU(num_classes=2)
    >>> metric.update_state([0, 0, 1, 1], [0, 1, 1, 1])
    >>> round(float(metric.result()), 4)
    0.5833
    """

    def __init__(
        self,
        num_classes: int,
        name: str = "mean_iou",
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ):
        super().__init__(num_classes, range(num_classes), name, ignore_class, sparse_y_true, sparse_y_pred, axis)


class BinaryIoU(IoU):
    """`IoU` of the classes 0 and 1, for predictions that are compared with a threshold.

    Parameters
    ----------
    target_class_ids : sequence of int
        0, 1 or both.
    threshold : float
        A prediction of at least so much is of class 1.
    name : str

    Examples
    --------
    >>> metric = BinaryIoU(threshold=0.3)
    >>> metric.update_state([0, 1, 0, 1], [0.1, 0.2, 0.4, 0.7])
    >>> round(float(metric.result()), 4)
    0.3333
    """

    def __init__(self, target_class_ids: Sequence[int] = (0, 1), threshold: float = 0.5, name: str = "binary_iou"):
        super().__init__(2, target_class_ids, name)
        self._threshold = threshold

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count predictions of this replica, as `ConfusionMatrix.update_state`."""
        labels = arrays.as_numpy(y_true).astype(np.int64)
        super().update_state(labels, arrays.as_numpy(y_pred) >= self._threshold, sample_weight)
