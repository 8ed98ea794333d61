"""Training by Horovod's examples: losses and weights are those of one process with the batches of all ranks."""

import copy
import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

import mpistrat.integrations.hvd.torch as hvd  # noqa: E402
from mpistrat.runtime.agreement.operation import MismatchError  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
BATCH = 12


@pytest.fixture(autouse=True)
def initialized():
    hvd.init()


def images(count=48):
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(count, 1, 8, 8, generator=generator), torch.randint(0, 5, (count,), generator=generator)
    )


def network(seed=3):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5))


def loader(dataset, ranks, rank):
    sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, seed=1)
    return sampler, DataLoader(dataset, batch_size=BATCH // ranks, sampler=sampler)


def assert_same_weights(model, other):
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_mnist_loop():
    """The loop of examples/pytorch/pytorch_mnist.py."""
    model = network(seed=RANK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), gradient_predivide_factor=2.0
    )
    assert isinstance(optimizer, torch.optim.SGD)
    alone = network(seed=0)
    by_alone = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.5)
    sampler, batches = loader(images(), SIZE, RANK)
    whole_sampler, whole_batches = loader(images(), 1, 0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        whole_sampler.set_epoch(epoch)
        for (data, target), (all_data, all_target) in zip(batches, whole_batches, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            by_alone.zero_grad()
            expected = F.cross_entropy(alone(all_data), all_target)
            expected.backward()
            by_alone.step()
            assert abs(hvd.allreduce(loss.detach(), name="avg_loss").item() - expected.item()) < 1e-5
    assert_same_weights(model, alone)


def test_imagenet_loop():
    """The loop of examples/pytorch/pytorch_imagenet_resnet50.py: several batches for a step, rates that warm up."""
    per_step = 2
    model = network()
    alone = copy.deepcopy(model)
    options = {"lr": 0.05 * per_step * SIZE, "momentum": 0.9, "weight_decay": 5e-5}
    optimizer, by_alone = (torch.optim.SGD(each.parameters(), **options) for each in (model, alone))
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=per_step
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    _, batches = loader(images(), SIZE, RANK)
    _, whole_batches = loader(images(), 1, 0)
    total = torch.tensor(0.0)
    for step, ((data, target), (all_data, all_target)) in enumerate(zip(batches, whole_batches, strict=True)):
        for each in (optimizer, by_alone):
            each.param_groups[0]["lr"] = 0.01 * (step + 1)
            each.zero_grad()
        size = math.ceil(len(data) / per_step)
        for i in range(0, len(data), size):
            loss = F.cross_entropy(model(data[i : i + size]), target[i : i + size])
            total += hvd.allreduce(loss.detach(), name="train_loss") * len(target[i : i + size]) / len(target)
            loss.mul_(len(target[i : i + size]) / len(target))
            loss.backward()
        optimizer.step()
        expected = F.cross_entropy(alone(all_data), all_target)
        expected.backward()
        by_alone.step()
        total -= expected.item()
        assert abs(total.item()) < 1e-5
    assert_same_weights(model, alone)


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
@pytest.mark.parametrize("groups", [None, 2, "lists"])
def test_synthetic_loop(compression, groups):
    """The loop of examples/pytorch/pytorch_synthetic_benchmark.py."""
    model = network()
    alone = copy.deepcopy(model)
    listed = [list(model.parameters())[1:3]] if groups == "lists" else groups
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), compression=compression, groups=listed
    )
    by_alone = torch.optim.Adam(alone.parameters(), lr=0.01)
    data, target = images(BATCH).tensors
    part = slice(RANK * BATCH // SIZE, (RANK + 1) * BATCH // SIZE)
    for _ in range(4):
        for each, by, rows in ((model, optimizer, part), (alone, by_alone, slice(None))):
            by.zero_grad()
            F.cross_entropy(each(data[rows]), target[rows]).backward()
            by.step()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        tolerance = 1e-5 if compression is hvd.Compression.none else 1e-2
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_gradient_clipping_and_schedulers():
    model = network()
    alone = copy.deepcopy(model)
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    early = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)  # replaces `step` of the optimizer that is wrapped
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    by_alone = torch.optim.SGD(alone.parameters(), lr=0.5)
    data, target = images(BATCH).tensors
    part = slice(RANK * BATCH // SIZE, (RANK + 1) * BATCH // SIZE)
    for step in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(data[part]), target[part]).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.step = lambda: None  # the scheduler wants that it was called
        by_alone.param_groups[0]["lr"] = 0.5 * 0.5**step
        by_alone.zero_grad()
        F.cross_entropy(alone(data), target).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        by_alone.step()
        with pytest.warns(UserWarning, match="lr_scheduler") if step == 0 else _nothing():
            early.step()
    assert_same_weights(model, alone)
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


class _nothing:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def test_parameters_without_a_gradient_on_some_ranks():
    """A branch that only rank 0 takes: the gradients of the others are zero."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=float(SIZE)))
    loss = weights[0].sum() + (weights[1].sum() if RANK == 0 else 0)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(weights[0].detach(), torch.full((2,), 1.0 - SIZE))
    torch.testing.assert_close(weights[1].detach(), torch.zeros(2), rtol=0, atol=1e-6)


def test_sparse_gradients():
    for as_dense in (False, True):
        embedding = torch.nn.Embedding(SIZE + 2, 2, sparse=True)
        torch.nn.init.ones_(embedding.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), sparse_as_dense=as_dense)
        embedding(torch.tensor([RANK, SIZE])).sum().backward()
        optimizer.step()
        expected = torch.full((SIZE + 2, 2), 1 - 1 / SIZE)
        expected[SIZE:] = torch.tensor([[0.0], [1.0]])
        torch.testing.assert_close(embedding.weight.detach(), expected)
        optimizer = torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=as_dense)
        optimizer.zero_grad()
        embedding(torch.tensor([RANK, SIZE])).sum().backward()
        optimizer.step()
        assert embedding.weight.grad.is_sparse
        expected[:-1] -= 0.1  # the first step of Adam is as long as the learning rate
        torch.testing.assert_close(embedding.weight.detach(), expected)


def test_process_set_of_an_optimizer():
    first = hvd.add_process_set([0])
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=first)
    (weight * (RANK + 1)).sum().backward()
    optimizer.step()
    assert weight.tolist() == [-1.0 - RANK] * 2
    hvd.remove_process_set(first)


def test_adasum():
    if SIZE & (SIZE - 1):
        pytest.skip("Adasum needs a power of two")
    weight = torch.nn.Parameter(torch.zeros(SIZE + 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
    weight[RANK].backward()  # orthogonal: the sum
    optimizer.step()
    assert weight.tolist() == [-1.0] * SIZE + [0.0]
    optimizer.zero_grad()
    weight[SIZE].backward()  # parallel: the mean
    optimizer.step()
    assert weight.tolist() == [-1.0] * SIZE + [-1.0]


def test_parameters_without_gradients_stay_under_adasum():
    """The gradients of zeros that are there at the start would let weight decay change them."""
    if SIZE & (SIZE - 1):
        pytest.skip("Adasum needs a power of two")
    used, unused = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([used, unused], lr=1.0, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    used.sum().backward()
    optimizer.step()
    assert used.item() == -0.5
    assert unused.item() == 1


def test_join_with_uneven_data():
    """Rank r has r + 1 batches; the sums of the later steps are of fewer ranks."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    for _ in range(RANK + 1):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    assert hvd.join() == SIZE - 1
    steps = [-float(sum(SIZE - step for step in range(rank + 1))) for rank in range(SIZE)]
    assert weight.item() == steps[RANK]


# --- wrong use -----------------------------------------------------------------------------------------


def test_wrong_arguments():
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    wrong = [
        {"named_parameters": named[:1]},
        {"named_parameters": named + named[:1]},
        {"named_parameters": list(model.parameters())},
        {"op": "Average"},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"backward_passes_per_step": 0},
    ]
    for arguments in wrong:
        with pytest.raises(ValueError):
            hvd.DistributedOptimizer(plain, **arguments)
    twice = [[named[0][1]], [named[0][1]]]
    optimizer = hvd.DistributedOptimizer(plain, groups=twice)
    if SIZE > 1:
        with pytest.raises(ValueError, match="only appear once"):
            optimizer.step()


@several
def test_more_passes_than_said_and_closures_raise():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=2)
    for _ in range(2):
        weight.sum().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        weight.sum().backward()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(3)
    for _ in range(3):
        weight.sum().backward()
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: None)
    optimizer.step()
    assert weight.item() == -3


@several
def test_other_parameters_on_one_rank_raise_and_are_named():
    for other in ({"weight": torch.zeros(2), "extra": torch.zeros(1)}, {"bias": torch.zeros(2)}):
        parameters = other if RANK == 0 else {"weight": torch.zeros(2)}
        named = [(name, torch.nn.Parameter(each)) for name, each in parameters.items()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named)
        sum(p.sum() for _, p in named).backward()
        with pytest.raises(MismatchError, match="gradients of weight") as caught:
            optimizer.step()
        assert "gradients of " + ", ".join(other) in str(caught.value)
        assert "test_hvd_training.py" in str(caught.value)


# --- gradients that are None ---------------------------------------------------------------------------

KINDS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
}


class Branches(torch.nn.Module):
    """Two branches, of which a step may use one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b = torch.nn.Linear(3, 2).double(), torch.nn.Linear(3, 2).double()

    def forward(self, x, with_b):
        return self.a(x) + self.b(x) if with_b else self.a(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["frozen", "unused", "alternating", "one rank", "all used"])
def test_gradients_that_are_none_stay_none(pattern, kind):
    """The oracle is one process with the whole batch. There is no `zero_grad` before the first step."""
    x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = [slice(12 * rank // SIZE, 12 * (rank + 1) // SIZE) for rank in range(SIZE)]
    model, alone = Branches(), Branches()
    by_alone = KINDS[kind](alone.parameters())
    optimizer = hvd.DistributedOptimizer(KINDS[kind](model.parameters()), model.named_parameters())
    for step in range(6):
        if pattern == "frozen" and step == 2:
            model.b.requires_grad_(False)
            alone.b.requires_grad_(False)
        uses = [
            pattern in ("frozen", "all used")
            or (pattern == "alternating" and step % 2 == 0)
            or (pattern == "one rank" and (SIZE == 1 or rank != 0))
            for rank in range(SIZE)
        ]
        model(x[rows[RANK]], uses[RANK]).pow(2).mean().backward()
        sum(alone(x[part], use).pow(2).mean() / SIZE for part, use in zip(rows, uses, strict=True)).backward()
        optimizer.step()
        by_alone.step()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
        optimizer.zero_grad()
        by_alone.zero_grad()


@several
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_groups": 2}, {"compression": hvd.Compression.fp16}], ids=str)
def test_every_reduction_knows_which_gradients_exist(op, options):
    p = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(p, 0.1), op=op, **options)
    p[1].grad.fill_(2.0)  # the gradients of zeros that are there at the start may be written to
    p[2].grad = torch.full((2,), 3.0) if RANK == LAST else None
    p[3].grad = None
    optimizer.synchronize()
    whole = {"Sum": 2.0 * SIZE, "Product": 2.0**SIZE}.get(op.name.title(), 2.0)
    last = {"Sum": 3.0, "Average": 3.0 / SIZE, "Max": 3.0}.get(op.name.title(), 0.0)
    torch.testing.assert_close(p[1].grad, torch.full((2,), whole))
    torch.testing.assert_close(p[2].grad, torch.full((2,), last), rtol=1e-3, atol=0)
    assert p[0].grad is p[3].grad is None
