"""The order of work on a GPU, on the stand-in for CuPy, in the two extreme orders that CUDA allows.

No ranks are started. `test_mutants` removes one ordering after another from the package and runs these tests.
"""

import sys
import threading
import time
import types

import array_api_compat
import numpy as np
import pytest
from fakes.install import stand_in

from mpistrat.arrays import arrays
from mpistrat.arrays import device as devices
from mpistrat.arrays.device import Device, on_device
from mpistrat.arrays.gpu import kernels, pinned
from mpistrat.arrays.gpu import pinned as feeds
from mpistrat.collectives import reduction
from mpistrat.collectives.gpu import nccl as nccl_route
from mpistrat.collectives.gpu import pointers
from mpistrat.collectives.gpu.route import GpuCall, MessageLayout, PackedMessage, pack_values, unpack
from mpistrat.values import ReduceOp

N = 5000


@pytest.fixture(params=["late", "early"])
def cupy(request, monkeypatch):
    """The stand-in, with a current stream of the program that does nothing before it must."""
    cupy = stand_in(monkeypatch)
    monkeypatch.setattr(cupy.cuda, "order", request.param)
    monkeypatch.setattr(pinned, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(feeds, "_lost", [])
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.work.late = True
    with stream:
        yield cupy


def pending(cupy, value, dtype=np.float32):
    """An array whose content comes when the stream is waited for."""
    array = cupy.full(N, value, dtype)
    assert cupy.cuda.get_current_stream().queue
    return array


# --- copies through pinned memory ----------------------------------------------------------------------


def test_a_download_comes_after_the_work_before_it(cupy):
    array = pending(cupy, 7) * cupy.arange(N).astype(np.float32)
    np.testing.assert_array_equal(pinned.download(array), 7 * np.arange(N))
    np.testing.assert_array_equal(pinned.download(array[::2]), 14 * np.arange(N // 2))


def test_an_upload_comes_before_the_work_after_it(cupy):
    for value in (5.0, 7.0):  # through the same pinned memory
        array = pinned.upload(value * np.arange(N), 0)
        np.testing.assert_array_equal((array + 1).get(), value * np.arange(N) + 1)


def test_an_upload_leaves_memory_alone_that_is_still_read(cupy):
    for _ in range(2):
        before = pending(cupy, 5.0)
        copy = before + 1
        place = before.data.ptr
        del before
        array = pinned.upload(np.full(N, 7, np.float32), 0)
        assert array.data.ptr == place
        assert (copy.get() == 6).all()
        assert (array.get() == 7).all()


@pytest.mark.parametrize("in_place", [True, False])
def test_pieces_through_the_host(cupy, in_place):
    """More pieces than slots, and what comes back lies in the memory of what went out, or in other memory."""
    source = pending(cupy, 3.0) * cupy.arange(N).astype(np.float32)
    total = source if in_place else cupy.empty(N, np.float32)

    def work(down, up):
        into = down if in_place else up[: len(down)]
        into.view(np.float32)[...] = 2 * down.view(np.float32)
        return into

    pieces = [
        pinned.StagedCopy(source.data.ptr + at, min(4096, 4 * N - at), work, total.data.ptr + at)
        for at in range(0, 4 * N, 4096)
    ]
    with pinned.staging(0) as stage:
        pinned.through_host(stage, pieces)
    np.testing.assert_array_equal((total + 1).get(), 6 * np.arange(N, dtype=np.float32) + 1)


def test_an_error_leaves_no_copy_behind(cupy):
    total, done = cupy.zeros(N, np.float32), []

    def work(down, up):
        if done:
            raise OSError("the other rank has gone")
        done.append(True)
        return down

    pieces = [pinned.StagedCopy(total.data.ptr + at, 4096, work, total.data.ptr + at) for at in (0, 4096, 8192)]
    with pytest.raises(OSError, match="gone"), pinned.staging(0) as stage:
        pinned.through_host(stage, pieces)
    place = total.data.ptr
    del total
    after = pending(cupy, 9.0)
    assert after.data.ptr == place
    assert (after.get() == 9).all()
    cupy.cuda.Device().synchronize()
    assert (after.get() == 9).all()


# --- batches -------------------------------------------------------------------------------------------


def sent(feed, value, length=N):
    return feed.send([np.full(length, value), value + np.arange(length)])


@pytest.mark.parametrize("device", [0, 1])
def test_batches_come_whole(cupy, device):
    """Through more pinned memory than there is. The memory of a batch is used again while work on it waits."""
    feed, seen = feeds.Feed(device), []
    on_its_way = sent(feed, 0.0)
    for step in range(12):
        following = sent(feed, step + 1.0)
        batch = feeds.received(on_its_way)
        with on_device(device):
            seen.append([each + 1 for each in batch])
        on_its_way = following
        del batch
    with on_device(device):
        for step, (ones, numbers) in enumerate(seen):
            assert (ones.get() == step + 1).all()
            np.testing.assert_array_equal(numbers.get(), step + 1 + np.arange(N))


def test_a_batch_is_ready_where_it_is_received(cupy):
    """On GPU 1, with GPU 0 current, whose streams are others."""
    feed = feeds.Feed(1)
    ones, numbers = feeds.received(sent(feed, 5.0))  # the last copies still wait
    assert ones.device.id == 1
    with on_device(1):
        assert ((ones + 1).get() == 6).all()
        np.testing.assert_array_equal((numbers + 1).get(), 6 + np.arange(N))


def test_memory_is_released_in_another_thread(cupy, monkeypatch):
    """Where another GPU is current: the event is that of the stream which used the memory."""
    problems = []
    monkeypatch.setattr(sys, "unraisablehook", problems.append)
    feed = feeds.Feed(1)
    batch = feeds.received(sent(feed, 5.0))
    with on_device(1):
        seen = batch[0] + 1
    in_thread(batch.clear)
    assert not problems
    assert not feeds._lost
    assert len(feed.released) == 2
    for value in (6.0, 7.0, 8.0):
        feeds.received(sent(feed, value)).clear()
    with on_device(1):
        assert (seen.get() == 6).all()


def test_memory_whose_end_of_use_is_unknown_is_kept(cupy, monkeypatch):
    problems = []
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: problems.append(problem.exc_type))
    feed = feeds.Feed(0)
    batch = feeds.received(sent(feed, 5.0))
    monkeypatch.setattr(cupy.cuda.Event, "record", lambda *_: 1 / 0)
    batch.clear()
    assert problems == [ZeroDivisionError] * 2
    assert len(feeds._lost) == 2
    assert not feed.released


# --- kernels and collectives -----------------------------------------------------------------------------


def test_each_stream_and_device_has_its_tables(cupy):
    """A table is copied to the GPU in the order of one stream; other streams do not wait for it."""
    for device in (0, 1):
        with on_device(device):
            sources, targets = [cupy.ones(N), cupy.zeros(N)], [cupy.zeros(N), cupy.ones(N)]
            cupy.cuda.Device().synchronize()
            first, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            first.work.late = other.work.late = True
            for stream in (first, other, cupy.cuda.Stream.null):
                with stream:
                    kernels.copy_each(sources, targets)
            other.synchronize()
            assert (targets[0]._host == 1).all()
            assert (targets[1]._host == 0).all()


def test_pack_and_unpack(cupy):
    shapes = [(3, 5), (), (700,), (2, 0), (40, 30)]
    values = [cupy.asarray(np.full(shape, i + 1.0)) for i, shape in enumerate(shapes)]
    (message,) = reduction.packed_messages(
        ReduceOp.SUM,
        tuple((each.dtype, each.shape) for each in values),
        1,
        {np.dtype(float): reduction.MessageSizes(1 << 30, 1 << 30, 1 << 30)},
    )
    places = MessageLayout.of(message)
    laid, out = pack_values(places, values), [None] * len(shapes)
    assert laid.send.tolist() == [1.0] * 15 + [2.0] + [3.0] * 700 + [5.0] * 1200
    unpack(places, laid.send, out)
    for i, shape in enumerate(shapes):
        if i != 3:  # which is empty, and not part of a message
            assert out[i].shape == shape
            assert (out[i].get() == i + 1).all()
    assert out[1].data.ptr != laid.send.data.ptr + 15 * 8  # a copy: a view would keep the message
    assert out[2].data.ptr == laid.send.data.ptr + 16 * 8


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_squared_norms(cupy, monkeypatch, dtype):
    """One launch and one copy for all arrays. A launch for each would wait for the GPU once an array."""
    launches = []
    original = cupy.RawKernel.__call__
    monkeypatch.setattr(cupy.RawKernel, "__call__", lambda *args: (launches.append(1), original(*args)))
    host = [np.random.default_rng(n).standard_normal(n).astype(dtype) for n in (1, 0, 777, 200_001)]
    got = kernels.squared_norms([cupy.asarray(each) for each in host])
    np.testing.assert_allclose(got, [np.square(each.astype(float)).sum() for each in host], rtol=1e-13)
    assert len(launches) == 1
    assert kernels.squared_norms([cupy.zeros(0, dtype)]) == [0.0]


def test_scratch_is_used_in_turn(cupy):
    """By streams that do not wait for each other."""
    with pointers.scratch(0) as memory:
        memory.send.view(np.float32)[:N] = 1
    other = cupy.cuda.Stream(non_blocking=True)
    with other, pointers.scratch(0) as again:
        assert again is memory
        again.send.view(np.float32)[:N] = 2
    other.synchronize()
    cupy.cuda.get_current_stream().synchronize()
    assert (memory.send.view(np.float32)._host[:N] == 2).all()


def test_mpi_reads_memory_that_is_written(cupy, monkeypatch):
    buffer = types.SimpleNamespace(fromaddress=lambda address, nbytes: (address, nbytes))
    monkeypatch.setattr(pointers.mpi, "start", lambda: types.SimpleNamespace(buffer=buffer, BYTE="byte"), raising=True)
    array = pending(cupy, 4.0)
    world = types.SimpleNamespace(Bcast=lambda data, root: seen.append(array._host.copy()))
    seen = []
    pointers.broadcast(types.SimpleNamespace(world=world), array, 0)
    assert (seen[0] == 4).all()


class Topology:
    """What the route by NCCL asks of the ranks, of which there is one."""

    size = rank = 0
    given_up = ""

    def __init__(self, cupy):
        self.communicators = {
            device: _communicator(cupy, device) for device in range(cupy.cuda.runtime.getDeviceCount())
        }
        self.lock = types.SimpleNamespace(give_up=lambda when, text: setattr(self, "given_up", when))

    def slot(self, _):
        return self.communicators


def _communicator(cupy, device):
    with on_device(device):
        return cupy.cuda.nccl.NcclCommunicator(1, bytes(range(128)), 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_nccl_in_the_order_of_the_stream(cupy, dtype, op):
    message = reduction.message_of(op, ((np.dtype(dtype), (N,)),), [0], 4)
    laid = PackedMessage(message, pending(cupy, 8.0, dtype), cupy.empty(N, message.result))
    nccl_route.NcclRoute().reduce(GpuCall(Topology(cupy), 0, None, None), [laid])
    want = 8 if op is ReduceOp.SUM else 2
    assert ((laid.total + 1).get() == want + 1).all()


def test_nccl_is_waited_for_alone(cupy, monkeypatch):
    """With a limit, the wait ends with the all-reduce, not with later work in the stream."""
    topology = Topology(cupy)
    message = reduction.message_of(ReduceOp.SUM, ((np.dtype(np.float32), (N,)),), [0], 1)
    laid = PackedMessage(message, pending(cupy, 8.0), cupy.empty(N, np.float32))
    stream = cupy.cuda.get_current_stream()
    original = nccl_route._wait

    def wait(*args):  # another thread adds to the stream meanwhile
        stream.put(lambda: pytest.fail("later work was waited for"))
        original(*args)

    monkeypatch.setattr(nccl_route, "_wait", wait)
    nccl_route.NcclRoute().reduce(GpuCall(topology, 0, None, 30.0), [laid])
    assert (laid.total._host == 8).all()
    stream.queue.clear()


def test_after_nccl_hangs_the_gpu_can_be_used(cupy, monkeypatch):
    """A handler that saves the weights copies them from the GPU."""
    topology, weights = Topology(cupy), pending(cupy, 3.0)
    monkeypatch.setattr(cupy.cuda.nccl, "hangs", True)
    message = reduction.message_of(ReduceOp.SUM, ((np.dtype(np.float32), (N,)),), [0], 1)
    laid = PackedMessage(message, pending(cupy, 8.0), cupy.empty(N, np.float32))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"was not done within 0\.1 s"):
        nccl_route.NcclRoute().reduce(GpuCall(topology, 0, None, 0.1), [laid])
    assert time.monotonic() - start < 20
    assert topology.given_up == "after a time-out"
    assert (pinned.download(weights) == 3).all()
    with pytest.raises(cupy.cuda.nccl.NcclError, match="has ended"):
        topology.communicators[0].check_async_error()


# --- contexts ------------------------------------------------------------------------------------------


def in_thread(function):
    """Run a function in a new thread, which begins on GPU 0 as every thread does."""
    errors = []

    def call():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def everything_on(cupy, device):
    """What a rank does on its GPU, in the main thread and in one that reads ahead."""
    feed = feeds.Feed(device)
    batch = feeds.received(sent(feed, 5.0))
    array = pinned.upload(np.ones(N, np.float32), device)
    assert (pinned.download(array) == 1).all()
    with on_device(device):
        kernels.copy_each([array], [cupy.empty(N, np.float32)])
        with pointers.scratch(device):
            pass
    batch.clear()
    assert nccl_route.NcclRoute().obstacle(NoTopology(), device) == "rank 0: stop here"


class NoTopology:
    class world:
        @staticmethod
        def allgather(told):
            return [(told[0] or "stop here", told[1])]


@pytest.mark.parametrize("device", [0, 1])
def test_a_rank_has_a_context_on_its_own_gpu_alone(cupy, monkeypatch, device):
    """A context takes 0.5 GB, and an error where the GPU is in exclusive mode."""
    monkeypatch.setattr(cupy.cuda, "order", "late")
    cupy.cuda.begin_anew()
    Device("cuda", device).require().use()
    everything_on(cupy, device)
    in_thread(lambda: everything_on(cupy, device))
    assert cupy.cuda.contexts == {device}


def test_back_to_a_gpu_that_was_used(cupy):
    runtime = cupy.cuda.runtime
    with on_device(1):
        assert runtime.getDevice() == 1
        with on_device(1):
            pass
        assert runtime.getDevice() == 1
    assert runtime.getDevice() == 0
    with pytest.raises(KeyError), on_device(1):
        raise KeyError
    assert runtime.getDevice() == 0


# --- arrays of other libraries ---------------------------------------------------------------------------


def test_an_array_is_known_by_its_type(cupy, monkeypatch):
    """A question to DLPack for each value of each call would cost more than small collectives."""
    array = cupy.ones(3)
    monkeypatch.delattr(cupy.ndarray, "__dlpack_device__")
    assert arrays.on_gpu(array)
    assert arrays.to_cupy(array) is array
    assert not arrays.on_gpu(np.ones(3))


class Tensor:
    """A tensor of PyTorch on a GPU, perhaps as `conj` returns it: DLPack cannot tell of what is still to be done.

    Its memory goes back to its own stream, which then waits for the streams that were recorded, as torch's does.
    """

    def __init__(self, array, own, pending=(), device=0):
        self.array, self.own, self.pending, self.readers = array, own, pending, []
        self.device = types.SimpleNamespace(index=device)

    def detach(self):
        return self

    def resolve_conj(self):
        self.pending = [each for each in self.pending if each != "conj"]
        return self

    def resolve_neg(self):
        self.pending = [each for each in self.pending if each != "neg"]
        return self

    def record_stream(self, stream):
        self.readers.append(stream)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if self.pending:
            raise BufferError("Can't export tensors with the conjugate bit set")
        with self.own:
            return self.array.__dlpack__(**options)

    def __del__(self):
        with on_device(self.device.index):
            for stream in self.readers:
                self.own.wait_event(stream.record())


class TorchStream:
    """What PyTorch tells of a stream."""

    def __init__(self, stream):
        self.cuda_stream = stream.ptr

    def __cuda_stream__(self):
        return 0, self.cuda_stream


@pytest.fixture
def torch(cupy, monkeypatch):
    """PyTorch's streams. That of number 0 is not to be had by `ExternalStream`."""
    streams = types.SimpleNamespace(
        ExternalStream=lambda ptr, device: cupy.cuda.stream_of(ptr) if ptr else cupy.cuda.Stream(non_blocking=True),
        default_stream=lambda device: cupy.cuda.Stream.null,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=streams))


def test_conjugated_views(cupy, torch):
    array = cupy.ones(3)
    tensor = Tensor(array, cupy.cuda.get_current_stream(), ("conj", "neg"))
    assert arrays.to_cupy(tensor).data.ptr == array.data.ptr


@pytest.mark.parametrize("null", [False, True])
def test_memory_of_a_tensor_is_kept_while_it_is_read(cupy, torch, null):
    """It was made in a side stream of PyTorch, which does not wait for CuPy's."""
    own = cupy.cuda.Stream(non_blocking=True)
    with own:
        tensor = Tensor(cupy.full(N, 5.0), own)
    with cupy.cuda.Stream.null if null else cupy.cuda.get_current_stream():
        seen = arrays.to_cupy(tensor) + 1
        del tensor
        with own:
            after = cupy.full(N, 7.0)  # in the same memory
        own.synchronize()
        assert (seen.get() == 6).all()
    assert (after.get() == 7).all()


def test_results_for_pytorch_are_in_its_stream(cupy, torch):
    """And so is their memory, when PyTorch gives them up while it reads them."""
    own = cupy.cuda.Stream(non_blocking=True)
    sys.modules["torch"].cuda.current_stream = lambda device: TorchStream(own)
    with own:
        tensor = Tensor(cupy.full(N, 5.0), own)
    with arrays.stream_of(tensor):
        result = arrays.to_cupy(tensor) * 2
    with own:
        seen = result + 1
    del result
    after = pending(cupy, 7.0, float)
    cupy.cuda.get_current_stream().synchronize()
    own.synchronize()
    assert (seen._host == 11).all()
    assert (after._host == 7).all()
    before = cupy.cuda.get_current_stream()
    for values in ([after], [tensor, after]):
        with arrays.stream_of(*values):
            assert cupy.cuda.get_current_stream() is before


def test_results_that_were_made_in_another_stream(cupy, torch, monkeypatch):
    """As those of `BatchNormalization`, which works in CuPy's stream."""
    own, before = cupy.cuda.Stream(non_blocking=True), cupy.cuda.get_current_stream()
    sys.modules["torch"].cuda.current_stream = lambda device: TorchStream(own)
    with own:
        tensor = Tensor(cupy.full(N, 5.0), own)

    def from_dlpack(array):
        array.__dlpack__(stream=own.ptr)
        return Tensor(array, own)

    namespace = types.SimpleNamespace(from_dlpack=from_dlpack)
    monkeypatch.setattr(array_api_compat, "array_namespace", lambda like: namespace)
    result = arrays.from_cupy(pending(cupy, 6.0, float), tensor)
    second = pending(cupy, 8.0, float)  # in the memory of CuPy's
    before.synchronize()
    with own:
        seen = result.array + 1
    del result
    third = pending(cupy, 9.0, float)
    before.synchronize()
    own.synchronize()
    assert (seen._host == 7).all()
    assert (second._host == 8).all()
    assert (third._host == 9).all()


@pytest.mark.parametrize("version", [13, 14])
def test_a_tensor_on_another_gpu_than_the_current_one(cupy, torch, monkeypatch, version):
    """As of a program of PyTorch that does not call `set_device`. GPU 0 gets no context."""
    if version == 13:
        monkeypatch.delattr(cupy.cuda.Stream, "from_external")
    with on_device(1):
        own = cupy.cuda.Stream(non_blocking=True)
        with own:
            tensor = Tensor(cupy.full(N, 5.0), own, device=1)
    sys.modules["torch"].cuda.current_stream = lambda device: TorchStream(own)
    for _ in range(2):
        # PyTorch makes no context on a GPU that it only returns to.
        cupy.cuda.runtime.local.device, cupy.cuda.runtime.local.context = 0, False
        cupy.cuda.contexts.clear()
        with arrays.stream_of(tensor):
            assert cupy.cuda.get_current_stream() is own
            assert ((arrays.to_cupy(tensor) * 2).get() == 10).all()
        cupy.cuda.runtime.local.device, cupy.cuda.runtime.local.context = 0, False
        cupy.cuda.contexts.clear()
        assert arrays.to_cupy(tensor).device.id == 1
        assert cupy.cuda.contexts == {1}


# --- what is missing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("missing", True, r"does not find CUDA's compiler \(NVRTC\).*\[ctk\].*libnvrtc"),
        ("headers", False, r"cannot compile a kernel.*CUDA's headers, or set CUDA_PATH.*could not open source"),
    ],
)
def test_what_the_compiler_lacks_is_said_where_the_device_is_asked_for(cupy, monkeypatch, name, value, text):
    monkeypatch.setattr(cupy.cuda.nvrtc, name, value)
    with pytest.raises(RuntimeError, match=f"device cuda:1.*{text}"):
        Device("cuda", 1).require()


def test_without_nccl(cupy, monkeypatch):
    monkeypatch.setattr(cupy.cuda.nccl, "available", False)
    with pytest.raises(RuntimeError, match=r"it: CuPy .* does not find NCCL \(libnccl"):
        nccl_route.nccl_for("it")


def test_nccl_is_imported_once(cupy, monkeypatch):
    """`catch_warnings` in two threads may leave all warnings of the program off."""
    nccl_route.nccl_for("it")
    monkeypatch.setattr(nccl_route.warnings, "catch_warnings", None)
    nccl_route.nccl_for("it")
    message = reduction.message_of(ReduceOp.SUM, ((np.dtype(np.float32), (N,)),), [0], 1)
    laid = PackedMessage(message, pending(cupy, 8.0), cupy.empty(N, np.float32))
    nccl_route.NcclRoute().reduce(GpuCall(Topology(cupy), 0, None, None), [laid])
    assert devices.gpu_count("it") == 2
