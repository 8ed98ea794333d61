"""The metric of a mean squared error."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.runtime import arrays
from mpistrat.training.metrics.accuracy import require_same_shape
from mpistrat.training.metrics.mean import Mean


class MeanSquaredError(Mean):
    """The mean of ``(y_pred - y_true) ** 2`` over all elements.

    Parameters
    ----------
    name : str

    Examples
    --------
    >>> metric = MeanSquaredError()
    >>> metric.update_state([0.0, 1.0], [0.0, 3.0])
    >>> float(metric.result())
    2.0
    """

    def __init__(self, name: str = "mean_squared_error"):
        super().__init__(name)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]  # as in Keras
        """Count predictions of this replica.

        Parameters
        ----------
        y_true, y_pred : array, of one shape
        sample_weight : array or number, optional

        Raises
        ------
        ValueError
            If the shapes differ.
        """
        y_true, y_pred = (arrays.as_numpy(y, np.float64) for y in (y_true, y_pred))
        require_same_shape(y_true, y_pred)
        super().update_state((y_pred - y_true) ** 2, sample_weight)
