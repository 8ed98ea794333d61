"""Programs that go wrong on purpose: ``python programs.py NAME`` under some ranks."""

import atexit
import importlib
import os
import signal
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.collectives.algorithms.exact import ExactAllReduce
from mpistrat.collectives.algorithms.hierarchical import OrderedAllReduce
from mpistrat.collectives.algorithms.mpi import MpiAllReduce
from mpistrat.memory.node import NodeMemory
from mpistrat.runtime.agreement.agreement import NodeAgreement
from mpistrat.runtime.agreement.collective_lock import CollectiveLock
from mpistrat.runtime.topology import Topology

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


def say(*words):
    """One line, in one piece."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def now():
    """The time is told when something goes wrong: how long the job then takes to end is of interest."""
    say("at", time.time())


def fail(text="on purpose"):
    now()
    raise ValueError(text)


def wait(strategy):
    """What the other ranks do meanwhile."""
    for _ in range(1000):
        strategy.reduce("SUM", np.ones(1000), axis=None)
    while True:
        strategy.barrier()


# --- errors that leave the program ---------------------------------------------------------------------


def one_raises():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    atexit.register(say, "atexit of rank", RANK)
    if RANK == SIZE - 1:
        fail()
    wait(strategy)


def all_raise():
    mpistrat.MultiWorkerMirroredStrategy()
    WORLD.Barrier()
    fail()


def huge_message():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    if RANK == 0:
        # Without the line of `now`: the launcher may print it in the middle of the long one.
        raise ValueError("begin" + "x" * 300_000 + "end")
    wait(strategy)


def raises_in_run():
    strategy = mpistrat.MultiWorkerMirroredStrategy()

    def replica_fn():
        if RANK == SIZE - 1:
            fail()
        mpistrat.get_replica_context().all_reduce("SUM", np.ones(3))

    strategy.run(replica_fn)


def raises_in_merge_call():
    strategy = mpistrat.MultiWorkerMirroredStrategy()

    def merge_fn(strategy):
        if RANK == SIZE - 1:
            fail()
        wait(strategy)

    strategy.run(lambda: mpistrat.get_replica_context().merge_call(merge_fn))


def raises_in_scope():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with strategy.scope(), strategy.scope():
        if RANK == SIZE - 1:
            fail()
        mpistrat.Variable(1.0)


def raises_in_update():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = mpistrat.Variable(1.0)
        strategy.extended.update(v, lambda x: fail() if RANK == SIZE - 1 else wait(strategy))


def raises_an_interrupt():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    if RANK == SIZE - 1:
        now()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    wait(strategy)


def chief_fails_first():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with strategy.chief_first():
        fail("no data")


def own_hook_before():
    sys.excepthook = lambda kind, error, trace: say("own hook:", error)
    one_raises()


def own_hook_after():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    sys.excepthook = lambda kind, error, trace: say("own hook:", error)
    if RANK == SIZE - 1:
        fail()
    wait(strategy)


def own_hook_that_fails():
    def hook(kind, error, trace):
        raise KeyError("of the hook")

    sys.excepthook = hook
    one_raises()


def thread_stays_alive():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    if RANK == SIZE - 1:
        threading.Thread(target=time.sleep, args=(300,)).start()
        fail()
    wait(strategy)


def interactive():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    strategy.barrier()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the end of what the user types
    if "ps1" in sys.argv:
        sys.ps1 = ">>> "
    fail()


# --- ends without an error -----------------------------------------------------------------------------


def exits(leave):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    if RANK == SIZE - 1:
        now()
        leave()
    wait(strategy)


def exit_3():
    exits(lambda: sys.exit(3))


def raise_exit_3():
    def leave():
        raise SystemExit(3)

    exits(leave)


def exit_text():
    exits(lambda: sys.exit("this is the text"))


def exit_true():
    exits(lambda: sys.exit(True))


def exit_256():
    exits(lambda: sys.exit(256))


def exit_huge():
    exits(lambda: sys.exit(1 << 70))


def exit_object():
    exits(lambda: sys.exit(["a", "list"]))


def exit_from_a_derived_class():
    class Leave(SystemExit):
        pass

    def leave():
        raise Leave(4)

    exits(leave)


def killed():
    exits(lambda: os.kill(os.getpid(), signal.SIGKILL))


def ends_at_once():
    exits(lambda: os._exit(5))


def ends_early():
    exits(lambda: sys.exit(0))


def returns_early():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    if RANK < SIZE - 1:
        wait(strategy)
    now()


def returns_early_on_a_part():
    """The strategy lives on a communicator that is not the whole world."""
    part = WORLD.Split(0 if RANK < SIZE - 1 else 1)
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=WORLD.Split(0, key=-RANK))
    strategy.barrier()
    if RANK < SIZE - 1:
        say("part of", part.size)
        wait(strategy)
    now()


def leaves_a_reduction_between_nodes():
    """In the middle, by an error that its program catches; and comes to its end as if nothing had been."""
    leaves_reductions(100_000, "hierarchical", CollectiveLock, "_token_of_next_meeting")


def leaves_a_small_reduction_between_nodes():
    """As above, in a message that goes the short way."""
    leaves_reductions(10, "leader", NodeMemory, "meet")


def leaves_a_reduction_by_mpi():
    leaves_reductions(10, "mpi", MpiAllReduce, "reduce", nodes=1)


def leaves_a_reduction_by_mpi_between_nodes():
    leaves_reductions(10, "mpi", MpiAllReduce, "reduce")


def leaves_an_ordered_reduction_between_nodes():
    leaves_reductions(100_000, "ordered", OrderedAllReduce, "reduce")


def leaves_an_exact_reduction_between_nodes():
    leaves_reductions(10, "exact", ExactAllReduce, "reduce")


def leaves_a_gather():
    module = importlib.import_module("mpistrat.collectives.movement.moves")
    leaves(lambda strategy: strategy.gather(np.ones(100_000), 0), module, "_by_mpi", nodes=1)


def leaves_a_barrier():
    """By a signal that comes while it waits for the others: Python serves it when they have come."""
    agree = NodeAgreement.agree

    def interrupted(self, word):
        agree(self, word)
        NodeAgreement.agree = agree
        in_the_middle()

    leaves(lambda strategy: strategy.barrier(), NodeAgreement, "agree", interrupted, nodes=1)


def leaves_reductions(length, implementation, owner, name, nodes=2):
    options = mpistrat.experimental.CommunicationOptions(implementation=implementation)
    values = np.ones(length)
    leaves(lambda strategy: strategy.reduce("SUM", values, axis=None), owner, name, nodes=nodes, options=options)


def in_the_middle(*args):
    raise MemoryError("in the middle")


def leaves(call, owner, name, fails=in_the_middle, nodes=2, options=None):
    """The last rank leaves the fourth of these calls, by what one of the functions in it then does."""
    comm = WORLD.Dup()
    Topology.of(comm, split=lambda comm: comm.rank % nodes)
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm, communication_options=options)
    for _ in range(3):
        call(strategy)
    if RANK == SIZE - 1:
        setattr(owner, name, fails)
    try:
        while True:
            call(strategy)
    except MemoryError:
        pass
    try:
        strategy.barrier()
    except RuntimeError as error:
        say("refused:", error)
    now()


def caught_exit():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    for code in (3, "text", None, 0):
        caught = None
        try:
            sys.exit(code)
        except SystemExit as error:
            caught = error
        assert caught.code == code
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
    atexit.register(lambda: sys.exit(3))  # Python ignores it
    strategy.barrier()
    say("all is well")


# --- ranks that disagree -------------------------------------------------------------------------------


def different_collectives():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    now()
    if RANK == SIZE - 1:
        strategy.gather(np.ones(2), 0)
    strategy.reduce("SUM", 1.0, axis=None)


def different_shapes():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    now()
    strategy.reduce("SUM", np.ones(3 + RANK, "float32"), axis=None)


def different_dtypes():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    now()
    strategy.reduce("SUM", np.ones(3, ["float32", "float64"][RANK % 2]), axis=None)


def different_ops():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    now()
    strategy.reduce(["SUM", "MEAN"][RANK % 2], np.ones(3), axis=None)


def caught_and_agreed():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    for step in range(4):
        try:
            if step == 2 and RANK == SIZE - 1:
                raise OSError("no such file")
            ok = True
        except OSError:
            ok = False
        if not strategy.agree(ok):
            say("stopped at", step)
            break
        strategy.reduce("SUM", 1.0, axis=None)
    strategy.barrier()


def time_out_is_caught_and_the_program_ends():
    options = mpistrat.experimental.CommunicationOptions(timeout_seconds=0.5)
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    without_limit = mpistrat.MultiWorkerMirroredStrategy()
    if RANK == 0:
        try:
            strategy.reduce("SUM", 1.0, axis=None)
        except TimeoutError:
            now()
    else:
        without_limit.barrier()


def time_outs_are_caught_and_the_programs_end():
    options = mpistrat.experimental.CommunicationOptions(timeout_seconds=0.5)
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    time.sleep(3.0 * RANK)
    try:
        strategy.reduce("SUM", 1.0, axis=None)
    except TimeoutError:
        say("rank", RANK, "was patient")


def asynchronous_time_out_is_caught_and_the_programs_end():
    options = mpistrat.experimental.CommunicationOptions(timeout_seconds=60 if RANK else 1.0)
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    values = np.ones(3_000_000, np.float32)
    WORLD.Barrier()  # or the limit could pass before the other has started
    pending = strategy.run(lambda: mpistrat.get_replica_context().experimental_all_reduce_async("SUM", values))
    time.sleep(4.0 * RANK)  # in which it makes no progress
    try:
        say("the sum is", pending.wait()[0])
    except TimeoutError:
        say("rank", RANK, "was patient")


def chief_fails_and_all_know():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    try:
        with strategy.chief_first():
            raise ValueError("no data")
    except ValueError as error:
        say("rank", RANK, "ValueError", error)
    except RuntimeError as error:
        say("rank", RANK, "RuntimeError", error)
    strategy.barrier()


def two_threads():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    go = WORLD.Dup()
    if RANK == 0:
        agree, inside = NodeAgreement.agree, threading.Event()

        def agrees(self, word):
            inside.set()
            return agree(self, word)

        NodeAgreement.agree = agrees
        thread = threading.Thread(target=strategy.barrier)
        thread.start()
        inside.wait()  # in the barrier: the others only come later
        try:
            strategy.barrier()
        except RuntimeError as error:
            say("refused:", error)
        go.Barrier()
        thread.join()
    else:
        go.Barrier()
        strategy.barrier()
    strategy.barrier()
    say("all is well")


def thread_raises():
    """An error in a thread ends the thread, as Python has it, not the job."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    strategy.barrier()
    say("all is well")


# --- shared memory -------------------------------------------------------------------------------------


def ours_in_shared_memory():
    """Files that this program has mapped and that still have a name. Those that never had one are ``#number``.

    A flight record has a name until its rank ends.
    """
    ours, record = ("/dev/shm/mpistrat-", "/dev/shm/#"), "/dev/shm/mpistrat-record-"
    with open("/proc/self/maps") as file:
        mapped = {line.split(maxsplit=5)[5].strip() for line in file if any(each in line for each in ours)}
    assert mapped
    return [name for name in mapped if not name.endswith("(deleted)") and not name.startswith(record)]


def buffers_at_exit():
    """Views are read when the strategy, its communicator and MPI have gone."""
    comm = WORLD.Dup()
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    buffer = strategy.experimental_buffers_like(np.zeros(100_000))
    buffer[:] = 1
    strategy.reduce("SUM", buffer, axis=None)
    if SIZE > 1:
        say("left behind", ours_in_shared_memory())
    view = buffer[1::2]

    def at_exit():
        assert MPI.Is_finalized()
        view[:] += 1
        say("view holds", int(view.min()))

    import mpi4py

    mpi4py.rc.finalize = False
    atexit.register(at_exit)
    atexit.register(MPI.Finalize)
    del strategy, buffer
    comm.Free()


def buffers_of_a_killed_rank():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    buffer = strategy.experimental_buffers_like(np.zeros(100_000))
    say("left behind", ours_in_shared_memory())
    strategy.barrier()
    if RANK == SIZE - 1:
        buffer[:] = 7
        now()
        os.kill(os.getpid(), signal.SIGKILL)
    wait(strategy)


def memory_does_not_grow():
    """Neither of the program nor of /dev/shm, once every kind of message was seen."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    buffers = strategy.experimental_buffers_like([np.zeros(100_000), np.zeros(10, np.float32)])
    arrays = [np.ones(n, dtype) for n in (3, 1000, 100_001) for dtype in (np.float32, np.float64, np.float16)]

    def step():
        replica = mpistrat.get_replica_context()
        replica.all_reduce("MEAN", arrays)
        replica.all_reduce("MEAN", buffers)
        replica.experimental_all_reduce_async("SUM", arrays).wait()
        strategy.experimental_local_results(1)

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    # Threads that a busy machine runs late hold a result of each kind, once: 3.4 MB in 1 of 5 runs. A leak goes on.
    grown = []
    while not grown or (grown[-1] >= 2 << 20 and len(grown) < 5):
        before = resident()
        for _ in range(60):
            strategy.run(step)
        grown.append(strategy.reduce("MAX", resident() - before, axis=None))
    assert grown[-1] < 2 << 20, grown
    say("all is well", ours_in_shared_memory())


def different_places():
    """With MPISTRAT_DEBUG=collectives."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    for _ in range(2):
        strategy.reduce("SUM", 1.0, axis=None)
    if RANK:
        strategy.reduce("SUM", 1.0, axis=None)
    else:
        strategy.reduce("SUM", 1.0, axis=None)


# --- communicators -------------------------------------------------------------------------------------


# More than an MPI library has room for at one time; three ranks are there for their parts of unequal size.
COMMUNICATORS = 2100 if SIZE < 3 else 200


def strategies():
    before = None
    for i in range(3000 if SIZE < 3 else 300):
        strategy = [mpistrat.MultiWorkerMirroredStrategy, mpistrat.MirroredStrategy][i % 2]()
        if i % 100 == 0:
            assert strategy.reduce("SUM", 1, axis=None) == SIZE
        if i == 10:
            before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= before


def parts_of_the_world():
    before = None
    for i in range(COMMUNICATORS):
        part = WORLD.Split(RANK % 2, key=-RANK)
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=part)
        assert strategy.num_replicas_in_sync == part.size
        if i % 100 == 0:
            assert strategy.reduce("SUM", 1, axis=None) == part.size
        if i == 10:
            before = len(os.listdir("/proc/self/fd"))
        part.Free()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert mpistrat.MultiWorkerMirroredStrategy().reduce("SUM", 1, axis=None) == SIZE


def copies_of_the_world():
    for i in range(COMMUNICATORS):
        copy = WORLD.Dup()
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=copy)
        if i % 100 == 0:
            assert strategy.reduce("SUM", 1, axis=None) == SIZE
        copy.Free()


def many_communicators():
    """Strategies, parts and copies of the world: what they take is given back."""
    strategies()
    parts_of_the_world()
    copies_of_the_world()
    say("all is well")


def frees_the_communicator():
    copy = WORLD.Dup()
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=copy)
    with strategy.scope():
        v = mpistrat.Variable(1.0)
    copy.Free()
    try:
        strategy.reduce("SUM", 1, axis=None)
    except RuntimeError as error:
        say("RuntimeError:", error)
    say(v)
    assert mpistrat.MultiWorkerMirroredStrategy().agree(True)
    say("all is well")


def frees_while_others_wait():
    """The strategy was used on a communicator that one rank has freed: it says so there, and the job ends."""
    copy = WORLD.Dup()
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=copy)
    copy.Free()
    now()
    strategy.barrier()


def null_communicator():
    part = WORLD.Split(0 if RANK else MPI.UNDEFINED)
    now()
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=part)
    wait(strategy)


def a_rank_that_opens_no_file():
    """The ranks of a node with folders for temporary files of their own."""
    open_ = os.open
    if RANK == 1:

        def refuse(path, *args, **options):
            if "mpistrat-" in str(path):
                raise OSError("not here")
            return open_(path, *args, **options)

        os.open = refuse
    for comm in (WORLD, WORLD.Dup()):
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
        assert strategy.reduce("SUM", 1.0, axis=None) == SIZE
    say("all is well")


def alone_first():
    """One rank makes a strategy of its own before all make theirs."""
    if RANK == 0:
        alone = mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF)
        assert alone.reduce("SUM", 1, axis=None) == 1
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    assert strategy.reduce("SUM", 1, axis=None) == SIZE
    say("all is well")


def alone_first_then_all_raise():
    """Each rank made a strategy of its own before: still only one traceback."""
    mpistrat.MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF)
    all_raise()


def finalized():
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    strategy.barrier()
    MPI.Finalize()
    try:
        mpistrat.MultiWorkerMirroredStrategy(comm=None)
    except RuntimeError as error:
        say("RuntimeError:", error)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
