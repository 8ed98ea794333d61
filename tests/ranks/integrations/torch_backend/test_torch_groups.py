"""Groups, messages, handles and options of the process group."""

import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpistrat  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
AFTER, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE


# --- what the group is ---------------------------------------------------------------------------------


def test_rank_size_and_backend():
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, SIZE)
    assert dist.get_backend() == "mpistrat"
    assert dist.is_backend_available("mpistrat")
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(SIZE))


def test_a_second_default_group_is_refused():
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("mpistrat")


def test_default_group_again():
    dist.destroy_process_group()
    with pytest.raises((AssertionError, ValueError)):
        dist.destroy_process_group()
    dist.init_process_group("mpistrat", init_method="mpistrat://", timeout=timedelta(seconds=30))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [SIZE] * 3
    dist.destroy_process_group()
    dist.init_process_group("mpistrat")


def test_rank_and_size_of_the_program_must_be_those_of_mpi():
    dist.destroy_process_group()
    try:
        with pytest.raises(ValueError, match="leave rank and world_size out"):
            dist.init_process_group("mpistrat", rank=0, world_size=SIZE + 1)
        with pytest.raises(RuntimeError, match="mpistrat run"):
            dist.init_process_group("mpistrat", store=dist.HashStore(), rank=RANK + 1, world_size=SIZE + 1)
        with pytest.raises(TypeError, match="CommunicationOptions"):
            dist.init_process_group("mpistrat", pg_options=3)
    finally:
        dist.init_process_group("mpistrat")


@pytest.mark.parametrize("members", ["all", "one each", "halves", "the ends"])
def test_new_group(members):
    lists = {
        "all": [list(range(SIZE))],
        "one each": [[rank] for rank in range(SIZE)],
        "halves": [list(range(SIZE // 2)), list(range(SIZE // 2, SIZE))],
        "the ends": [sorted({0, SIZE - 1})],
    }[members]
    for ranks in filter(None, lists):
        group = dist.new_group(ranks)
        if RANK not in ranks:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert (dist.get_rank(group), dist.get_world_size(group)) == (ranks.index(RANK), len(ranks))
        tensor = torch.full((3,), float(RANK))
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [sum(ranks)] * 3
        dist.broadcast(tensor.fill_(RANK), ranks[-1], group=group)
        assert tensor.tolist() == [ranks[-1]] * 3
        found = [torch.zeros(1) for _ in ranks]
        dist.all_gather(found, torch.tensor([float(RANK)]), group=group)
        assert torch.cat(found).tolist() == ranks
        gathered = [torch.zeros(1) for _ in ranks] if ranks[0] == RANK else None
        dist.gather(torch.tensor([float(RANK)]), gathered, dst=ranks[0], group=group)
        if gathered:
            assert torch.cat(gathered).tolist() == ranks
        dist.barrier(group=group)
        dist.destroy_process_group(group)


def test_many_groups_are_made_and_freed():
    for _ in range(20):
        group = dist.new_group()
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == SIZE
        dist.destroy_process_group(group)


def test_new_subgroups():
    group, groups = dist.new_subgroups(1)
    assert len(groups) == SIZE
    tensor = torch.full((2,), float(RANK))
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [RANK] * 2


def test_device_mesh():
    shape = (SIZE // 2, 2) if SIZE % 2 == 0 else (1, SIZE)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mesh.get_group("columns"))
    dist.all_reduce(tensor, group=mesh.get_group("rows"))
    assert tensor.item() == SIZE


def test_a_group_that_was_destroyed_refuses():
    group = dist.new_group()
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="was destroyed"):
        group.allreduce([torch.ones(1)])


def test_options_of_a_group():
    options = mpistrat.experimental.CommunicationOptions(implementation="exact")
    group = dist.new_group(pg_options=options)
    # The sum of these depends on the order of additions, except where it is exact.
    values = [1e16, 1.0, -1e16, 1.0]
    tensor = torch.tensor([values[RANK]], dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    import math

    assert tensor.item() == math.fsum(values[:SIZE])
    part = torch.zeros(1, dtype=torch.float64)
    dist.reduce_scatter_tensor(part, torch.full((SIZE,), values[RANK], dtype=torch.float64), group=group)
    assert part.item() == math.fsum(values[:SIZE])


# --- handles -------------------------------------------------------------------------------------------

CALLS = {
    "all_reduce": lambda **k: dist.all_reduce(torch.ones(3), **k),
    "broadcast": lambda **k: dist.broadcast(torch.ones(3), 0, **k),
    "reduce": lambda **k: dist.reduce(torch.ones(3), 0, **k),
    "all_gather": lambda **k: dist.all_gather([torch.ones(3) for _ in range(SIZE)], torch.ones(3), **k),
    "all_gather_into_tensor": lambda **k: dist.all_gather_into_tensor(torch.ones(3 * SIZE), torch.ones(3), **k),
    "reduce_scatter": lambda **k: dist.reduce_scatter(torch.ones(3), [torch.ones(3)] * SIZE, **k),
    "reduce_scatter_tensor": lambda **k: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(3 * SIZE), **k),
    "gather": lambda **k: dist.gather(torch.ones(3), [torch.ones(3)] * SIZE if RANK == 0 else None, 0, **k),
    "scatter": lambda **k: dist.scatter(torch.ones(3), [torch.ones(3)] * SIZE if RANK == 0 else None, 0, **k),
    "all_to_all_single": lambda **k: dist.all_to_all_single(torch.ones(SIZE), torch.ones(SIZE), **k),
    "all_to_all": lambda **k: dist.all_to_all([torch.ones(1)] * SIZE, [torch.ones(1)] * SIZE, **k),
    "barrier": lambda **k: dist.barrier(**k),
}


@pytest.mark.parametrize("name", CALLS)
def test_handles(name):
    assert CALLS[name]() is None
    work = CALLS[name](async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    future = work.get_future()
    assert future.done()
    assert [type(each) for each in future.wait()] == [torch.Tensor] * len(work.result())
    seen = []
    future.then(lambda done: seen.append(done.value()))
    assert len(seen) == 1


def test_handles_of_one_group_complete_in_order():
    tensors = [torch.full((4,), float(i)) for i in range(10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [i * SIZE for i in range(10)]


# --- messages ------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]


@several
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float8_e5m2], ids=str)
def test_send_and_receive(dtype):
    tensor = (torch.arange(6) + RANK).reshape(2, 3).to(dtype)
    found = torch.zeros(2, 3).to(dtype)
    if RANK % 2 == 0:
        if RANK + 1 < SIZE:
            dist.send(tensor, RANK + 1)
    else:
        assert dist.recv(found, RANK - 1) == RANK - 1
        expected = (torch.arange(6) + RANK - 1).reshape(2, 3).to(dtype)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@several
@pytest.mark.parametrize("count", [0, 1, 1000, 1 << 20])
def test_messages_round_the_ring(count):
    found = torch.zeros(count)
    works = [dist.isend(torch.full((count,), float(RANK)), AFTER), dist.irecv(found, BEFORE)]
    for work in works:
        work.wait()
        assert work.is_completed()
    assert (found == BEFORE).all()


@several
def test_tags_tell_messages_apart():
    a, b = torch.zeros(1), torch.zeros(1)
    sends = [dist.isend(torch.ones(1), AFTER, tag=1), dist.isend(torch.full((1,), 2.0), AFTER, tag=2)]
    dist.recv(b, BEFORE, tag=2)
    dist.recv(a, BEFORE, tag=1)
    for work in sends:
        work.wait()
    assert (a.item(), b.item()) == (1, 2)


@several
def test_receive_from_any():
    if RANK:
        dist.send(torch.full((2,), float(RANK)), 0)
        return
    seen = set()
    for _ in range(SIZE - 1):
        tensor = torch.zeros(2)
        source = dist.recv(tensor)
        assert tensor.tolist() == [source] * 2
        seen.add(source)
    assert seen == set(range(1, SIZE))


@several
def test_messages_in_a_group():
    group = dist.new_group(list(range(1, SIZE)))
    if RANK and SIZE > 2:
        found = torch.zeros(1)
        peer = 1 + (RANK % (SIZE - 1))
        work = dist.isend(torch.tensor([float(RANK)]), peer, group=group)
        source = dist.recv(found, group=group)
        assert found.item() == source
        work.wait()


@several
def test_batches_of_messages():
    found = torch.zeros(3)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, found, BEFORE), dist.P2POp(dist.isend, torch.full((3,), float(RANK)), AFTER)]
    )
    for work in works:
        work.wait()
    assert found.tolist() == [BEFORE] * 3


@several
def test_futures_of_messages():
    found = torch.zeros(3)
    work = dist.irecv(found, BEFORE)
    future = work.get_future()
    seen = []
    future.then(lambda done: seen.append(done.value()[0].tolist()))
    dist.isend(torch.full((3,), float(RANK)), AFTER).wait()
    assert future.wait()[0] is found
    assert seen == [[BEFORE] * 3]
    assert work.get_future().done()


@several
@pytest.mark.parametrize("length", [2, 4])
def test_messages_of_another_length_raise(length):
    work = dist.isend(torch.ones(3), AFTER)
    with pytest.raises(ValueError, match=r"receive of torch\.float32"):
        dist.recv(torch.zeros(length), BEFORE)
    work.wait()


@several
def test_objects_in_messages():
    if RANK == 0:
        dist.send_object_list(["a", {"b": 1}], dst=1)
    elif RANK == 1:
        found = [None, None]
        assert dist.recv_object_list(found, src=0) == 0
        assert found == ["a", {"b": 1}]


@several
def test_handles_that_nothing_waits_for():
    dist.isend(torch.full((100_000,), float(RANK)), AFTER)
    dist.irecv(found := torch.zeros(100_000), BEFORE)
    end = time.monotonic() + 30
    came = torch.zeros(1)
    while not came:
        work = dist.isend(torch.ones(1), AFTER, tag=5)  # later messages let MPI make progress
        dist.recv(torch.ones(1), BEFORE, tag=5)
        work.wait()
        came.fill_((found == BEFORE).all() or time.monotonic() > end)
        dist.all_reduce(came, dist.ReduceOp.MIN)
    assert (found == BEFORE).all()


def test_messages_that_nothing_takes_end_with_their_group():
    group = dist.new_group(timeout=timedelta(seconds=5))
    if SIZE > 1:
        dist.irecv(torch.zeros(3), BEFORE, group=group)
        dist.isend(torch.zeros(3), AFTER, group=group, tag=7)
    dist.destroy_process_group(group)


@several
def test_waits_have_a_limit():
    MPI.COMM_WORLD.Barrier()  # to make a group has its limit, too
    group = dist.new_group(timeout=timedelta(seconds=2))
    work = dist.irecv(torch.zeros(3), BEFORE, group=group)
    with pytest.raises(TimeoutError, match=r"receive of torch.float32\[3\] from rank .* within 2 s"):
        work.wait()
    with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
        work.wait(timedelta(seconds=0.1))
    dist.barrier()


@pytest.mark.parametrize("tag", [-1, 1 << 40])
def test_tags_have_bounds(tag):
    group = dist.group.WORLD
    with pytest.raises((ValueError, TypeError, RuntimeError), match="tag"):
        group.send([torch.ones(1)], 0, tag)


# --- the store -----------------------------------------------------------------------------------------


def test_store():
    import mpistrat.integrations.torch

    store = mpistrat.integrations.torch.MpiStore()
    store.set(f"rank {RANK}", str(RANK))
    assert store.get(f"rank {AFTER}") == str(AFTER).encode()
    assert store.multi_get([f"rank {rank}" for rank in range(SIZE)]) == [str(rank).encode() for rank in range(SIZE)]
    totals = []
    MPI.COMM_WORLD.Barrier()
    total = store.add("count", 1)
    store.set(f"told {RANK}", str(total))
    totals = [int(store.get(f"told {rank}")) for rank in range(SIZE)]
    assert sorted(totals) == list(range(1, SIZE + 1))
    assert store.get("count") == str(SIZE).encode()
    assert not store.check(["unknown"])
    with pytest.raises(TimeoutError, match="unknown"):
        store.wait(["unknown"], timedelta(seconds=0.1))


def test_store_behind_a_prefix():
    import mpistrat.integrations.torch

    own = mpistrat.integrations.torch.MpiStore()
    store = dist.PrefixStore("prefix", own)
    store.set(f"k{RANK}", "v")
    assert store.get(f"k{AFTER}") == b"v"
    won = store.compare_set("leader", "", str(RANK)) == str(RANK).encode()
    store.set(f"won {RANK}", str(int(won)))
    assert sum(int(store.get(f"won {rank}")) for rank in range(SIZE)) == 1
    assert own.check([f"prefix/k{RANK}"])
    store.delete_key(f"k{RANK}")


# --- ranks that disagree -------------------------------------------------------------------------------


@several
@pytest.mark.parametrize("what", ["call", "shape", "dtype", "op", "root"])
def test_ranks_that_disagree_raise_everywhere_and_name_their_lines(what):
    odd = RANK == SIZE - 1

    def call():
        if what == "call" and odd:
            dist.barrier()
        elif what == "root":
            dist.broadcast(torch.ones(3), int(odd))
        else:
            shape = (4,) if what == "shape" and odd else (3,)
            dtype = torch.float64 if what == "dtype" and odd else torch.float32
            op = dist.ReduceOp.MAX if what == "op" and odd else dist.ReduceOp.SUM
            dist.all_reduce(torch.ones(shape, dtype=dtype), op)

    with pytest.raises(RuntimeError, match=r"test_torch_groups\.py:"):
        call()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the ranks are in step
    assert tensor.item() == SIZE


@several
@pytest.mark.parametrize("where", ["one rank", "all ranks"])
def test_sparse_tensors_are_refused_on_all_ranks(where):
    tensor = torch.ones(3)
    if where == "all ranks" or RANK == 0:
        tensor = tensor.to_sparse()
    with pytest.raises((TypeError, RuntimeError), match=r"sparse|refused"):
        dist.all_reduce(tensor)
    dist.barrier()


@several
def test_lengths_that_do_not_fit_raise_on_all_ranks():
    found = [torch.zeros(rank + 1 + (RANK == 0)) for rank in range(SIZE)]
    with pytest.raises(ValueError, match="all_gather: the ranks send"):
        dist.all_gather(found, torch.zeros(RANK + 1))
    with pytest.raises(ValueError, match="split sizes must fit"):
        dist.all_to_all([torch.zeros(2 + (RANK == 0)) for _ in range(SIZE)], [torch.zeros(2) for _ in range(SIZE)])
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_gather_into_tensor(torch.zeros(SIZE * 3 + 1), torch.zeros(3))
    dist.barrier()


@pytest.mark.parametrize("op", ["AVG", "BXOR"])
def test_ops_that_are_not_defined(op):
    with pytest.raises(TypeError, match="not defined"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), getattr(dist.ReduceOp, op))
    if op == "BXOR":
        with pytest.raises(TypeError, match="not defined"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR)


@several
@pytest.mark.parametrize("seconds", [0, 0.2])
@pytest.mark.parametrize("kind", [TimeoutError, RuntimeError])  # Gloo's is a RuntimeError
def test_monitored_barrier_names_the_ranks_that_are_missing(kind, seconds):
    group = dist.new_group()
    if RANK == 0:
        with pytest.raises(kind, match="did not come within"):
            group.monitored_barrier(timedelta(seconds=seconds))
    MPI.COMM_WORLD.Barrier()


def test_devices_are_those_of_this_machine():
    """torch moves what it sends to a device of the backend."""
    devices = {device.type for device in dist.group.WORLD._device_types}
    assert devices == ({"cpu", "cuda"} if torch.cuda.device_count() else {"cpu"})
    assert dist.Backend.backend_capability["mpistrat"] == sorted(devices)
