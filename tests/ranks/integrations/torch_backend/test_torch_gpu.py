"""Tensors on a GPU, in PyTorch's current stream.

They are those of PyTorch where MPISTRAT_TEST_GPU is set. Elsewhere they are on the host, and say that they are on the
stand-in's GPU.
"""

import os
import types

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import array_api_compat.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpistrat  # noqa: E402
from mpistrat.integrations.torch.work import Done, PendingWork  # noqa: E402
from mpistrat.runtime.agreement.operation import MismatchError  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
N = 3000
HALF = torch.bfloat16


class OnGpu(torch.Tensor):
    is_cuda = True
    device = torch.device("cuda", 0)

    def record_stream(self, stream):
        pass

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        host = self.cpu()
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if host.dtype is HALF else host.numpy()

    def cpu(self):
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


class Stream:
    """A stream of PyTorch on the stand-in's GPU."""

    def __init__(self, cupy):
        self.cupy, self.own = cupy, cupy.cuda.Stream(non_blocking=True)

    def __cuda_stream__(self):
        return 0, self.own.ptr

    def record_event(self):
        event = self.own.record()
        event.query = lambda: event._wait.is_over()
        return event

    def wait_event(self, event):
        self.own.wait_event(event)

    def synchronize(self):
        self.own.synchronize()


@pytest.fixture
def stream(cupy, monkeypatch):
    """PyTorch's current stream, in which its reads of results are. CuPy's current stream is another one."""
    if not hasattr(cupy.cuda, "order"):
        if not torch.cuda.is_available():
            pytest.skip("this torch is built without CUDA")
        with torch.cuda.device(cupy.cuda.Device().id), torch.cuda.stream(torch.cuda.Stream()) as entered:
            yield entered
        return
    stream = Stream(cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: cupy.cuda.stream_of(ptr))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: cupy.cuda.Stream.null)

    def from_dlpack(result):
        stream.synchronize()
        host = result._host.copy()
        if host.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(host.view(np.int16)).view(HALF)
        return torch.from_numpy(host)

    monkeypatch.setattr(array_api_compat.torch, "from_dlpack", from_dlpack)
    cupy.cuda.nccl.calls.clear()
    yield stream


def calls_of_nccl(cupy):
    """How many all-reduces NCCL was asked for; None where only the stand-in tells."""
    return len(cupy.cuda.nccl.calls) if hasattr(cupy.cuda.nccl, "calls") else None


def of_rank(rank, dtype=torch.float32):
    return (torch.arange(N) % 7 + rank).to(dtype)


def on_gpu(dtype=torch.float32):
    return moved(of_rank(RANK, dtype))


def moved(tensor):
    return tensor.cuda() if os.environ.get("MPISTRAT_TEST_GPU") else tensor.as_subclass(OnGpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF, torch.int32], ids=str)
@pytest.mark.parametrize("name", ["SUM", "AVG"])
def test_all_reduce_of_a_group(cupy, stream, dtype, name):
    """By NCCL, as far as it can. The mean of integers is rounded towards 0, by the host."""
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, name)
    tensor = on_gpu(dtype)
    place = tensor.data_ptr()
    dist.group.WORLD.allreduce([tensor], options).wait()
    total = sum(of_rank(rank, torch.float64) for rank in range(SIZE))
    want = (total / SIZE if name == "AVG" else total).to(dtype)
    assert tensor.data_ptr() == place
    np.testing.assert_array_equal(tensor.tolist(), want.tolist())
    by_nccl = SIZE > 1 and not (name == "AVG" and dtype is torch.int32)
    assert calls_of_nccl(cupy) in (by_nccl, None)


@pytest.mark.parametrize("dtypes", [[HALF], [torch.float32, HALF]], ids=str)
def test_what_cupy_does_not_read(cupy, stream, monkeypatch, dtypes):
    """CuPy 13 refuses bfloat16. The host reduces it, on all ranks."""
    if not hasattr(cupy.cuda, "order"):
        pytest.skip("takes bfloat16 away from the stand-in")
    monkeypatch.setattr(cupy, "has_bfloat16", False)
    tensors = [on_gpu(dtype) for dtype in dtypes]
    dist.group.WORLD.allreduce_coalesced(tensors)
    for tensor in tensors:
        assert tensor.tolist() == sum(of_rank(rank, torch.float32) for rank in range(SIZE)).tolist()
    assert calls_of_nccl(cupy) == 0


def test_what_the_host_reduces(cupy, stream):
    """Bools, and bits of integers."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.BAND
    tensor = on_gpu(torch.int32)
    dist.group.WORLD.allreduce([tensor], options)
    rows = np.stack([of_rank(rank, torch.int32).numpy() for rank in range(SIZE)])
    assert tensor.tolist() == np.bitwise_and.reduce(rows).tolist()
    flags = moved(of_rank(RANK) > 4)
    dist.group.WORLD.allreduce([flags])
    assert flags.tolist() == (of_rank(SIZE - 1) > 4).tolist()
    assert not calls_of_nccl(cupy)


def test_a_tensor_that_is_not_dense(stream):
    """On the last rank alone."""
    tensor = on_gpu()
    if RANK == SIZE - 1:
        tensor = torch.zeros(N).to_sparse()
    with pytest.raises((TypeError, MismatchError), match="process groups of mpistrat take dense tensors"):
        dist.group.WORLD.allreduce([tensor])


def test_collectives_of_a_strategy(stream):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    total = strategy.reduce("SUM", on_gpu(), axis=None)
    assert type(total) is torch.Tensor
    assert torch.equal(total.cpu(), sum(of_rank(rank) for rank in range(SIZE)))
    assert torch.equal(strategy.gather(on_gpu(), 0).cpu(), torch.cat([of_rank(rank) for rank in range(SIZE)]))


@pytest.mark.parametrize("by_future", [False, True])
def test_a_wait_in_another_stream(cupy, stream, monkeypatch, by_future):
    """NCCL only queues its work, in the stream of the call. The stream of the wait comes after it."""
    if not hasattr(cupy.cuda, "order"):
        pytest.skip("looks into the stand-in")
    done, made = [], []
    stream.own.put(lambda: done.append("the all-reduce"))
    work = Done([on_gpu(), of_rank(0)])
    assert not work.is_completed()
    other = Stream(cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: other)
    if by_future:
        future = types.SimpleNamespace(set_result=lambda tensors: other.record_event())
        monkeypatch.setattr(torch.futures, "Future", lambda devices: made.append(devices) or future)
        work.get_future()
        assert made == [[torch.device("cuda", 0)]]  # a future that was not told of the device refuses the tensor
    else:
        work.wait()
    assert not done  # the program did not wait
    other.synchronize()
    assert done
    assert work.is_completed()


def test_a_message_that_arrives_in_another_stream(cupy, stream, monkeypatch):
    """It is written in the stream that is current when MPI is done, by `is_completed` or by `wait`."""
    if not hasattr(cupy.cuda, "order"):
        pytest.skip("looks into the stand-in")
    done = []
    request = MPI.COMM_SELF.Ibarrier()
    finish = lambda statuses: stream.own.put(lambda: done.append("written"))  # noqa: E731
    assert PendingWork("a message", [request], finish, 9.0, [on_gpu()], lambda: False).wait()
    assert done
