"""Training that saves, and goes on from the file: ``python restarted.py PATH SERVERS [LAST]``.

Before step LAST, which is optional, a parameter server is killed between two writes, while the worker reads.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator
from mpistrat.experimental.partitioners import FixedShardsPartitioner

STEPS, EACH = 12, 4  # steps in all, and between two files
SHAPES = (), (3,), (7, 2)


def gradients(step):
    random = np.random.default_rng(step)
    return [random.normal(size=shape) for shape in SHAPES]


def serial():
    """The variables after all steps."""
    variables, optimizer = ([mpistrat.Variable(np.ones(shape)) for shape in SHAPES], mpistrat.optimizers.Adam(0.1))
    for step in range(STEPS):
        optimizer.apply_gradients(zip(gradients(step), variables, strict=True))
    return [each.numpy() for each in variables]


def kill_soon(pid):
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()


def read_until_an_error(variables):
    while True:
        for each in variables:
            each.numpy()


def train(strategy, path, last):
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variables = [mpistrat.Variable(np.ones(shape), name=f"v{len(shape)}") for shape in SHAPES]
        optimizer = mpistrat.optimizers.Adam(0.1)
        optimizer.build(variables)
    state = [*variables, *optimizer.variables]
    if path.exists():
        mpistrat.training.load(state, path)
    first = int(optimizer.iterations)
    sys.stdout.write(f"begins at step {first}\n")

    def update(step):
        strategy.run(optimizer.apply_gradients, ([*zip(gradients(step), variables, strict=True)],))

    for step in range(first, STEPS):
        if step == last:
            pid = strategy.extended.update(variables[1], lambda _: os.getpid(), group=False)
            coordinator.schedule(read_until_an_error, (variables,))
            sys.stdout.write(f"lost soon after {time.time()}\n")
            sys.stdout.flush()
            strategy.extended.update(variables[1], lambda _, number: kill_soon(number), np.ravel(pid)[:1].tolist())
            coordinator.join()
        coordinator.schedule(update, (step,))
        coordinator.join()
        if (step + 1) % EACH == 0:
            mpistrat.training.save(state, path)
    for each, expected in zip(variables, serial(), strict=True):
        np.testing.assert_allclose(each.numpy(), expected, rtol=1e-12)
    sys.stdout.write(f"right after {STEPS} steps on {strategy.extended.parameter_devices}\n")


def main(path, servers, last=-1):
    jobs = {"chief": 1, "worker": MPI.COMM_WORLD.size - 1 - int(servers), "ps": int(servers)}
    resolver = MpiClusterResolver(jobs=jobs)
    if resolver.task_type == "chief":
        strategy = mpistrat.ParameterServerStrategy(resolver, FixedShardsPartitioner(int(servers)))
        train(strategy, Path(path), int(last))
    else:
        mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()


if __name__ == "__main__":
    main(*sys.argv[1:])
