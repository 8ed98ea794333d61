"""Programs with roles that lose ranks: ``mpistrat run --ft -n RANKS losses.py NAME``."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator, experimental_get_current_worker_index

CALLS = 20


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# --- workers, each in another way ----------------------------------------------------------------------


def die_in_a_function():
    die()


def die_by_exit():
    os._exit(3)


def die_soon():
    """Die while the result waits for the coordinator, which makes no progress meanwhile."""
    threading.Timer(0.3, die).start()
    return np.zeros(4 << 20)


def has_died(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def workers(strategy):
    coordinator = ClusterCoordinator(strategy, exactly_once=True)
    with strategy.scope():
        counters = [mpistrat.Variable(0) for _ in range(2)]
    process = coordinator.create_per_worker_resource(os.getpid)
    pids, expected = {}, 0

    def place():
        time.sleep(0.02)
        return experimental_get_current_worker_index(), os.getpid()

    while len(pids) < 4:
        pids |= dict(coordinator.fetch([coordinator.schedule(place) for _ in range(4)]))

    def call(i, victim, end, pid):
        for counter in counters:
            counter.assign_add(1)
        sent = end() if victim == experimental_get_current_worker_index() else None
        time.sleep(0.02)  # so that each worker takes calls
        return i, pid, sent

    for victim, end in enumerate((die_in_a_function, die_by_exit, die_soon)):
        values = [coordinator.schedule(call, (i, victim, end, process)) for i in range(CALLS)]
        while not has_died(pids[victim]):
            time.sleep(0.01)
        assert [i for i, _, _ in coordinator.fetch(values)] == [*range(CALLS)]
        expected += CALLS
        assert [int(counter.numpy()) for counter in counters] == [expected] * 2
        lost = [each.lost for each in coordinator.statistics().workers]
        assert lost == [i <= victim for i in range(4)]
    _, pid, _ = coordinator.schedule(call, (0, None, None, process)).fetch()
    os.kill(pid, signal.SIGKILL)  # the last one, which waits for functions
    values = [coordinator.schedule(call, (i, None, None, process)) for i in range(3)]
    try:
        coordinator.join()
    except RuntimeError as error:
        say("joined", error)
    for value in [*values, coordinator.schedule(len, ((),))]:
        try:
            value.fetch()
        except RuntimeError:
            say("fetched", type(value).__name__)
    say("counted", *(int(counter.numpy()) for counter in counters))


# --- other roles ---------------------------------------------------------------------------------------


def server(strategy):
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variables = [mpistrat.Variable([1.0]) for _ in range(2)]

    def read_for_ever():
        while True:
            variables[1].numpy()

    value = coordinator.schedule(read_for_ever)
    start = time.monotonic()
    for call in (
        lambda: strategy.extended.update(variables[1], lambda _: die()),
        coordinator.join,
        coordinator.done,
        value.fetch,
        lambda: variables[1].assign([2.0]),
        lambda: coordinator.schedule(die),
    ):
        try:
            call()
        except RuntimeError as error:
            say("raised", error)
    say(variables[0].numpy(), time.monotonic() - start)


def server_unhandled(strategy):
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variable = mpistrat.Variable([1.0])
    coordinator.schedule(time.sleep, args=(100,))
    strategy.extended.update(variable, lambda _: die())


def chief(strategy):
    coordinator = ClusterCoordinator(strategy)
    coordinator.schedule(time.sleep, args=(100,))
    die()


def main():
    name = sys.argv[1]
    resolver = MpiClusterResolver(jobs={"chief": 1, "worker": 4 if name == "workers" else 1, "ps": 2})
    if resolver.task_type == "chief":
        globals()[name](mpistrat.ParameterServerStrategy(resolver))
    else:
        spec = resolver.cluster_spec()
        mpistrat.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id).join()


if __name__ == "__main__":
    main()
