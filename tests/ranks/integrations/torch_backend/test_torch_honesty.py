"""Calls that must not give a wrong result without an error."""

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # names that torch replaced
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
AFTER, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE
FLOAT8 = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2")]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("name", ["SUM", "MAX", "AVG"])
def test_bytes_of_float8_are_not_added(dtype, name):
    op = getattr(dist.ReduceOp, name)
    tensor = torch.ones(2 * SIZE).to(dtype)
    with pytest.raises(TypeError, match="not defined"):
        dist.all_reduce(tensor, op)
    with pytest.raises(TypeError, match="not defined"):
        dist.reduce_scatter_tensor(torch.ones(2).to(dtype), tensor, op)
    assert (tensor.float() == 1).all()


@several
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_ranks_with_different_bitwise_ops_raise(collective):
    op = dist.ReduceOp.BAND if RANK == 0 else dist.ReduceOp.BOR
    output, tensor = torch.ones(2, dtype=torch.int32), torch.ones(2 * SIZE, dtype=torch.int32)
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor, op),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(output, tensor, op),
    }
    with pytest.raises(RuntimeError, match="bitwise_and"):
        calls[collective]()
    dist.barrier()


@several
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "bitwise"])
def test_every_reduction_has_the_limit_of_its_group(collective):
    MPI.COMM_WORLD.Barrier()  # to make a group has its limit, too
    group = dist.new_group(timeout=timedelta(seconds=2))
    output, tensor = torch.ones(2, dtype=torch.int32), torch.ones(2 * SIZE, dtype=torch.int32)
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(output, tensor, group=group),
        "bitwise": lambda: dist.all_reduce(tensor, dist.ReduceOp.BAND, group=group),
    }
    if RANK == 0:
        with pytest.raises(TimeoutError, match="did not come within"):
            calls[collective]()
    MPI.COMM_WORLD.Barrier()


@several
def test_lengths_are_not_taken_for_rows():
    # The other ranks tell each other SIZE + 1 lengths of int64, and rank 0 gathers as many numbers of this dtype.
    count = SIZE + 1 if RANK == 0 else SIZE + 3
    found = [torch.zeros(SIZE + 1 + 2 * (RANK > 0) * (rank > 0), dtype=torch.int64) for rank in range(SIZE)]
    with pytest.raises(RuntimeError, match="rank 0"):
        dist.all_gather(found, torch.zeros(count, dtype=torch.int64))
    dist.barrier()


@several
def test_chained_futures_of_messages_make_progress():
    work = dist.irecv(torch.zeros(3), BEFORE)
    after = work.get_future().then(lambda done: done.value()[0].sum().item()).then(lambda done: done.value() * 2)
    failed = work.get_future().then(lambda done: 1 / 0)
    send = dist.isend(torch.full((3,), float(RANK)), AFTER)
    assert after.wait() == 6 * BEFORE
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    send.wait()


@several
def test_large_messages_survive_the_end_of_their_group():
    group = dist.new_group()
    count = 1 << 20
    if RANK == 0:
        dist.isend(torch.full((count,), 5.0), 1, group=group)
        dist.destroy_process_group(group)
        other = [torch.full((count,), 7.0) for _ in range(4)]  # would take memory that was freed
    MPI.COMM_WORLD.Barrier()
    if RANK == 1:
        found = torch.zeros(count)
        dist.recv(found, 0, group=group)
        assert (found == 5).all()
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        assert all((each == 7).all() for each in other)
    else:
        dist.destroy_process_group(group)


def test_handles_of_a_group_that_ended_say_so():
    group = dist.new_group()
    work = dist.irecv(torch.zeros(3), BEFORE, group=group) if SIZE > 1 else None
    dist.destroy_process_group(group)
    if work is not None:
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(RuntimeError, match="destroyed"):
            work.wait()


# --- ranks that are not in the group ---------------------------------------------------------------------

WITH_A_RANK = {
    "broadcast": lambda rank: dist.broadcast(torch.ones(3), rank),
    "reduce": lambda rank: dist.reduce(torch.ones(3), rank),
    "gather": lambda rank: dist.gather(torch.ones(3), None, rank),
    "scatter": lambda rank: dist.scatter(torch.ones(3), None, rank),
    "send": lambda rank: dist.send(torch.ones(3), rank),
    "receive": lambda rank: dist.recv(torch.ones(3), rank),
}


@pytest.mark.parametrize("rank", [SIZE, SIZE + 3, -1])
@pytest.mark.parametrize("name", WITH_A_RANK)
def test_ranks_that_do_not_exist(name, rank):
    with pytest.raises(ValueError, match=rf"{name}: rank {rank} is not in the group, whose ranks are 0 to {SIZE - 1}"):
        WITH_A_RANK[name](rank)
    total = torch.ones(1)
    dist.all_reduce(total)  # the ranks are in step
    assert total.item() == SIZE


@pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_a_root_that_does_not_exist_on_one_rank_raises_on_all(name):
    with pytest.raises((ValueError, RuntimeError), match="is not in the group"):
        WITH_A_RANK[name](SIZE if RANK == 0 else 0)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == SIZE
