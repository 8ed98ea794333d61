"""Names of ``torch.distributed`` beside the plain collectives: each gives what it gives on Gloo."""

import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
import torch.distributed.nn.functional as with_history  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpistrat  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
AFTER, BEFORE, LAST = (RANK + 1) % SIZE, (RANK - 1) % SIZE, SIZE - 1
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about names that it replaced


def own(*shape, rank=RANK):
    """Small whole numbers of a rank."""
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return (tensor + rank) % 5 + 1


def thing(rank=RANK):
    return {"rank": rank, "rows": own(rank + 1, rank=rank).tolist(), "text": "x" * rank}


def told(tensor):
    """A result of a functional collective, waited for."""
    return functional.wait_tensor(tensor)


CASES = {}


def case(function):
    """A function of a process group, which returns what a rank has then."""
    CASES[function.__name__] = function
    return function


@pytest.mark.parametrize("name", CASES)
def test_as_on_gloo(name, gloo):
    found, expected = CASES[name](dist.group.WORLD), CASES[name](gloo)
    if name.startswith("objects"):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


# --- collectives by their other names and arguments ----------------------------------------------------


@case
def all_reduce_coalesced(group):
    tensors = [own(3), own(2, 2), own()]
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX, group)
    waited = [own(4), own(1)]
    dist.all_reduce_coalesced(waited, group=group, async_op=True).wait()
    return tensors + waited


@case
def single(group):
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the second name is the older one
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    whole, part = torch.zeros(2 * SIZE, 3), torch.zeros(2, 3)
    gather(whole, own(2, 3), group)
    scatter(part, whole + RANK, group=group)
    return whole, part


@case
def coalesced_and_waited_for(group):
    tensors = [own(3), own(2, 2)]
    with dist._coalescing_manager(group, async_ops=True) as works:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    works.wait()
    return tensors


@case
def roots_by_their_rank_in_the_group(group):
    shared, total, part = own(3), own(3), torch.zeros(2)
    dist.broadcast(shared, group=group, group_src=LAST)
    dist.reduce(total, group=group, group_dst=LAST)
    found = [torch.zeros(3) for _ in range(SIZE)] if RANK == LAST else None
    dist.gather(own(3), found, group=group, group_dst=LAST)
    dist.scatter(part, [own(2, rank=i) for i in range(SIZE)] if RANK == LAST else None, group=group, group_src=LAST)
    return shared, total if RANK == LAST else None, found, part


@case
def objects(group):
    everywhere, shared, mine = [None] * SIZE, [thing(), RANK], [None]
    dist.all_gather_object(everywhere, thing(), group)
    dist.broadcast_object_list(shared, group=group, group_src=LAST, device=torch.device("cpu"))
    gathered = [None] * SIZE if RANK == LAST else None
    dist.gather_object(thing(), gathered, group=group, group_dst=LAST)
    things = [thing(i) for i in range(SIZE)] if RANK == LAST else None
    dist.scatter_object_list(mine, things, group=group, group_src=LAST)
    return everywhere, shared, gathered, mine


@case
def objects_of_collective_utils(group):
    from torch.distributed import collective_utils

    shared = collective_utils.broadcast(lambda: thing(LAST), rank=LAST, pg=group)
    return shared, collective_utils.all_gather(thing, pg=group)


@case
def batches_of_messages(group):
    if SIZE == 1:
        return None
    found = [torch.zeros(2), torch.zeros(3), torch.zeros(4)]
    ops = [
        dist.P2POp(dist.irecv, found[1], group=group, group_peer=BEFORE, tag=2),
        dist.P2POp(dist.isend, own(2), AFTER, group, tag=1),
        dist.P2POp(dist.irecv, found[0], BEFORE, group, tag=1),
        dist.P2POp(dist.isend, own(3), group=group, group_peer=AFTER, tag=2),
        dist.P2POp(dist.irecv, found[2], AFTER, group, tag=3),
        dist.P2POp(dist.isend, own(4), BEFORE, group, tag=3),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return found


@case
def futures_of_collectives(group):
    total = dist.all_reduce(own(3), group=group, async_op=True).get_future()
    doubled = total.then(lambda done: 2 * done.value()[0])
    both = torch.futures.collect_all([total, doubled])
    torch.futures.wait_all([total, doubled])
    return total.wait(), doubled.wait(), [each.wait() for each in both.wait()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["auto", "exact", "ordered", "mpi"])
def test_large_tensors_by_every_algorithm(implementation, dtype):
    options = mpistrat.experimental.CommunicationOptions(implementation=implementation)
    group = dist.new_group(pg_options=options)
    tensors = [own((1 << 20) + 3, rank=rank).to(dtype) for rank in range(SIZE)]
    total, kept = sum(tensors), tensors[RANK].clone()
    dist.all_reduce(tensors[RANK], group=group)
    assert torch.equal(tensors[RANK], total)
    dist.reduce(kept, 0, group=group)
    assert torch.equal(kept, total) == (RANK == 0 or SIZE == 1)
    dist.destroy_process_group(group)


# --- collectives that compute gradients ----------------------------------------------------------------


def and_gradient(function):
    """The result of a function of a tensor, and the gradient of its weighted sum."""
    value = own(2 * SIZE, 2).requires_grad_()
    result = function(value)
    parts = result if isinstance(result, (list, tuple)) else [result]
    weights = [torch.arange(1.0, 1 + part.numel()).reshape(part.shape) for part in parts]
    sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)).backward()
    return [part.detach() for part in parts], value.grad


@case
def gradients_through_moves(group):
    rows = SIZE * [2]
    return [
        and_gradient(lambda value: with_history.broadcast(value, LAST, group)),
        and_gradient(lambda value: with_history.all_gather(value, group)),
        and_gradient(lambda value: with_history.scatter(list(value.split(2)), LAST, group)),
        and_gradient(lambda value: with_history.all_to_all_single(torch.zeros_like(value), value, rows, rows, group)),
        and_gradient(
            lambda value: with_history.all_to_all([torch.zeros(2, 2) for _ in rows], list(value.split(2)), group)
        ),
        and_gradient(lambda value: [each * (RANK == LAST) for each in with_history.gather(value, LAST, group)]),
    ]


@case
def gradients_through_reductions(group):
    return [
        and_gradient(lambda value: with_history.all_reduce(value, group=group)),
        and_gradient(lambda value: with_history.reduce(value, LAST, group=group) * (RANK == LAST)),
        and_gradient(lambda value: with_history.reduce_scatter(torch.zeros(2, 2), list(value.split(2)), group=group)),
    ]


@case
def functional_gradients(group):
    rows = SIZE * [2]
    return [
        and_gradient(lambda value: functional.all_gather_tensor_autograd(value, 0, group)),
        and_gradient(lambda value: functional.all_gather_tensor_autograd(value, 1, group)),
        and_gradient(lambda value: functional.reduce_scatter_tensor_autograd(value, "sum", 0, group)),
        and_gradient(lambda value: functional.all_to_all_single_autograd(value, rows, rows, group)),
    ]


@case
def functional_moves(group):
    halves = [1 + (i > RANK) for i in range(SIZE)]  # to later ranks two rows, to the others one
    theirs = [1 + (i < RANK) for i in range(SIZE)]
    return [
        told(functional.all_gather_tensor(own(2, 3), 1, group)),
        told(functional.broadcast(own(3), LAST, group)),
        told(functional.all_to_all_single(own(sum(halves), 2), theirs, halves, group)),
        told(functional.permute_tensor(own(3), [(i + 1) % SIZE for i in range(SIZE)], group)),
        *map(told, functional.all_gather_into_tensor_coalesced([own(2), own(1, 3)], group)),
    ]


@case
def functional_reductions(group):
    parts = [own(2 * SIZE), own(SIZE, 3)]
    return [
        *(told(functional.all_reduce(own(3), name, group)) for name in ("sum", "min", "max", "product")),
        told(functional.reduce_scatter_tensor(own(3, 2 * SIZE), "sum", 1, group)),
        *map(told, functional.all_reduce_coalesced([own(2), own(1, 3)], "sum", group)),
        *map(told, functional.reduce_scatter_tensor_coalesced(parts, "sum", [0, 0], group)),
    ]


def test_functional_average():  # which Gloo does not have
    averaged = told(functional.all_reduce(own(4), "avg", dist.group.WORLD))
    assert torch.equal(averaged, sum(own(4, rank=i) for i in range(SIZE)) / SIZE)


# --- groups --------------------------------------------------------------------------------------------


def test_what_torch_tells_of_groups():
    assert dist.get_default_backend_for_device("cpu") in ("gloo", "mpistrat")
    assert dist.get_backend_config() == ("cpu:mpistrat,cuda:mpistrat" if torch.cuda.device_count() else "cpu:mpistrat")
    before = dist.get_pg_count()
    group = dist.new_group([0, LAST] if SIZE > 1 else [0])
    assert dist.get_pg_count() == before + 1
    if RANK in (0, LAST):
        assert dist.get_process_group_ranks(group) == sorted({0, LAST})
        assert dist.get_group_rank(group, LAST) == min(LAST, 1)
        assert dist.get_global_rank(group, min(LAST, 1)) == LAST
        dist.destroy_process_group(group)


def sum_of_ranks(group):
    tensor = torch.tensor([float(RANK)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@several
def test_subgroups():
    half = SIZE // 2
    parts = [list(range(half)), list(range(half, SIZE))]
    mine = parts[half <= RANK]
    group, groups = dist.new_subgroups_by_enumeration(parts)
    assert len(groups) == 2
    assert sum_of_ranks(group) == sum(mine)
    alone = dist.new_group(mine, use_local_synchronization=True)  # the other ranks do not call it with these ranks
    assert sum_of_ranks(alone) == sum(mine)
    if SIZE % 2 == 0:
        pair, pairs = dist.new_subgroups(2)
        assert len(pairs) == half
        assert sum_of_ranks(pair) == 4 * (RANK // 2) + 1


@several
def test_members_may_be_in_another_order():
    try:
        group = dist.new_group(list(range(SIZE))[::-1], sort_ranks=False)
    except TypeError:
        pytest.skip("this torch sorts the ranks of a group")
    assert dist.get_group_rank(group, RANK) == LAST - RANK
    found = [torch.zeros(1) for _ in range(SIZE)]
    dist.all_gather(found, torch.tensor([float(RANK)]), group=group)
    assert torch.cat(found).tolist() == list(range(SIZE))[::-1]


def test_parts_of_a_device_mesh():
    shape = (2, SIZE // 2) if SIZE % 2 == 0 else (1, SIZE)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))
    row, column = divmod(RANK, shape[1])
    assert list(mesh.get_coordinate()) == [row, column]
    assert mesh["columns"].get_local_rank() == column
    assert sum_of_ranks(mesh["columns"].get_group()) == sum(range(row * shape[1], (row + 1) * shape[1]))
    assert sum_of_ranks(mesh["rows"].get_group()) == sum(range(column, SIZE, shape[1]))
    assert sum_of_ranks(mesh._flatten("all").get_group()) == sum(range(SIZE))
    again = dist.device_mesh.DeviceMesh.from_group(mesh["columns"].get_group(), "cpu")
    assert again.mesh.tolist() == mesh.mesh[row].tolist()


# --- what torch itself refuses to backends beside its own ----------------------------------------------


def test_shrink_group_is_refused_by_torch():
    if not hasattr(dist, "shrink_group"):
        pytest.skip("this torch does not have it")
    with pytest.raises((RuntimeError, ValueError, TypeError), match=r"not support shrinking|cannot be empty"):
        dist.shrink_group([LAST] if SIZE > 1 else [])
    assert sum_of_ranks(None) == sum(range(SIZE))


def test_local_ranks_are_asked_of_the_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert dist.get_node_local_rank(fallback_rank=3) == 3
    assert "LOCAL_RANK" not in os.environ


# --- tensors that cannot be sent -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["meta", "sparse", "quantized", "nested"])
@pytest.mark.parametrize(
    "collective", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send"]
)
def test_tensors_without_values_in_a_row_are_refused(kind, collective):
    make = {
        "meta": lambda: torch.ones(SIZE, device="meta"),
        "sparse": lambda: torch.ones(SIZE).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(SIZE), 0.5, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    }[kind]
    group = dist.group.WORLD
    calls = {
        "all_reduce": lambda: group.allreduce([make()]),
        "broadcast": lambda: dist.broadcast(make(), 0),
        "all_gather": lambda: group.allgather([[make() for _ in range(SIZE)]], [make()]),
        "reduce_scatter": lambda: group._reduce_scatter_base(torch.zeros(1), make()),
        "all_to_all": lambda: group.alltoall([make() for _ in range(SIZE)], [make() for _ in range(SIZE)]),
        "send": lambda: group.send([make()], AFTER, 0),
    }
    with pytest.raises((TypeError, ValueError), match=r"dense tensors|one dtype|elements"):
        calls[collective]()
    assert sum_of_ranks(None) == sum(range(SIZE))
