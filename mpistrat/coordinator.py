"""The names of ``tf.distribute.coordinator``."""

from mpistrat.asynchronous.cluster_coordinator import ClusterCoordinator
from mpistrat.asynchronous.on_worker import experimental_get_current_worker_index
from mpistrat.asynchronous.remote_value import CancelledError, PerWorkerValue, RemoteValue

__all__ = [
    "CancelledError",
    "ClusterCoordinator",
    "PerWorkerValue",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
