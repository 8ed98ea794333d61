"""Programs without a fault, in which nothing may be found: a mesh, Keras, PyTorch, and restarts on other ranks.

``mpistrat run -n 3 -m tests.ranks.verify.quiet_programs 10000 7`` makes so many steps of all from a seed, half of the
time of which verifies, and counts these.
"""

import collections
import contextlib
import os
import shutil
import sys
import tempfile

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat import Mesh, ShardedArray, training
from mpistrat.verify import checks

from . import quiet_steps

SUM = mpistrat.VariableAggregation.SUM
OPTIMIZERS = (
    lambda: mpistrat.optimizers.SGD(0.1, momentum=0.9),
    lambda: mpistrat.optimizers.Adam(0.01),
    lambda: mpistrat.optimizers.Adam(0.01, shard_state=True),
)


@contextlib.contextmanager
def counted(counts, share=2):
    """Count verifications, which take one in ``share`` parts of the time; 0 for one after each reduction."""
    verified, usual = checks.Checks.verify, checks._SHARE

    def verify(*args):
        counts["verifications"] += 1
        verified(*args)

    checks.Checks.verify, checks._SHARE = verify, share
    try:
        yield
    finally:
        checks.Checks.verify, checks._SHARE = verified, usual


def mesh(comm, count, seed):
    """Steps of replicas of two ranks, or of one."""
    inner = 2 if comm.size % 2 == 0 and comm.size > 2 else 1
    axes = Mesh(replica=-1, verified=inner)  # a name of its own: its communicators are not those of another test
    strategy = mpistrat.MultiWorkerMirroredStrategy(mesh=axes)
    shared, rng = np.random.default_rng(seed), np.random.default_rng([comm.rank, *seed])
    whole = shared.normal(size=(12, 8)).astype("f")
    with strategy.scope():
        cut = mpistrat.Variable(ShardedArray.from_array(whole, mesh=axes, axes=(None, "verified")), aggregation=SUM)
        weights = [mpistrat.Variable(np.ones(shape, "f")) for shape in [(40, 20), (20,)]]
        optimizer = mpistrat.optimizers.SGD(0.1, momentum=0.9)
    for _ in range(count):
        # The ranks of a replica have the same gradients of what is not cut.
        of_replica = np.random.default_rng([comm.rank // inner, int(shared.integers(1 << 40))])
        gradients = [quiet_steps.values(of_replica, "f", w.shape) for w in weights]
        part = quiet_steps.values(rng, "f", cut.local.shape)

        def step(gradients=gradients, part=part):
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            cut.assign_add(part)

        strategy.run(step)


def keras_fit(comm, count, seed):
    """Steps of ``fit``."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    import mpistrat.integrations.keras

    keras.utils.set_random_seed(seed[0])
    rows = 8 * comm.size
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows * min(count, 50), 6)), rng.normal(size=(rows * min(count, 50), 1))
    with mpistrat.MultiWorkerMirroredStrategy(comm=comm).scope():
        layers = keras.layers.Dense(5, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile("adam", "mse")
    for first in range(0, count, 1000):  # digests of weights are compared after epochs 1, 2, 4, 8
        steps = min(1000, count - first)
        model.fit(x[: rows * min(steps, 50)], y[: rows * min(steps, 50)], rows, epochs=-(-steps // 50), verbose=0)


def torch_backend(comm, count, seed):
    """Steps of DistributedDataParallel, and reductions of tensors of some dtypes."""
    import torch
    import torch.distributed as dist

    import mpistrat.integrations.torch  # noqa: F401

    is_new = not dist.is_initialized()
    if is_new:
        dist.init_process_group("mpistrat")
    torch.manual_seed(seed[0])
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(comm.rank)
    shared, rng = np.random.default_rng(seed), np.random.default_rng([comm.rank, *seed])
    ops = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT
    for number in range(count):
        if number % 2:
            optimizer.zero_grad()
            model(torch.randn(6, 8)).pow(2).mean().backward()
            optimizer.step()
        else:
            dtype, shape = shared.choice([*"bhilBefd"]), [(7,), (3, 4), (900,), (9000,)][shared.integers(4)]
            dist.all_reduce(torch.from_numpy(quiet_steps.values(rng, dtype, shape)), ops[shared.integers(4)])
    if is_new:
        dist.destroy_process_group()


def restarts(comm, count, seed, steps=25):
    """Steps on all ranks, then on all but one, which goes on with the files of the run before, and so on."""
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    for run, first in enumerate(range(0, count, steps)):
        size = comm.size - run % 2
        own = comm.Split(comm.rank >= size, comm.rank)
        if comm.rank < size:
            _run(own, min(steps, count - first), f"{folder}/state.h5", run, seed)
        comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)


def _run(comm, count, path, run, seed):
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    rng = np.random.default_rng([comm.rank, run, *seed])
    with strategy.scope():
        weights = [mpistrat.Variable(np.ones(shape, "f")) for shape in [(40, 20), (20,)]]
        optimizer = OPTIMIZERS[seed[0] % len(OPTIMIZERS)]()
        optimizer.build(weights)
    state = {"weights": weights, "optimizer": optimizer}
    if run:
        training.Checkpoint(**state).restore(path)
    for _ in range(count):
        gradients = [rng.normal(size=w.shape).astype("f") for w in weights]
        strategy.run(lambda: optimizer.apply_gradients(zip(gradients, weights, strict=True)))  # noqa: B023
    training.Checkpoint(**state).write(path)


PROGRAMS = {"mesh": mesh, "keras": keras_fit, "torch": torch_backend, "restarts": restarts}


def main(count, seed, *names):
    mpistrat.rc.verify = "copies,sums"
    np.seterr(all="ignore")
    for number, name in enumerate(names or PROGRAMS):
        counts = collections.Counter()
        with counted(counts):
            PROGRAMS[name](MPI.COMM_WORLD.Dup(), count, [seed, number])
        if MPI.COMM_WORLD.rank == 0:
            print(f"{name}: {count} steps, {counts['verifications']} verifications", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
