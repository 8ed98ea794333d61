"""Every way to reduce a value, and every kind of ops."""

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.collectives import CollectiveAllReduce

SIZE = MPI.COMM_WORLD.size
SUM_OF_RANKS = SIZE * (SIZE - 1) // 2
ALL_OPS = {
    "default": CollectiveAllReduce,
    "hierarchical": mpistrat.HierarchicalCopyAllReduce,
    "one device": mpistrat.ReductionToOneDevice,
}


def all_reduce(strategy, op, value, options=None):
    """Call all_reduce in a replica."""
    return strategy.run(lambda: mpistrat.get_replica_context().all_reduce(op, value, options))


def ways(strategy, op, value):
    """Yield every way to reduce one value."""
    yield lambda: strategy.reduce(op, value, axis=None)
    yield lambda: all_reduce(strategy, op, value)
    yield lambda: strategy.extended.reduce_to(op, value, "cpu:0").values[0]
    yield lambda: strategy.extended.batch_reduce_to(op, [(value, "cpu:0")])[0].values[0]


def rows_of(rank):
    """Rank 1 has no rows; indices repeat inside and across ranks."""
    n = 0 if rank == 1 else 3
    return mpistrat.IndexedSlices(np.full((n, 2), rank + 1.0), [0, 2, 2][:n], (4, 2))
