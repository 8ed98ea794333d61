"""Horovod's calls for PyTorch: tensors, gradients, compression, and ranks that begin alike."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from mpi4py import MPI  # noqa: E402

import mpistrat.integrations.hvd.torch as hvd  # noqa: E402
from mpistrat.runtime.agreement.operation import MismatchError  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]


@pytest.fixture(autouse=True)
def initialized():
    hvd.init()


def of_rank(rank, shape=(3, 5), dtype=torch.float32):
    count = int(torch.tensor(shape).prod())
    return ((torch.arange(count) + rank) % 4).reshape(shape).to(dtype)


def everyone(*arguments, **more):
    return torch.stack([of_rank(rank, *arguments, **more) for rank in range(SIZE)])


# --- tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_dtypes(dtype):
    own, expected = of_rank(RANK, dtype=dtype), everyone().sum(0)
    assert torch.equal(hvd.allreduce(own, op=hvd.Sum), expected.to(dtype))
    assert torch.equal(hvd.allreduce(own, op=hvd.Max), everyone().amax(0).to(dtype))
    mean = hvd.synchronize(hvd.allreduce_async(own))
    torch.testing.assert_close(mean, (expected.double() / SIZE).to(dtype))
    assert hvd.allreduce_(own, op=hvd.Sum) is own
    assert torch.equal(own, expected.to(dtype))


def test_strides_scalars_and_parameters():
    own = of_rank(RANK, (4, 3)).t()
    assert torch.equal(hvd.allreduce(own, op=hvd.Sum), everyone((4, 3)).sum(0).t())
    hvd.broadcast_(own, LAST)
    assert torch.equal(own, of_rank(LAST, (4, 3)).t())
    assert hvd.allreduce(torch.tensor(RANK), op=hvd.Sum).item() == SIZE * LAST // 2
    parameter = torch.nn.Parameter(of_rank(RANK))
    hvd.allreduce_(parameter, op=hvd.Sum)
    assert torch.equal(parameter.detach(), everyone().sum(0))
    assert parameter.requires_grad


def test_compression():
    own = torch.full((3,), 1 / 3)
    total = hvd.allreduce(own, compression=hvd.Compression.fp16, op=hvd.Sum)
    assert total.dtype is torch.float32
    assert torch.equal(total, (own.half().float() * SIZE).half().float())
    whole = hvd.allreduce(torch.tensor([3]), compression=hvd.Compression.fp16)
    assert whole.tolist() == [3]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors():
    own = torch.sparse_coo_tensor([[RANK, 0]], [[1.0, 2.0], [3.0, 4.0]], (SIZE, 2))
    dense = torch.zeros(SIZE, 2) + torch.tensor([[1.0, 2.0]])
    dense[0] += SIZE * torch.tensor([3.0, 4.0])
    assert torch.equal(hvd.sparse_allreduce_async(own, "rows", hvd.Sum)().to_dense(), dense)
    mean = hvd.sparse_allreduce_async(own, "rows", hvd.Average)().to_dense()
    torch.testing.assert_close(mean, dense / SIZE)


# --- gradients -----------------------------------------------------------------------------------------


def gradient(call, shape=(3, 5)):
    """The gradient of a call's result times what differs by rank."""
    own = of_rank(RANK, shape).requires_grad_()
    result = call(own)
    weights = of_rank(RANK, tuple(result.shape)) + 1
    (result * weights).sum().backward()
    return own.grad


def test_gradients_of_reductions():
    weights = everyone() + 1
    torch.testing.assert_close(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)), weights.sum(0))
    torch.testing.assert_close(gradient(hvd.allreduce), weights.mean(0))
    scaled = gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0))
    torch.testing.assert_close(scaled, 2 * weights.sum(0))
    two = gradient(lambda x: sum(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)))
    torch.testing.assert_close(two, 3 * weights.sum(0))


def test_gradients_of_moves():
    rows = RANK + 1
    total = sum(range(1, SIZE + 1))
    start = sum(range(1, RANK + 1))
    weights = torch.stack([of_rank(rank, (total, 2)) + 1 for rank in range(SIZE)]).mean(0)
    torch.testing.assert_close(gradient(hvd.allgather, (rows, 2)), weights[start : start + rows])
    mean = (everyone() + 1).mean(0)
    expected = mean if RANK == LAST else torch.zeros_like(mean)
    torch.testing.assert_close(gradient(lambda x: hvd.broadcast(x, LAST)), expected)
    back = gradient(hvd.alltoall, (2 * SIZE,))
    sent = [of_rank(rank, (2 * SIZE,))[2 * RANK : 2 * RANK + 2] + 1 for rank in range(SIZE)]
    torch.testing.assert_close(back, torch.cat(sent))
    uneven = gradient(lambda x: hvd.alltoall(x, splits=torch.tensor([1] * LAST + [3]))[0], (SIZE + 2,))
    assert uneven.shape == (SIZE + 2,)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_gradients_of_reducescatter(op):
    got = gradient(lambda x: hvd.reducescatter(x, op=op), (2 * SIZE, 3))
    weights = torch.cat([of_rank(rank, (2, 3)) + 1 for rank in range(SIZE)])
    torch.testing.assert_close(got, weights * (SIZE if op is hvd.Sum else 1))


# --- alike at the start --------------------------------------------------------------------------------


def model_of(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


@pytest.mark.parametrize("given", ["state_dict", "named_parameters", "parameters"])
def test_broadcast_parameters(given):
    model = model_of(RANK)
    params = {
        "state_dict": model.state_dict(),
        "named_parameters": list(model.named_parameters()),
        "parameters": list(model.parameters()),
    }
    hvd.broadcast_parameters(params[given], LAST)
    for mine, theirs in zip(model.parameters(), model_of(LAST).parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="params"):
        hvd.broadcast_parameters(torch.ones(3), 0)


@several
def test_parameters_of_other_models_raise():
    names = {"first": torch.ones(2), "second": torch.ones(2)}
    if RANK:
        names = {"first": torch.ones(2), "third": torch.ones(2)}
    with pytest.raises(MismatchError, match="first, second") as caught:
        hvd.broadcast_parameters(names, 0)
    assert "first, third" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_broadcast_optimizer_state(kind, options):
    """The last rank has made steps with another rate; the others have not."""
    model = model_of(1)
    optimizer = kind(model.parameters(), lr=0.1 * (RANK + 1), **options)
    if RANK == LAST:
        for _ in range(2):
            model(torch.ones(3, 3)).pow(2).sum().backward()
            optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, LAST)
    assert optimizer.param_groups[0]["lr"] == 0.1 * SIZE
    states = hvd.allgather_object(optimizer.state_dict())
    for state in states:
        torch.testing.assert_close(state, states[LAST], rtol=0, atol=0)
    hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(optimizer), 0)


def test_the_state_of_the_root_comes_bit_by_bit():
    """`load_state_dict` would cast it to the dtype of the parameter, and could not make some of these types."""
    number = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([number], 0.1)
    wanted = {
        "master": torch.tensor([1 / 3, torch.nan, -0.0]),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
        "count": torch.tensor(2**53 + 1),
        "flags": torch.tensor([True, False]),
        "half": torch.tensor([0.1], dtype=torch.float16),
        "nested": [{"factors": (torch.ones(2, 0), torch.tensor(1 / 3))}],
        "array": np.arange(3.0),
        "text": "rule",
        "number": 1 / 3,
        "nothing": None,
    }
    if RANK == LAST:
        optimizer.state[number].update(wanted)
    hvd.broadcast_optimizer_state(optimizer, LAST)
    got = optimizer.state[number]
    assert shown(got) == shown(wanted)
    optimizer.zero_grad()
    hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(optimizer), LAST)


def shown(value):
    """Nested values with tensors as their dtype, shape and bytes."""
    if torch.is_tensor(value):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, dict):
        return [(key, shown(each)) for key, each in sorted(value.items())]
    return [type(value).__name__, *map(shown, value)] if isinstance(value, (list, tuple)) else repr(value)


def test_state_of_lbfgs_is_refused():
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model_of(0).parameters()), 0)


# --- values that are not tensors -----------------------------------------------------------------------

OF_TENSORS = {
    "allreduce": hvd.allreduce,
    "allgather": hvd.allgather,
    "broadcast": lambda value: hvd.broadcast(value, 0),
    "alltoall": hvd.alltoall,
    "reducescatter": hvd.reducescatter,
}


@pytest.mark.parametrize("name", OF_TENSORS)
@pytest.mark.parametrize("where", ["all ranks", "one rank"])
def test_other_values_are_refused_on_all_ranks(name, where):
    hvd.init()
    value = [1.0] * SIZE if where == "all ranks" or RANK == SIZE - 1 else torch.ones(SIZE)
    with pytest.raises((TypeError, hvd.HorovodInternalError), match="takes tensors of torch, not list"):
        OF_TENSORS[name](value)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE


def test_tensors_may_come_from_a_generator():
    hvd.init()
    totals = hvd.grouped_allreduce((torch.ones(n) for n in (2, 3)), op=hvd.Sum)
    assert [total.tolist() for total in totals] == [[SIZE] * 2, [SIZE] * 3]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("whose", ["first", "last", "all", "none"])
def test_gather_of_tensors_of_which_some_require_a_gradient(whose):
    requires = {"first": RANK == 0, "last": RANK == SIZE - 1, "all": True, "none": False}[whose]
    x = torch.full((RANK + 1,), float(RANK), requires_grad=requires)
    gathered = hvd.allgather(x)
    assert gathered.tolist() == [float(rank) for rank in range(SIZE) for _ in range(rank + 1)]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
    if whose == "all":
        (gathered * torch.arange(len(gathered))).sum().backward()
        first = RANK * (RANK + 1) // 2
        assert x.grad.tolist() == list(range(first, first + RANK + 1))


@pytest.mark.parametrize("part", [lambda gradient: gradient.data, lambda gradient: gradient.numpy()])
def test_gradients_that_a_program_writes_in_place_before_a_backward_pass_count(part):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.zeros(3) if SIZE == 1 else None
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0), named_parameters=[("p", p)])
    part(p.grad)[:] = 2
    optimizer.step()
    assert p.tolist() == [-1, -1, -1]


def test_gradients_are_there_before_the_first_backward_pass():
    model = torch.nn.Linear(2, 1)
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters(), frozen], 0.1)
    hvd.DistributedOptimizer(optimizer, named_parameters=[*model.named_parameters(), ("frozen", frozen)])
    for p in model.parameters():
        assert (p.grad is None) if SIZE == 1 else not p.grad.any()
    assert frozen.grad is None
