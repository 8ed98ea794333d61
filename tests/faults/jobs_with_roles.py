"""Programs with roles that go wrong on purpose: ``python jobs_with_roles.py NAME`` under 4 ranks."""

import os
import signal
import sys
import time

from mpi4py import MPI

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator

RANK = MPI.COMM_WORLD.rank
JOBS = {"chief": 1, "worker": 2, "ps": 1}
LATE = 1


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def serve(resolver):
    spec = resolver.cluster_spec()
    mpistrat.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id).join()
    say("free", RANK)


def with_roles(chief):
    """The program whose coordinator does what ``chief`` does with its strategy."""

    def program():
        resolver = MpiClusterResolver(jobs=JOBS)
        if resolver.task_type != "chief":
            serve(resolver)
        else:
            chief(mpistrat.ParameterServerStrategy(resolver))

    return program


def sleep():
    time.sleep(1000)


# --- while functions run -------------------------------------------------------------------------------


@with_roles
def chief_raises(strategy):
    ClusterCoordinator(strategy).schedule(sleep)
    raise ValueError("on purpose")


@with_roles
def chief_is_killed(strategy):
    ClusterCoordinator(strategy).schedule(sleep)
    os.kill(os.getpid(), signal.SIGKILL)


@with_roles
def worker_is_killed(strategy):
    coordinator = ClusterCoordinator(strategy)
    coordinator.schedule(lambda: os.kill(os.getpid(), signal.SIGKILL))
    coordinator.join()


@with_roles
def server_is_killed(strategy):
    with strategy.scope():
        v = mpistrat.Variable([1.0])
        strategy.extended.update(v, lambda _: os.kill(os.getpid(), signal.SIGKILL))


@with_roles
def chief_is_interrupted(strategy):
    coordinator = ClusterCoordinator(strategy)
    coordinator.schedule(sleep)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    coordinator.join()


@with_roles
def chief_leaves_without_join(strategy):
    coordinator = ClusterCoordinator(strategy)
    for _ in range(30):
        coordinator.schedule(lambda: bytearray(1_000_000))
    coordinator.schedule(lambda: 1 / 0)


# --- before the first function -------------------------------------------------------------------------


def worker_is_not_there():
    resolver = MpiClusterResolver(jobs=JOBS)
    MPI.COMM_WORLD.Barrier()  # or the limit could pass before all have started
    if RANK == 0:
        mpistrat.ParameterServerStrategy(resolver)
    elif RANK == 2:
        sleep()
    serve(resolver)


def worker_is_late():
    resolver = MpiClusterResolver(jobs=JOBS)
    MPI.COMM_WORLD.Barrier()
    if RANK == 2:
        MPI.COMM_WORLD.recv(source=0, tag=LATE)
    if RANK:
        serve(resolver)
        return
    try:
        mpistrat.ParameterServerStrategy(resolver)
    except TimeoutError as error:
        say("chief goes on without:", error)
        MPI.COMM_WORLD.send(None, 2, tag=LATE)


def no_coordinator():
    resolver = MpiClusterResolver(jobs=JOBS)
    if RANK:
        serve(resolver)
    sleep()


def roles_differ():
    resolver = MpiClusterResolver(jobs=JOBS if RANK != 2 else {"chief": 1, "worker": 1, "ps": 2})
    try:
        if RANK:
            serve(resolver)
        else:
            mpistrat.ParameterServerStrategy(resolver)
    except RuntimeError as error:
        say("refused", RANK, error)


def more_servers_than_ranks():
    try:
        MpiClusterResolver(jobs={"chief": 1, "worker": 1, "ps": 9})
    except RuntimeError as error:
        say("refused", RANK, error)


def chief_fails_before_its_strategy():
    resolver = MpiClusterResolver(jobs=JOBS)
    if RANK == 0:
        raise ValueError("on purpose")
    serve(resolver)


def worker_is_its_own_chief():
    resolver = MpiClusterResolver(jobs=JOBS)
    if RANK == 1:
        mpistrat.ParameterServerStrategy(resolver)
    elif RANK:
        serve(resolver)
    else:
        sleep()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
