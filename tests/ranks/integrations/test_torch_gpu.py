"""Tensors on a GPU, in PyTorch's current stream. They are on the host here, and say that they are on the stand-in's."""

import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import array_api_compat.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpistrat  # noqa: E402
from mpistrat.integrations.torch.work import Done  # noqa: E402
from mpistrat.runtime.agreement.operation import MismatchError  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
N = 3000


class OnGpu(torch.Tensor):
    is_cuda = True
    device = torch.device("cuda", 0)

    def record_stream(self, stream):
        pass

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        return self.cpu().numpy()

    def cpu(self):
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


@pytest.fixture
def stream(cupy, monkeypatch):
    """PyTorch's current stream, in which its reads of results are. CuPy's current stream is another one."""
    if not hasattr(cupy.cuda, "order"):
        pytest.skip("looks into the stand-in")
    stream = cupy.cuda.Stream(non_blocking=True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=stream.ptr))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: cupy.cuda.stream_of(ptr))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: cupy.cuda.Stream.null)

    def from_dlpack(result):
        stream.synchronize()
        return torch.from_numpy(result._host.copy())

    monkeypatch.setattr(array_api_compat.torch, "from_dlpack", from_dlpack)
    cupy.cuda.nccl.calls.clear()
    return stream


def of_rank(rank, dtype=torch.float32):
    return (torch.arange(N) % 7 + rank).to(dtype)


def on_gpu(dtype=torch.float32):
    return of_rank(RANK, dtype).as_subclass(OnGpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
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
    assert len(cupy.cuda.nccl.calls) == by_nccl


def test_what_the_host_reduces(cupy, stream):
    """Bools, and bits of integers."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.BAND
    tensor = on_gpu(torch.int32)
    dist.group.WORLD.allreduce([tensor], options)
    rows = np.stack([of_rank(rank, torch.int32).numpy() for rank in range(SIZE)])
    assert tensor.tolist() == np.bitwise_and.reduce(rows).tolist()
    flags = (of_rank(RANK) > 4).as_subclass(OnGpu)
    dist.group.WORLD.allreduce([flags])
    assert flags.tolist() == (of_rank(SIZE - 1) > 4).tolist()
    assert not cupy.cuda.nccl.calls


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
    assert torch.equal(total, sum(of_rank(rank) for rank in range(SIZE)))
    assert torch.equal(strategy.gather(on_gpu(), 0), torch.cat([of_rank(rank) for rank in range(SIZE)]))


def test_futures_of_tensors_on_a_gpu(monkeypatch):
    """A future that was not told of the device refuses the tensor."""
    made = []
    future = types.SimpleNamespace(set_result=made.append)
    monkeypatch.setattr(torch.futures, "Future", lambda devices: made.append(devices) or future)
    tensors = [on_gpu(), on_gpu(), of_rank(0)]
    Done(tensors).get_future()
    assert made == [[torch.device("cuda", 0)], tensors]
