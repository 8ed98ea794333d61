"""The reduction of the replicas' losses."""

from __future__ import annotations

from mpistrat.values import ReduceOp


def get_loss_reduction() -> ReduceOp:
    """Return the reduction of losses outside of Estimators: always SUM.

    Examples
    --------
    >>> get_loss_reduction().name
    'SUM'
    """
    return ReduceOp.SUM
