"""The metric of a sum."""

from __future__ import annotations

from typing import Any

from mpistrat.training.metrics.metric import Metric, as_float64, weighted


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
