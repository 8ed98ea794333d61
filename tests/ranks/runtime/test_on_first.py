"""What rank 0 does for all, and what all ranks do of which one may fail."""

import pytest

from mpistrat.data.errors import DataFileError
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology


def test_result(comm):
    topology = Topology.of(comm)
    assert topology.on_first(lambda: [comm.rank]) == [0]


@pytest.mark.parametrize("kind", [KeyError, MemoryError, RuntimeError])
def test_error(comm, kind):
    def fail():
        raise kind("on purpose")

    topology = Topology.of(comm)
    with pytest.raises(kind, match="on purpose"):
        topology.on_first(fail)
    assert topology.all_true(True)


@pytest.mark.ranks(min=2)
def test_a_collective_in_it(comm):
    """All ranks raise, and the next call works."""
    topology = Topology.of(comm)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the ranks met in different collectives"):
            topology.on_first(topology.barrier)
        assert topology.on_first(lambda: "next") == "next"


@pytest.mark.ranks(min=2)
def test_what_is_compared(comm):
    topology = Topology.of(comm)
    with pytest.raises(ValueError, match="rank 0: write 0"):
        topology.on_first(lambda: None, operation("write", comm.rank))
    assert topology.all_true(True)


def test_results_of_all_ranks(comm):
    assert Topology.of(comm).on_all_ranks(lambda: comm.rank) == [*range(comm.size)]


class Foreign(LookupError):
    """An error whose class has no text alone."""

    def __init__(self, text, code):
        super().__init__(text)


@pytest.mark.parametrize("error", [KeyError("bad"), DataFileError("bad"), Foreign("bad", 3), UnicodeError("bad")])
def test_one_rank_fails_and_all_raise(comm, error):
    """Other ranks raise the nearest class that they have."""
    topology, last = Topology.of(comm), comm.size - 1

    def fail():
        if comm.rank == last:
            raise error

    kind = LookupError if comm.rank != last and isinstance(error, Foreign) else type(error)
    error.path = "a.h5"
    with pytest.raises(kind, match="bad" if comm.rank == last else f"rank {last}: .*bad") as caught:
        topology.on_all_ranks(fail)
    assert caught.value.path == "a.h5"
    assert topology.on_all_ranks(lambda: 1) == [1] * comm.size
