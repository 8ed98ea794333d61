"""Variables of a strategy, and what their copies must be."""

import numpy as np
from mpi4py import MPI

from mpistrat import Variable
from mpistrat import VariableAggregation as Aggregation
from mpistrat import VariableSynchronization as Synchronization

SIZE = MPI.COMM_WORLD.size


def make(strategy, value=1.0, aggregation=Aggregation.NONE, on_read=False, **options):
    synchronization = Synchronization.ON_READ if on_read else Synchronization.AUTO
    with strategy.scope():
        return Variable(value, synchronization=synchronization, aggregation=aggregation, **options)


def own(v):
    """This replica's copy, without communication."""
    return v.distribute_strategy.experimental_local_results(v)[0].array


def equal(v, wanted):
    np.testing.assert_array_equal(own(v), wanted)


def combined(aggregation, values):
    values = [np.asarray(each) for each in values]
    if aggregation is Aggregation.ONLY_FIRST_REPLICA:
        return values[0]
    total = sum(values)
    return total / SIZE if aggregation is Aggregation.MEAN else total


AGGREGATIONS = [Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA]
