"""Metrics of predictions that are compared with thresholds: precision, recall, and areas under curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.training.metrics.metric import Metric, as_float64, quotient, require_same_shape, weighted

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
        if self._thresholds.ndim != 1 or not self._thresholds.size or np.isnan(self._thresholds).any():
            raise ValueError(f"thresholds must be a list of numbers, not {thresholds!r}")
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
        where = above + (labels.reshape(-1) != 0) * (self._thresholds.size + 1)
        shape = self._counts.shape
        counts = np.bincount(where, weights.reshape(-1), shape[0] * shape[1])
        self._counts.assign_add(counts.reshape(shape))

    def _chosen(
        self, labels: np.ndarray, predictions: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the labels, predictions and weights that count."""
        return labels, predictions, weights

    def _read_counts(self) -> Counts:
        """Return the counts of all replicas, for increasing thresholds."""
        below = np.cumsum(self._counts.read_value(), axis=1)
        negatives, positives = below
        return Counts(positives[-1] - positives[:-1], negatives[-1] - negatives[:-1], negatives[:-1], positives[:-1])


class _OfPositives(ThresholdMetric):
    """The part of true positives among these and others, at one threshold or at several."""

    _others: str  # their name in `Counts`

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
    ):
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {top_k!r}")
        default = 0.5 if top_k is None else -np.inf
        given = default if thresholds is None else thresholds
        self._single = np.ndim(given) == 0
        super().__init__(name, np.atleast_1d(given).tolist())
        self._order = np.argsort(np.argsort(np.atleast_1d(given), kind="stable"), kind="stable")
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

    def result(self) -> Any:
        """Return the metric over the examples of all replicas."""
        counts = self._read_counts()
        part = counts.true_positives
        found = quotient(part, part + getattr(counts, self._others))[self._order]
        return found[0] if self._single else found


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

    The value is that of one process with the examples of all replicas. More thresholds approximate the area better.

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
        if curve not in ("ROC", "PR"):
            raise ValueError(f"curve must be 'ROC' or 'PR', not {curve!r}")
        if summation_method not in _HEIGHTS:
            raise ValueError(f"summation_method must be one of {sorted(_HEIGHTS)}, not {summation_method!r}")
        if thresholds is None:
            if num_thresholds < 2:
                raise ValueError(f"num_thresholds must be at least 2, not {num_thresholds!r}")
            inner = np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
        else:
            inner = np.asarray(thresholds, np.float64)
            if inner.size and not ((inner >= 0) & (inner <= 1)).all():
                raise ValueError(f"thresholds must be in [0, 1], not {thresholds!r}")
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
    both = (positives[:-1] > 0) & (positives[1:] > 0)
    ratio = np.where(both, quotient(positives[:-1], positives[1:]), 1.0)
    return np.sum(quotient(slope * (gained + intercept * np.log(ratio)), tp[1:] + fn[1:]))
