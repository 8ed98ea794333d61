"""A pair of nodes that seems slow is measured again, when no other pair is."""

import pytest
from mpi4py import MPI

from mpistrat.cli.check import network
from mpistrat.cli.check.job import CheckedJob, CheckOptions, Severity, TimedExchange

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.ranks(min=2)


@pytest.mark.parametrize(
    ("second", "verdict"), [(1e9, Severity.OK), (3e6, Severity.FIX)], ids=["was disturbed", "is slow"]
)
def test_slow_pair(comm, monkeypatch, second, verdict):
    measured = []

    def measure(exchange, peer, first):
        measured.append(peer)
        if {RANK, peer} == {0, 1}:
            return 1e-5, 1e6 if measured.count(peer) == 1 else second
        return 1e-5, 1e9

    monkeypatch.setattr(network, "measure", measure)
    exchange = TimedExchange(comm, 10)
    exchange.leaders = tuple(range(SIZE))  # as if each rank were on a node of its own
    pairs = network.measure_network(exchange, CheckOptions())
    others = [rank for rank in range(SIZE) if rank != RANK]
    assert sorted(measured) == sorted([*others, *([1 - RANK] if RANK < 2 else [])])
    if RANK:
        assert pairs is None
        return
    assert len(pairs) == SIZE * (SIZE - 1) // 2
    assert [pair[:2] for pair in pairs if pair.again] == [(0, 1)]
    job = CheckedJob(SIZE, {rank: {"host": f"n{rank}"} for rank in range(SIZE)}, {"network": pairs})
    assert network.judge_network(job).severity is verdict
