"""Variables: local, mirrored, and combined when they are read."""

from mpistrat.variables.cut import CutVariable
from mpistrat.variables.local import GpuVariable, LocalVariable, kind_on
from mpistrat.variables.mirrored import DistributedVariable, MirroredVariable
from mpistrat.variables.shared_copies import MirroredOfReplicas
from mpistrat.variables.sync_on_read import SyncOnReadOfReplicas, SyncOnReadVariable, read_together
from mpistrat.variables.variable import Variable, operand

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
    "operand",
    "read_together",
]
