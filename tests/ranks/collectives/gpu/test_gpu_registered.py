"""Arrays on GPUs by way of memory that the ranks of a node share, as `test_gpu_collectives` has it."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.collectives import gpu_all_reduce
from mpistrat.collectives.operations import parse_op
from mpistrat.experimental import CommunicationOptions
from mpistrat.runtime import registered_memory
from mpistrat.runtime.registered_memory import RegisteredMemory
from mpistrat.runtime.shared_memory import NoSharedMemoryError, share
from mpistrat.runtime.topology import Topology

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int64, np.complex64]
LENGTHS = (1, 0, 777, 40_001, 5)
ROUTE = "mpistrat.collectives.gpu_registered"


def values_of(rank, dtype):
    random = np.random.default_rng(rank)
    return [(100 * random.standard_normal(length)).astype(dtype).reshape(-1, 1) for length in LENGTHS]


def strategy_with(comm=None, implementation="registered", **options):
    return mpistrat.MultiWorkerMirroredStrategy(
        comm=comm, communication_options=CommunicationOptions(implementation=implementation, **options)
    )


@pytest.fixture
def registered(cupy, monkeypatch):
    """``registered(bytes of a slot)``: a strategy that goes this way, on a communicator of its own."""
    made = []

    def make(slot_bytes=40_000):
        monkeypatch.setattr(f"{ROUTE}.SLOT_BYTES", slot_bytes)
        made.append(strategy_with(MPI.COMM_WORLD.Dup()))
        return made[-1]

    yield make
    for strategy in made:
        strategy.comm.Free()


def assert_equal(cupy, got, want):
    assert type(got) is cupy.ndarray
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got.get(), want)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_as_on_the_host(cupy, registered, op, dtype):
    """In the order of ranks, in many pieces and in one; from two streams in turn."""
    if SIZE == 1:
        return
    mine = values_of(RANK, dtype)
    want = strategy_with(implementation="ordered").reduce(op, mine, axis=None)
    for slot_bytes in (4096, 2 << 20):
        strategy = registered(slot_bytes)
        for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
            with stream:
                for _ in range(2):
                    got = strategy.reduce(op, [cupy.asarray(value) for value in mine], axis=None)
                    for one, other in zip(got, want, strict=True):
                        assert_equal(cupy, one, other)


@pytest.mark.parametrize("name", ["MAX", "MIN", "PROD"])
def test_further_operations(cupy, registered, name):
    if SIZE == 1:
        return
    topology = Topology.of(registered().comm)
    for dtype in (np.float32, np.int32):
        rows = [np.array([rank - 1, 2, -3], dtype) for rank in range(SIZE)]
        (got,) = gpu_all_reduce.all_reduce(
            topology, parse_op(name), [cupy.asarray(rows[RANK])], name="registered"
        )
        want = {"MAX": np.maximum, "MIN": np.minimum, "PROD": np.multiply}[name].reduce(rows)
        assert_equal(cupy, got, want.astype(dtype))


def test_what_streams_still_do_comes_first(cupy, registered):
    """The value is written by work that waits in the caller's stream, and results are read in it much later."""
    if SIZE == 1 or not hasattr(cupy.cuda.Stream.null, "put"):
        return
    strategy, totals = registered(4096), []
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for number in range(6):
        with streams[number % 2] as stream:
            value = cupy.empty(5_000, np.float32)
            stream.put(lambda value=value, number=number: value._host.fill(number + RANK))
            totals.append(strategy.reduce("SUM", value, axis=None))
    for number, total in enumerate(totals):
        with streams[number % 2]:
            assert (total.get() == SIZE * number + sum(range(SIZE))).all()


def test_buffers_are_reduced_where_they_are(cupy, registered):
    if SIZE == 1:
        return
    strategy = registered(4096)
    buffers = strategy.experimental_buffers_like([cupy.ones(3_000, np.float32), cupy.ones(5)])
    for each in buffers:
        each[...] = RANK + 1
    got = strategy.reduce("SUM", buffers, axis=None)
    assert got[0] is buffers[0]
    assert all((each.get() == SIZE * (SIZE + 1) / 2).all() for each in got)


@pytest.mark.parametrize("layout", ["0011", "0101", "0001", "0123"])
def test_several_nodes(cupy, registered, monkeypatch, layout):
    if SIZE != 4:
        return
    node = int(layout[RANK])
    monkeypatch.setattr(Topology, "_ranks_of_node", staticmethod(lambda world: world.Split(node, world.rank)))
    strategy = registered(10_000)
    reason = {"0001": "different numbers of ranks", "0123": "alone on its node"}.get(layout)
    if reason:
        with pytest.raises(RuntimeError, match=reason):
            strategy.reduce("SUM", cupy.ones(3), axis=None)
        return
    for dtype in DTYPES:
        base = np.arange(20_011) % (7 if np.dtype(dtype).itemsize > 1 else 3)
        rows = [(base + rank).astype(dtype) for rank in range(SIZE)]
        want = (SIZE * base + sum(range(SIZE))).astype(dtype)
        assert_equal(cupy, strategy.reduce("SUM", cupy.asarray(rows[RANK]), axis=None), want)
        assert_equal(cupy, strategy.reduce("SUM", cupy.asarray(rows[RANK][:1]), axis=None), want[:1])


def test_memory_that_cuda_does_not_take(cupy, registered, monkeypatch):
    """What one rank cannot register, none uses, and nothing stays registered; the next way is gone."""
    if SIZE == 1 or not hasattr(cupy.cuda.runtime, "register_error"):
        return
    runtime, strategy = cupy.cuda.runtime, registered()
    before = dict(runtime._registered)
    if RANK == SIZE - 1:
        monkeypatch.setattr(runtime, "register_error", "cudaErrorNotSupported")
    with pytest.raises(RuntimeError, match=f"rank {SIZE - 1}: .*CUDA is told of: cudaErrorNotSupported"):
        strategy.reduce("SUM", cupy.ones(3), axis=None)
    gc.collect()
    assert runtime._registered == before
    by_itself = strategy_with(strategy.comm, "auto")
    assert by_itself.reduce("SUM", cupy.ones(3), axis=None).tolist() == [SIZE] * 3


def test_no_room(cupy, registered, monkeypatch):
    if SIZE == 1:
        return
    strategy = registered()

    def refuse(*_):
        raise NoSharedMemoryError("no space left on device")

    monkeypatch.setattr(f"{ROUTE}.share", refuse)
    with pytest.raises(RuntimeError, match="rank 0: memory that ranks share: no space left"):
        strategy.reduce("SUM", cupy.ones(3), axis=None)


def test_the_registration_ends_before_the_memory(cupy, registered, monkeypatch):
    """With the communicator, after the copies that still wait; at once a second time, and never twice."""
    if SIZE == 1 or not hasattr(cupy.cuda.runtime, "_registered"):
        return
    runtime = cupy.cuda.runtime
    before = dict(runtime._registered)
    comm = MPI.COMM_WORLD.Dup()
    strategy = strategy_with(comm)
    total = strategy.reduce("SUM", cupy.ones(50_000), axis=None)
    (memory,) = Topology.of(comm).gpu_registered.values()
    assert len(runtime._registered) == len(before) + 1
    del strategy  # another may be made on the communicator: the memory stays
    assert len(runtime._registered) == len(before) + 1
    held = weakref.ref(memory.slots.base)
    comm.Free()
    assert runtime._registered == before
    memory.close()
    assert held() is not None
    del memory
    gc.collect()
    assert held() is None
    assert (total.get() == SIZE).all()


def test_memory_is_held_until_it_is_unregistered(cupy):
    """Also where nobody closes it: a stand-in's `hostUnregister` looks at the memory."""
    if not hasattr(cupy.cuda.runtime, "_registered"):
        return
    before = dict(cupy.cuda.runtime._registered)
    shared = share(MPI.COMM_SELF, 3 * 8192, 3 * 8192)
    memory = RegisteredMemory(0, shared, 8192)
    held = weakref.ref(shared.stretches.base)
    assert memory.slots.shape == (1, registered_memory.SLOTS, 8192)
    del shared
    assert len(cupy.cuda.runtime._registered) == len(before) + 1
    del memory
    gc.collect()
    assert cupy.cuda.runtime._registered == before
    assert held() is None
