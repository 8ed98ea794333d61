"""Means of precision and recall, for each class or over the classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.training.metrics.metric import Metric, as_float64, quotient, require_same_shape, weighted


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
        num_classes: int,
        average: str | None = None,
        beta: float = 1.0,
        threshold: float | None = None,
        name: str = "fbeta_score",
    ):
        if not isinstance(num_classes, int) or num_classes < 1:
            raise ValueError(f"num_classes must be a positive int, not {num_classes!r}")
        if average not in (None, "micro", "macro", "weighted"):
            raise ValueError(f"average must be None, 'micro', 'macro' or 'weighted', not {average!r}")
        if not beta > 0:
            raise ValueError(f"beta must be above 0, not {beta!r}")
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
        self, num_classes: int, average: str | None = None, threshold: float | None = None, name: str = "f1_score"
    ):
        super().__init__(num_classes, average, 1.0, threshold, name)
