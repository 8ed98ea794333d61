"""`DistributedDataParallel.join`, and other handles that torch keeps in C++ without their Python objects."""

import gc

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch._C import _distributed_c10d as c10d  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")


class Branches(torch.nn.Module):
    """A model of which a step uses some parameters, others on each rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.always, self.never = (torch.nn.Linear(2, 2) for _ in range(3))

    def forward(self, x, branch):
        return self.always(self.first(x) if branch else x)


def gradients(group, by_initial_size, unused):
    """Return the gradients of all steps of this rank, one more than the rank before has, and how many there were."""
    model = DistributedDataParallel(Branches(), process_group=group, find_unused_parameters=unused)
    if not unused:
        model.module.never.requires_grad_(False)
        model = DistributedDataParallel(model.module, process_group=group)
    found = []
    with model.join(divide_by_initial_world_size=by_initial_size):
        for step in range(2 + RANK):
            model.zero_grad()
            model(torch.full((1, 2), 1.0 + RANK + step), branch=not unused or (step + RANK) % 2 == 0).sum().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("by_initial_size", [True, False])
def test_gradients_of_ranks_with_fewer_steps(gloo, by_initial_size, unused):
    own, theirs = (gradients(group, by_initial_size, unused) for group in (None, gloo))
    assert len(own) == len(theirs) >= 4
    for found, expected in zip(own, theirs, strict=True):
        torch.testing.assert_close(found, expected)


@several
def test_a_rank_that_ends_early_is_an_error_on_all():
    model = DistributedDataParallel(torch.nn.Linear(2, 1))

    def train():
        with model.join(throw_on_early_termination=True):
            for _ in range(2 + RANK):
                model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()


def test_join_of_an_optimizer_that_divides_its_state(gloo):
    def weights(group):
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, group, lr=0.1, momentum=0.9)
        with Join([model, optimizer], divide_by_initial_world_size=False):
            for step in range(2 + RANK):
                optimizer.zero_grad()
                model(torch.full((2, 3), float(RANK + step))).square().sum().backward()
                optimizer.step()
        return list(model.parameters())

    for found, expected in zip(weights(dist.group.WORLD), weights(gloo), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_handle_that_torch_keeps_is_complete():
    tensor = torch.full((3,), RANK + 1.0)
    c10d._register_work(tensor, dist.all_reduce(tensor, async_op=True))
    gc.collect()
    total = torch.ops._c10d_functional.wait_tensor(tensor)
    assert total.tolist() == [SIZE * (SIZE + 1) / 2] * 3


@several
def test_a_message_that_torch_keeps_is_waited_for():
    found = torch.zeros(3)
    sent = dist.isend(torch.full((3,), float(RANK)), (RANK + 1) % SIZE)
    c10d._register_work(found, dist.irecv(found, (RANK - 1) % SIZE))
    for _ in range(3):  # the group forgets messages that are complete
        sent.wait()
        dist.group.WORLD.barrier()
        sent = dist.isend(torch.zeros(1), RANK, tag=1)
        dist.irecv(torch.zeros(1), RANK, tag=1).wait()
    gc.collect()
    assert torch.ops._c10d_functional.wait_tensor(found).tolist() == [(RANK - 1) % SIZE] * 3
