"""Values with one component per replica, sparse rows, and the enums that name reductions."""

from mpistrat.values.array_like import ArrayLike
from mpistrat.values.distributed import (
    OPS,
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
    ReduceOp,
    ValueContext,
    VariableAggregation,
    VariableSynchronization,
    component,
    reducible,
    snapshot,
)

__all__ = [
    "OPS",
    "ArrayLike",
    "DistributedValues",
    "IndexedSlices",
    "Mirrored",
    "PerReplica",
    "ReduceOp",
    "ValueContext",
    "VariableAggregation",
    "VariableSynchronization",
    "component",
    "reducible",
    "snapshot",
]
