"""Programs around the end of MPI: ``python end_of_mpi.py NAME [PATH]`` under some ranks."""

import atexit
import os
import sys
import tempfile
import threading

import mpi4py
import numpy as np

BY_LIBRARY = (
    "started",
    "not_finalized",
    "one_level",
    "one_raises",
    "one_exits",
    "forks",
    "coordinator_forks",
    "finalizes_itself",
)
if sys.argv[1] in BY_LIBRARY:
    mpi4py.rc.initialize = False

import mpistrat  # noqa: E402
from mpistrat.data import Dataset  # noqa: E402


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


# --- MPI that the library started ----------------------------------------------------------------------


def started():
    strategy = mpistrat.MultiWorkerMirroredStrategy()

    def at_exit():
        from mpi4py import MPI

        say("finalized before the handlers:", MPI.Is_finalized())

    atexit.register(at_exit)
    say("sum", strategy.reduce("SUM", 1, axis=None))


def not_finalized():
    """The program says that it does so itself, with the last handler of all."""
    mpi4py.rc.finalize = False

    def at_exit():
        from mpi4py import MPI

        say("finalized:", MPI.Is_finalized())
        MPI.Finalize()

    atexit.register(at_exit)
    started()


def finalizes_itself():
    started()
    from mpi4py import MPI

    atexit._clear()
    MPI.Finalize()


def one_level():
    mpi4py.rc.thread_level = "serialized"
    started()
    from mpi4py import MPI

    say("level:", MPI.Query_thread() == MPI.THREAD_SERIALIZED)


def one_raises():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    if strategy.comm.rank == strategy.comm.size - 1:
        raise ValueError("on purpose")
    while True:
        strategy.barrier()


def one_raises_with_own_mpi():
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        raise ValueError("on purpose")
    MPI.COMM_WORLD.Barrier()


def one_exits_with_own_mpi():
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        sys.exit(7)
    MPI.COMM_WORLD.Barrier()


def one_exits():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    if strategy.comm.rank == strategy.comm.size - 1:
        sys.exit(7)
    while True:
        strategy.barrier()


def forks():
    """A child that comes to the end of the program is no rank: it leaves MPI to its parent."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    child = os.fork()
    if child:
        say("child:", os.waitpid(child, 0)[1])
        say("sum", strategy.reduce("SUM", 1, axis=None))
    else:
        try:
            strategy.reduce("SUM", 1, axis=None)
        except RuntimeError as error:
            say("refused:", error)


def coordinator_forks():
    """The child does not end the calls of its parent, nor let the workers of it go."""
    comm = mpistrat.MultiWorkerMirroredStrategy().comm
    executor = mpistrat.coordinator.Executor(comm)
    if comm.rank == 0:
        say("before", executor.submit(pow, 2, 3).result())
        child = os.fork()
        if child:
            say("child:", os.waitpid(child, 0)[1])
            say("after", executor.submit(pow, 2, 4).result())


# --- use after the end ---------------------------------------------------------------------------------


def after_finalize():
    """Every call that communicates, once MPI is finalized."""
    from mpi4py import MPI

    strategy = mpistrat.MultiWorkerMirroredStrategy()
    on_read = {
        "synchronization": mpistrat.VariableSynchronization.ON_READ,
        "aggregation": mpistrat.VariableAggregation.MEAN,
    }
    with strategy.scope():
        mirrored = mpistrat.Variable(0.0, name="v", aggregation=mpistrat.VariableAggregation.MEAN)
        read = mpistrat.Variable(1.0, **on_read)
    buffer = strategy.experimental_buffers_like([np.zeros(5)])
    folder = MPI.COMM_WORLD.bcast(tempfile.mkdtemp() if MPI.COMM_WORLD.rank == 0 else None)
    path = os.path.join(folder, "checkpoint")
    mpistrat.training.save([mirrored], path)
    dataset = strategy.experimental_distribute_dataset(Dataset.range(8).batch(2))
    stream = iter(
        strategy.distribute_datasets_from_function(lambda _: Dataset.from_iterable(lambda: iter(range(4))).batch(2))
    )
    large = np.ones(300_000)

    def in_replica(fn):
        return lambda: strategy.run(lambda: fn(mpistrat.get_replica_context()))

    def chief_first():
        with strategy.chief_first():
            pass

    def variable():
        with strategy.scope():
            mpistrat.Variable(1.0)

    calls = {
        "reduce": lambda: strategy.reduce("SUM", 1.0, axis=None),
        "reduce over an axis": lambda: strategy.reduce("MEAN", np.ones((2, 3)), axis=0),
        "reduce of a large array": lambda: strategy.reduce("SUM", large, axis=None),
        "gather": lambda: strategy.gather(np.ones(2), axis=0),
        "all_reduce": in_replica(lambda context: context.all_reduce("SUM", 1.0)),
        "all_reduce of buffers": in_replica(lambda context: context.all_reduce("SUM", buffer)),
        "all_reduce of a list": in_replica(lambda context: context.all_reduce("MEAN", [large, 1.0])),
        "all_reduce_async": in_replica(lambda context: context.experimental_all_reduce_async("SUM", large).wait()),
        "reduce_scatter": in_replica(lambda context: context.experimental_reduce_scatter("SUM", np.ones(6))),
        "all_gather": in_replica(lambda context: context.all_gather(np.ones(2), axis=0)),
        "reduce_to": lambda: strategy.extended.reduce_to("SUM", 1.0, "cpu:0"),
        "batch_reduce_to": lambda: strategy.extended.batch_reduce_to("SUM", [(1.0, "cpu:0"), (2.0, "cpu:0")]),
        "broadcast_to": lambda: strategy.extended.broadcast_to(np.ones(3), "cpu:0"),
        "barrier": strategy.barrier,
        "agree": lambda: strategy.agree(True),
        "chief_first": chief_first,
        "buffers": lambda: strategy.experimental_buffers_like([np.zeros(3)]),
        "Variable": variable,
        "assign": in_replica(lambda _: mirrored.assign(1.0)),
        "read": read.read_value,
        "save": lambda: mpistrat.training.save([mirrored], path),
        "save_async": lambda: mpistrat.training.save_async([mirrored], path).wait(),
        "load": lambda: mpistrat.training.load([mirrored], path),
        "distribute": lambda: strategy.experimental_distribute_dataset(Dataset.range(8).batch(2)),
        "from_function": lambda: strategy.distribute_datasets_from_function(lambda _: Dataset.range(8).batch(2)),
        "stream": lambda: next(stream),
        "strategy": mpistrat.MultiWorkerMirroredStrategy,
    }
    MPI.Finalize()
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            if "MPI.Finalize()" not in str(error):
                say("no error that says why:", name, error)
        else:
            say("no error:", name)
    assert len(list(dataset)) == 4  # reading sends nothing
    say("all calls were made")


def after_free():
    """The same on a communicator that was freed, where ranks go on with another."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    other = mpistrat.MultiWorkerMirroredStrategy()
    strategy.barrier()
    comm.Free()
    for call in (strategy.barrier, lambda: strategy.reduce("SUM", 1.0, axis=None), lambda: strategy.agree(True)):
        try:
            call()
        except RuntimeError as error:
            say("refused:", "communicator that was freed" in str(error))
    say("sum", other.reduce("SUM", 1, axis=None))


if __name__ == "__main__":
    guard = threading.Timer(100, os._exit, (99,))
    guard.daemon = True
    guard.start()
    globals()[sys.argv[1]]()
