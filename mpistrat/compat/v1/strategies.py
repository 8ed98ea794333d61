"""The strategies with the methods of version 1."""

from __future__ import annotations

from mpistrat import strategies
from mpistrat.compat.v1.strategy import Strategy


class MirroredStrategy(strategies.MirroredStrategy, Strategy):
    """`mpistrat.MirroredStrategy` with the methods of version 1.

    Examples
    --------
    >>> MirroredStrategy().num_replicas_in_sync
    1
    """


class OneDeviceStrategy(strategies.OneDeviceStrategy, Strategy):
    """`mpistrat.OneDeviceStrategy` with the methods of version 1.

    Examples
    --------
    >>> OneDeviceStrategy("cpu:0").num_replicas_in_sync
    1
    """
