"""A signal handler raises in a call, or behind its last collective: others have its result, this rank has not."""

import sys

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import training
from mpistrat.collectives.asynchronous import InFlight
from mpistrat.experimental import CommunicationOptions
from mpistrat.runtime.agreement.collective_lock import CollectiveLock
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.variables import SyncOnReadVariable
from tests.selection import core

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


class InterruptError(Exception):
    """What the signal handler raises."""


class Case:
    """A strategy, and what its calls need."""

    def __init__(self, folder):
        self.strategy = mpistrat.MultiWorkerMirroredStrategy(comm=WORLD.Dup())
        self.topology = self.strategy.extended.engine.topology
        self.path = WORLD.bcast(folder) / "weights.h5"
        with self.strategy.scope():
            self.mirrored = mpistrat.Variable(np.zeros(3), name="v")
            self.counts, self.count = (
                mpistrat.Variable(
                    value,
                    synchronization=mpistrat.VariableSynchronization.ON_READ,
                    aggregation=mpistrat.VariableAggregation.SUM,
                )
                for value in (np.zeros(3), 0)
            )
        training.save([self.mirrored], self.path)

    def set_item(self):
        self.counts[0] = 0.0


def chief_first(case):
    with case.strategy.chief_first():
        pass


def begin(case):
    replica = mpistrat.get_replica_context
    return case.strategy.run(lambda: replica().experimental_all_reduce_async("SUM", np.ones(3)))


TURNS = {
    "agree": lambda case: case.strategy.agree(True),
    "barrier": lambda case: case.strategy.barrier(),
    "begin": begin,
    "chief_first": chief_first,
    "load": lambda case: training.load([case.mirrored], case.path),
    "save": lambda case: training.save([case.mirrored], case.path),
}
READS = {
    "add": lambda case: case.counts + 1,
    "array": lambda case: np.asarray(case.counts),
    "bool": lambda case: bool(case.count),
    "float": lambda case: float(case.count),
    "gather_nd": lambda case: case.counts.gather_nd([[0]]),
    "getitem": lambda case: case.counts[0],
    "index": lambda case: [1, 2, 3][case.count],
    "int": lambda case: int(case.count),
    "iter": lambda case: list(case.counts),
    "numpy": lambda case: case.counts.numpy(),
    "read_value": lambda case: case.counts.read_value(),
    "setitem": Case.set_item,
    "sparse_read": lambda case: case.counts.sparse_read([0]),
    "value": lambda case: case.counts.value(),
}


class Behind:
    """Wraps a method, and raises behind one of its calls."""

    def __init__(self, patch, kind, name):
        self.calls, self.raises_at = 0, None
        real = getattr(kind, name)

        def method(*args):
            result = real(*args)
            self.calls += 1
            if self.calls == self.raises_at:
                raise InterruptError
            return result

        patch.setattr(kind, name, method)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", [*TURNS, *READS])
def test_call_is_not_repeated_alone(name, tmp_path, monkeypatch):
    case = Case(tmp_path)
    where = (CollectiveLock, "__exit__") if name in TURNS else (SyncOnReadVariable, "_read")
    call = TURNS.get(name) or READS[name]
    with monkeypatch.context() as patch:
        behind = Behind(patch, *where)
        call(case)
        if RANK == SIZE - 1:
            behind.raises_at = 2 * behind.calls
            with pytest.raises(InterruptError):
                call(case)
        else:
            call(case)
    if name == "begin":  # MPI may still write to the messages
        assert case.topology.slot(InFlight)
    with pytest.raises(
        MismatchError, match=f"rank {SIZE - 1}'s call .* was interrupted by InterruptError after its part in collective"
    ):
        call(case)
    for pending in list(case.topology.slot(InFlight)):
        pending.wait_for_mpi()


BEFORE_MEETING = {
    "barrier": lambda case: case.strategy.barrier(),
    "mean": lambda case: case.strategy.reduce("MEAN", np.full(40_000, 2.0), axis=None),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", BEFORE_MEETING)
def test_call_is_not_repeated_where_no_other_rank_was_met(name, tmp_path, monkeypatch):
    """A handler raises where ``__enter__`` of the lock begins: it is held, and its ``with`` has not begun.

    The call could be repeated here. That is not worth the distinction between this and a collective in which the ranks
    have met, which a program cannot make: all ranks raise.
    """
    case = Case(tmp_path)
    call = BEFORE_MEETING[name]
    call(case)
    if RANK == SIZE - 1:
        with monkeypatch.context() as patch:

            def interrupted(self):
                raise InterruptError

            patch.setattr(CollectiveLock, "__enter__", interrupted)
            with pytest.raises(InterruptError):
                call(case)
    with pytest.raises(MismatchError, match=f"rank {SIZE - 1}'s call .* was interrupted by InterruptError"):
        call(case)
    with pytest.raises(RuntimeError, match="after an interrupted call: the ranks are not in step"):
        call(case)


@pytest.mark.ranks(min=2)
def test_call_is_repeated_where_its_collective_has_not_begun(tmp_path, monkeypatch):
    case = Case(tmp_path)
    if RANK == SIZE - 1:
        with monkeypatch.context() as patch:

            def interrupted(*_):
                raise InterruptError

            patch.setattr(CollectiveLock, "begin", interrupted)
            for call in BEFORE_MEETING.values():
                with pytest.raises(InterruptError):
                    call(case)
    for call in BEFORE_MEETING.values():
        call(case)


def interrupted(call, function):
    """Call, and be interrupted where the function is entered: before its first line."""

    def trace(frame, event, arg):
        if frame.f_code is function.__code__:
            raise InterruptError

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(InterruptError):
            call()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("function", [CollectiveLock.__enter__, CollectiveLock.__exit__, CollectiveLock.end])
@pytest.mark.parametrize("kind", ["barrier", "agree", "gather", "reduce"])
def test_collective_that_an_interrupt_left(function, kind):
    """Several ranks refuse to repeat it, and one rank goes on, wherever in the collective the interrupt came."""
    if SIZE == 1 and kind == "reduce":
        pytest.skip("one rank copies the values without it")
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=WORLD.Dup())
    topology = strategy.extended.engine.topology
    values = np.ones(50_000)
    call = {
        "barrier": topology.barrier,
        "agree": lambda: topology.all_true(True),
        "gather": lambda: strategy.gather(values, axis=0),
        "reduce": lambda: strategy.reduce("SUM", values, axis=None),
    }[kind]
    interrupted(call, function)
    WORLD.Barrier()
    if SIZE > 1:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"was interrupted by InterruptError"):
                call()
    else:
        call()
        assert strategy.reduce("SUM", values, axis=None)[0] == SIZE
    topology.lock.left = ""  # or the end of this program would end the job


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("size", core([1, 1 << 20], 1 << 20))
def test_interrupt_before_the_wait(size, monkeypatch):
    """This rank refuses to repeat the call, and the others wait for it until their time is over."""

    def interrupted(*_):
        raise InterruptError

    options = CommunicationOptions(timeout_seconds=0.5)
    strategy = mpistrat.MultiWorkerMirroredStrategy(comm=WORLD.Dup(), communication_options=options)
    if RANK == SIZE - 1:
        with monkeypatch.context() as patch:
            patch.setattr(CollectiveLock, "_wait_for_all", interrupted)
            with pytest.raises(InterruptError):
                strategy.reduce("SUM", np.ones(size), axis=None)
        with pytest.raises(RuntimeError, match="after an InterruptError in the middle of a collective"):
            strategy.reduce("SUM", np.ones(size), axis=None)
        strategy.extended.engine.topology.lock.left = ""  # or the end of this program would end the job
    else:
        with pytest.raises(TimeoutError, match=rf"rank {SIZE - 1} of {SIZE} did not come within 0\.5 s"):
            strategy.reduce("SUM", np.ones(size), axis=None)
    WORLD.Barrier()
