"""Strategies that a program makes and drops, again and again, keep neither memory nor communicators."""

import gc
import os

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import strategies
from mpistrat.experimental import CommunicationOptions, Mesh, PowerSGD

SIZE = MPI.COMM_WORLD.size
ROUNDS, WINDOWS = 500, 4
MOST_KIB = 8  # of a strategy; without noise it is 0, and a communicator takes 30 or more


def kinds():
    multi, cpu = mpistrat.MultiWorkerMirroredStrategy, "cpu:0"
    return {
        "OneDevice": lambda: mpistrat.OneDeviceStrategy(cpu),
        "Mirrored": mpistrat.MirroredStrategy,
        "Mirrored, devices": lambda: mpistrat.MirroredStrategy([f"cpu:{i}" for i in range(2 * SIZE)]),
        "MultiWorker": multi,
        "MultiWorker, virtual": lambda: multi(virtual_replicas=2 * SIZE + 1),
        "MultiWorker, timeout": lambda: multi(communication_options=CommunicationOptions(timeout_seconds=60)),
        "MultiWorker, mesh": lambda: multi(mesh=Mesh(replica=-1, m=1)),
        "MultiWorker, model over ranks": lambda: multi(mesh=Mesh(replica=1, m=-1)),
        "groups, each rank": lambda: multi(groups=Mesh(x=-1, m=1).axis("m"), compression=PowerSGD(rank=1)),
        "groups, one": lambda: multi(groups=Mesh(x=-1, m=1).axis("x"), sync_every=2),
        "groups, nodes": lambda: multi(groups="node"),
        "CentralStorage": mpistrat.experimental.CentralStorageStrategy,
        "TPU": mpistrat.TPUStrategy,
    }


def test_all_kinds_are_here():
    """The strategy of a job with roles is in tests/asynchronous."""
    public = {name for name in dir(strategies) if name.endswith("Strategy")}
    assert {type(make()).__name__ for make in kinds().values()} == public - {"ParameterServerStrategy"}


def kibibytes():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def next_handle():
    """Return the number of a communicator that is made now: the first that is free, as each MPI library has a table."""
    made = MPI.COMM_WORLD.Dup()
    number = made.py2f()
    made.Free()
    return number


@pytest.mark.full
@pytest.mark.parametrize("kind", kinds())
def test_a_strategy_leaves_nothing(kind):
    make, gradient = kinds()[kind], np.ones((20, 20))

    def step(strategy):
        with strategy.scope():
            weights = mpistrat.Variable(np.zeros((20, 20)))
            optimizer = mpistrat.optimizers.SGD(0.1)
        strategy.run(lambda: optimizer.apply_gradients([(gradient, weights)]))

    def use(count):
        for number in range(count):
            strategy = make()
            if number % 20 == 0:
                step(strategy)

    use(100)
    handle, seen = next_handle(), [kibibytes()]
    for _ in range(WINDOWS):
        use(ROUNDS // WINDOWS)
        seen.append(kibibytes())
    assert next_handle() == handle
    assert np.diff(seen).min() / (ROUNDS // WINDOWS) < MOST_KIB  # what is kept shows in each window
