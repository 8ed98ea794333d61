"""``tf.compat.v1.distribute.experimental``: its strategy and options."""

from __future__ import annotations

from mpistrat import experimental
from mpistrat.collectives import CollectiveHints, CommunicationImplementation, CommunicationOptions
from mpistrat.compat.v1.parameter_server import ParameterServerStrategy
from mpistrat.compat.v1.strategy import Strategy

CollectiveCommunication = CommunicationImplementation


class CentralStorageStrategy(experimental.CentralStorageStrategy, Strategy):
    """`mpistrat.experimental.CentralStorageStrategy` with the methods of version 1.

    Examples
    --------
    >>> CentralStorageStrategy().num_replicas_in_sync
    1
    """


class MultiWorkerMirroredStrategy(experimental.MultiWorkerMirroredStrategy, Strategy):
    """`mpistrat.experimental.MultiWorkerMirroredStrategy` with the methods of version 1.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     strategy = MultiWorkerMirroredStrategy()
    >>> strategy.num_replicas_in_sync
    1
    """


__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
]
