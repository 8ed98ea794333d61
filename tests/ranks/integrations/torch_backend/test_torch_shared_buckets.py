"""DDP's buckets in memory that a node shares: the same gradients as in memory of their own."""

import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from layouts import layouts, on_nodes  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from mpistrat.arrays import arrays  # noqa: E402
from mpistrat.integrations.torch import ProcessGroup, SharedBuckets, reduce_in_place  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about itself


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(7, 33), torch.nn.ReLU(), torch.nn.Linear(33, 21), torch.nn.Linear(21, 3)]
    return torch.nn.Sequential(*layers).to(dtype)


def trained(model, dtype=torch.float32, steps=4):
    """The gradients of the last of some steps on rows of this rank, and the model's weights."""
    torch.manual_seed(RANK + 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(5, 7, dtype=dtype)).pow(2).mean().backward()
        optimizer.step()
    return [each for parameter in model.parameters() for each in (parameter.grad, parameter.detach())]


def in_place(model, group=None, **options):
    ddp = DistributedDataParallel(model, process_group=group, **options)
    ddp.register_comm_hook(SharedBuckets(group), reduce_in_place)
    return ddp


OPTIONS = {
    "views": {"gradient_as_bucket_view": True},
    "copies": {},
    "many buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-3},
    "static graph": {"gradient_as_bucket_view": True, "static_graph": True},
    "unused parameters": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_training_is_that_of_plain_buckets(options, dtype):
    found = trained(in_place(network(dtype), **OPTIONS[options]), dtype)
    expected = trained(DistributedDataParallel(network(dtype), **OPTIONS[options]), dtype)
    # DDP divides before it adds, and rounds bfloat16 both times.
    tolerance = 0 if SIZE <= 2 else 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_gradients_lie_in_shared_memory():
    found = trained(in_place(network(), gradient_as_bucket_view=True))
    assert {each.is_shared() for each in found[::2]} == {SIZE > 1}
    found = trained(in_place(network()))
    assert {each.is_shared() for each in found[::2]} == {False}


@pytest.mark.parametrize("layout", layouts("0000", "0011", "0101", "0123"))
def test_layouts(layout):
    comm = on_nodes(layout)
    group = ProcessGroup(comm)
    state = SharedBuckets(group)
    tensor = torch.empty(10001)
    for step in range(3):
        tensor.copy_(torch.arange(10001.0) * (RANK + 1) + step)
        buffer = state.in_arena(tensor)
        if buffer is not None:
            assert arrays.to_host(tensor).tolist() == buffer.tolist()
            group.average_buffer(buffer)
            torch.testing.assert_close(tensor, torch.arange(10001.0) * ((SIZE + 1) / 2) + step)
    assert (buffer is None) == (group.topology.memory is None)
    group.shutdown()


def test_a_rank_with_too_little_shared_memory(monkeypatch):
    if SIZE > 1 and RANK == SIZE - 1:
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([4096, 4096, 1, 1, 1, 0, 0, 0, 0, 255]))
    state = SharedBuckets()
    tensor = torch.ones(5000)
    assert state.in_arena(tensor) is None
    monkeypatch.undo()
    assert state.in_arena(tensor) is None  # tried once for each bucket


def test_memory_that_comes_where_another_bucket_was():
    state = SharedBuckets()
    for step in range(6):
        tensor = torch.full((70001,), float(RANK + step))  # freed and allocated again, perhaps at one address
        buffer = state.in_arena(tensor)
        dist.barrier()
        if buffer is not None:
            state.process_group.average_buffer(buffer)
            assert tensor.eq((SIZE - 1) / 2 + step).all()
        del tensor, buffer


def test_groups_of_other_backends_are_refused():
    with pytest.raises(TypeError, match="backend mpistrat, not str"):
        SharedBuckets("gloo")


@pytest.mark.parametrize("part", [torch.ones(9)[3:], torch.ones(9)[::2], torch.ones(3, 3).t()])
def test_parts_of_tensors_are_refused(part):
    with pytest.raises(ValueError, match="memory for itself"):
        SharedBuckets().in_arena(part)


def test_a_group_that_was_destroyed():
    group = dist.new_group()
    state = SharedBuckets(group)
    buffer = state.in_arena(torch.ones(3))
    dist.destroy_process_group(group)
    if buffer is not None:
        with pytest.raises(RuntimeError, match="destroyed"):
            group.average_buffer(buffer)
