"""``tf.compat.v1.distribute``: the strategies with the methods that only version 1 had."""

from mpistrat.asynchronous.server import Server
from mpistrat.collectives import CrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice
from mpistrat.compat.v1 import cluster_resolver, experimental
from mpistrat.compat.v1.strategy import InputIterator, MirroredStrategy, OneDeviceStrategy, Strategy, get_loss_reduction
from mpistrat.data import InputContext, InputReplicationMode
from mpistrat.strategy import (
    ReplicaContext,
    RunOptions,
    StrategyExtended,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mpistrat.values import ReduceOp

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputIterator",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
