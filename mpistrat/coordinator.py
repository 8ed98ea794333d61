"""The names of ``tf.distribute.coordinator``, and the executor of a task farm."""

from mpistrat.asynchronous.cluster_coordinator import ClusterCoordinator
from mpistrat.asynchronous.executor import Executor
from mpistrat.asynchronous.on_worker import (
    CancelledError,
    PerWorkerValue,
    RemoteValue,
    experimental_get_current_worker_index,
)
from mpistrat.messages.pickling import LostRankError

__all__ = [
    "CancelledError",
    "ClusterCoordinator",
    "Executor",
    "LostRankError",
    "PerWorkerValue",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
