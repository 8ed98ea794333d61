"""The mean of what was seen."""

from __future__ import annotations

from typing import Any

from mpistrat.training.metrics.metric import Metric, weighted


class Mean(Metric):
    """The (weighted) mean of all values: over examples, however many each replica saw; 0 of none.

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
        """Count this replica's values.

        Parameters
        ----------
        values : array or number
        sample_weight : array or number, optional
            Of the values' shape, or of their first axes.
        """
        values, weights = weighted(values, sample_weight)
        self._total.add(values * weights)
        self._count.add(weights)

    def result(self) -> Any:
        """The mean over all replicas' values."""
        total, count = self._total.result(), self._count.result()
        return total / count if count else total * 0.0
