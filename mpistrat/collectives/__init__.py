"""Collectives of values of the replicas: all-reduce, all-gather, broadcast and reduce-scatter."""

from mpistrat.collectives.asynchronous import PendingAllReduce
from mpistrat.collectives.ops.base import CrossDeviceOps
from mpistrat.collectives.ops.default import (
    CollectiveAllReduce,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from mpistrat.collectives.options import CollectiveHints, CommunicationImplementation, CommunicationOptions

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
