"""Where the ranks are, and how they notice that they disagree."""

import gc
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.runtime.agreement.operation import MismatchError, operation
from mpistrat.runtime.topology import Limits, SingleRankTopology, Topology

pytestmark = pytest.mark.four_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


@pytest.fixture
def topology():
    return Topology.of(WORLD)


def test_one_for_each_communicator(topology):
    assert Topology.of(WORLD) is topology
    assert mpistrat.MultiWorkerMirroredStrategy().extended.engine.topology is topology
    assert mpistrat.MirroredStrategy().extended.engine.topology is topology
    copy = WORLD.Dup()
    other = Topology.of(copy)
    assert other is not topology
    assert Topology.of(copy) is other
    assert Topology.of(MPI.COMM_SELF) is not topology
    copy.Free()


def test_tiers(topology):
    assert (topology.rank, topology.size) == (RANK, SIZE)
    assert sorted(sum(topology.nodes, ())) == list(range(SIZE))
    assert list(topology.nodes) == sorted(topology.nodes)
    (mine,) = [ranks for ranks in topology.nodes if RANK in ranks]
    assert topology.node.allgather(RANK) == list(mine)
    assert topology.node.rank == mine.index(RANK)
    local = topology.node.rank
    assert topology.rail.allgather(RANK) == [ranks[local] for ranks in topology.nodes if len(ranks) > local]
    assert (topology.leaders is not None) == (local == 0)
    assert topology.ranks_per_node == tuple(map(len, topology.nodes))
    assert topology.parent is WORLD
    assert topology.world is not WORLD
    assert str(SIZE) in repr(topology)


def test_order_of_ranks_is_that_of_the_communicator():
    reverse = WORLD.Split(0, key=-RANK)
    topology = Topology.of(reverse)
    assert topology.rank == SIZE - 1 - RANK
    assert topology.world.allgather(RANK) == list(reversed(range(SIZE)))
    assert topology.nodes[0][0] == 0
    assert topology.all_gather_object(RANK) == list(reversed(range(SIZE)))
    reverse.Free()


def test_nodes_as_asked_for():
    """By groups of ranks, and by a function."""
    half = max(1, SIZE // 2)
    groups = [group for group in (range(half), range(half, SIZE)) if group]
    for split, nodes in [
        (groups, groups),
        ([[rank] for rank in reversed(range(SIZE))], [[rank] for rank in range(SIZE)]),
        (lambda comm: comm.rank % 2, [group for group in (range(0, SIZE, 2), range(1, SIZE, 2)) if group]),
    ]:
        comm = WORLD.Dup()
        topology = Topology.of(comm, split=split)
        assert topology.nodes == tuple(map(tuple, nodes))
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
        assert (strategy.reduce("SUM", np.ones(10_000), axis=None) == SIZE).all()
        comm.Free()


def test_limits_hold_for_one_communicator():
    comm = WORLD.Dup()
    topology = Topology.of(comm, limits=Limits(slot_bytes=0))
    assert topology.limits != Topology.of(WORLD).limits == Limits()
    assert topology.memory is None
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    assert (strategy.reduce("SUM", np.ones(10_000), axis=None) == SIZE).all()
    comm.Free()


def test_a_freed_communicator_gives_its_memory_back():
    """Also while a strategy still exists that has used it."""
    comm = WORLD.Dup()
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    for value in (np.ones(3), [np.ones(3), np.ones(4)], np.ones(10_000)):
        strategy.reduce("SUM", value, axis=None)
    memory = Topology.of(comm).memory
    left = None if memory is None else weakref.ref(memory)
    del memory
    comm.Free()
    gc.collect()
    assert left is None or left() is None


def test_wrong_nodes(topology):
    comm = WORLD.Dup()
    for wrong in ([], [range(SIZE), [0]], [range(SIZE + 1)]):
        with pytest.raises(ValueError, match="once"):
            Topology.of(comm, split=wrong)
    for options in ({"split": [range(SIZE)]}, {"limits": Limits()}):
        with pytest.raises(ValueError, match="has one"):
            Topology.of(WORLD, **options)
    comm.Free()


def test_objects(topology):
    assert topology.all_gather_object({"rank": RANK}) == [{"rank": rank} for rank in range(SIZE)]
    for root in range(SIZE):
        assert topology.broadcast_object([RANK], root) == [root]
    assert topology.all_true(True)
    assert not topology.all_true(RANK > 0)
    topology.barrier()


def test_sequence_counts_collectives(topology):
    before = topology.lock.sequence
    topology.barrier()
    topology.all_true(1)
    assert topology.lock.sequence == before + 2


def test_alone():
    alone = SingleRankTopology()
    assert (alone.rank, alone.size, alone.nodes) == (0, 1, ((0,),))
    assert alone.all_gather_object(RANK) == [RANK]
    assert alone.broadcast_object(RANK) == RANK
    assert not alone.all_true(False)
    alone.barrier()
    assert alone.parent == MPI.COMM_SELF
    with pytest.raises(AttributeError):
        alone.no_such_thing  # noqa: B018


def test_wrong_communicators():
    for wrong in (None, 3, "x"):
        with pytest.raises(TypeError):
            Topology.of(wrong)
    with pytest.raises(ValueError, match="COMM_NULL"):
        Topology.of(MPI.COMM_NULL)


@pytest.mark.ranks(min=2)
def test_mismatch_names_all_ranks(topology):
    with pytest.raises(MismatchError) as caught:
        topology.barrier() if RANK == SIZE - 1 else topology.all_true(True)
    text = str(caught.value)
    assert f"rank {RANK}:" in text
    assert f"rank {SIZE - 1}: barrier at {__file__}" in text
    assert ("rank 0: agree" if SIZE == 2 else f"ranks 0-{SIZE - 2}: agree" if SIZE > 3 else "ranks 0-1: agree") in text
    topology.barrier()


def in_a_collective(topology, action):
    """Do something in this thread while it is in one."""

    def begin(*arguments):
        del topology.lock.begin
        word = topology.lock.begin(*arguments)
        action()
        return word

    topology.lock.begin = begin
    assert topology.all_true(True)


def test_one_thread_at_a_time(topology):
    entered, leave, errors = threading.Event(), threading.Event(), []

    def wait():
        entered.set()
        leave.wait(20)

    def hold():
        try:
            in_a_collective(topology, wait)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(20)
    for call in (topology.barrier, lambda: topology.all_true(True), lambda: mpistrat.MirroredStrategy().barrier()):
        with pytest.raises(RuntimeError, match="another thread"):
            call()
    leave.set()
    thread.join()
    assert errors == []
    topology.barrier()


def test_threads_with_communicators_of_their_own():
    comms = [WORLD.Dup() for _ in range(2)]
    strategies = [mpistrat.MultiWorkerMirroredStrategy(comm=comm) for comm in comms]
    results = [[], []]

    def work(i):
        for j in range(20):
            results[i].append(float(strategies[i].reduce("SUM", np.full(2000, j + i), axis=None)[0]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[float((j + i) * SIZE) for j in range(20)] for i in range(2)]
    for comm in comms:
        comm.Free()


def test_turn_is_given_back_after_an_error(topology):
    with pytest.raises(ZeroDivisionError), topology.lock.collective(operation("fails")):
        raise topology.lock.on_all_ranks(ZeroDivisionError())
    topology.barrier()


def test_an_object_that_cannot_be_pickled(topology):
    """On one rank: no other waits for it in the middle of a collective."""
    if SIZE == 1:
        return
    for call in (topology.all_gather_object, partial(topology.broadcast_object, root=SIZE - 1)):
        with pytest.raises(MismatchError, match=r"refused: (AttributeError|PicklingError)"):
            call((lambda: 0) if RANK == SIZE - 1 else 0)
        topology.barrier()


def test_handler_of_a_signal_makes_no_collective_in_one(topology):
    """But on one rank, which has no others to be out of step with."""

    def interrupted():
        if SIZE == 1:
            topology.barrier()
            assert topology.all_true(True)
            return
        with pytest.raises(RuntimeError, match="in a collective of the same communicator"):
            topology.barrier()
        with pytest.raises(RuntimeError, match="in a collective of the same communicator"):
            topology.all_true(True)

    in_a_collective(topology, interrupted)
    topology.barrier()


def test_waiting_ranks_are_not_disturbed(topology):
    if RANK == 0:
        time.sleep(0.2)
    assert topology.all_gather_object(RANK) == list(range(SIZE))


def test_error_of_the_first_rank_is_everyones(topology):
    def fail(error):
        raise error

    for error, kind in [
        (KeyError("gone"), KeyError),
        (OSError("gone"), OSError),
        (FileNotFoundError(2, "gone"), FileNotFoundError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "gone"), (ValueError, RuntimeError)),
        (np.linalg.LinAlgError("gone"), Exception),
        (MPI.Exception(1), RuntimeError),
    ]:
        with pytest.raises(kind) as caught:
            topology.on_first(lambda error=error: fail(error))
        if not isinstance(error, MPI.Exception):
            assert "gone" in str(caught.value)
    assert topology.on_first(lambda: RANK + 5) == 5
    topology.barrier()
