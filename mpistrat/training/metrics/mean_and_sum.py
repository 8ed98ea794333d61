"""The metrics of a mean, a sum, and means of errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.training.metrics.metric import Metric, as_float64, require_same_shape, weighted
from mpistrat.training.metrics.total import results


class Mean(Metric):
    """The (weighted) mean of all values.

    Every value counts the same, also when replicas count different numbers of values. The mean of no values is 0.

    Parameters
    ----------
    name : str

    Examples
    --------
    >>> metric = Mean()
    >>> metric.update_state([1.0, 2.0])
    >>> metric.update_state(6.0)
    >>> float(metric.result())
    3.0
    """

    def __init__(self, name: str = "mean"):
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

    Parameters
    ----------
    name : str

    Examples
    --------
    >>> metric = Sum()
    >>> metric.update_state([1.0, 2.0])
    >>> float(metric.result())
    3.0
    """

    def __init__(self, name: str = "sum"):
        super().__init__(name)
        self._total = self.add_total("total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Count values of this replica.

        Parameters
        ----------
        values : array or number
        sample_weight : array or number, optional
            The shape is that of the values, or of their first axes.
        """
        if sample_weight is None:
            self._total.add(as_float64(values))
        else:
            values, weights = weighted(values, sample_weight)
            self._total.add(values * weights)

    def result(self) -> Any:
        """Return the sum of the values of all replicas."""
        return self._total.result()


class _MeanOfErrors(Mean):
    """The mean of what `_error` returns for predictions, over all elements."""

    _error: Any

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
        super().update_state(self._error(y_pred - y_true), sample_weight)


class MeanAbsoluteError(_MeanOfErrors):
    """The mean of ``abs(y_pred - y_true)`` over all elements.

    Parameters
    ----------
    name : str

    Examples
    --------
    >>> metric = MeanAbsoluteError()
    >>> metric.update_state([0.0, 1.0], [0.0, 3.0])
    >>> float(metric.result())
    1.0
    """

    _error = staticmethod(np.abs)

    def __init__(self, name: str = "mean_absolute_error"):
        super().__init__(name)


class MeanSquaredError(_MeanOfErrors):
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

    _error = staticmethod(np.square)

    def __init__(self, name: str = "mean_squared_error"):
        super().__init__(name)


class RootMeanSquaredError(MeanSquaredError):
    """The square root of `MeanSquaredError`.

    Parameters
    ----------
    name : str

    Examples
    --------
    >>> metric = RootMeanSquaredError()
    >>> metric.update_state([0.0, 1.0], [0.0, 1.5])
    >>> round(float(metric.result()), 4)
    0.3536
    """

    def __init__(self, name: str = "root_mean_squared_error"):
        super().__init__(name)

    def result(self) -> Any:
        """Return the root of the mean over the predictions of all replicas."""
        return np.sqrt(super().result())
