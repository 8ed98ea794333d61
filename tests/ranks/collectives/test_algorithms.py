"""Every algorithm on every layout of nodes, against a serial oracle."""

import resource

import ml_dtypes
import numpy as np
import pytest
from layouts import layouts, on_nodes
from mpi4py import MPI

import mpistrat
from mpistrat.collectives import CollectiveAllReduce
from mpistrat.collectives.algorithms import hierarchical
from mpistrat.collectives.algorithms.choose import ALGORITHMS
from mpistrat.collectives.arena import Arenas
from mpistrat.memory import node as shared_memory
from mpistrat.memory.node import NoSharedMemoryError
from mpistrat.runtime.topology import Topology

pytestmark = pytest.mark.four_ranks

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank

DTYPES = [np.dtype(each) for each in ("f4", "f8", "i4", "i1", "u2", "f2", ml_dtypes.bfloat16, "c8", ">f4")]
SHAPES = [(3,), (), (5, 7), (0,), (9_001,), (3,), (3,), (2, 2), (30, 100), (17,)]


LAYOUTS = layouts("0000", "0011", "0001", "0101", "0123")
# What each dtype needs does not depend on the nodes: all dtypes on one node and on two, three of them elsewhere.
QUICK = DTYPES[0], DTYPES[2], DTYPES[6]
PLACED = [
    pytest.param(layout, dtype, marks=() if dtype in QUICK else pytest.mark.full)
    for layout in LAYOUTS
    for dtype in DTYPES
    if dtype in QUICK or layout in LAYOUTS[:2]
]


@pytest.fixture(params=LAYOUTS)
def nodes(request):
    """A strategy whose ranks are spread over nodes, and whose pieces are small."""
    comm = on_nodes(
        request.param,
        slot_bytes=12_000,
        slot_bytes_between_nodes=12_000,
        same_place_bytes=1_000,
        alone_bytes=1_000,
        segment_bytes=100,
    )
    yield mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    comm.Free()


def oracle(make, op):
    values = [np.asarray(make(rank), np.result_type(make(rank).dtype, np.float64)) for rank in range(SIZE)]
    total = np.sum(values, axis=0)
    return total / SIZE if op == "MEAN" else total


def combine(strategy, algorithm, op, values):
    ops = CollectiveAllReduce(algorithm).bound_to(strategy.extended.engine.topology)
    return ops.all_reduce(mpistrat.ReduceOp.parse(op), values, mpistrat.experimental.CommunicationOptions())


def able(strategy):
    topology = strategy.extended.engine.topology
    return [name for name, each in ALGORITHMS.items() if each.fits(topology)]


@pytest.mark.parametrize("length", [0, 1, 5, 700, 10_007])
@pytest.mark.parametrize("combine", [np.add, np.maximum], ids=lambda ufunc: ufunc.__name__)
def test_segmented_ring_combines_in_the_order_of_the_ring(combine, length):
    """With fewer segments than receives that wait, and with many more."""
    comm = MPI.COMM_WORLD.Dup()
    values = np.random.default_rng(RANK).normal(size=length).astype(np.float32)
    everyone = comm.allgather(values)
    expected = np.empty_like(values)
    for rank in range(SIZE):  # whose part is combined with those of the next ranks, one after the other
        part = slice(length * rank // SIZE, length * (rank + 1) // SIZE)
        expected[part] = everyone[rank][part]
        for after in range(1, SIZE):
            combine(expected[part], everyone[(rank + after) % SIZE][part], out=expected[part])
    for nbytes in (20, 400, 100_000):
        for _ in range(2):
            mine, gathered, finished, copies = values.copy(), [], [], np.zeros_like(values)
            rest = iter(range(2))

            def spread(where, mine=mine, copies=copies):
                copies[where] = mine[where]

            hooks = hierarchical.InMemory(gathered.append, finished.append, spread, rest)
            hierarchical.segmented_ring_all_reduce(comm, combine, mine, nbytes, hooks)
            np.testing.assert_array_equal(mine, expected)
            np.testing.assert_array_equal(copies, expected)
            assert sorted(np.r_[tuple(gathered)].tolist()) == list(range(length))
            everywhere = np.concatenate([np.r_[tuple(each)] for each in comm.allgather(finished)])
            assert sorted(everywhere.tolist()) == list(range(length))
            assert SIZE == 1 or list(rest) == []
    comm.Free()


@pytest.mark.parametrize(("nodes", "dtype"), PLACED, indirect=["nodes"], ids=str)
def test_sums_and_means(nodes, dtype):
    def make(rank, shape):
        return (np.arange(int(np.prod(shape))) % 5 * (rank + 1)).reshape(shape).astype(dtype)

    tolerance = 0.01 if dtype.name in ("float16", "bfloat16") else 1e-6
    values = [make(RANK, shape) for shape in SHAPES]
    for op in ("SUM", "MEAN"):
        wanted = [oracle(lambda rank, shape=shape: make(rank, shape), op) for shape in SHAPES]
        for algorithm in [None, *able(nodes)]:
            for _ in range(2):
                got = combine(nodes, algorithm, op, values)
                for each, want in zip(got, wanted, strict=True):
                    assert each.shape == want.shape
                    np.testing.assert_allclose(each.astype(want.dtype), want, rtol=tolerance)
                same = nodes.comm.allgather(b"".join(each.tobytes() for each in got))
                assert len(set(same)) == 1


def test_ranks_that_differ_are_told(nodes):
    for length in (10, 1_200, 40_000):
        if SIZE > 1:
            with pytest.raises(ValueError, match="do not fit together"):
                nodes.reduce("SUM", np.ones(length + (RANK == SIZE - 1)), axis=None)
            other = nodes.barrier if RANK == SIZE - 1 else lambda n=length: nodes.reduce("SUM", np.ones(n), axis=None)
            with pytest.raises(RuntimeError, match="different collectives"):
                other()
        assert (nodes.reduce("SUM", np.ones(length), axis=None) == SIZE).all()


def test_buffers(nodes):
    like = {
        "a": np.zeros((5, 7), np.float32),
        "b": [np.zeros(3), np.zeros(20_001, np.float32)],
        "c": np.zeros((), np.int32),
        "d": np.zeros(9, np.float16),
        "e": np.zeros((0, 3)),
    }
    buffers = nodes.experimental_buffers_like(like)
    flat = [buffers["a"], *buffers["b"], buffers["c"], buffers["d"], buffers["e"]]
    assert not any(each.any() for each in flat)
    for op in ("SUM", "MEAN"):
        for _ in range(2):
            for i, each in enumerate(flat):
                each[...] = (np.arange(each.size).reshape(each.shape) % 7 + i) * (RANK + 1)
            got = nodes.run(lambda op=op: mpistrat.get_replica_context().all_reduce(op, buffers))
            got = [got["a"], *got["b"], got["c"], got["d"], got["e"]]
            for i, (mine, each) in enumerate(zip(flat, got, strict=True)):
                factor = SIZE * (SIZE + 1) / 2 / (SIZE if op == "MEAN" else 1)
                want = (np.arange(each.size).reshape(each.shape) % 7 + i) * factor
                np.testing.assert_allclose(each.astype(float), want, rtol=1e-6 if each.dtype != np.float16 else 0.01)
                if op == "SUM" or mine.dtype != np.int32:
                    assert each is mine


def test_buffers_beside_arrays_and_parts_of_buffers(nodes):
    buffer = nodes.experimental_buffers_like(np.zeros(1000))
    buffer[:] = 1
    array = np.ones(1000)
    total = nodes.reduce("SUM", [array, buffer, array[:3]], axis=None)
    assert total[1] is buffer
    assert all((each == SIZE).all() for each in total)
    assert (array == 1).all()
    nodes.reduce("SUM", buffer[10:20], axis=None)
    assert (buffer[10:20] == SIZE**2).all()
    assert (buffer[20:] == SIZE).all()
    assert (nodes.reduce("SUM", buffer[::2], axis=None)[10:] == SIZE**2).all()
    assert (buffer[20:] == SIZE).all()
    with pytest.raises(ValueError, match="overlap"):
        nodes.reduce("SUM", [buffer, buffer], axis=None)


def test_buffers_outlive_the_strategy():
    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    topology = strategy.extended.engine.topology
    buffer = strategy.experimental_buffers_like(np.zeros(100_000))
    assert len(topology.slot(Arenas)) == 1
    view = buffer[5:10]
    buffer[:] = 3
    del strategy, buffer
    comm.Free()
    assert (view == 3).all()
    del view
    assert not topology.slot(Arenas)


def test_buffers_of_different_shapes():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    if SIZE > 1:
        with pytest.raises(ValueError, match="do not fit together"):
            strategy.experimental_buffers_like(np.zeros(3 + RANK))
    with pytest.raises(TypeError, match="objects"):
        strategy.experimental_buffers_like(np.array([None]))


@pytest.mark.parametrize("everywhere", [True, False])
def test_no_room_for_shared_memory(nodes, monkeypatch, everywhere, caplog):
    def full(descriptor, start, nbytes):
        raise OSError(28, "No space left on device")

    if everywhere or RANK == SIZE - 1:
        monkeypatch.setattr("mpistrat.memory.node._reserve", full)
    comm = MPI.COMM_WORLD.Dup()
    Topology.of(comm, split=nodes.extended.engine.topology.nodes)
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    assert strategy.extended.engine.topology.memory is None
    buffer = strategy.experimental_buffers_like(np.zeros(10))
    for _ in range(2):
        buffer[:] = 1
        assert (strategy.reduce("SUM", np.ones(100_000), axis=None) == SIZE).all()
        assert strategy.reduce("SUM", buffer, axis=None) is buffer
        assert (buffer == SIZE).all()
    if SIZE > 1:
        text = MPI.COMM_WORLD.allgather(caplog.text)
        assert any("No space left" in each for each in text)
        large = nodes.experimental_buffers_like(np.ones(10_000))  # the strategy has memory, this does not
        large[:] = 1
        assert (nodes.reduce("MEAN", large, axis=None) == 1).all()
    comm.Free()


def test_little_room_for_shared_memory(monkeypatch):
    """One node has none for slots as large as wanted: those of all nodes are smaller."""
    reserve = shared_memory._reserve

    def nearly_full(descriptor, start, nbytes):
        if RANK == SIZE - 1 and nbytes > 200_000:
            raise OSError(28, "No space left on device")
        reserve(descriptor, start, nbytes)

    monkeypatch.setattr("mpistrat.memory.node._reserve", nearly_full)
    comm = on_nodes("0101")
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    memory = strategy.extended.engine.topology.memory
    assert SIZE == 1 or memory.slot_bytes == 64 << 10
    for _ in range(2):
        assert (strategy.reduce("SUM", np.ones(300_001, np.float32), axis=None) == SIZE).all()
    comm.Free()


def test_a_limit_for_files_is_told():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limits[1]))
    try:
        with pytest.raises(NoSharedMemoryError, match="cannot share"):
            shared_memory.share(MPI.COMM_WORLD, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_sharing_says_why_not(monkeypatch):
    monkeypatch.setattr(shared_memory, "FOLDER", "/no/such/folder")
    with pytest.raises(NoSharedMemoryError, match="/no/such/folder"):
        shared_memory.share(MPI.COMM_WORLD, 100)
