"""Training with virtual replicas has the same bits on any number of ranks and any nodes."""

import numpy as np
import pytest
from layouts import layouts, on_nodes
from mpi4py import MPI
from network import DIGESTS, Training, check_all, trained

import mpistrat
from mpistrat import PerReplica, VariableAggregation, VariableSynchronization
from mpistrat.runtime.topology import Topology
from tests.selection import core

SIZE = MPI.COMM_WORLD.size


@pytest.mark.parametrize("replicas", [6, 8])
@pytest.mark.parametrize("options", [{}, {"bytes_per_pack": 1}, {"bytes_per_pack": 1 << 20}], ids=str)
@pytest.mark.parametrize("buffers", [False, True])
def test_by_the_tree(replicas, options, buffers):
    assert trained(replicas, buffers=buffers, **options) == DIGESTS[replicas, "tree"]


@pytest.mark.four_ranks
@pytest.mark.parametrize("layout", layouts("000000", "001122", "010101", "000122", "011001"))
@pytest.mark.parametrize("replicas", [6, 8])
def test_on_nodes(layout, replicas):
    comm = on_nodes(layout)
    try:
        check_all(replicas, comm)
    finally:
        comm.Free()


@pytest.mark.skipif(SIZE < 8, reason="tests/replicas/test_eight_ranks.py starts eight")
@pytest.mark.parametrize("layout", ["00001111", "00112233", "01010101", "000122"])
def test_on_eight_ranks(layout):
    comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank < len(layout))
    if MPI.COMM_WORLD.rank < len(layout):
        Topology.of(comm, split=lambda comm: int(layout[comm.rank]))
        if comm.size == 6:
            check_all(6, comm)
        check_all(8, comm)
    comm.Free()


def totals(replicas, comm, op, dtype, length):
    """What replicas of several ranks get for values of which any order of addition shows."""
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, virtual_replicas=replicas)
    values = [np.random.default_rng(i).normal(size=length).astype(dtype) for i in range(replicas)]

    def fn():
        replica = mpistrat.get_replica_context()
        return replica.all_reduce(op, values[replica.replica_id_in_sync_group])

    def tree(of):
        if len(of) == 1:
            return of[0]
        middle = 1 << (len(of) - 1).bit_length() - 1
        return combine(tree(of[:middle]), tree(of[middle:]))

    combine = {"MAX": np.maximum, "PROD": np.multiply}.get(op, np.add)
    wide = np.float32 if dtype == np.float16 else dtype
    expected = tree([value.astype(wide) for value in values])
    expected = (expected / wide(replicas) if op == "MEAN" else expected).astype(dtype)
    return [*strategy.experimental_local_results(strategy.run(fn))], expected


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX", "PROD"])
@pytest.mark.parametrize("dtype", core([np.float16, np.float32, np.float64], np.float32))
def test_the_tree_is_followed(op, dtype):
    for layout in layouts("000000", "010101", "011001", "012222"):
        comm = on_nodes(layout)
        try:
            for replicas, length in ((SIZE, 3), (6, 1), (7, 40_000), (11, 257)):
                got, expected = totals(replicas, comm, op, dtype, length)
                assert all(each.tobytes() == expected.tobytes() for each in got)
        finally:
            comm.Free()


@pytest.mark.parametrize("limits", [{"slot_bytes": 0}, {"slot_bytes": 64 << 10}], ids=str)
def test_in_pieces_and_without_shared_memory(limits):
    comm = on_nodes("0" * SIZE, **limits)
    try:
        got, expected = totals(9, comm, "SUM", np.float64, 30_001)
        assert all(each.tobytes() == expected.tobytes() for each in got)
    finally:
        comm.Free()


@pytest.mark.four_ranks
@pytest.mark.skipif(SIZE == 1, reason="for several ranks")
@pytest.mark.parametrize("accumulate", [None, 3])
@pytest.mark.parametrize("replicas", [6, 8])
def test_saved_and_finished_on_fewer_ranks(replicas, accumulate, tmp_path):
    def training(comm):
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, virtual_replicas=replicas)
        made = Training(strategy, accumulate)
        made.optimizer.build(made.variables)
        return made, made.variables + made.optimizer.variables + made.metric.variables

    begun, state = training(MPI.COMM_WORLD)
    begun.run(range(4))  # into the second accumulation
    mpistrat.training.save(state, tmp_path / "half.h5")
    fewer = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank == SIZE - 1)
    if MPI.COMM_WORLD.rank < SIZE - 1:
        finished, state = training(fewer)
        mpistrat.training.load(state, tmp_path / "half.h5")
        finished.run(range(4, 6))
        weights, _, metric = DIGESTS[replicas, "accumulated" if accumulate else "tree"]
        assert finished.shown()[::2] == (weights, metric)
    fewer.Free()


def test_the_parts_of_other_replicas_are_shared_anew(tmp_path):
    def counter(replicas):
        strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=replicas)
        with strategy.scope():
            on_read, summed = VariableSynchronization.ON_READ, VariableAggregation.SUM
            value = mpistrat.Variable(np.zeros(2), synchronization=on_read, aggregation=summed, name="count")
        return strategy, value

    def parts(strategy, count):
        return strategy.gather(PerReplica([copy[:1] for copy in count.own_copies()]), 0).tolist()

    def number():
        return mpistrat.get_replica_context().replica_id_in_sync_group

    strategy, count = counter(6)
    strategy.run(lambda: count.assign_add([number(), 1.0]))
    mpistrat.training.save_async([count], tmp_path / "count.h5").wait()
    checkpoint = mpistrat.training.Checkpoint(count=count)
    saved = checkpoint.save(tmp_path / "objects")
    strategy.run(lambda: count.assign([7.0, 7.0]))
    mpistrat.training.load([count], tmp_path / "count.h5")
    assert parts(strategy, count) == [0, 1, 2, 3, 4, 5]
    count.assign([30.0, 0.0])
    checkpoint.restore(saved).assert_consumed()
    assert parts(strategy, count) == [0, 1, 2, 3, 4, 5]
    assert [*mpistrat.training.load_arrays(tmp_path / "count.h5")] == ["count"]
    for replicas in (10, None):
        strategy, count = counter(replicas)
        mpistrat.training.load([count], tmp_path / "count.h5")
        each = 15 / strategy.num_replicas_in_sync
        assert parts(strategy, count) == [each] * strategy.num_replicas_in_sync
