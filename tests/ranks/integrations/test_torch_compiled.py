"""Programs under ``torch.compile``: what is compiled changes no result."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
BACKEND = "eager"  # the tracer alone
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def compile_anew():
    yield
    torch.compiler.reset()


def weights(wrap):
    torch.manual_seed(RANK)  # DDP gives all ranks those of rank 0
    layers = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
    model = wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + RANK)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return [*model.parameters(), *model.buffers()]


def test_distributed_data_parallel():
    wrap = torch.nn.parallel.DistributedDataParallel
    compiled = weights(lambda model: torch.compile(wrap(model), backend=BACKEND))
    for found, expected in zip(compiled, weights(wrap), strict=True):
        assert torch.equal(found, expected)


def collectives(x):
    y = x * 2
    dist.all_reduce(y)
    parts = torch.zeros(SIZE * len(y))
    work = dist.all_gather_into_tensor(parts, y + dist.get_rank(), async_op=True)
    work.wait()
    dist.broadcast(y, 0)
    dist.barrier()
    rows = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)
    return y, parts, torch.stack(rows)


def test_collectives():
    x = torch.arange(3.0) + RANK
    compiled = torch.compile(collectives, backend=BACKEND)
    for _ in range(2):
        for found, expected in zip(compiled(x), collectives(x), strict=True):
            assert torch.equal(found, expected)
