"""Values with one component per replica, sparse rows, and the enums that name reductions."""

from mpistrat.values.array_like import ArrayLike
from mpistrat.values.distributed import (
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
    ValueContext,
    component,
    reducible,
    snapshot,
)
from mpistrat.values.enums import OPS, ReduceOp, VariableAggregation, VariableSynchronization

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
