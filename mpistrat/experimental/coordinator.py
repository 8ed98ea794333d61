"""The names of ``tf.distribute.experimental.coordinator``."""

from mpistrat.coordinator import ClusterCoordinator, RemoteValue
from mpistrat.coordinator import PerWorkerValue as PerWorkerValues

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
