"""A coordinator that makes strategies and drops them, on 3 ranks: neither it nor its worker keeps what they took."""

import gc
import os

import numpy as np
from mpi4py import MPI

import mpistrat

ROUNDS, MOST_KIB = 150, 2.5  # of a strategy; a worker kept 5 of each


def kibibytes():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def next_handle():
    made = MPI.COMM_SELF.Dup()
    number = made.py2f()
    made.Free()
    return number


def used(resolver, task):
    """Return what a task returns on the worker, with a strategy that is dropped."""
    strategy = mpistrat.ParameterServerStrategy(resolver)
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(5))
    coordinator = mpistrat.coordinator.ClusterCoordinator(strategy)
    result = coordinator.schedule(lambda: (v.assign_add(np.ones(5)), task())[1])
    coordinator.join()
    return result.fetch()


def measured(resolver):
    return np.array([used(resolver, kibibytes), kibibytes()])


resolver = mpistrat.cluster_resolver.MpiClusterResolver(jobs={"chief": 1, "worker": 1, "ps": 1})
if resolver.task_type != "chief":
    mpistrat.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
else:
    for _ in range(100):  # more than a worker keeps
        used(resolver, int)
    handle, seen = next_handle(), [measured(resolver)]
    for _ in range(4):
        for _ in range(ROUNDS):
            used(resolver, int)
        seen.append(measured(resolver))
    assert next_handle() == handle
    growth = np.diff(seen, axis=0).min(axis=0) / ROUNDS  # what is kept shows in each of the four
    assert (growth < MOST_KIB).all(), growth
    print("all checks passed")
