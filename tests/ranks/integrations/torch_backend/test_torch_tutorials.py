"""Programs of torch's tutorials, which name no group: each gives on this backend what it gives on Gloo.

The tutorials of sharding, tensor parallelism, pipelines and hooks are in the files of these wrappers.
"""

import copy
import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch import nn, optim  # noqa: E402
from torch.distributed.algorithms.join import Join, Joinable, JoinHook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about itself
TUTORIALS = {}


def tutorial(function):
    """A program of a folder for its files, which returns what a rank has then."""
    TUTORIALS[function.__name__] = function
    return function


def ran(program, group, folder):
    """What a program returns where this group is the default one."""
    usual, dist.group.WORLD = dist.group.WORLD, group
    try:
        torch.manual_seed(1234)
        return program(folder)
    finally:
        dist.group.WORLD = usual


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


# --- Writing distributed applications with PyTorch -----------------------------------------------------


@tutorial
def blocking_and_immediate_messages(folder):
    if SIZE == 1:
        return []
    found = []
    for immediate in (False, True):
        tensor = torch.zeros(1)
        if RANK == 0:
            tensor += 1
            if immediate:
                dist.isend(tensor=tensor, dst=1).wait()
            else:
                dist.send(tensor=tensor, dst=1)
        elif RANK == 1:
            if immediate:
                dist.irecv(tensor=tensor, src=0).wait()
            else:
                dist.recv(tensor=tensor, src=0)
        found.append(tensor)
    return found


@tutorial
def all_reduce_in_a_group_of_two(folder):
    group = dist.new_group(list(range(min(2, SIZE))))
    tensor = torch.ones(1)
    if RANK < 2:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


@tutorial
def gather_to_the_first(folder):
    tensor = torch.ones(1) * RANK
    if RANK == 0:
        tensor_list = [torch.empty(1) for i in range(SIZE)]
        dist.gather(tensor, gather_list=tensor_list, group=dist.group.WORLD)
        return tensor_list
    dist.gather(tensor, group=dist.group.WORLD)
    return []


@tutorial
def ring_all_reduce(folder):
    """Its ``allreduce(send, recv)``, an addition round the ring."""
    if SIZE == 1:
        return []
    send, recv = torch.rand(2, 2) * (RANK + 1), torch.zeros(2, 2)
    send_buff, recv_buff, accum = send.clone(), send.clone(), send.clone()
    left, right = ((RANK - 1) + SIZE) % SIZE, (RANK + 1) % SIZE
    for i in range(SIZE - 1):
        if i % 2 == 0:
            send_req = dist.isend(send_buff, right)
            dist.recv(recv_buff, left)
            accum[:] += recv_buff[:]
        else:
            send_req = dist.isend(recv_buff, right)
            dist.recv(send_buff, left)
            accum[:] += send_buff[:]
        send_req.wait()
    recv[:] = accum[:]
    return recv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, kernel_size=5)
        self.conv2 = nn.Conv2d(3, 4, kernel_size=5)
        self.fc1 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return F.log_softmax(self.fc1(x.view(-1, 64)), dim=1)


@tutorial
def averaged_gradients(folder):
    """Its ``run``: synchronous SGD over partitions of a data set."""
    images, labels = torch.rand(24, 1, 28, 28), torch.randint(0, 10, (24,))
    bsz, model = 12 // SIZE, Net()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(2):
        part = torch.randperm(24, generator=torch.Generator().manual_seed(epoch))[RANK::SIZE]
        for index in part.split(bsz):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images[index]), labels[index])
            loss.backward()
            size = float(dist.get_world_size())
            for param in model.parameters():
                dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
                param.grad.data /= size
            optimizer.step()
    return weights(model)


# --- Getting started with distributed data parallel ----------------------------------------------------


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def step(model, optimizer):
    torch.manual_seed(RANK)
    optimizer.zero_grad()
    nn.MSELoss()(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()


@tutorial
def demo_checkpoint(folder):
    """Its ``demo_checkpoint``: rank 0 saves, all load after a barrier."""
    ddp_model = DDP(ToyModel())
    checkpoint = os.path.join(folder, "model.checkpoint")
    if RANK == 0:
        torch.save(ddp_model.state_dict(), checkpoint)
    dist.barrier()
    ddp_model.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True))
    step(ddp_model, optim.SGD(ddp_model.parameters(), lr=0.001))
    dist.barrier()
    if RANK == 0:
        os.remove(checkpoint)
    return weights(ddp_model)


@tutorial
def demo_model_parallel(folder):
    """Its ``demo_model_parallel``: a module on two devices, so without ``device_ids``."""

    class ToyMpModel(ToyModel):
        def __init__(self, dev0, dev1):
            super().__init__()
            self.dev0, self.dev1 = dev0, dev1
            self.net1.to(dev0)
            self.net2.to(dev1)

        def forward(self, x):
            return self.net2(self.relu(self.net1(x.to(self.dev0))).to(self.dev1))

    ddp_mp_model = DDP(ToyMpModel("cpu", "cpu"))
    step(ddp_mp_model, optim.SGD(ddp_mp_model.parameters(), lr=0.001))
    return weights(ddp_mp_model)


# --- Shard optimizer states with ZeroRedundancyOptimizer -----------------------------------------------


@tutorial
def sharded_optimizer(folder):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(5)])
    ddp_model = DDP(model)
    optimizer = ZeroRedundancyOptimizer(ddp_model.parameters(), optimizer_class=optim.Adam, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        nn.MSELoss()(ddp_model(torch.randn(20, 20)), torch.randn(20, 20)).backward()
        optimizer.step()
    return weights(model)


# --- Distributed training with uneven inputs using the Join context manager ----------------------------


class CounterJoinHook(JoinHook):
    def __init__(self, counter, sync_max_count):
        self.counter, self.sync_max_count = counter, sync_max_count

    def main_hook(self):
        dist.all_reduce(torch.zeros(1))

    def post_hook(self, is_last_joiner):
        if not self.sync_max_count:
            return
        common_rank = torch.tensor([RANK if is_last_joiner else -1])
        dist.all_reduce(common_rank, op=dist.ReduceOp.MAX)
        if common_rank.item() == RANK:
            self.counter.max_count = self.counter.count.detach().clone()
        dist.broadcast(self.counter.max_count, src=int(common_rank.item()))


class Counter(Joinable):
    def __init__(self):
        super().__init__()
        self.count, self.max_count = torch.zeros(1), torch.zeros(1)

    def __call__(self):
        Join.notify_join_context(self)
        t = torch.ones(1)
        dist.all_reduce(t)
        self.count += t

    def join_hook(self, **kwargs):
        return CounterJoinHook(self, kwargs.get("sync_max_count", False))

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


@tutorial
def uneven_inputs_of_a_class_of_ones_own(folder):
    counter = Counter()
    with Join([counter], sync_max_count=True):
        for _ in range(5 + RANK):
            counter()
    assert counter.max_count == sum(5 + rank for rank in range(SIZE))
    return [counter.count, counter.max_count]


@tutorial
def uneven_inputs_of_several_classes(folder):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(nn.Linear(1, 1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        for each in [torch.tensor([1.0]) for _ in range(5 + RANK)]:
            model(each).sum().backward()
            optimizer.step()
    return weights(model)


@tutorial
def early_ends_of_inputs(folder):
    model, told = DDP(nn.Linear(1, 1)), ""
    try:
        with Join([model], throw_on_early_termination=True):
            for _ in range(5 + RANK):
                model(torch.ones(1)).sum().backward()
    except RuntimeError as error:
        told = str(error)
    assert ("exhausted" in told) == (SIZE > 1)
    return weights(model)


# --- each with both backends ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", TUTORIALS)
def test_programs_of_tutorials(name, gloo, tmp_path):
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    assert ran(lambda _: dist.get_backend(), gloo, folder) == "gloo"
    found, expected = (ran(TUTORIALS[name], group, folder) for group in (dist.group.WORLD, gloo))
    torch.testing.assert_close(found, expected, **({"rtol": 0, "atol": 0} if SIZE <= 2 else {}))


# --- meshes, of which torch remembers the first of each shape: so not with Gloo in one process ---------


def test_state_of_an_application(tmp_path):
    """Getting started with distributed checkpoint: save, load, and load without sharding."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.distributed.fsdp import fully_shard

    folder = MPI.COMM_WORLD.bcast(tmp_path)

    class AppState(Stateful):
        def __init__(self, model, optimizer=None):
            self.model, self.optimizer = model, optimizer

        def state_dict(self):
            model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
            return {"model": model_state_dict, "optim": optimizer_state_dict}

        def load_state_dict(self, state_dict):
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
            )

    def made(seed):
        torch.manual_seed(seed)
        model = fully_shard(ToyModel(), mesh=dist.init_device_mesh("cpu", (SIZE,)))
        return model, optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = made(seed=0)
    step(model, optimizer)
    saved = {name: each.full_tensor().clone() for name, each in model.state_dict().items()}
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder / "checkpoint")
    other, by_other = made(seed=1)
    dcp.load({"app": AppState(other, by_other)}, checkpoint_id=folder / "checkpoint")
    for pair in ((model, optimizer), (other, by_other)):
        step(*pair)
    for one, two in zip(weights(model), weights(other), strict=True):
        assert torch.equal(one.to_local(), two.to_local())
    state = {"app": {"model": ToyModel().state_dict()}}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    torch.testing.assert_close(dict(state["app"]["model"]), saved, rtol=0, atol=0)


def test_groups_of_a_mesh():
    """Getting started with DeviceMesh: groups of two axes by hand and by a mesh, then hybrid sharding by its mesh."""
    from torch.distributed.fsdp import fully_shard

    shape = (2, SIZE // 2) if SIZE % 2 == 0 else (1, SIZE)
    places = torch.arange(SIZE).reshape(shape)
    mesh_2d = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for name, rows in (("shard", places), ("replicate", places.T)):
        for ranks in rows.tolist():
            by_hand = dist.new_group(ranks)
            if RANK in ranks:
                for group in (by_hand, mesh_2d.get_group(mesh_dim=name), mesh_2d[name].get_group()):
                    total = torch.full((2,), RANK + 1.0)
                    dist.all_reduce(total, group=group)
                    assert total.tolist() == [sum(ranks) + len(ranks)] * 2
    torch.manual_seed(0)
    model = ToyModel()
    ddp_model = DDP(copy.deepcopy(model))
    fully_shard(model, mesh=mesh_2d)
    for each in (model, ddp_model):
        step(each, optim.SGD(each.parameters(), lr=0.1))
    for mine, theirs in zip(weights(model), weights(ddp_model), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)
