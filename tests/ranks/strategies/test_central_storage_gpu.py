"""CentralStorageStrategy with replicas that compute on GPUs: the variables are in memory of the host."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import IndexedSlices, VariableAggregation
from mpistrat.experimental import CentralStorageStrategy

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture
def strategy(cupy):
    return CentralStorageStrategy(["cuda:0"] * SIZE, "cpu:0")


def test_variables_are_on_the_host(strategy, cupy):
    assert strategy.extended.parameter_devices == ("cpu:0",)
    assert strategy.extended.worker_devices == ("cuda:0",)
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0], aggregation=VariableAggregation.SUM)
    assert v.device == "cpu:0"
    assert type(v.read_value()) is np.ndarray
    strategy.run(lambda: v.assign_add(cupy.asarray([1.0, RANK])))
    v.assign_add(cupy.asarray([1.0, 1.0]))
    assert v.numpy().tolist() == [2.0 + SIZE, 3.0 + SIZE * (SIZE - 1) / 2]


def test_optimizers(strategy, cupy):
    with strategy.scope():
        weights = [mpistrat.Variable(np.ones(5)), mpistrat.Variable(np.ones((4, 2)))]
        optimizer = mpistrat.optimizers.SGD(0.5, momentum=0.5)
    gradients = [cupy.full(5, 1.0 + RANK), IndexedSlices(cupy.full((1, 2), 1.0), cupy.asarray([RANK % 4]))]
    strategy.run(lambda: optimizer.apply_gradients(list(zip(gradients, weights, strict=True))))
    total = SIZE * (SIZE + 1) / 2
    np.testing.assert_allclose(weights[0], 1 - 0.5 * total)
    np.testing.assert_allclose(np.asarray(weights[1])[:, 0], [1 - 0.5 * (rank < SIZE) for rank in range(4)])


def test_one_replica_has_its_variables_where_it_computes(cupy):
    strategy = CentralStorageStrategy(["cuda:0"], comm=MPI.COMM_SELF)
    assert strategy.extended.parameter_devices == ("cuda:0",)
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0])
    assert v.device == "cuda:0"
    v.assign_add(cupy.asarray([1.0, 1.0]))
    assert v.numpy().tolist() == [2.0, 3.0]
