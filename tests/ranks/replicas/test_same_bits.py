"""Training with virtual replicas has the same bits on any number of ranks and any nodes."""

import numpy as np
import pytest
from layouts import layouts, on_nodes
from mpi4py import MPI
from network import Training

import mpistrat

SIZE = MPI.COMM_WORLD.size
DIGESTS = {
    (6, "tree"): ("efb752a9b7c3fa31", "f20f7e194b4595b6", "0.4785163666787816"),
    (6, "exact"): ("deaf1717729bf344", "274fbb133a8320b3", "0.4785163671444429"),
    (6, "accumulated"): ("88b1b40d1d4e2aa3", "4c0872a2af4386ff", "0.7251697154747995"),
    (8, "tree"): ("799eebb872111467", "f5a1397b36a8541c", "0.47851636657530133"),
    (8, "exact"): ("eb612347922b1f69", "f20f7e194b4595b6", "0.47851636693748234"),
    (8, "accumulated"): ("eea93696158fb925", "d92c17f4f778462a", "0.7251697161150837"),
}

pytestmark = pytest.mark.skipif(SIZE > 6, reason="for at most as many ranks as replicas")


def trained(replicas, comm=None, accumulate=None, buffers=False, **options):
    strategy = mpistrat.MultiWorkerMirroredStrategy(
        communication_options=mpistrat.experimental.CommunicationOptions(**options),
        comm=comm,
        virtual_replicas=replicas,
    )
    training = Training(strategy, accumulate, buffers)
    training.run(range(6))
    return training.shown()


@pytest.mark.parametrize("replicas", [6, 8])
@pytest.mark.parametrize("options", [{}, {"bytes_per_pack": 1}, {"bytes_per_pack": 1 << 20}], ids=str)
@pytest.mark.parametrize("buffers", [False, True])
def test_by_the_tree(replicas, options, buffers):
    assert trained(replicas, buffers=buffers, **options) == DIGESTS[replicas, "tree"]


@pytest.mark.parametrize("replicas", [6, 8])
def test_exactly_and_accumulated(replicas):
    assert trained(replicas, implementation="exact") == DIGESTS[replicas, "exact"]
    assert trained(replicas, accumulate=3) == DIGESTS[replicas, "accumulated"]


@pytest.mark.parametrize("layout", layouts("001122", "010101", "000122", "011001"))
@pytest.mark.parametrize("replicas", [6, 8])
def test_on_nodes(layout, replicas):
    comm = on_nodes(layout)
    try:
        assert trained(replicas, comm) == DIGESTS[replicas, "tree"]
        assert trained(replicas, comm, implementation="exact") == DIGESTS[replicas, "exact"]
        assert trained(replicas, comm, accumulate=3) == DIGESTS[replicas, "accumulated"]
    finally:
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
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
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


@pytest.mark.skipif(SIZE == 1, reason="for several ranks")
@pytest.mark.parametrize("replicas", [6, 8])
def test_saved_and_finished_on_fewer_ranks(replicas, tmp_path):
    def training(comm):
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, virtual_replicas=replicas)
        made = Training(strategy)
        made.optimizer.build(made.variables)
        return made, made.variables + made.optimizer.variables

    begun, state = training(MPI.COMM_WORLD)
    begun.run(range(3))
    mpistrat.training.save(state, tmp_path / "half.h5")
    fewer = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank == SIZE - 1)
    if MPI.COMM_WORLD.rank < SIZE - 1:
        finished, state = training(fewer)
        mpistrat.training.load(state, tmp_path / "half.h5")
        finished.run(range(3, 6))
        assert finished.shown()[0] == DIGESTS[replicas, "tree"][0]
    fewer.Free()
