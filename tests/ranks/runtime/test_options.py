"""``mpistrat.rc`` over the ranks: an option is the same on all of them, or all of them raise."""

import pytest
from mpi4py import MPI

import mpistrat

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
STRATEGIES = [mpistrat.MultiWorkerMirroredStrategy, mpistrat.MirroredStrategy]
WRONG = {"DEBUG": "variable", "DEVICE": "moon", "GPU_DIRECT": "perhaps", "PROGRESS": "2", "TUNED": "2"}
DIFFERENT = {"ALL_REDUCE": "ordered", "DEBUG": "collectives", "DEVICE": "auto", "GPU_DIRECT": "off"}


@pytest.fixture
def comm():
    """Ranks that have not met yet."""
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", WRONG)
def test_all_raise_if_one_cannot_read_it(comm, monkeypatch, strategy, name):
    wrong = SIZE - 1
    if wrong == RANK:
        monkeypatch.setenv(f"MPISTRAT_{name}", WRONG[name])
    rank = f"rank {wrong}: " if SIZE > 1 else ""
    with pytest.raises(ValueError, match=f"^{rank}MPISTRAT_{name}={WRONG[name]} cannot be read: use "):
        strategy(comm=comm)
    monkeypatch.undo()
    assert strategy(comm=comm).reduce("SUM", 1.0, axis=None) == SIZE


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", DIFFERENT)
def test_all_raise_if_it_differs(comm, monkeypatch, name):
    if RANK == 0:
        monkeypatch.setenv(f"MPISTRAT_{name}", DIFFERENT[name])
    with pytest.raises(
        ValueError, match=rf"^MPISTRAT_{name} .*differs between ranks: rank 0: {DIFFERENT[name]}; ranks? 1"
    ):
        mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    monkeypatch.undo()
    assert mpistrat.MultiWorkerMirroredStrategy(comm=comm).reduce("SUM", 1.0, axis=None) == SIZE


def test_some_may_differ(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_PROGRESS", str(RANK % 2))
    monkeypatch.setenv("MPISTRAT_TUNED", str(int(RANK == SIZE)))
    assert mpistrat.MultiWorkerMirroredStrategy(comm=comm).reduce("SUM", 1.0, axis=None) == SIZE


@pytest.mark.ranks(min=2)
def test_debug_by_the_program(comm):
    """Equal calls from different lines are told, once the program asks for it."""
    mpistrat.rc.debug = "collectives"
    try:
        strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
    finally:
        del mpistrat.rc.debug

    def meet():
        if RANK == 0:
            return strategy.barrier()
        return strategy.barrier()

    with pytest.raises(RuntimeError, match="values that do not fit together"):
        meet()
    strategy.barrier()
