"""``TPUStrategy`` on ranks: a replica of several logical devices."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.tpu.experimental import DeviceAssignment, Topology, initialize_tpu_system, shutdown_tpu_system

SIZE = MPI.COMM_WORLD.size


def check(cores):
    """A program written for TPUs: ``SIZE / cores`` replicas train one variable on rows of their own."""
    resolver = mpistrat.cluster_resolver.MpiClusterResolver()
    topology = initialize_tpu_system(resolver)
    assignment = DeviceAssignment.build(topology, computation_shape=[1, 1, 1, cores], num_replicas=SIZE // cores)
    strategy = mpistrat.TPUStrategy(resolver, experimental_device_assignment=assignment)
    count = SIZE // cores
    assert strategy.num_replicas_in_sync == count
    assert strategy.cluster_resolver is resolver
    dataset = mpistrat.data.Dataset.from_arrays(np.arange(4.0 * count)).batch(2 * count)
    with strategy.scope():
        v = mpistrat.Variable(0.0, aggregation=mpistrat.VariableAggregation.SUM)

    def step(rows):
        rows = strategy.experimental_split_to_logical_devices(np.resize(rows, (2, cores)), [1, cores])
        rows = strategy.experimental_assign_to_logical_device(rows, cores - 1)
        return v.assign_add(strategy.experimental_replicate_to_logical_devices(rows).sum() / cores)

    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=(batch,))
    assert strategy.mesh.parent.allgather(float(v)) == SIZE * [float(v)]
    if cores == 1:
        assert float(v) == np.arange(4.0 * count).sum()
    assert strategy.mesh.comm("logical_device").size == cores
    shutdown_tpu_system(resolver)


@pytest.mark.four_ranks
@pytest.mark.parametrize("cores", [1, 2, 4])
def test_program(cores):
    if SIZE % cores:
        pytest.skip(f"for a multiple of {cores} ranks")
    check(cores)


@pytest.mark.skipif(SIZE < 8, reason="tests/replicas/test_eight_ranks.py starts eight")
def test_on_eight_ranks_with_four_replicas():
    check(2)


def test_errors():
    with pytest.raises(ValueError, match="their product must be the number of ranks"):
        mpistrat.TPUStrategy(experimental_device_assignment=DeviceAssignment.build(Topology(99), [3], None, 33))
    with pytest.raises(ValueError, match="need 9 ranks, and there are 8"):
        DeviceAssignment.build(Topology(8), [3], num_replicas=3)
    strategy = mpistrat.TPUStrategy(experimental_spmd_xla_partitioning=True)
    with pytest.raises(ValueError, match="does not go with SPMD"):
        strategy.experimental_assign_to_logical_device(1, 0)


def test_former_names():
    with pytest.warns(DeprecationWarning, match="use mpistrat.TPUStrategy"):
        former = mpistrat.experimental.TPUStrategy()
    assert isinstance(former, mpistrat.TPUStrategy)
    old = mpistrat.compat.v1.experimental.TPUStrategy(steps_per_run=3)
    assert (old.steps_per_run, old.num_replicas_in_sync) == (3, SIZE)
    assert float(old.reduce("SUM", 2.0)) == 2.0 * SIZE


@pytest.mark.parametrize("name", ["Server", "Client"])
def test_rpc_says_what_to_use(name):
    kind = getattr(mpistrat.experimental.rpc, name)
    with pytest.raises(NotImplementedError, match=r"ClusterCoordinator\.schedule"):
        kind.create("grpc", "localhost:1")
    with pytest.raises(NotImplementedError, match=r"ClusterCoordinator\.schedule"):
        kind()
    with pytest.raises(ValueError, match="'grpc', not 'http'"):
        kind.create("http", "localhost:1")
