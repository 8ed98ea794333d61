"""The sum of what was seen."""

from __future__ import annotations

from typing import Any

from mpistrat.training.metrics.metric import Metric, weighted


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
        """Count this replica's values.

        Parameters
        ----------
        values : array or number
        sample_weight : array or number, optional
            Of the values' shape, or of their first axes.
        """
        values, weights = weighted(values, sample_weight)
        self._total.add(values * weights)

    def result(self) -> Any:
        """The sum over all replicas."""
        return self._total.result()
