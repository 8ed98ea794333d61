"""Collectives of arrays on GPUs: those of CuPy where MPISTRAT_TEST_GPU is set, else of what stands in for it."""

import functools

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.collectives import reduction
from mpistrat.collectives.gpu.nccl import Communicators, NcclRoute
from mpistrat.collectives.gpu.route import GpuCall, PackedMessage
from mpistrat.experimental import CommunicationOptions
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.topology import Topology
from mpistrat.values import ReduceOp

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int64, np.complex64]
LENGTHS = (1, 0, 777, 40_001, 5)


def values_of(rank, dtype=np.float32, lengths=LENGTHS):
    random = np.random.default_rng(rank)
    return [(100 * random.standard_normal(length)).astype(dtype).reshape(-1, 1) for length in lengths]


def in_replica(strategy, fn):
    return strategy.run(lambda: fn(mpistrat.get_replica_context()))


def strategy_with(comm=None, **options):
    return mpistrat.MultiWorkerMirroredStrategy(comm=comm, communication_options=CommunicationOptions(**options))


def assert_equal(cupy, got, want, exactly=True):
    assert type(got) is cupy.ndarray
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if exactly:
        np.testing.assert_array_equal(got.get(), want)
    else:
        limit = 1e-2 if want.dtype.itemsize == 2 else 1e-6
        np.testing.assert_allclose(got.get().astype(complex), want.astype(complex), rtol=limit, atol=1e-4)


def possible(route, cupy):
    """Whether a route can be gone here; a real GPU that ranks share is no place for NCCL."""
    shared = hasattr(cupy.cuda.runtime, "gpus") is False and cupy.cuda.runtime.getDeviceCount() < SIZE
    return not (route == "nccl" and (shared or not cupy.cuda.nccl.available))


# --- all-reduce ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("route", ["auto", "ring", "ordered"])
def test_lists_as_on_the_host(cupy, op, dtype, route):
    """Every way gives what the same arrays on the host give; through the host, with its bits."""
    strategy = strategy_with(implementation=route)
    mine = values_of(RANK, dtype)
    on_gpu = [cupy.asarray(value) for value in mine]
    want = strategy_with(implementation="ordered" if route == "ordered" else "auto").reduce(op, mine, None)
    for _ in range(2):
        got = strategy.reduce(op, on_gpu, axis=None)
        for one, other in zip(got, want, strict=True):
            assert_equal(cupy, one, other, exactly=route == "ordered")
    for before, after in zip(mine, on_gpu, strict=True):
        np.testing.assert_array_equal(after.get(), before)


def test_bits_through_the_host(cupy):
    """One array alone goes piece by piece as on the host, whatever its size."""
    strategy = strategy_with(implementation="ordered")
    for length in (1, 999, 1_000_001):
        (mine,) = values_of(RANK, lengths=[length])
        assert_equal(cupy, strategy.reduce("MEAN", cupy.asarray(mine), None), strategy.reduce("MEAN", mine, None))


def test_nccl(cupy, monkeypatch):
    if not possible("nccl", cupy):
        return
    strategy = strategy_with(MPI.COMM_WORLD.Dup(), implementation="nccl")
    calls = getattr(cupy.cuda.nccl, "calls", [])
    calls.clear()
    for op in ("SUM", "MEAN"):
        for dtype in DTYPES:
            mine = values_of(RANK, dtype)
            got = strategy.reduce(op, [cupy.asarray(value) for value in mine], axis=None)
            want = mpistrat.MultiWorkerMirroredStrategy().reduce(op, mine, axis=None)
            for one, other in zip(got, want, strict=True):
                assert_equal(cupy, one, other, exactly=False)
    if SIZE > 1 and hasattr(cupy.cuda.nccl, "calls"):
        assert len(calls) == 2 * len(DTYPES)  # a message for each list
        assert {dtype.itemsize for _, dtype, _ in calls} <= {4, 8}  # nothing is added up in half precision
        assert (cupy.cuda.nccl.NCCL_AVG in {op for *_, op in calls}) is (SIZE in (2, 4))  # where that is exact
        with pytest.raises(RuntimeError, match="implementation NCCL combines arrays on GPUs"):
            strategy.reduce("SUM", np.ones(3), axis=None)
    strategy.comm.Free()


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_nccl_in_half_precision(cupy, monkeypatch, dtype, op):
    """Sums are rounded at each step, a mean only once more."""
    if not possible("nccl", cupy):
        return
    monkeypatch.setitem(vars(mpistrat.rc), "nccl_half", True)
    strategy = strategy_with(MPI.COMM_WORLD.Dup(), implementation="nccl")
    stands_in = hasattr(cupy.cuda.nccl, "calls")
    calls = cupy.cuda.nccl.calls if stands_in else []
    calls.clear()
    got = strategy.reduce(op, [cupy.asarray(value) for value in values_of(RANK, dtype)], axis=None)
    for one, *every in zip(got, *(values_of(rank, dtype) for rank in range(SIZE)), strict=True):
        total = functools.reduce(np.add, every)
        want = total if op == "SUM" else (total.astype(np.float32) / SIZE).astype(dtype)
        assert_equal(cupy, one, want, exactly=stands_in)
    if stands_in and SIZE > 1:
        assert calls == [(sum(LENGTHS), np.dtype(dtype), cupy.cuda.nccl.NCCL_SUM)]
    smallest = np.finfo(dtype).smallest_subnormal if dtype is np.float16 else dtype(9.2e-41)
    got = strategy.reduce(op, cupy.full(3, smallest, dtype), axis=None)  # divided before the sum it would be 0
    assert got.get().tolist() == [float(smallest) * (SIZE if op == "SUM" else 1)] * 3
    calls.clear()
    monkeypatch.setitem(vars(mpistrat.rc), "nccl_half", False)
    strategy.reduce(op, cupy.full(3, smallest, dtype), axis=None)  # of a shape that is known
    assert {each.itemsize for _, each, _ in calls} <= {4}
    strategy.comm.Free()


def test_half_precision_on_one_rank_alone(cupy, monkeypatch):
    if SIZE == 1 or not possible("nccl", cupy):
        return
    strategy = strategy_with(MPI.COMM_WORLD.Dup(), implementation="nccl")
    monkeypatch.setitem(vars(mpistrat.rc), "nccl_half", RANK == 0)
    with pytest.raises(MismatchError, match="in half precision"):
        strategy.reduce("SUM", cupy.ones(3, np.float16), axis=None)
    with pytest.raises(ValueError, match=r"MPISTRAT_NCCL_HALF .*differs"):
        strategy_with(MPI.COMM_WORLD.Dup())


def test_nccl_with_one_rank(cupy):
    """All that one GPU can tell of NCCL: that it starts, takes these calls and dtypes, and ends."""
    if not cupy.cuda.nccl.available:
        return
    comm = MPI.COMM_SELF.Dup()
    topology, route = Topology.of(comm), NcclRoute()
    device = cupy.cuda.Device().id
    assert route.obstacle(topology, device) == ""
    for dtype in DTYPES:
        for op in (ReduceOp.SUM, ReduceOp.MEAN):
            (mine,) = values_of(RANK, dtype, [1001])
            message = cupy.asarray(mine).reshape(-1)
            whole = reduction.message_of(op, ((mine.dtype, mine.shape),), [0], 1)
            laid = PackedMessage(whole, message, cupy.empty(whole.length, whole.result))
            route.reduce(GpuCall(topology, device, None, 60.0), [laid])
            np.testing.assert_array_equal(laid.total.get(), mine.reshape(-1).astype(whole.result))
    comm.Free()


def test_nccl_where_ranks_share_a_gpu(cupy, monkeypatch):
    if SIZE == 1 or not hasattr(cupy.cuda.runtime, "gpus"):
        return
    monkeypatch.setattr(cupy.cuda.runtime, "gpus", ["the only one"])
    cupy.cuda.nccl.calls.clear()
    strategy = strategy_with(MPI.COMM_WORLD.Dup(), implementation="nccl")
    with pytest.raises(RuntimeError, match=r"ranks 0.* share a GPU"):
        strategy.reduce("SUM", cupy.ones(3), axis=None)
    got = strategy_with(strategy.comm).reduce("SUM", cupy.ones(3), axis=None)
    assert got.tolist() == [SIZE] * 3  # the next route
    assert not cupy.cuda.nccl.calls
    strategy.comm.Free()


def test_nccl_that_hangs(cupy, monkeypatch):
    if SIZE == 1 or not hasattr(cupy.cuda.nccl, "hangs"):
        return
    strategy = strategy_with(MPI.COMM_WORLD.Dup(), implementation="nccl", timeout_seconds=30)
    assert strategy.reduce("SUM", cupy.ones(3), axis=None).tolist() == [SIZE] * 3
    monkeypatch.setattr(cupy.cuda.nccl, "hangs", True)
    options = CommunicationOptions(timeout_seconds=1.0)  # more than the ranks of a busy machine need to meet
    with pytest.raises(TimeoutError, match=r"NCCL was not done within 1 s"):
        in_replica(strategy, lambda replica: replica.all_reduce("SUM", cupy.ones(3), options))
    (communicator,) = Topology.of(strategy.comm).slot(Communicators).values()
    assert communicator.aborted
    with pytest.raises(RuntimeError, match="after a time-out"):
        strategy.reduce("SUM", cupy.ones(3), axis=None)


def test_nccl_that_does_not_start(cupy, monkeypatch):
    """What fails on one rank alone is told to all, which go the next way."""
    if SIZE == 1 or not hasattr(cupy.cuda.nccl, "id_error"):
        return
    strategy = strategy_with(MPI.COMM_WORLD.Dup(), implementation="nccl")
    if RANK == 0:
        monkeypatch.setattr(cupy.cuda.nccl, "id_error", "no socket interface found")
    with pytest.raises(RuntimeError, match="rank 0: NCCL does not start: no socket interface"):
        strategy.reduce("SUM", cupy.ones(3), axis=None)
    assert strategy_with(strategy.comm).reduce("SUM", cupy.ones(3), axis=None).tolist() == [SIZE] * 3
    strategy.comm.Free()


@pytest.mark.parametrize("waits", [False, True])
def test_nccl_that_fails_meanwhile(cupy, monkeypatch, waits):
    if SIZE == 1 or not hasattr(cupy.cuda.nccl, "async_error"):
        return
    strategy = strategy_with(MPI.COMM_WORLD.Dup(), implementation="nccl")
    assert strategy.reduce("SUM", cupy.ones(3), axis=None).tolist() == [SIZE] * 3
    monkeypatch.setattr(cupy.cuda.nccl, "async_error", 7)  # in progress, as CuPy says it
    assert strategy.reduce("SUM", cupy.ones(3), axis=None).tolist() == [SIZE] * 3
    monkeypatch.setattr(cupy.cuda.nccl, "async_error", "unhandled system error")
    options = CommunicationOptions(timeout_seconds=30) if waits else None
    with pytest.raises(RuntimeError, match=f"rank {RANK}: .*NCCL failed: unhandled system error"):
        in_replica(strategy, lambda replica: replica.all_reduce("SUM", cupy.ones(3), options))
    (communicator,) = Topology.of(strategy.comm).slot(Communicators).values()
    assert communicator.aborted
    with pytest.raises(RuntimeError, match="after an error of NCCL"):
        strategy.reduce("SUM", cupy.ones(3), axis=None)


def test_an_error_of_the_gpu_while_nccl_works(cupy, monkeypatch):
    """CuPy's `Event.done` stays False then. It is not a time-out."""
    if SIZE == 1 or not hasattr(cupy.cuda.runtime, "failed"):
        return
    strategy = strategy_with(MPI.COMM_WORLD.Dup(), implementation="nccl")
    assert strategy.reduce("SUM", cupy.ones(3), axis=None).tolist() == [SIZE] * 3
    monkeypatch.setattr(cupy.cuda.runtime, "failed", True)
    options = CommunicationOptions(timeout_seconds=30)
    with pytest.raises(RuntimeError, match=f"rank {RANK}: CUDA, in work .* failed: cudaErrorIllegalAddress"):
        in_replica(strategy, lambda replica: replica.all_reduce("SUM", cupy.ones(3), options))
    (communicator,) = Topology.of(strategy.comm).slot(Communicators).values()
    assert communicator.aborted


def test_arrays_on_several_devices_of_one_rank(cupy):
    """The other ranks are told."""
    if SIZE == 1 or cupy.cuda.runtime.getDeviceCount() == 1:
        return
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    values = [cupy.ones(3), cupy.ones(3)]
    if RANK == 0:
        with cupy.cuda.Device(1 - cupy.cuda.Device().id):
            values[1] = cupy.ones(3)
    with pytest.raises((ValueError, MismatchError), match="cuda:0 and cuda:1"):
        strategy.reduce("SUM", values, axis=None)


def test_nccl_ends_with_its_communicator(cupy):
    if SIZE == 1 or not hasattr(cupy.cuda.nccl, "calls"):
        return
    strategy = strategy_with(MPI.COMM_WORLD.Dup(), implementation="nccl")
    strategy.reduce("SUM", cupy.ones(3), axis=None)
    (communicator,) = Topology.of(strategy.comm).slot(Communicators).values()
    strategy.comm.Free()
    assert communicator.destroyed


@pytest.mark.parametrize("name", ["MAX", "MIN", "PROD"])
def test_further_operations(cupy, name):
    ops = mpistrat.HierarchicalCopyAllReduce() if name == "PROD" else mpistrat.collectives.CollectiveAllReduce()
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ops)
    value = np.array([RANK + 1.0, 2.0, np.nan if RANK else 1.0], np.float32)
    want = np.asarray(strategy.extended.engine.ops.reduce(name, value, "cpu:0"))
    got = strategy.extended.engine.ops.reduce(name, cupy.asarray(value), "cpu:0").values[0]
    assert_equal(cupy, got, want)


def test_pieces_are_packed_in_one_launch(cupy, monkeypatch):
    from mpistrat.arrays.gpu import kernels

    launches = []
    original = kernels.EachElement.launch
    monkeypatch.setattr(kernels.EachElement, "launch", lambda *args: (launches.append(args[1]), original(*args))[1])
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    values = [cupy.full(n, float(RANK), np.float32) for n in range(200)]
    got = strategy.reduce("SUM", values, axis=None)
    assert [each.tolist() for each in got] == [[sum(range(SIZE))] * n for n in range(200)]
    assert len(launches) == 1


def test_structures_and_mixtures(cupy):
    """What lives on the host stays there, what lives on a GPU stays there; numbers are numbers."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    value = {"a": cupy.ones((2, 3)), "b": [np.ones(4), 1.0], "c": cupy.asarray(np.float32(RANK))}
    got = strategy.reduce("SUM", value, axis=None)
    assert_equal(cupy, got["a"], np.full((2, 3), float(SIZE)))
    assert type(got["b"][0]) is np.ndarray
    assert got["b"][1] == SIZE
    assert got["c"].shape == ()
    assert float(got["c"]) == sum(range(SIZE))


def test_arrays_that_are_not_contiguous(cupy):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    value = np.arange(12.0).reshape(3, 4)
    for view in (np.s_[:, ::2], np.s_[::-1], np.s_[:, 1]):
        got = strategy.reduce("SUM", cupy.asarray(value)[view], axis=None)
        assert_equal(cupy, got, SIZE * value[view])
    got = strategy.reduce("SUM", cupy.asarray(value).T, axis=None)
    assert_equal(cupy, got, SIZE * value.T)


def test_what_the_stream_still_does_comes_first(cupy):
    """The value is written by work that waits in the caller's stream, of which there are two."""
    if not hasattr(cupy.cuda.get_current_stream(), "put"):
        return
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            for call, want in (
                (lambda x: strategy.reduce("SUM", x, axis=None), 7.0 * SIZE),
                (lambda x: strategy.gather(x, axis=0), 7.0),
            ):
                value = cupy.zeros(100_000, np.float32)
                stream.put(lambda value=value: value._host.fill(7))
                got = call(value)
                assert (got.get() == want).all()


def test_mismatches_raise_on_all(cupy):
    if SIZE == 1:
        return
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with pytest.raises(ValueError, match=r"(?s)do not fit together.*all_reduce SUM on GPUs"):
        strategy.reduce("SUM", cupy.ones(3 + RANK), axis=None)
    with pytest.raises((ValueError, RuntimeError), match=r"ranks? 0"):
        strategy.reduce("SUM", np.ones(3) if RANK else cupy.ones(3), axis=None)
    with pytest.raises(TypeError, match="bool"):
        strategy.reduce("SUM", cupy.ones(3, bool), axis=None)


def test_arrays_on_several_devices(cupy):
    if cupy.cuda.runtime.getDeviceCount() == 1:
        return
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with cupy.cuda.Device(1):
        second = cupy.ones(3)
    with pytest.raises(ValueError, match="cuda:0 and cuda:1"):
        strategy.reduce("SUM", [cupy.ones(3), second], axis=None)
    got = strategy.reduce("SUM", second, axis=None)
    assert got.device.id == 1
    assert got.tolist() == [SIZE] * 3


# --- the other collectives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int64])
def test_gather_broadcast_and_scatter(cupy, dtype):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    mine = np.arange(3 * (RANK + 1)).reshape(RANK + 1, 3).astype(dtype)
    want = strategy.gather(mine, axis=0)
    assert_equal(cupy, strategy.gather(cupy.asarray(mine), axis=0), want)
    same = np.full((5, 4), RANK, dtype)
    got = strategy.extended.broadcast_to(cupy.asarray(same), "cpu:0").values[0]
    assert_equal(cupy, got, np.zeros((5, 4), dtype))
    got, want = (
        in_replica(strategy, lambda replica, x=each: replica.experimental_reduce_scatter("SUM", x))
        for each in (cupy.asarray(same), same)
    )
    assert_equal(cupy, got, want)
    if dtype is np.float32:
        large = np.arange(1_500_001).astype(dtype)  # several pieces of pinned memory
        assert_equal(cupy, strategy.gather(cupy.asarray(large), axis=0), np.concatenate([large] * SIZE))


def test_asynchronous(cupy):
    strategy = mpistrat.MultiWorkerMirroredStrategy()

    def fn(replica):
        pending = [replica.experimental_all_reduce_async("MEAN", [cupy.full(9, i), 1.0]) for i in range(4)]
        return [each.wait() for each in reversed(pending)]

    for i, (got, one) in zip((3, 2, 1, 0), in_replica(strategy, fn), strict=True):
        assert_equal(cupy, got, np.full(9, float(i)))
        assert one == 1.0


def test_reduce_over_an_axis(cupy):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    mine = np.arange(3.0 * (RANK + 1)).reshape(RANK + 1, 3)
    for op in ("SUM", "MEAN"):
        for axis in (0, (0, 1)):
            got = strategy.reduce(op, cupy.asarray(mine), axis=axis)
            np.testing.assert_allclose(got.get(), strategy.reduce(op, mine, axis=axis))


def test_reduction_to_one_device(cupy):
    strategy = mpistrat.MirroredStrategy(cross_device_ops=mpistrat.ReductionToOneDevice())
    got = strategy.reduce("MEAN", [cupy.full(3, RANK), cupy.ones(2)], axis=None)
    assert got[0].tolist() == [(SIZE - 1) / 2] * 3
    assert type(got[1]) is cupy.ndarray


# --- other libraries ---------------------------------------------------------------------------------------


class Tensor:
    """An array on a GPU of a library that speaks DLPack."""

    def __init__(self, array):
        self.array = array

    def __array_namespace__(self, api_version=None):
        return Tensor

    @staticmethod
    def from_dlpack(array):
        return Tensor(array)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def test_other_libraries_get_back_their_own(cupy):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    value = cupy.full(4, RANK + 1.0)
    got = strategy.reduce("SUM", [Tensor(value), value], axis=None)
    assert type(got[0]) is Tensor
    assert type(got[1]) is cupy.ndarray
    assert got[0].array.tolist() == got[1].tolist() == [SIZE * (SIZE + 1) / 2] * 4
    gathered = strategy.gather(Tensor(value), axis=0)
    assert type(gathered) is Tensor
    assert len(gathered.array) == 4 * SIZE
