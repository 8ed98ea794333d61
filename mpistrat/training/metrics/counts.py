"""Metrics of counts: confusion matrices and intersections over unions, and predictions compared with thresholds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.representation import require
from mpistrat.training.metrics.metric import Metric, as_float64, quotient, require_same_shape, weighted


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
        require(num_classes >= 1, "num_classes must be positive", num_classes)
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
        # The index of each pair in the flat matrix. int64: 8-bit labels would overflow.
        cells = labels.astype(np.int64).reshape(-1) * self._classes + predictions.astype(np.int64).reshape(-1)
        counts = np.bincount(cells, weights.reshape(-1), self._classes**2)
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
        If ``num_classes`` is not positive, or a number in ``target_class_ids`` is not a class.

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
        require(
            target_class_ids and all(0 <= class_id < num_classes for class_id in target_class_ids),
            f"target_class_ids must be from 0 to {num_classes - 1}",
            target_class_ids,
        )
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


class FBetaScore(Metric):
    """The harmonic mean of precision and recall, in which recall counts ``beta`` times as much.

    Parameters
    ----------
    num_classes : int
        Keras learns it from the first batch, for which replicas would have to communicate.
    average : {None, "micro", "macro", "weighted"}
        None returns the score of each class. Otherwise the result is the score of all classes counted together, the
        mean over the classes, or their mean weighted by the number of labels.
    beta : float
    threshold : float, optional
        A prediction above it is of the class. By default the largest prediction of an example is, if it is not 0.
    name : str

    Raises
    ------
    TypeError
        Without ``num_classes``.
    ValueError
        If ``num_classes`` or ``beta`` is not positive, or ``average`` is another text.

    Examples
    --------
    >>> metric = FBetaScore(num_classes=2, beta=2.0, threshold=0.5)
    >>> metric.update_state([[1, 1], [1, 0]], [[0.2, 0.6], [0.7, 0.6]])
    >>> metric.result().round(4)
    array([0.5556, 0.8333])
    """

    def __init__(
        self,
        num_classes: int | None = None,
        average: str | None = None,
        beta: float = 1.0,
        threshold: float | None = None,
        name: str = "fbeta_score",
    ):
        if num_classes is None:  # the first argument of Keras' class is `average`
            raise TypeError(
                f"{type(self).__name__}() needs num_classes=, the number of columns of y_true: Keras learns it from "
                "the first batch"
            )
        require(isinstance(num_classes, int) and num_classes >= 1, "num_classes must be a positive int", num_classes)
        require(
            average in (None, "micro", "macro", "weighted"),
            "average must be None, 'micro', 'macro' or 'weighted'",
            average,
        )
        require(beta > 0, "beta must be above 0", beta)
        super().__init__(name)
        self._average, self._beta, self._threshold = average, beta, threshold
        # The rows: true positives, predictions of the class, labels of the class.
        self._counts = self.add_weight("counts", (3, num_classes))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count predictions of this replica, as `Accuracy.update_state`.

        ``y_true`` has labels of 0 and 1, ``y_pred`` predictions. The shape of both is (examples, num_classes).
        """
        labels, predictions = as_float64(y_true), as_float64(y_pred)
        require_same_shape(labels, predictions)
        if labels.ndim != 2 or labels.shape[1] != self._counts.shape[1]:
            raise ValueError(f"y_true has shape {labels.shape}, not (examples, num_classes={self._counts.shape[1]})")
        labels, weights = weighted(labels, sample_weight)
        if self._threshold is None:
            # Keras' rule: 1e-9 keeps a row of zeros from being positive in all classes.
            positive = (predictions == predictions.max(1, keepdims=True)) & (np.abs(predictions) > 1e-9)
        else:
            positive = predictions > self._threshold
        self._counts.assign_add((weights * [positive * labels, positive, labels]).sum(1))

    def result(self) -> Any:
        """Return the score over the examples of all replicas: one, or without ``average`` one for each class."""
        counts = self._counts.read_value()
        if self._average == "micro":
            counts = counts.sum(1)
        right, predicted, labelled = counts
        scores = quotient((1 + self._beta**2) * right, self._beta**2 * labelled + predicted)
        if self._average == "weighted":
            return quotient((scores * labelled).sum(), labelled.sum())[()]
        return scores.mean() if self._average else scores


class F1Score(FBetaScore):
    """`FBetaScore` for ``beta`` of 1.

    Parameters
    ----------
    num_classes, average, threshold, name
        As for `FBetaScore`.

    Examples
    --------
    >>> metric = F1Score(num_classes=3, average="macro")
    >>> metric.update_state([[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[0.9, 0, 0], [0, 0.8, 0], [0.7, 0, 0.2]])
    >>> round(float(metric.result()), 4)
    0.5556
    """

    def __init__(
        self,
        num_classes: int | None = None,
        average: str | None = None,
        threshold: float | None = None,
        name: str = "f1_score",
    ):
        super().__init__(num_classes, average, 1.0, threshold, name)


_BEYOND = 1e-7  # how far the first and the last threshold of an AUC lie outside of [0, 1]


class Counts(NamedTuple):
    """Weights of examples for each threshold: predicted above it or not, and of a true label or not."""

    true_positives: np.ndarray
    false_positives: np.ndarray
    true_negatives: np.ndarray
    false_negatives: np.ndarray


class ThresholdMetric(Metric):
    """The base class of metrics that compare predictions with thresholds.

    A replica counts its examples in the intervals between thresholds. Counts are exact, whatever the replicas' shares
    of the examples. Weighted counts are sums in float64.
    """

    def __init__(self, name: str | None, thresholds: Sequence[float]):
        super().__init__(name)
        self._thresholds = np.sort(np.asarray(thresholds, np.float64))
        require(
            self._thresholds.ndim == 1 and self._thresholds.size and not np.isnan(self._thresholds).any(),
            "thresholds must be a list of numbers",
            thresholds,
        )
        # The row: the label. The column: the number of thresholds below the prediction.
        self._counts = self.add_weight("counts", (2, self._thresholds.size + 1))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count predictions of this replica, as `Accuracy.update_state`.

        ``y_true`` has labels of 0 and 1, ``y_pred`` numbers in [0, 1] in the same shape. Another prediction raises
        ValueError.
        """
        labels, predictions = as_float64(y_true), as_float64(y_pred)
        require_same_shape(labels, predictions)
        if predictions.size and not ((predictions >= 0) & (predictions <= 1)).all():
            raise ValueError(f"predictions must be in [0, 1], not from {predictions.min()} to {predictions.max()}")
        labels, weights = weighted(labels, sample_weight)
        labels, predictions, weights = self._chosen(labels, predictions, weights)
        above = np.searchsorted(self._thresholds, predictions.reshape(-1))
        cells = above + (labels.reshape(-1) != 0) * (self._thresholds.size + 1)
        shape = self._counts.shape
        counts = np.bincount(cells, weights.reshape(-1), shape[0] * shape[1])
        self._counts.assign_add(counts.reshape(shape))

    def _chosen(
        self, labels: np.ndarray, predictions: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the labels, predictions and weights that count."""
        return labels, predictions, weights

    def _read_counts(self) -> Counts:
        """Return the counts of all replicas, for increasing thresholds."""
        # Counts up to a threshold are not above it; the last column has all.
        negatives, positives = np.cumsum(self._counts.read_value(), axis=1)
        return Counts(positives[-1] - positives[:-1], negatives[-1] - negatives[:-1], negatives[:-1], positives[:-1])


class _AtThresholds(ThresholdMetric):
    """A metric with a result at one threshold or at several, in the order of the argument."""

    def __init__(self, thresholds: float | Sequence[float] | None = None, name: str | None = None):
        numbers = 0.5 if thresholds is None else thresholds
        self._single = np.ndim(numbers) == 0
        super().__init__(name, np.atleast_1d(numbers).tolist())
        # The position of each threshold among the sorted ones: results are in the order of the argument.
        self._order = np.argsort(np.argsort(np.atleast_1d(numbers), kind="stable"), kind="stable")

    @abstractmethod
    def _value(self, counts: Counts) -> np.ndarray:
        """Return the value at each threshold."""

    def result(self) -> Any:
        """Return the metric over the examples of all replicas."""
        values = self._value(self._read_counts())[self._order]
        return values[0] if self._single else values


class TruePositives(_AtThresholds):
    """The number, or the sum of the weights, of examples of label 1 whose prediction is above a threshold.

    Parameters
    ----------
    thresholds : float or sequence of float, optional
        By default 0.5. For a sequence, `result` has an element for each.
    name : str

    Examples
    --------
    >>> metric = TruePositives()
    >>> metric.update_state([0, 1, 1, 1], [0.9, 0.0, 0.8, 0.7])
    >>> float(metric.result())
    2.0
    """

    _part = "true_positives"  # its name in `Counts`

    def _value(self, counts: Counts) -> np.ndarray:
        return getattr(counts, self._part)


class FalsePositives(TruePositives):
    """The examples of label 0 whose prediction is above a threshold, as `TruePositives`.

    Examples
    --------
    >>> float(FalsePositives()([0, 1, 1, 1], [0.9, 0.0, 0.8, 0.7]))
    1.0
    """

    _part = "false_positives"


class TrueNegatives(TruePositives):
    """The examples of label 0 whose prediction is not above a threshold, as `TruePositives`.

    Examples
    --------
    >>> float(TrueNegatives()([0, 1, 1, 1], [0.9, 0.0, 0.8, 0.7]))
    0.0
    """

    _part = "true_negatives"


class FalseNegatives(TruePositives):
    """The examples of label 1 whose prediction is not above a threshold, as `TruePositives`.

    Examples
    --------
    >>> float(FalseNegatives()([0, 1, 1, 1], [0.9, 0.0, 0.8, 0.7]))
    1.0
    """

    _part = "false_negatives"


class _OfPositives(_AtThresholds):
    """The part of true positives among these and others, at one threshold or at several."""

    _others: str  # their name in `Counts`

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
    ):
        require(top_k is None or top_k >= 1, "top_k must be at least 1", top_k)
        super().__init__(-np.inf if thresholds is None and top_k is not None else thresholds, name)
        self._top_k, self._class_id = top_k, class_id

    def _chosen(
        self, labels: np.ndarray, predictions: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self._top_k is not None and self._top_k < predictions.shape[-1]:
            left = np.argsort(-predictions, axis=-1, kind="stable")[..., self._top_k :]
            predictions = predictions.copy()
            np.put_along_axis(predictions, left, -np.inf, axis=-1)
        if self._class_id is None:
            return labels, predictions, weights
        column = (..., self._class_id)
        return labels[column], predictions[column], weights[column]

    def _value(self, counts: Counts) -> np.ndarray:
        return quotient(counts.true_positives, counts.true_positives + getattr(counts, self._others))


class Precision(_OfPositives):
    """The part of the positive predictions whose label is 1; 0 without positive predictions.

    Parameters
    ----------
    thresholds : float or sequence of float, optional
        A prediction above it is positive. By default 0.5, or none with ``top_k``. For a sequence, `result` has an
        element for each.
    top_k : int, optional
        Only the largest ``top_k`` predictions along the last axis may be positive.
    class_id : int, optional
        Only this index of the last axis counts.
    name : str

    Examples
    --------
    >>> metric = Precision()
    >>> metric.update_state([0, 1, 1, 1], [0.9, 0.0, 0.8, 0.7])
    >>> round(float(metric.result()), 4)
    0.6667
    """

    _others = "false_positives"


class Recall(_OfPositives):
    """The part of the examples with label 1 whose prediction is positive; 0 without such examples.

    Parameters
    ----------
    thresholds, top_k, class_id, name
        As for `Precision`.

    Examples
    --------
    >>> metric = Recall()
    >>> metric.update_state([0, 1, 1, 1], [0.9, 0.0, 0.8, 0.7])
    >>> round(float(metric.result()), 4)
    0.6667
    """

    _others = "false_negatives"


class AUC(ThresholdMetric):
    """The area under the ROC curve or the precision-recall curve, approximated at thresholds.

    The value is as of one process with the examples of all replicas. More thresholds approximate the area better.

    Parameters
    ----------
    num_thresholds : int
        At least 2. They are equally spaced in [0, 1].
    curve : {"ROC", "PR"}
    summation_method : {"interpolation", "minoring", "majoring"}
        Between two thresholds: the trapezoid, or for PR the interpolation of Davis and Goadrich (2006); the lower
        height; the higher one.
    name : str
    thresholds : sequence of float, optional
        In [0, 1], in place of ``num_thresholds``. Both ends are added.

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> metric = AUC(num_thresholds=3)
    >>> metric.update_state([0, 0, 1, 1], [0.0, 0.5, 0.3, 0.9])
    >>> float(metric.result())
    0.75
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str = "auc",
        thresholds: Sequence[float] | None = None,
    ):
        require(curve in ("ROC", "PR"), "curve must be 'ROC' or 'PR'", curve)
        require(summation_method in _HEIGHTS, f"summation_method must be one of {sorted(_HEIGHTS)}", summation_method)
        if thresholds is None:
            require(num_thresholds >= 2, "num_thresholds must be at least 2", num_thresholds)
            # Both ends are added below, outside of [0, 1], so that 0 and 1 are between thresholds.
            inner = np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
        else:
            inner = np.asarray(thresholds, np.float64)
            require(not inner.size or ((inner >= 0) & (inner <= 1)).all(), "thresholds must be in [0, 1]", thresholds)
        self._curve, self._method = curve, summation_method
        super().__init__(name, [-_BEYOND, *inner, 1 + _BEYOND])

    def result(self) -> Any:
        """Return the area over the examples of all replicas."""
        tp, fp, tn, fn = self._read_counts()
        if self._curve == "PR" and self._method == "interpolation":
            return _interpolated_area(tp, fp, fn)
        recall = quotient(tp, tp + fn)
        x, y = (quotient(fp, fp + tn), recall) if self._curve == "ROC" else (recall, quotient(tp, tp + fp))
        return np.sum((x[:-1] - x[1:]) * _HEIGHTS[self._method](y[:-1], y[1:]))


_HEIGHTS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "interpolation": lambda a, b: (a + b) / 2,
    "minoring": np.minimum,
    "majoring": np.maximum,
}


def _interpolated_area(tp: np.ndarray, fp: np.ndarray, fn: np.ndarray) -> Any:
    """Return the area under the precision-recall curve, where true positives grow linearly with all positives."""
    positives = tp + fp
    gained = tp[:-1] - tp[1:]
    slope = quotient(gained, positives[:-1] - positives[1:])
    intercept = tp[1:] - slope * positives[1:]
    # Davis and Goadrich: the slope is constant between two thresholds, and the integral has a logarithm.
    both = (positives[:-1] > 0) & (positives[1:] > 0)
    ratio = np.where(both, quotient(positives[:-1], positives[1:]), 1.0)
    return np.sum(quotient(slope * (gained + intercept * np.log(ratio)), tp[1:] + fn[1:]))
