"""Collectives of ``torch.distributed`` give what torch's documentation says, for all ops, dtypes and layouts."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # names that torch replaced

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
MOVED = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.float8_e4m3fn]
SHAPES = [(), (1,), (7,), (3, 5), (0,), (2, 0)]
NAMES = ["SUM", "PRODUCT", "MIN", "MAX", "AVG"]


def of_rank(rank, shape=(7,), dtype=torch.float32):
    """The tensor of a rank: small whole numbers, which no dtype rounds."""
    count = int(np.prod(shape))
    values = (torch.arange(count) + rank) % 3 + (1 if dtype is not torch.bool else 0)
    return values.reshape(shape).to(dtype)


def combined(name, tensors):
    """What one process computes from the tensors of all ranks."""
    dtype = tensors[0].dtype
    wide = torch.stack([t.to(torch.complex128 if dtype.is_complex else torch.float64) for t in tensors])
    if name == "SUM":
        return wide.sum(0).to(dtype)
    if name == "AVG":
        return (wide.sum(0) / len(tensors)).to(dtype)  # of integers, towards 0
    if name == "PRODUCT":
        return wide.prod(0).to(dtype)
    return getattr(torch, f"a{name.lower()}")(wide, 0).to(dtype)


def everyone(**arguments):
    return [of_rank(rank, **arguments) for rank in range(SIZE)]


# --- all_reduce ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_all_reduce_ops_and_dtypes(name, dtype):
    tensor = of_rank(RANK, dtype=dtype)
    op = getattr(dist.ReduceOp, name)
    dist.all_reduce(tensor, op)
    torch.testing.assert_close(tensor, combined(name, everyone(dtype=dtype)), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64], ids=str)
@pytest.mark.parametrize("count", [3, 300_000])
def test_means_of_integers(dtype, count):
    """Rounded towards 0, as by NCCL and by a division whose result is copied to integers."""
    tensor = (torch.arange(count) % 11 - 5 - RANK).to(dtype)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    wanted = sum(torch.arange(count) % 11 - 5 - rank for rank in range(SIZE)) / SIZE
    torch.testing.assert_close(tensor, wanted.to(dtype), rtol=0, atol=0)
    part = torch.empty(2, dtype=dtype)
    dist.reduce_scatter_tensor(part, torch.full((2 * SIZE,), -1 - RANK, dtype=dtype), dist.ReduceOp.AVG)
    assert part.tolist() == [-int((SIZE + 1) / 2)] * 2


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("name", ["SUM", "AVG"])
def test_all_reduce_of_complex_numbers(name, dtype):
    tensor = of_rank(RANK, dtype=dtype) * 1j
    dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
    torch.testing.assert_close(tensor, combined(name, [each * 1j for each in everyone(dtype=dtype)]))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", ["BAND", "BOR", "BXOR"])
def test_all_reduce_bitwise(name, dtype):
    tensor = of_rank(RANK, dtype=dtype)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
    ufunc = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}[name]
    assert tensor.tolist() == ufunc.reduce([each.numpy() for each in everyone(dtype=dtype)]).tolist()


@pytest.mark.parametrize(("name", "expected"), [("SUM", "any"), ("MAX", "any"), ("MIN", "all"), ("PRODUCT", "all")])
def test_all_reduce_of_bools(name, expected):
    tensor = of_rank(RANK, dtype=torch.bool)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
    assert tensor.dtype is torch.bool
    assert torch.equal(tensor, getattr(torch.stack(everyone(dtype=torch.bool)), expected)(0))


@pytest.mark.parametrize("shape", SHAPES)
def test_all_reduce_shapes(shape):
    tensor = of_rank(RANK, shape=shape)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, combined("SUM", everyone(shape=shape)))


LAYOUTS = {
    "transposed": lambda t: t.reshape(3, 4).t().contiguous().t(),
    "every other": lambda t: torch.stack([t, t], 1).reshape(-1)[::2].reshape(3, 4),
    "channels last": lambda t: t.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "with an offset": lambda t: torch.cat([t, t])[12:].reshape(3, 4),
    "a parameter": lambda t: torch.nn.Parameter(t.reshape(3, 4)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce", "all_gather", "scatter", "send"])
def test_layouts(collective, layout):
    own, others = LAYOUTS[layout](of_rank(RANK, (12,))), [LAYOUTS[layout](t) for t in everyone(shape=(12,))]
    others = [other.detach() for other in others]
    strides, root = own.stride(), SIZE - 1
    if collective == "all_reduce":
        dist.all_reduce(own)
        expected = combined("SUM", others)
    elif collective == "reduce":
        dist.reduce(own, root)
        expected = combined("SUM", others) if root == RANK else others[RANK]
    elif collective == "broadcast":
        dist.broadcast(own, root)
        expected = others[root]
    elif collective == "all_gather":
        found = [LAYOUTS[layout](torch.zeros(12)) for _ in range(SIZE)]
        dist.all_gather(found, own.detach())
        assert all(torch.equal(*pair) for pair in zip(found, others, strict=True))
        return
    elif collective == "scatter":
        dist.scatter(own.detach(), others if root == RANK else None, src=root)
        expected = others[RANK]
    else:
        if SIZE == 1:
            return
        request = dist.isend(own.detach(), (RANK + 1) % SIZE)
        found = LAYOUTS[layout](torch.zeros(12)).detach()
        dist.recv(found, (RANK - 1) % SIZE)
        request.wait()
        own, expected = found, others[(RANK - 1) % SIZE]
    assert own.stride() == strides
    assert torch.equal(own, expected)


def test_half_precision_is_added_in_single():
    # 2048 + 1 is 2048 in half precision, so that adding one by one would give 2048.
    tensor = torch.tensor([2048.0 if RANK == 0 else 1.0], dtype=torch.float16)
    dist.all_reduce(tensor)
    assert tensor.item() == float(torch.tensor(2048.0 + SIZE - 1).half())


@pytest.mark.parametrize("count", [1 << 10, 1 << 16, (1 << 18) + 3, 1 << 21])
def test_all_reduce_of_many_elements(count):
    tensor = torch.full((count,), float(RANK + 1))
    dist.all_reduce(tensor)
    assert (tensor == SIZE * (SIZE + 1) / 2).all()


def test_all_reduce_coalesced():
    tensors = [of_rank(RANK, (3,)), of_rank(RANK, (2, 2)), of_rank(RANK, ())]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        assert torch.equal(tensor, combined("SUM", everyone(shape=tuple(tensor.shape))))


@pytest.mark.parametrize("root", [0, SIZE - 1])
@pytest.mark.parametrize("name", NAMES)
def test_reduce(name, root):
    tensor = of_rank(RANK)
    dist.reduce(tensor, root, getattr(dist.ReduceOp, name))
    expected = combined(name, everyone()) if root == RANK else of_rank(RANK)
    torch.testing.assert_close(tensor, expected)


# --- reduce_scatter ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "BAND", "BOR", "BXOR"])
def test_reduce_scatter_single(name):
    dtype = torch.int64 if name.startswith("B") else torch.float32
    output = torch.zeros(4, dtype=dtype)
    dist.reduce_scatter_tensor(output, of_rank(RANK, (SIZE, 4), dtype), getattr(dist.ReduceOp, name))
    rows = [each[RANK] for each in everyone(shape=(SIZE, 4), dtype=dtype)]
    if name.startswith("B"):
        ufunc = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}[name]
        assert output.tolist() == ufunc.reduce([row.numpy() for row in rows]).tolist()
    else:
        torch.testing.assert_close(output, combined(name, rows))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_reduce_scatter_dtypes(dtype):
    output = torch.zeros(3, dtype=dtype)
    dist.reduce_scatter_tensor(output, of_rank(RANK, (3 * SIZE,), dtype))
    rows = [each.reshape(SIZE, 3)[RANK] for each in everyone(shape=(3 * SIZE,), dtype=dtype)]
    expected = torch.stack(rows).any(0) if dtype is torch.bool else combined("SUM", rows)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_reduce_scatter_of_lists(name, uneven):
    lengths = [rank + 2 if uneven else 3 for rank in range(SIZE)]
    output = torch.zeros(lengths[RANK])
    parts = [[of_rank(rank + i, (n,)) for i, n in enumerate(lengths)] for rank in range(SIZE)]
    dist.reduce_scatter(output, parts[RANK], getattr(dist.ReduceOp, name))
    torch.testing.assert_close(output, combined(name, [each[RANK] for each in parts]))


def test_reduce_scatter_coalesced():
    outputs = [torch.zeros(2), torch.zeros(3)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_tensor(output, torch.full((len(output) * SIZE,), float(RANK + 1)))
    assert all((output == SIZE * (SIZE + 1) / 2).all() for output in outputs)


# --- moves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [0, SIZE - 1])
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_broadcast(dtype, root):
    tensor = of_rank(RANK, (2, 3), dtype)
    dist.broadcast(tensor, root)
    assert torch.equal(tensor.view(torch.uint8), of_rank(root, (2, 3), dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_all_gather_dtypes(dtype):
    found = [torch.zeros(7).to(dtype) for _ in range(SIZE)]
    dist.all_gather(found, of_rank(RANK, dtype=dtype))
    for each, expected in zip(found, everyone(dtype=dtype), strict=True):
        assert torch.equal(each.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
def test_all_gather_shapes(shape):
    found = [torch.zeros(shape) for _ in range(SIZE)]
    dist.all_gather(found, of_rank(RANK, shape))
    assert all(torch.equal(*pair) for pair in zip(found, everyone(shape=shape), strict=True))


def test_all_gather_of_different_lengths():
    found = [torch.zeros(rank, 2) for rank in range(SIZE)]
    dist.all_gather(found, of_rank(RANK, (RANK, 2)))
    assert all(torch.equal(each, of_rank(rank, (rank, 2))) for rank, each in enumerate(found))


@pytest.mark.parametrize("shape", [(7,), (2, 3), (0,)])
@pytest.mark.parametrize("stacked", [False, True])
def test_all_gather_single(shape, stacked):
    whole = (SIZE, *shape) if stacked else (SIZE * shape[0], *shape[1:])
    output = torch.zeros(whole)
    dist.all_gather_into_tensor(output, of_rank(RANK, shape))
    parts = everyone(shape=shape)
    assert torch.equal(output, torch.stack(parts) if stacked else torch.cat(parts))


def test_all_gather_single_coalesced():
    outputs = [torch.zeros(2 * SIZE), torch.zeros(3 * SIZE)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.all_gather_into_tensor(output, of_rank(RANK, (len(output) // SIZE,)))
    for output in outputs:
        assert torch.equal(output, torch.cat(everyone(shape=(len(output) // SIZE,))))


def test_all_gather_coalesced():
    outputs = [[torch.zeros(2), torch.zeros(1, 3)] for _ in range(SIZE)]
    dist.all_gather_coalesced(outputs, [of_rank(RANK, (2,)), of_rank(RANK, (1, 3))])
    for rank, (a, b) in enumerate(outputs):
        assert torch.equal(a, of_rank(rank, (2,)))
        assert torch.equal(b, of_rank(rank, (1, 3)))


@pytest.mark.parametrize("root", [0, SIZE - 1])
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_gather_and_scatter(dtype, root):
    found = [torch.zeros(7).to(dtype) for _ in range(SIZE)] if root == RANK else None
    dist.gather(of_rank(RANK, dtype=dtype), found, dst=root)
    if root == RANK:
        for each, expected in zip(found, everyone(dtype=dtype), strict=True):
            assert torch.equal(each.view(torch.uint8), expected.view(torch.uint8))
    back = torch.zeros(7).to(dtype)
    dist.scatter(back, found, src=root)
    assert torch.equal(back.view(torch.uint8), of_rank(RANK, dtype=dtype).view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
def test_gather_shapes(shape):
    found = [torch.zeros(shape) for _ in range(SIZE)] if RANK == 0 else None
    dist.gather(of_rank(RANK, shape), found)
    if RANK == 0:
        assert all(torch.equal(*pair) for pair in zip(found, everyone(shape=shape), strict=True))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_all_to_all_single(dtype):
    output = torch.zeros(SIZE, 3).to(dtype)
    dist.all_to_all_single(output, of_rank(RANK, (SIZE, 3), dtype))
    expected = torch.stack([of_rank(rank, (SIZE, 3), dtype).view(torch.uint8)[RANK] for rank in range(SIZE)])
    assert torch.equal(output.view(torch.uint8), expected)


def test_all_to_all_single_with_split_sizes():
    # Rank r sends r + i rows to rank i.
    sent, received = [RANK + i for i in range(SIZE)], [i + RANK for i in range(SIZE)]
    output = torch.zeros(sum(received), 2)
    dist.all_to_all_single(output, of_rank(RANK, (sum(sent), 2)), received, sent)
    parts = []
    for rank in range(SIZE):
        theirs = torch.split(of_rank(rank, (sum(rank + i for i in range(SIZE)), 2)), [rank + i for i in range(SIZE)])
        parts.append(theirs[RANK])
    assert torch.equal(output, torch.cat(parts))


@pytest.mark.parametrize("uneven", [False, True])
def test_all_to_all_of_lists(uneven):
    length = (lambda a, b: a + 2 * b) if uneven else (lambda a, b: 3)
    found = [torch.zeros(length(rank, RANK)) for rank in range(SIZE)]
    dist.all_to_all(found, [torch.full((length(RANK, i),), 10.0 * RANK + i) for i in range(SIZE)])
    for rank, each in enumerate(found):
        assert torch.equal(each, torch.full((length(rank, RANK),), 10.0 * rank + RANK))


# --- objects -------------------------------------------------------------------------------------------


def test_objects():
    found = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK, "text": "x" * RANK})
    assert found == [{"rank": rank, "text": "x" * rank} for rank in range(SIZE)]
    told = [f"of {RANK}", RANK] if RANK == 0 else [None, None]
    dist.broadcast_object_list(told)
    assert told == ["of 0", 0]
    gathered = [None] * SIZE if RANK == SIZE - 1 else None
    dist.gather_object(RANK, gathered, dst=SIZE - 1)
    assert gathered == (list(range(SIZE)) if RANK == SIZE - 1 else None)
    mine = [None]
    dist.scatter_object_list(mine, [f"for {rank}" for rank in range(SIZE)] if RANK == 0 else None)
    assert mine == [f"for {RANK}"]


# --- functional collectives ----------------------------------------------------------------------------


def test_functional_collectives():
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    total = functional.all_reduce(of_rank(RANK), "sum", group)
    assert torch.equal(functional.wait_tensor(total), combined("SUM", everyone()))
    gathered = functional.all_gather_tensor(of_rank(RANK), 0, group)
    assert torch.equal(functional.wait_tensor(gathered), torch.cat(everyone()))
    part = functional.reduce_scatter_tensor(of_rank(RANK, (SIZE * 2,)), "sum", 0, group)
    rows = [each.reshape(SIZE, 2)[RANK] for each in everyone(shape=(SIZE * 2,))]
    assert torch.equal(functional.wait_tensor(part), combined("SUM", rows))
    swapped = functional.all_to_all_single(of_rank(RANK, (SIZE,)), None, None, group)
    assert functional.wait_tensor(swapped).tolist() == [of_rank(rank, (SIZE,))[RANK] for rank in range(SIZE)]
    shared = functional.broadcast(of_rank(RANK), 0, group)
    assert torch.equal(functional.wait_tensor(shared), of_rank(0))
