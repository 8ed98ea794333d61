"""``tf.compat.v1.distribute.experimental``: its strategies and options."""

from __future__ import annotations

from typing import Any

from mpistrat import experimental, strategies
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


class TPUStrategy(strategies.TPUStrategy, Strategy):
    """`mpistrat.TPUStrategy` with the arguments and methods of version 1.

    Parameters
    ----------
    tpu_cluster_resolver : ClusterResolver, optional
    steps_per_run : int, optional
        Kept, and without effect: `run` runs one step.
    device_assignment : DeviceAssignment, optional

    Examples
    --------
    >>> TPUStrategy(steps_per_run=5).steps_per_run
    5
    """

    def __init__(
        self, tpu_cluster_resolver: Any = None, steps_per_run: int | None = None, device_assignment: Any = None
    ):
        super().__init__(tpu_cluster_resolver, device_assignment)
        self._steps_per_run = steps_per_run

    @property
    def steps_per_run(self) -> int | None:
        """The number that the strategy was given."""
        return self._steps_per_run


__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
]
