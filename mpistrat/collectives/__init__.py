"""How the values of many replicas become one: one algorithm a file, chosen by a table."""

from mpistrat.collectives.asynchronous import PendingAllReduce
from mpistrat.collectives.collective_all_reduce import CollectiveAllReduce
from mpistrat.collectives.cross_device_ops import CrossDeviceOps
from mpistrat.collectives.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from mpistrat.collectives.nccl_all_reduce import NcclAllReduce
from mpistrat.collectives.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from mpistrat.collectives.reduction_to_one_device import ReductionToOneDevice

__all__ = [
    "CollectiveAllReduce",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "PendingAllReduce",
    "ReductionToOneDevice",
]
