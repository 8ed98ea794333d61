"""Programs with roles that lose ranks: ``python losses.py NAME`` under 5 ranks, with ULFM."""

import os
import signal
import sys
import threading
import time

import numpy as np

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator, experimental_get_current_worker_index

JOBS = {"chief": 1, "worker": 2, "ps": 2}
CALLS = 40


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_on(number):
    """Die on one worker. The other one runs the calls that it had."""
    if experimental_get_current_worker_index() == number:
        die()


def counted(coordinator):
    """Count calls on whatever workers are left."""
    with coordinator.strategy.scope():
        counter = mpistrat.Variable(0)

    def count(i):
        counter.assign_add(1)
        return i

    values = [coordinator.schedule(count, args=(i,)) for i in range(CALLS)]
    coordinator.join()
    assert coordinator.fetch(values) == [*range(CALLS)]
    say("counted", counter.numpy())


# --- workers -------------------------------------------------------------------------------------------


def worker_in_a_function(strategy):
    coordinator = ClusterCoordinator(strategy)
    values = [coordinator.schedule(die_on, args=(1,)) for _ in range(3)]
    coordinator.join()
    assert coordinator.fetch(values) == [None] * 3
    counted(coordinator)
    assert [each.lost for each in coordinator.statistics().workers] == [False, True]


def worker_between_functions(strategy):
    coordinator = ClusterCoordinator(strategy)
    resource = coordinator.create_per_worker_resource(os.getpid)

    def process(pid):
        time.sleep(0.5)  # the other worker takes the other call
        return pid

    lost, left = coordinator.fetch([coordinator.schedule(process, (resource,)) for _ in range(2)])
    os.kill(lost, signal.SIGKILL)
    counted(coordinator)
    assert coordinator.schedule(process, (resource,)).fetch() == left


def worker_while_it_sends(strategy):
    coordinator = ClusterCoordinator(strategy)

    def large():
        if experimental_get_current_worker_index() == 1:
            threading.Timer(0.3, die).start()
        return np.zeros(8 << 20)

    values = [coordinator.schedule(large) for _ in range(2)]
    time.sleep(0.6)  # makes no progress: the results wait for the coordinator
    assert [value.nbytes for value in coordinator.fetch(values)] == [64 << 20] * 2
    counted(coordinator)


def worker_by_exit(strategy):
    coordinator = ClusterCoordinator(strategy)
    coordinator.schedule(lambda: os._exit(3) if experimental_get_current_worker_index() else None)
    coordinator.schedule(lambda: os._exit(3) if experimental_get_current_worker_index() else None)
    coordinator.join()
    counted(coordinator)


def last_worker(strategy):
    coordinator = ClusterCoordinator(strategy)
    values = [coordinator.schedule(die) for _ in range(4)]
    try:
        coordinator.join()
    except RuntimeError as error:
        say("join:", error)
    for value in [*values, coordinator.schedule(len, ((),))]:
        try:
            value.fetch()
        except RuntimeError as error:
            say("fetch:", error)


# --- others --------------------------------------------------------------------------------------------


def server(strategy):
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variables = [mpistrat.Variable([1.0]) for _ in range(2)]

    def wait_for_it():
        start = time.monotonic()
        while time.monotonic() < start + 30:
            variables[1].numpy()

    value = coordinator.schedule(wait_for_it)
    start = time.monotonic()
    for call in (
        lambda: strategy.extended.update(variables[1], lambda _: die()),
        coordinator.join,
        coordinator.done,
        value.fetch,
        lambda: variables[1].assign([2.0]),
        lambda: coordinator.schedule(die_on, args=(1,)),
    ):
        try:
            call()
        except RuntimeError as error:
            say("raised", error)
    say(variables[0].numpy(), "within 2 s" if time.monotonic() < start + 2 else "late")


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
    resolver = MpiClusterResolver(jobs=JOBS)
    if resolver.task_type == "chief":
        globals()[sys.argv[1]](mpistrat.ParameterServerStrategy(resolver))
    else:
        spec = resolver.cluster_spec()
        mpistrat.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id).join()


if __name__ == "__main__":
    main()
