"""The names of ``tf.tpu.experimental``: the devices of a job, and how many of them make a replica."""

from mpistrat.strategies.tpu import DeviceAssignment, initialize_tpu_system, shutdown_tpu_system
from mpistrat.strategies.tpu import DeviceTopology as Topology

__all__ = ["DeviceAssignment", "Topology", "initialize_tpu_system", "shutdown_tpu_system"]
