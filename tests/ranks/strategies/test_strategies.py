"""Each strategy: what it is made of, and what it says of itself."""

import time

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy, PerReplica

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def test_all_ranks_by_default():
    for make in (MultiWorkerMirroredStrategy, MirroredStrategy):
        strategy = make()
        assert strategy.num_replicas_in_sync == SIZE
        assert strategy.is_chief == (RANK == 0)
        assert (strategy.comm.rank, strategy.comm.size) == (RANK, SIZE)
        assert f"replicas={SIZE}" in repr(strategy)
        assert strategy.reduce("SUM", RANK, axis=None) == SIZE * (SIZE - 1) // 2


def test_one_device():
    strategy = OneDeviceStrategy("/cpu:0")
    assert strategy.num_replicas_in_sync == 1
    assert strategy.is_chief
    assert strategy.comm == MPI.COMM_SELF
    value = np.arange(3.0)
    assert strategy.reduce("SUM", RANK, axis=None) == RANK
    np.testing.assert_array_equal(strategy.reduce("MEAN", value, axis=None), value)
    assert strategy.reduce("SUM", value, axis=0) == 3
    assert strategy.reduce("MEAN", np.array([1, 2]), axis=0) == 1.5
    np.testing.assert_array_equal(strategy.gather(value, 0), value)
    assert float(strategy.extended.broadcast_to(float(RANK), "cpu:0")) == RANK
    assert strategy.extended.worker_devices == ("cpu:0",)
    assert strategy.extended.should_checkpoint
    assert strategy.run(lambda x: x + 1, (RANK,)) == RANK + 1
    assert strategy.agree(RANK == 0) == (RANK == 0)
    strategy.barrier()
    with strategy.chief_first() as first:
        assert first
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0])
        v += 1
    np.testing.assert_array_equal(v, [2, 3])
    assert strategy.extended.update(v, lambda x, y: x.assign_sub(y), ([1.0, 1.0],)).values[0] is v
    np.testing.assert_array_equal(v, [1, 2])
    with pytest.raises(TypeError):
        strategy.reduce("SUM", True, axis=None)


def test_a_reduction_without_an_axis_says_what_none_is():
    with pytest.raises(TypeError, match="axis=None combines the values of the replicas element by element"):
        MultiWorkerMirroredStrategy().reduce("SUM", 1.0)


def test_one_device_on_some_ranks_only():
    """It needs no other rank, not even to be made."""
    if RANK == SIZE - 1:
        strategy = OneDeviceStrategy("cpu:0")
        assert strategy.reduce("SUM", 2.0, axis=None) == 2
        assert strategy.comm.size == 1
    assert MultiWorkerMirroredStrategy().agree(True)


def test_devices_that_are_not_there():
    for wrong, error in [("", ValueError), ("moon:0", ValueError), (None, TypeError), (0, TypeError)]:
        with pytest.raises(error):
            OneDeviceStrategy(wrong)
        with pytest.raises(error):
            MirroredStrategy(devices=[wrong] * SIZE)
    with pytest.raises(RuntimeError, match="cuda:9"):
        OneDeviceStrategy("/gpu:9")
    with pytest.raises(RuntimeError, match="cuda:9"):
        MirroredStrategy(devices=["gpu:9"] * SIZE)


def test_devices_are_a_list():
    with pytest.raises(TypeError, match="not the string 'cpu:0'"):
        MirroredStrategy(devices="cpu:0")


def test_devices_of_replicas():
    for names in (["cpu:0"] * SIZE, ("/cpu:0",) * SIZE, [f"CPU:{rank}" for rank in range(SIZE)]):
        strategy = MirroredStrategy(devices=names)
        assert strategy.num_replicas_in_sync == SIZE
        assert strategy.extended.worker_devices[0].startswith("cpu:")
    for names in ([], ["cpu:0"] * (SIZE - 1)):
        with pytest.raises(ValueError):
            MirroredStrategy(devices=names)


def test_more_devices_than_ranks_are_dealt():
    strategy = MirroredStrategy(devices=[f"cpu:{i}" for i in range(SIZE + 1)])
    assert strategy.num_replicas_in_sync == SIZE + 1
    own = strategy.run(lambda: mpistrat.get_replica_context().devices[0])
    assert strategy.experimental_local_results(own) == strategy.extended.worker_devices
    with pytest.raises(ValueError, match="cannot share GPUs"):
        MirroredStrategy(devices=["cpu:0"] * SIZE + ["gpu:0"])
    with pytest.raises(ValueError, match="cross_device_ops"):
        MirroredStrategy(devices=["cpu:0"] * (SIZE + 1), cross_device_ops=mpistrat.ReductionToOneDevice())


def test_communicators():
    half = MPI.COMM_WORLD.Split(RANK % 2, key=-RANK)
    for make in (MultiWorkerMirroredStrategy, MirroredStrategy):
        strategy = make(comm=half)
        members = [rank for rank in reversed(range(SIZE)) if rank % 2 == RANK % 2]
        assert strategy.comm is half
        assert strategy.num_replicas_in_sync == len(members)
        assert strategy.is_chief == (members[0] == RANK)
        assert strategy.gather(np.array([RANK]), 0).tolist() == members
        assert strategy.run(lambda: mpistrat.get_replica_context().replica_id_in_sync_group) == half.rank
        assert float(strategy.extended.broadcast_to(float(RANK), "cpu:0")) == members[0]
        alone = make(comm=MPI.COMM_SELF)
        assert alone.reduce("SUM", RANK, axis=None) == RANK
        assert alone.gather(np.array([RANK]), 0).tolist() == [RANK]
    half.Free()


def test_own_calls_never_meet_those_of_the_library():
    comm = MPI.COMM_WORLD.Dup()
    strategy = MultiWorkerMirroredStrategy(comm=comm)
    request = comm.Irecv(np.empty(1), source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    assert strategy.reduce("SUM", 1, axis=None) == SIZE
    assert strategy.gather(np.ones(RANK), 0).shape == (SIZE * (SIZE - 1) // 2,)
    strategy.barrier()
    assert not request.Test()
    request.Cancel()
    request.Wait()
    comm.Free()


def test_communicators_that_are_none():
    for wrong in (1, "world", MPI, object()):
        for make in (MultiWorkerMirroredStrategy, MirroredStrategy):
            with pytest.raises(TypeError, match="communicator"):
                make(comm=wrong)
    with pytest.raises(ValueError, match="COMM_NULL"):
        MultiWorkerMirroredStrategy(comm=MPI.COMM_NULL)
    part = MPI.COMM_WORLD.Split(0 if RANK == 0 else MPI.UNDEFINED)
    if RANK:
        with pytest.raises(ValueError, match="COMM_NULL"):
            MultiWorkerMirroredStrategy(comm=part)
    else:
        assert MultiWorkerMirroredStrategy(comm=part).num_replicas_in_sync == 1
        part.Free()


@pytest.mark.ranks(min=2)
def test_inter_communicators_are_none():
    halves = MPI.COMM_WORLD.Split(RANK % 2)
    inter = halves.Create_intercomm(0, MPI.COMM_WORLD, 1 - RANK % 2)
    with pytest.raises(TypeError, match="intra-communicator"):
        MultiWorkerMirroredStrategy(comm=inter)
    inter.Free()
    halves.Free()


def test_strategy_on_a_freed_communicator():
    comm = MPI.COMM_WORLD.Dup()
    strategy = MultiWorkerMirroredStrategy(comm=comm)
    with strategy.scope():
        v = mpistrat.Variable(1.0, aggregation=mpistrat.VariableAggregation.SUM)
    assert strategy.reduce("SUM", 1, axis=None) == SIZE
    comm.Free()
    for call in (
        lambda: strategy.reduce("SUM", 1, axis=None),
        lambda: strategy.gather(np.ones(1), 0),
        lambda: strategy.barrier(),
        lambda: strategy.agree(True),
        lambda: strategy.run(lambda: v.assign(2.0)),
    ):
        if SIZE > 1:
            with pytest.raises(RuntimeError):
                call()
    assert "1" in repr(v)
    with pytest.raises(ValueError, match="COMM_NULL"):
        MultiWorkerMirroredStrategy(comm=comm)
    assert MultiWorkerMirroredStrategy().reduce("SUM", 1, axis=None) == SIZE


def test_many_strategies():
    first = MultiWorkerMirroredStrategy()
    for i in range(300):
        strategy = [MultiWorkerMirroredStrategy, MirroredStrategy][i % 2]()
        if i % 50 == 0:
            assert strategy.reduce("SUM", 1, axis=None) == SIZE
    assert first.reduce("SUM", 1, axis=None) == SIZE


def test_extended(strategy):
    extended = strategy.extended
    assert extended.worker_devices == extended.parameter_devices == ("cpu:0",)
    assert extended.experimental_between_graph == (SIZE > 1)
    assert extended.experimental_should_init is True
    assert extended.experimental_require_static_shapes is False
    assert extended.should_checkpoint == extended.should_save_summary == (RANK == 0)
    assert extended.non_slot_devices([]) == ("cpu:0",)


def test_resolver():
    resolver = mpistrat.cluster_resolver.MpiClusterResolver(MPI.COMM_WORLD)
    assert MultiWorkerMirroredStrategy(resolver).cluster_resolver is resolver
    strategy = MultiWorkerMirroredStrategy()
    found = strategy.cluster_resolver
    assert (found.task_type, found.task_id, found.placement.size) == ("worker", RANK, SIZE)
    assert strategy.cluster_resolver is found
    assert MirroredStrategy().cluster_resolver is None
    with pytest.raises(TypeError, match="must be a ClusterResolver"):
        MultiWorkerMirroredStrategy(object())


def test_agree(strategy):
    assert strategy.agree(True)
    assert not strategy.agree(False)
    assert not strategy.agree(RANK != 0)
    assert not strategy.agree(RANK != SIZE - 1)
    assert strategy.agree(1)
    assert not strategy.agree(None)
    assert strategy.agree(np.True_)


def test_barrier_waits_for_the_last(strategy, tmp_path):
    for late in range(SIZE):
        path = tmp_path / str(late)
        if late == RANK:
            time.sleep(0.05)
            path.touch()
        strategy.barrier()
        assert path.exists()


def test_chief_first(strategy, tmp_path):
    path = tmp_path / "made"
    with strategy.chief_first() as first:
        assert first == (RANK == 0)
        if first:
            assert not path.exists()
            time.sleep(0.05)
            path.write_text("x")
        assert path.exists()
    assert strategy.agree(True)


def test_chief_first_that_fails(strategy):
    def make_files(error):
        with strategy.chief_first():
            assert RANK == 0
            raise error("no file")

    for error in (KeyError, SystemExit, KeyboardInterrupt):
        with pytest.raises(error if RANK == 0 else RuntimeError, match="no file"):
            make_files(error)
    assert strategy.agree(True)


def test_chief_first_around_a_collective(strategy):
    """The others wait for replica 0, and cannot take part: all raise once, where they are, and are in step again."""

    def reduce_first():
        with strategy.chief_first() as first:
            assert first
            strategy.reduce("SUM", 1.0, axis=None)

    if SIZE == 1:
        reduce_first()
        return
    with pytest.raises(RuntimeError) as caught:
        reduce_first()
    told = str(caught.value)
    assert "rank 0: all_reduce SUM float64[] at " + __file__ in told
    assert "chief_first 0 at " + __file__ in told
    assert strategy.reduce("SUM", 1.0, axis=None) == SIZE


def test_chief_first_in_chief_first(strategy):
    with strategy.chief_first(), strategy.chief_first() as first:
        assert first == (RANK == 0)
    assert strategy.agree(True)


def test_agree_on_what_is_no_flag(strategy):
    """Before anybody is told: nobody waits, and the strategy goes on."""
    with pytest.raises(ValueError, match="ambiguous"):
        strategy.agree(np.array([True, False]))
    assert strategy.agree(np.True_)
    assert strategy.reduce("SUM", 1.0, axis=None) == SIZE


def test_values_from_function(strategy):
    seen = []

    def value_fn(context):
        seen.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
        return ("any", RANK)

    made = strategy.experimental_distribute_values_from_function(value_fn)
    assert isinstance(made, PerReplica)
    assert seen == [(RANK, SIZE)]
    assert made.values == (("any", RANK),)
    assert strategy.run(lambda x: x, (made,)) == ("any", RANK)
    assert strategy.experimental_local_results(made) == (("any", RANK),)


def test_local_results(strategy):
    assert strategy.experimental_local_results(3) == (3,)
    assert strategy.experimental_local_results(None) == (None,)
    assert strategy.experimental_local_results([1, PerReplica((2,))]) == ([1, 2],)
    assert strategy.experimental_local_results({"a": PerReplica((2,))}) == ({"a": 2},)
    assert strategy.experimental_local_results(mpistrat.Mirrored((4,))) == (4,)


def test_group(strategy):
    assert strategy.group(3) is None
    assert strategy.group(strategy.reduce("SUM", 1, axis=None), name="x") is None
