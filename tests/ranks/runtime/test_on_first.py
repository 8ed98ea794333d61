"""What rank 0 does for all."""

import pytest

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
