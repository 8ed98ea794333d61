"""Every mean of complex numbers divides their parts one by one: an infinite part leaves the other one as it is."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import VariableAggregation, VariableSynchronization
from mpistrat.experimental import CommunicationOptions

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ROWS = 7


def values_of(rank, rows=ROWS, dtype=np.complex128):
    values = (np.arange(1, rows + 1) * (rank + 1) + 1j * np.arange(rows)).astype(dtype)
    if rank == 0:
        values[0], values[-1] = complex(np.inf, 2), complex(3, -np.inf)
    return values


def mean(rows=ROWS, dtype=np.complex128):
    total = sum(values_of(rank, rows, dtype) for rank in range(SIZE))
    out = np.empty_like(total)
    out.real, out.imag = total.real / SIZE, total.imag / SIZE
    return out


def own_rows(array):
    counts = [len(array) // SIZE + (rank < len(array) % SIZE) for rank in range(SIZE)]
    first = sum(counts[:RANK])
    return array[first : first + counts[RANK]]


def same(found, wanted):
    rtol = 1e-5 if np.asarray(wanted).dtype == np.complex64 else 1e-13
    np.testing.assert_allclose(np.real(found), np.real(wanted), rtol)
    np.testing.assert_allclose(np.imag(found), np.imag(wanted), rtol)


def replica():
    return mpistrat.get_replica_context()


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("rows", [ROWS, 100_001])
@pytest.mark.parametrize("algorithm", ["auto", "mpi", "hierarchical", "hierarchical_copy", "ordered", "exact", "tree"])
def test_all_reduce(algorithm, rows, dtype):
    options = CommunicationOptions(implementation=algorithm)
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    x, wanted = values_of(RANK, rows, dtype), mean(rows, dtype)
    for _ in range(2):  # the second call may go another way
        same(strategy.run(lambda: replica().all_reduce("MEAN", x)), wanted)
    for part in strategy.run(lambda: replica().all_reduce("MEAN", [x, x.copy()])):
        same(part, wanted)
    same(strategy.reduce("MEAN", complex(x[0]), axis=None), wanted[0])


@pytest.mark.parametrize("rows", [1, ROWS, 100_001])
def test_reduce_scatter_equals_all_reduce(strategy, rows):
    x = values_of(RANK, rows)
    part = strategy.run(lambda: replica().experimental_reduce_scatter("MEAN", x))
    same(part, own_rows(mean(rows)))
    whole = strategy.run(lambda: replica().all_reduce("MEAN", x))
    np.testing.assert_array_equal(np.isnan(part), np.isnan(own_rows(whole)))


def test_other_ways(strategy):
    x, wanted = values_of(RANK), mean()
    same(strategy.run(lambda: replica().experimental_all_reduce_async("MEAN", x).wait()), wanted)
    same(strategy.extended.reduce_to("MEAN", x, "cpu:0"), wanted)
    buffer = strategy.experimental_buffers_like(x)
    buffer[...] = x
    same(strategy.reduce("MEAN", buffer, axis=None), wanted)
    to_one = mpistrat.MirroredStrategy(cross_device_ops=mpistrat.ReductionToOneDevice())
    same(to_one.reduce("MEAN", x, axis=None), wanted)


def test_rows(strategy):
    rows = mpistrat.IndexedSlices(values_of(RANK), np.arange(ROWS))
    found = strategy.run(lambda: replica().all_reduce("MEAN", rows))
    for rank in range(SIZE):
        part, values = found.values[rank * ROWS : (rank + 1) * ROWS], values_of(rank)
        same(part.real, values.real / SIZE)
        same(part.imag, values.imag / SIZE)


@pytest.mark.parametrize("algorithm", ["auto", "exact"])
def test_over_an_axis(algorithm):
    options = CommunicationOptions(implementation=algorithm)
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    x = values_of(RANK)[:-1, None]
    everything = np.concatenate([values_of(rank)[:-1, None] for rank in range(SIZE)])
    found = strategy.reduce("MEAN", x, axis=0)
    assert np.isinf(found.real).all()
    np.testing.assert_allclose(found.imag, everything.imag.mean(0))


def test_variables(strategy):
    with strategy.scope():
        mirrored = mpistrat.Variable(np.zeros(ROWS, complex), aggregation=VariableAggregation.MEAN)
        averaged, summed = (
            mpistrat.Variable(
                np.zeros(ROWS, complex), synchronization=VariableSynchronization.ON_READ, aggregation=aggregation
            )
            for aggregation in (VariableAggregation.MEAN, VariableAggregation.SUM)
        )
    strategy.run(lambda: mirrored.assign(values_of(RANK)))
    same(mirrored.numpy(), mean())
    strategy.run(lambda: averaged.assign(values_of(RANK)))
    same(averaged.numpy(), mean())
    summed.assign(values_of(0))
    same(summed.numpy(), values_of(0))
