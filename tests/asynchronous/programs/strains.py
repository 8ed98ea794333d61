"""Much of one thing, on a chief, a worker and a parameter server: ``mpistrat run -n 3 strains.py NAME [NUMBERS]``.

``queue 1000000`` and ``array 3`` are too long for a test of each change. They print seconds and memory.
"""

import resource
import sys
import time

import numpy as np

import mpistrat
from mpistrat.asynchronous import cluster_coordinator
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator

GIB = 1 << 30


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def memory():
    """The most bytes of memory that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def queue(strategy, calls, longest=None):
    """Functions wait in a queue of a limited length, and each one runs."""
    coordinator = ClusterCoordinator(strategy)
    if longest is not None:
        cluster_coordinator._LONGEST_QUEUE = longest
    with strategy.scope():
        counter = mpistrat.Variable(0)
    resource_of_worker = coordinator.create_per_worker_resource(list)

    def count(i, seen):
        seen.append(i)

    start, before, most = time.monotonic(), memory(), 0
    for i in range(calls):
        coordinator.schedule(count, (i, resource_of_worker))
        most = max(most, coordinator.statistics().waiting) if i % 100 == 0 else most
    coordinator.join()
    took = time.monotonic() - start
    assert coordinator.schedule(lambda seen: seen == [*range(calls)], (resource_of_worker,)).fetch()
    counter.assign_add(1)
    say(f"{calls} calls in {took:.1f} s, at most {most} waiting, {(memory() - before) >> 20} MiB more memory")
    assert longest is None or most <= longest


def array(strategy, gib):
    """A variable that is larger than a message of MPI can be."""
    value = np.zeros(int(gib * GIB), np.uint8)
    value[[0, len(value) // 2, -1]] = 1, 2, 3
    start = time.monotonic()
    with strategy.scope():
        v = mpistrat.Variable(value)
    created = time.monotonic()
    copy = v.read_value()
    for i in range(0, len(value), GIB // 8):  # parts: comparing takes as much memory again
        np.testing.assert_array_equal(copy[i : i + GIB // 8], value[i : i + GIB // 8])
    del copy
    read = time.monotonic()
    v.assign_add(value)
    assert [*v[[0, len(value) // 2, -1]]] == [2, 4, 6]
    seconds = created - start, read - created, time.monotonic() - read
    say(f"{gib} GiB: created in {seconds[0]:.1f} s, read in {seconds[1]:.1f} s, added in {seconds[2]:.1f} s")


def little(strategy):
    """What a test of each change does."""
    array(strategy, 0.02)
    queue(strategy, 3_000, 100)


def no_memory(strategy):
    """A parameter server refuses a function that needs too much memory, and the job ends if an array does."""
    with strategy.scope():
        v = mpistrat.Variable(np.ones(10))
    limit = strategy.extended.update(v, _limit_memory, group=False)[0]
    say("limited to", limit)
    try:
        strategy.extended.update(v, lambda v: v.assign(np.ones(GIB // 32)[:10]) and None)
    except MemoryError as error:
        say("refused", error.__cause__)
    v.assign_add(np.ones(10))
    assert v.numpy().tolist() == [2.0] * 10
    with strategy.scope():
        mpistrat.Variable(np.ones(GIB // 32))
    say("not refused")


def _limit_memory(_):
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + GIB // 8
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return limit


def main(name, *numbers):
    resolver = MpiClusterResolver(jobs={"chief": 1, "worker": 1, "ps": 1})
    if resolver.task_type != "chief":
        mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return
    globals()[name](mpistrat.ParameterServerStrategy(resolver), *map(float if name == "array" else int, numbers))
    say(name, "passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
