"""Wrappers of torch train on this backend as on Gloo: the same bits with one or two ranks, else nearly."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about itself


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    )


def trained(model, optimizer, steps=4):
    """The losses of some steps on rows of this rank, and the weights."""
    torch.manual_seed(RANK + 1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), [parameter.detach().clone() for parameter in model.parameters()]


def agree(one, other, half=False):
    tolerance = {"rtol": 0, "atol": 0} if SIZE <= 2 else {"rtol": 1e-2, "atol": 1e-2} if half else {}
    torch.testing.assert_close(one, other, **tolerance)


DDP = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "many buckets": {"bucket_cap_mb": 1e-4},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "without buffers": {"broadcast_buffers": False},
}


@pytest.mark.parametrize("options", DDP)
def test_distributed_data_parallel(options, gloo):
    def run(group):
        model = DistributedDataParallel(network(), process_group=group, **DDP[options])
        return trained(model, torch.optim.SGD(model.parameters(), 0.1))

    agree(run(None), run(gloo))


def test_gradients_are_those_of_the_whole_batch():
    torch.manual_seed(1)
    rows = torch.randn(SIZE * 5, 3)
    linear = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.fill_(0.5)
    model = DistributedDataParallel(linear)
    model(rows[RANK * 5 : RANK * 5 + 5]).pow(2).mean().backward()
    found = linear.weight.grad.clone()
    linear.weight.grad = None
    linear(rows).pow(2).mean().backward()
    torch.testing.assert_close(found, linear.weight.grad)


def test_accumulation_without_reduction():
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    with model.no_sync():
        model(torch.full((1, 2), float(RANK))).sum().backward()
    assert model.module.weight.grad.tolist() == [[RANK] * 2]
    model(torch.full((1, 2), float(RANK))).sum().backward()
    assert model.module.weight.grad.tolist() == [[SIZE - 1.0] * 2]


@pytest.mark.parametrize("hook", ["allreduce_hook", "fp16_compress_hook", "powerSGD"])
def test_communication_hooks(hook, gloo):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def run(group):
        model = DistributedDataParallel(network(), process_group=group)
        if hook == "powerSGD":
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(group, getattr(default_hooks, hook))
        return trained(model, torch.optim.SGD(model.parameters(), 0.1))

    agree(run(None), run(gloo), half=hook == "fp16_compress_hook")


def test_uneven_inputs():
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model]):
        trained(model, optimizer, steps=2 + RANK)
    weights = [torch.zeros_like(model.module[0].weight) for _ in range(SIZE)]
    dist.all_gather(weights, model.module[0].weight.detach())
    assert all(torch.equal(each, weights[0]) for each in weights)


def test_zero_redundancy_optimizer(gloo):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def run(group):
        model = DistributedDataParallel(network(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group or dist.group.WORLD, lr=0.1, momentum=0.9
        )
        return trained(model, optimizer)

    agree(run(None), run(gloo))


def test_synchronized_averaging():
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, RANK)
        parameter.grad = torch.zeros_like(parameter)
    PeriodicModelAverager(period=1).average_parameters(model.parameters())
    assert model.weight.tolist() == [[(SIZE - 1) / 2] * 2] * 2


@pytest.mark.parametrize("kind", ["fully_shard", "FullyShardedDataParallel"])
def test_sharded_training(kind):
    reference = DistributedDataParallel(network())
    expected, _ = trained(reference, torch.optim.SGD(reference.parameters(), 0.1))
    model = network()
    if kind == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (SIZE,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    losses, _ = trained(model, torch.optim.SGD(model.parameters(), 0.1))
    agree(losses, expected)


def test_distributed_tensors():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(12.0 * SIZE).reshape(3 * SIZE, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert rows.to_local().shape == (3, 4)
    assert torch.equal(rows.full_tensor(), whole)
    product = rows @ distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
    assert torch.equal(product.full_tensor(), whole @ torch.ones(4, 2))
    assert rows.sum().full_tensor() == whole.sum()
    uneven = distribute_tensor(torch.arange(2.0 * SIZE + 1), mesh, [Shard(0)])
    assert torch.equal(uneven.full_tensor(), torch.arange(2.0 * SIZE + 1))
    columns = rows.redistribute(mesh, [Replicate()])
    assert torch.equal(columns.to_local(), whole)


def test_tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def layers():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))

    mesh = dist.init_device_mesh("cpu", (SIZE,))
    model = parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(model(torch.ones(2, 4)), layers()(torch.ones(2, 4)))


def test_checkpoints(tmp_path):
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard

    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))  # no buffers that ranks have apart
    model = fully_shard(layers, mesh=dist.init_device_mesh("cpu", (SIZE,)))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    trained(model, optimizer)
    state = model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    checkpoint.save({"model": state}, checkpoint_id=tmp_path / "checkpoint")
    trained(model, optimizer)
    checkpoint.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint")
    for name, value in model.state_dict().items():
        saved = before[name]
        pair = (value.to_local(), saved.to_local()) if hasattr(value, "to_local") else (value, saved)
        assert torch.equal(*pair)


@pytest.mark.parametrize("workers", [0, 2])
def test_samplers_and_loaders(workers):
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(torch.arange(12.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False), num_workers=workers)
        seen = torch.cat([rows for (rows,) in loader])
    found = [torch.zeros_like(seen) for _ in range(SIZE)]
    dist.all_gather(found, seen)
    assert sorted(torch.cat(found).tolist()) == list(range(12))


def test_collectives_with_history():
    import torch.distributed.nn.functional as functional

    value = torch.ones(2, requires_grad=True)
    total = functional.all_reduce(value * (RANK + 1), group=dist.group.WORLD)
    assert total.tolist() == [SIZE * (SIZE + 1) / 2] * 2
    total.sum().backward()
    assert value.grad.tolist() == [SIZE * (RANK + 1)] * 2


def test_batch_norm_is_saved_as_rank_0_has_it(tmp_path):
    """The running averages of batch norm differ between the ranks of DDP: what they have is not saved unasked."""
    from mpistrat.training import load, save

    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)), broadcast_buffers=False
    )
    model(torch.arange(12.0).reshape(4, 3) * (RANK + 1)).sum().backward()
    state = model.state_dict()
    mean = state["module.1.running_mean"].clone()
    if SIZE > 1:
        with pytest.raises(ValueError, match=r"2 of 7 arrays \('module.1.running_mean', 'module.1.running_var'\)"):
            save(state, tmp_path / "model.h5")
    save(state, tmp_path / "model.h5", differing="chief")
    load(state, tmp_path / "model.h5")
    assert torch.equal(state["module.1.running_mean"], mean) == (RANK == 0)


# --- under torch.compile, which changes no result -------------------------------------------------------

COMPILER = "eager"  # the tracer alone


@pytest.fixture
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


def test_compiled_model_in_distributed_data_parallel(compile_anew):
    wrap = DistributedDataParallel
    compiled = weights(lambda model: torch.compile(wrap(model), backend=COMPILER))
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


def test_compiled_collectives(compile_anew):
    x = torch.arange(3.0) + RANK
    compiled = torch.compile(collectives, backend=COMPILER)
    for _ in range(2):
        for found, expected in zip(compiled(x), collectives(x), strict=True):
            assert torch.equal(found, expected)
