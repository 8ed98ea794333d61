"""Programs with roles that strain the machinery: ``python misuse.py NAME`` under 3 or 4 ranks. None may hang."""

import atexit
import gc
import signal
import sys
import threading

import numpy as np
from mpi4py import MPI
from raised import raised

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator, Executor

LARGE = 1_000_000  # elements: such an array leaves its rank only while the receiver waits for it


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def refusals(strategy):
    updates_that_cannot_be_answered(strategy)
    parts_that_cannot_be_made(strategy)
    functions_that_use_the_machinery(strategy)
    strategies_that_are_dropped(strategy)
    late_calls(strategy)


# --- functions that a server or a worker runs ----------------------------------------------------------


def updates_that_cannot_be_answered(strategy):
    with strategy.scope():
        v = mpistrat.Variable([1.0])
    assert "SystemExit" in str(raised(strategy.extended.update, v, lambda _: sys.exit(0)))
    assert isinstance(raised(strategy.extended.update, v, lambda _: threading.Lock()), TypeError)
    np.testing.assert_array_equal(v.read_value(), [1.0])


def parts_that_cannot_be_made(strategy):
    coordinator = ClusterCoordinator(strategy)
    leaving = coordinator.create_per_worker_resource(lambda: sys.exit(0))
    assert "SystemExit" in str(raised(coordinator.schedule(repr, (leaving,)).fetch))
    raised(coordinator.join)
    failing = coordinator.create_per_worker_resource(lambda: 1 / 0)
    causes = []
    for _ in range(3):
        causes.append(str(raised(coordinator.schedule(repr, (failing,)).fetch).__cause__))
        raised(coordinator.join)
    assert len({*causes}) == 1, causes


def functions_that_use_the_machinery(strategy):
    coordinator = ClusterCoordinator(strategy)
    resolver = strategy.cluster_resolver

    def serves():
        mpistrat.Server(resolver.cluster_spec(), job_name="worker", task_index=0).join()

    calls = {
        serves: "serves the coordinator already",
        lambda: coordinator.schedule(abs, (1,)): "only the chief's program",
        coordinator.join: "only the chief's program",
        mpistrat.MirroredStrategy: "runs a function alone",
        lambda: strategy.run(lambda: strategy.run(abs, (1,))): "a replica function cannot run another",
    }
    for call, text in calls.items():
        assert text in str(raised(coordinator.schedule(call).fetch)), call
        raised(coordinator.join)
    assert coordinator.schedule(lambda: coordinator.strategy is strategy).fetch()
    assert coordinator.schedule(lambda: mpistrat.MirroredStrategy(comm=MPI.COMM_SELF) is None).fetch() is False


# --- servers that several ranks ask --------------------------------------------------------------------


def two_servers_asked_in_two_orders(strategy):
    """Each server answers another rank first, with an array that leaves only while this rank receives it."""
    cut = mpistrat.ParameterServerStrategy(strategy.cluster_resolver, lambda shape, dtype: [2])
    with cut.scope():
        v = mpistrat.Variable(np.zeros(LARGE // 4))
        mpistrat.Variable(0.0)
        w = mpistrat.Variable(np.zeros(LARGE // 4))
    assert v.device == w.device[::-1]

    def read(x):
        for _ in range(200):
            x.read_value()

    value = ClusterCoordinator(cut).schedule(read, (w,))
    read(v)
    value.fetch()


# --- what lives how long -------------------------------------------------------------------------------


def strategies_that_are_dropped(strategy):
    resolver = strategy.cluster_resolver
    coordinator = ClusterCoordinator(mpistrat.ParameterServerStrategy(resolver))
    gc.collect()
    assert coordinator is ClusterCoordinator(coordinator.strategy)
    for _ in range(10):
        with mpistrat.ParameterServerStrategy(resolver).scope():
            mpistrat.Variable(np.zeros(LARGE))
        gc.collect()
    with strategy.scope():
        v = mpistrat.Variable([0.0])
    assert strategy.extended.update(v, _arrays_held, group=False)[0] <= 1


def _arrays_held(_):
    """Return the number of large arrays in this process."""
    from mpistrat.variables.on_server import HeldVariable

    gc.collect()
    return sum(isinstance(each, HeldVariable) and each.shape == (LARGE,) for each in gc.get_objects())


# --- interruptions and the end -------------------------------------------------------------------------


class Interruption(BaseException):
    """What a signal handler raises."""


def an_interrupted_update(strategy):
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(LARGE))
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        strategy.extended.update(v, _slowly)
    except Interruption:
        say("interrupted")
    return v


def _interrupt(_, frame):
    """Raise between two polls: an interruption inside of one ends the program."""
    if frame.f_code.co_name == "pause":
        raise Interruption
    signal.setitimer(signal.ITIMER_REAL, 0.003)


def _slowly(v):
    import time

    time.sleep(1)
    return np.zeros(v.shape)


def interruptions(strategy):
    """Other calls work after one, and the program ends after one."""
    v = an_interrupted_update(strategy)
    assert ClusterCoordinator(strategy).schedule(lambda: float(v.read_value().sum())).fetch() == 0.0
    an_interrupted_update(strategy)


def calls_after_the_goodbye():
    """Registered before the strategy is made, so that it runs after the other ranks were let go."""
    strategy, v = _late
    for call in (v.read_value, ClusterCoordinator(strategy).schedule(abs, (1,)).fetch):
        assert "has let the other ranks go" in str(raised(call))
    say("refused at the end")


_late = []


def late_calls(strategy):
    with strategy.scope():
        _late.extend((strategy, mpistrat.Variable([1.0])))


def a_farm_without_a_block():
    executor = Executor(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        assert executor.submit(pow, 2, 3).result() == 8


def main(name):
    if name == "a_farm_without_a_block":
        a_farm_without_a_block()
        say(name, "passed")
        return
    resolver = MpiClusterResolver(jobs={"chief": 1, "worker": 1, "ps": MPI.COMM_WORLD.size - 2})
    if resolver.task_type != "chief":
        spec = resolver.cluster_spec()
        mpistrat.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id).join()
        return
    if name == "refusals":
        atexit.register(calls_after_the_goodbye)
    globals()[name](mpistrat.ParameterServerStrategy(resolver))
    say(name, "passed")


if __name__ == "__main__":
    main(sys.argv[1])
