"""Variables: local, mirrored, and combined when they are read."""

from mpistrat.variables.distributed import DistributedVariable
from mpistrat.variables.local import LocalVariable
from mpistrat.variables.mirrored import CutVariable, MirroredOfReplicas, MirroredVariable
from mpistrat.variables.on_gpu import GpuVariable, kind_on
from mpistrat.variables.sync_on_read import SyncOnReadOfReplicas, SyncOnReadVariable, read_together
from mpistrat.variables.variable import Variable

__all__ = [
    "CutVariable",
    "DistributedVariable",
    "GpuVariable",
    "LocalVariable",
    "MirroredOfReplicas",
    "MirroredVariable",
    "SyncOnReadOfReplicas",
    "SyncOnReadVariable",
    "Variable",
    "kind_on",
    "read_together",
]
