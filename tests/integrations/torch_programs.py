"""Torch programs that go wrong on purpose: ``python torch_programs.py NAME`` under two ranks."""

import os
import signal
import sys
import warnings

import torch
import torch.distributed as dist

import mpistrat.integrations.torch

warnings.simplefilter("ignore")
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))


def model():
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))


def steps(ddp, count):
    for _ in range(count):
        ddp(torch.ones(3, 4)).sum().backward()


def killed():
    """One rank is killed in the middle of a training."""
    ddp = model()
    steps(ddp, 3)
    if RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    steps(ddp, 1_000_000)


def ends():
    """One rank has fewer steps, and ends."""
    ddp = model()
    steps(ddp, 3 if RANK else 1_000_000)


def late():
    """One rank does not come in time."""
    from datetime import timedelta

    dist.destroy_process_group()
    dist.init_process_group("mpistrat", timeout=timedelta(seconds=3))
    if RANK:
        signal.pause()
    dist.all_reduce(torch.ones(1))


def waits_in_torch():
    """All ranks wait in torch for what comes late, and none is in a collective."""
    import threading

    dist.barrier()
    late: torch.futures.Future = torch.futures.Future()
    threading.Timer(20, late.set_result, [None]).start()
    torch.futures.wait_all([late])


def receives_from_ended():
    """One rank waits for messages of another that has ended; what that had sent still comes."""
    if RANK:
        dist.send(torch.ones(3), 0)
        return
    try:
        dist.recv(torch.ones(3), tag=5)
    except RuntimeError as error:
        print(error)
    found = torch.zeros(3)
    dist.recv(found, 1)
    print("came", found.tolist())
    dist.recv(torch.ones(3), 1)


def asks_the_store_of_ended():
    """One rank waits for keys of another that has ended; what that had set still comes."""
    store = mpistrat.integrations.torch.MpiStore()
    if RANK == 1:
        store.set("last", "words")
        return
    print("came", store.get("last"))
    store.get("never set")


def counts_after_the_first():
    """Rank 0, which counts for all, has ended."""
    store = mpistrat.integrations.torch.MpiStore()
    if RANK == 1:
        store.add("count", 1)


def meets(rank, size):
    """The first call of a process that ``mp.spawn`` made, as tutorials write it."""
    dist.init_process_group("mpistrat", init_method="mpistrat://", rank=rank, world_size=size)


def spawns():
    """A rank makes processes of its own, which MPI does not know."""
    torch.multiprocessing.spawn(meets, args=(1,), nprocs=1)


def leaves_everything():
    """Handles that nothing waited for, messages that nothing takes, and a group that is not destroyed."""
    dist.all_reduce(torch.ones(3), async_op=True)
    dist.irecv(torch.ones(3), 1 - RANK, tag=3)
    dist.isend(torch.ones(3), 1 - RANK, tag=4)
    dist.new_group()
    print("at the end")


if __name__ == "__main__":
    dist.init_process_group(mpistrat.integrations.torch.BACKEND)
    globals()[sys.argv[1]]()
