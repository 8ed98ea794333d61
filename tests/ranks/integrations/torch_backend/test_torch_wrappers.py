"""More of torch's wrappers: meshes of several axes, pipelines, sharded optimizers and checkpoints of many kinds."""

import copy
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about itself


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))


def rows_of(rank, step):
    torch.manual_seed(100 * step + rank)
    return torch.randn(3, 6)


def trained(model, optimizer, steps=3, clip=None):
    """The losses of some steps on rows of this rank, averaged over the ranks."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(rows_of(RANK, step)).pow(2).mean()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return total / SIZE


def alone(steps=3, clip=None):
    """The same of one process that has all rows, and its network."""
    model, losses = network(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.cat([rows_of(rank, step) for rank in range(SIZE)])).pow(2).mean()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), model


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def plane():
    """A mesh of two axes."""
    shape = (SIZE // 2, 2) if SIZE % 2 == 0 else (1, SIZE)
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))


# --- sharded models ------------------------------------------------------------------------------------


SHARDED = {
    "one axis": lambda: {"mesh": dist.init_device_mesh("cpu", (SIZE,))},
    "two axes": lambda: {"mesh": plane()},
    "parts that stay whole": lambda: {"mesh": dist.init_device_mesh("cpu", (SIZE,)), "reshard_after_forward": False},
}


@pytest.mark.parametrize("kind", SHARDED)
def test_fully_shard(kind):
    from torch.distributed.fsdp import fully_shard

    model, options = network(), SHARDED[kind]()
    for layer in (model[0], model[2], model):
        fully_shard(layer, **options)
    if hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        model.set_allocate_memory_from_process_group_for_comm(kind == "one axis")
    losses = trained(model, sgd(model), clip=0.05)
    expected, whole = alone(clip=0.05)
    torch.testing.assert_close(losses, expected)
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), other)


def test_fully_shard_in_bfloat16_and_with_gradients_that_are_kept():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = network(), dist.init_device_mesh("cpu", (SIZE,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.set_requires_gradient_sync(False)
    model(rows_of(RANK, 0)).float().pow(2).mean().backward()
    model.set_requires_gradient_sync(True)
    model(rows_of(RANK, 1)).float().pow(2).mean().backward()
    whole = network()
    for step in range(2):
        whole(torch.cat([rows_of(rank, step) for rank in range(SIZE)])).pow(2).mean().backward()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, rtol=0.1, atol=0.01)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_fully_sharded_data_parallel(strategy):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    options = {"device_mesh": plane()} if strategy == "HYBRID_SHARD" else {}
    model = FullyShardedDataParallel(
        network(),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
        **options,
    )
    losses = trained(model, sgd(model))
    expected, whole = alone()
    torch.testing.assert_close(losses, expected)
    with FullyShardedDataParallel.summon_full_params(model):
        for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(parameter, other)


# --- distributed tensors -------------------------------------------------------------------------------


def test_every_way_between_placements():
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = plane()
    whole = torch.arange(float(3 * SIZE * (2 * SIZE + 1))).reshape(3 * SIZE, 2 * SIZE + 1)
    places = [Replicate(), Shard(0), Shard(1)]
    pairs = [(one, other) for one in places for other in places]
    for source in pairs:
        tensor = distribute_tensor(whole, mesh, source)
        for target in pairs:
            assert torch.equal(tensor.redistribute(mesh, target).full_tensor(), whole), (source, target)
    line = dist.init_device_mesh("cpu", (SIZE,))
    partial = dist.tensor.DTensor.from_local(whole * (RANK + 1), line, [Partial()])
    for target in places:
        assert torch.equal(partial.redistribute(line, [target]).full_tensor(), whole * SIZE * (SIZE + 1) / 2)


def test_losses_of_scores_in_parts():
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = dist.init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(1)
    scores, targets = torch.randn(5, 4 * SIZE), torch.randint(4 * SIZE, (5,))
    with loss_parallel():
        parts = distribute_tensor(scores, mesh, [Shard(1)]).requires_grad_()
        loss = torch.nn.functional.cross_entropy(parts, targets)
        loss.backward()
    scores.requires_grad_()
    torch.nn.functional.cross_entropy(scores, targets).backward()
    torch.testing.assert_close(parts.grad.full_tensor(), scores.grad)


# --- pipelines -----------------------------------------------------------------------------------------


@several
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipelines(schedule):
    from torch.distributed import pipelining

    def layer(rank):
        torch.manual_seed(rank)
        return torch.nn.Linear(5, 5)

    own = layer(RANK)
    stage = pipelining.PipelineStage(own, RANK, SIZE, torch.device("cpu"))
    step = getattr(pipelining, schedule)(stage, 4, loss_fn=lambda found, wanted: (found - wanted).pow(2).mean()).step
    torch.manual_seed(50)
    rows, wanted, losses = torch.randn(8, 5), torch.randn(8, 5), []
    first, last = RANK == 0, RANK == SIZE - 1
    found = step(*([rows] if first else []), **({"target": wanted, "losses": losses} if last else {}))
    whole = torch.nn.Sequential(*map(layer, range(SIZE)))
    expected = whole(rows)
    (expected - wanted).pow(2).mean().backward()
    torch.testing.assert_close(own.weight.grad, whole[RANK].weight.grad)
    if last:
        torch.testing.assert_close(found, expected)
        assert len(losses) == 4


# --- optimizers ----------------------------------------------------------------------------------------


def test_the_whole_state_of_a_sharded_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    torch.testing.assert_close(trained(model, optimizer), alone()[0])
    for root in {0, SIZE - 1}:
        optimizer.consolidate_state_dict(to=root)
        if root == RANK:
            state = optimizer.state_dict()
            assert len(state["state"]) == 4
            optimizer.load_state_dict(state)


def test_a_sharded_optimizer_with_uneven_inputs():
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    with Join([model, optimizer]):
        for step in range(2 + RANK):
            optimizer.zero_grad()
            model(rows_of(RANK, step)).pow(2).mean().backward()
            optimizer.step()
    weights = [torch.zeros(4, 12) for _ in range(SIZE)]
    dist.all_gather(weights, model.module[2].weight.detach())
    assert all(torch.equal(each, weights[0]) for each in weights)


def test_optimizers_that_average_seldom():
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = torch.nn.Linear(2, 2)
    optimizer = PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=2))
    for step in range(2):
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, RANK)
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert model.weight[0, 0] == ((SIZE - 1) / 2 if step % 2 == 0 else RANK)
    if SIZE == 4:
        averager = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]))  # by pairs, every fourth time by all
        for expected in (1.5, RANK, 2 * (RANK // 2) + 0.5, RANK):
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, RANK)
            averager.average_parameters(model.parameters())
            assert model.weight[0, 0] == expected


# --- checkpoints ---------------------------------------------------------------------------------------


def folder(tmp_path):
    """The folder of rank 0, for all ranks."""
    return MPI.COMM_WORLD.bcast(tmp_path)


def sharded(seed=0):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(network(seed), mesh=dist.init_device_mesh("cpu", (SIZE,)))


def wholes(state):
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}


def test_whole_states_go_through_one_rank():
    from torch.distributed.checkpoint import state_dict

    model, other = sharded(), sharded(seed=1)
    trained(model, sgd(model))
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = state_dict.get_model_state_dict(model, options=options)
    assert (len(whole) == 4) == (RANK == 0)
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict.set_model_state_dict(other, whole, options=options)
    torch.testing.assert_close(wholes(other.state_dict()), wholes(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("group", ["all", "of its own"])
def test_checkpoints_in_the_background(group, tmp_path):
    import torch.distributed.checkpoint as checkpoint

    place = folder(tmp_path) / "checkpoint"
    process_group = dist.new_group() if group == "of its own" else None
    model = sharded()
    saved = {name: each.clone() for name, each in wholes(model.state_dict()).items()}
    future = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=place, process_group=process_group)
    if group == "of its own":  # training goes on meanwhile
        trained(model, sgd(model))
    future.result()
    state = {"model": sharded(seed=1).state_dict()}
    checkpoint.load(state, checkpoint_id=place)
    torch.testing.assert_close(wholes(state["model"]), saved, rtol=0, atol=0)


def test_checkpoints_of_other_layouts(tmp_path):
    """What ranks saved in parts is loaded whole, and in parts along another axis."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.tensor import Shard, distribute_tensor, zeros

    place = folder(tmp_path) / "checkpoint"
    mesh = dist.init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(float((SIZE + 1) * (2 * SIZE + 1))).reshape(SIZE + 1, 2 * SIZE + 1)
    checkpoint.save({"rows": distribute_tensor(whole, mesh, [Shard(0)]), "step": 3}, checkpoint_id=place)
    state = {"rows": zeros(*whole.shape, device_mesh=mesh, placements=[Shard(1)]), "step": 0}
    checkpoint.load(state, checkpoint_id=place)
    assert torch.equal(state["rows"].full_tensor(), whole)
    assert state["step"] == 3
    plain = {"rows": torch.zeros_like(whole)}
    checkpoint.load(plain, checkpoint_id=place)
    assert torch.equal(plain["rows"], whole)


# --- data parallel -------------------------------------------------------------------------------------


def test_copies_and_pickles_of_models():
    model = DistributedDataParallel(network())
    trained(model, sgd(model))
    again = DistributedDataParallel(copy.deepcopy(model.module))
    torch.testing.assert_close(trained(again, sgd(again)), trained(model, sgd(model)), rtol=0, atol=0)


@several
def test_embeddings_with_sparse_gradients_name_the_remedy():
    model = DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True))
    with pytest.raises((TypeError, RuntimeError), match="sparse=False"):
        model(torch.tensor([1, RANK])).sum().backward()
    dist.barrier()
