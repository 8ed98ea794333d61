"""Metrics of means and sums: of values, of errors, of correct predictions, of cross entropies."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.representation import require
from mpistrat.training.metrics.metric import Metric, as_float64, quotient, require_same_shape, results, weighted


class Mean(Metric):
    """The (weighted) mean of all values.

    Every value counts the same, also when replicas count different numbers of values. The mean of no values is 0.

    Examples
    --------
    >>> metric = Mean()
    >>> metric.update_state([1.0, 2.0])
    >>> metric.update_state(6.0)
    >>> float(metric.result())
    3.0
    """

    def __init__(self, name: str | None = None):
        super().__init__(name)
        self._total = self.add_total("total")
        self._count = self.add_total("count")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Count values of this replica.

        Parameters
        ----------
        values : array or number
        sample_weight : array or number, optional
            The shape is that of the values, or of their first axes.
        """
        if sample_weight is None:
            values = as_float64(values)
            self._total.add(values)
            self._count.add(np.array(values.size, np.float64))
        else:
            values, weights = weighted(values, sample_weight)
            self._total.add(values * weights)
            self._count.add(weights)

    def result(self) -> Any:
        """Return the mean of the values of all replicas."""
        total, count = results(self._total, self._count)
        return total / count if count else total * 0.0


class Sum(Metric):
    """The (weighted) sum of all values.

    Examples
    --------
    >>> metric = Sum()
    >>> metric.update_state([1.0, 2.0])
    >>> float(metric.result())
    3.0
    """

    def __init__(self, name: str | None = None):
        super().__init__(name)
        self._total = self.add_total("total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Count values of this replica, as `Mean.update_state`."""
        if sample_weight is None:
            self._total.add(as_float64(values))
        else:
            values, weights = weighted(values, sample_weight)
            self._total.add(values * weights)

    def result(self) -> Any:
        """Return the sum of the values of all replicas."""
        return self._total.result()


class MeanOfExamples(Mean):
    """The mean of what `_values` returns for labels and predictions."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]  # as in Keras
        """Count predictions of this replica.

        Parameters
        ----------
        y_true, y_pred : array
            Labels and predictions. They have one shape, unless the class says otherwise.
        sample_weight : array or number, optional
            The shape is that of the labels, or of their first axes.

        Raises
        ------
        ValueError
            If the shapes do not fit together.
        """
        super().update_state(self._values(*(arrays.as_numpy(y) for y in (y_true, y_pred))), sample_weight)

    @abstractmethod
    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        """Return the values whose mean is the result: one for each example, or one for each element."""


class MeanAbsoluteError(MeanOfExamples):
    """The mean of ``abs(y_pred - y_true)`` over all elements.

    Examples
    --------
    >>> metric = MeanAbsoluteError()
    >>> metric.update_state([0.0, 1.0], [0.0, 3.0])
    >>> float(metric.result())
    1.0
    """

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return np.abs(_errors(y_true, y_pred))


class MeanAbsolutePercentageError(MeanOfExamples):
    """The mean of ``100 * abs((y_pred - y_true) / y_true)`` over all elements.

    A label nearer to 0 than 1e-7 counts as 1e-7.

    Examples
    --------
    >>> metric = MeanAbsolutePercentageError()
    >>> metric.update_state([2.0, -4.0], [3.0, -4.0])
    >>> float(metric.result())
    25.0
    """

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return 100 * np.abs(_errors(y_true, y_pred)) / np.maximum(np.abs(y_true), 1e-7)


class MeanSquaredError(MeanOfExamples):
    """The mean of ``(y_pred - y_true) ** 2`` over all elements.

    Examples
    --------
    >>> metric = MeanSquaredError()
    >>> metric.update_state([0.0, 1.0], [0.0, 3.0])
    >>> float(metric.result())
    2.0
    """

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return np.square(_errors(y_true, y_pred))


class RootMeanSquaredError(MeanSquaredError):
    """The square root of `MeanSquaredError`.

    Examples
    --------
    >>> metric = RootMeanSquaredError()
    >>> metric.update_state([0.0, 1.0], [0.0, 1.5])
    >>> round(float(metric.result()), 4)
    0.3536
    """

    def result(self) -> Any:
        """Return the root of the mean over the predictions of all replicas."""
        return np.sqrt(super().result())


class R2Score(Metric):
    """The coefficient of determination: the part of the variance of the labels that predictions explain.

    Constant labels have no variance: the score is 1 if all predictions are exact, otherwise 0.

    Parameters
    ----------
    class_aggregation : {"uniform_average", "variance_weighted_average", None}
        How the scores of several outputs become one. None returns the score of each.
    name : str
    num_outputs : int
        Values of an example. Keras learns it from the first batch, for which replicas would have to communicate.

    Raises
    ------
    ValueError
        If ``class_aggregation`` is another text, or ``num_outputs`` is below 1.

    Examples
    --------
    >>> metric = R2Score()
    >>> metric.update_state([1.0, 2.0, 3.0], [1.0, 2.0, 4.0])
    >>> float(metric.result())
    0.5
    """

    def __init__(self, class_aggregation: str | None = "uniform_average", name: str = "r2_score", num_outputs: int = 1):
        if class_aggregation not in ("uniform_average", "variance_weighted_average", None):
            raise ValueError(
                "class_aggregation must be 'uniform_average', 'variance_weighted_average' or None, not "
                f"{class_aggregation!r}"
            )
        require(num_outputs >= 1, "num_outputs must be at least 1", num_outputs)
        super().__init__(name)
        self._aggregation = class_aggregation
        # The rows: weights, labels, squares of labels, squares of errors.
        self._sums = self.add_weight("sums", (4, num_outputs))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count predictions of this replica, as `Accuracy.update_state`.

        The shape of ``y_true`` and ``y_pred`` is (examples, num_outputs), or (examples,) for one output.
        """
        labels, predictions = as_float64(y_true), as_float64(y_pred)
        require_same_shape(labels, predictions)
        outputs = self._sums.shape[1]
        if labels.shape[1:] not in ([(), (1,)] if outputs == 1 else [(outputs,)]) or not labels.ndim:
            raise ValueError(f"y_true has shape {labels.shape}, not (examples, num_outputs={outputs})")
        labels, weights = weighted(labels, sample_weight)
        terms = np.stack([np.ones_like(labels), labels, labels**2, (labels - predictions) ** 2])
        self._sums.assign_add((terms * weights).sum(1).reshape(4, outputs))

    def result(self) -> Any:
        """Return the score over the examples of all replicas."""
        weights, labels, squares, errors = self._sums.read_value()
        variances = squares - labels * quotient(labels, weights)
        scores = np.where(variances > 0, 1 - quotient(errors, variances), errors == 0)
        if self._aggregation is None:
            return scores
        return np.average(scores, weights=variances if self._aggregation[0] == "v" and variances.any() else None)


def _errors(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    require_same_shape(y_true, y_pred)
    return as_float64(y_pred) - as_float64(y_true)


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
        require(k >= 1, "k must be at least 1", k)
        super().__init__(name)
        self._k = k

    def _values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        labels = sparse_labels(y_true, y_pred).astype(np.int64)
        known = (labels >= 0) & (labels < y_pred.shape[-1])
        # Index 0 stands in for unknown labels, which `known` excludes.
        of_label = np.take_along_axis(y_pred, np.where(known, labels, 0)[..., None], -1)
        return known & ((y_pred > of_label).sum(-1) < self._k) & np.isfinite(of_label[..., 0])


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
        require(0 <= label_smoothing <= 1, "label_smoothing must be in [0, 1]", label_smoothing)
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
        # -y log(p) - (1 - y) log(1 - p) in odds: no overflow for large ones.
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
        # The largest is 0 then: exp cannot overflow.
        values = values - values.max(-1, keepdims=True)
        return values - np.log(np.exp(values).sum(-1, keepdims=True))
    return np.log(np.clip(values / values.sum(-1, keepdims=True), _NEAREST, 1 - _NEAREST))
