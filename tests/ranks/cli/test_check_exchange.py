"""What the ranks of `mpistrat check` find out together."""

import time

import pytest
from mpi4py import MPI

from mpistrat.cli.check import checks, network
from mpistrat.cli.check.job import CheckedJob, CheckOptions, Severity, SilenceError, TimedExchange
from mpistrat.runtime.topology import Topology

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1


class SlowExchange(TimedExchange):
    """A rank whose messages leave it at 1 MB/s."""

    def send(self, data, to):
        time.sleep(len(data) / 1e6)
        super().send(data, to)


@pytest.fixture
def exchange(comm):
    """Every rank stands for a node of its own."""
    exchange = TimedExchange(comm, 30)
    exchange.topology = Topology.of(comm)
    exchange.leaders = tuple(range(SIZE))
    return exchange


def job(**exchanged):
    return CheckedJob(SIZE, {rank: {"host": f"n{rank}"} for rank in range(SIZE)}, exchanged)


@pytest.mark.ranks(min=3, max=3)
def test_slow_link(exchange, comm):
    if RANK == LAST:
        exchange.__class__ = SlowExchange
    pairs = network.measure_network(exchange, CheckOptions())
    assert (pairs is None) == (RANK > 0)
    if RANK == 0:
        assert sorted(tuple(pair[:2]) for pair in pairs) == [(0, 1), (0, 2), (1, 2)]
        found = network.judge_network(job(network=pairs))
        assert found.severity is Severity.FIX
        assert "worst bandwidth 1 MB/s" in found.text
        assert f"-n{LAST})" in found.text.split(", best")[0]


def test_alone_or_not_every_pair_is_measured(exchange):
    exchange.leaders = (0,)
    pairs = network.measure_network(exchange, CheckOptions())
    if RANK == 0:
        assert pairs == []
        assert network.judge_network(job(network=pairs)).severity is Severity.OK


@pytest.mark.ranks(min=2)
def test_clock_of_one_rank(exchange, monkeypatch):
    if RANK == LAST:
        monkeypatch.setattr(network, "now", lambda: time.time() - 7)
    found = network.compare_clocks(exchange, CheckOptions())
    if RANK == 0:
        assert [peer for peer, _, _ in found] == list(range(1, SIZE))
        _, ahead, error = found[-1]
        assert abs(ahead + 7) <= error + 1e-3
        finding = network.judge_clocks(job(clocks=found))
        assert finding.severity is Severity.FIX
        assert finding.text == f"rank {LAST} (n{LAST}) is {-ahead:.1f} s behind rank 0"


def test_clocks_that_agree(exchange):
    found = network.compare_clocks(exchange, CheckOptions())
    if RANK == 0:
        assert network.judge_clocks(job(clocks=found)).severity is Severity.OK


def test_layout(exchange):
    said = checks.compare_layout(exchange, CheckOptions())
    assert said is None
    assert checks.judge_layout(job(layout=said)).severity is Severity.OK


def test_layout_that_is_contradicted(exchange, monkeypatch):
    """Rank LAST has the variables of another launch."""
    if RANK == LAST:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(SIZE + 5))
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(SIZE + 5))
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(RANK))
    said = checks.compare_layout(exchange, CheckOptions())
    if RANK == 0:
        finding = checks.judge_layout(job(layout=said))
        assert finding.severity is Severity.FIX
        assert f"rank {LAST}: size is {SIZE + 5} according to OMPI_COMM_WORLD_SIZE" in finding.text


@pytest.mark.ranks(min=2)
def test_silence(comm):
    """A rank that sends nothing is named, and nobody hangs."""
    exchange = TimedExchange(comm, 0.3 if RANK == 0 else 30)
    if RANK == 0:
        for rank in range(1, LAST):  # or the time could be up before they send
            comm.recv(source=rank, tag=1)
        with pytest.raises(SilenceError, match=rf"no message from ranks \[{LAST}\] in 0.3 s"):
            exchange.gather({})
        comm.Barrier()
        assert exchange.receive(LAST, 2) == b"{}"
    elif RANK < LAST:
        assert exchange.gather({}) is None
        comm.send(None, 0, tag=1)
        comm.Barrier()
    else:
        comm.Barrier()
        exchange.gather({})


def test_gather(comm):
    everyone = TimedExchange(comm, 30).gather({"rank": RANK, "text": "x" * 100_000})
    if RANK == 0:
        assert [each["rank"] for each in everyone] == list(range(SIZE))
