"""The job that `mpistrat check` looks at: its facts, the findings about it, and messages between its ranks."""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpistrat.process import mpi
from mpistrat.representation import grouped

START = "the start of MPI"  # a stage of the checks
_TAG = 23


class Severity(enum.Enum):
    """The severity of a finding."""

    OK = "ok"
    LOOK = "look"
    FIX = "fix"
    UNKNOWN = "not checked"


class Finding(NamedTuple):
    """A result of a check: its text, how severe it is, and what to do about it."""

    text: str
    severity: Severity
    advice: str = ""


@dataclass(frozen=True)
class CheckOptions:
    """The options of `mpistrat check`. A rank without progress for ``limit`` seconds is reported."""

    data: str | None = None
    limit: float = 60.0


class Blame(enum.IntEnum):
    """The kinds of trouble of a rank: probable causes first, waiting for other ranks last."""

    UNHEARD = enum.auto()
    ENDED = enum.auto()
    ALONE = enum.auto()
    LIBRARY = enum.auto()
    SILENCE = enum.auto()
    FAILED = enum.auto()
    STUCK = enum.auto()  # no progress within the limit
    WAS_STUCK = enum.auto()  # in a stage when other ranks failed


class Trouble(NamedTuple):
    """The trouble that stopped the checks of a rank. It has plain values only: it is sent as JSON.

    ``blame`` is a `Blame`, and ``stage`` the stage of the checks at that time, or empty.
    """

    blame: int
    text: str
    stage: str = ""


@dataclass
class CheckedJob:
    """The facts of a job of ``size`` ranks. It has plain values only: they are sent as JSON.

    ``facts`` has for each rank its own: ``host``, ``node`` (its number), and the facts of each check by name.
    ``exchanged`` has by name of a check the facts from messages between ranks. It is empty if the ranks could not
    communicate. ``troubles`` has by rank what stopped its checks. ``alone`` says that each rank is a job of its own;
    None if the ranks are one job.
    """

    size: int
    facts: dict[int, dict[str, Any]]
    exchanged: dict[str, Any] = field(default_factory=dict)
    troubles: dict[int, Trouble] = field(default_factory=dict)
    alone: Finding | None = None
    options: CheckOptions = field(default_factory=CheckOptions)

    def of(self, check: str) -> dict[int, Any]:
        """Return the facts of a check by rank."""
        return {rank: facts[check] for rank, facts in sorted(self.facts.items()) if facts.get(check) is not None}

    def nodes(self) -> dict[str, list[int]]:
        """Return the ranks of each node by its name. Nodes of the same name get a number."""
        by_node = grouped((facts.get("node", facts["host"]), rank) for rank, facts in sorted(self.facts.items()))
        hosts = [self.facts[ranks[0]]["host"] for ranks in by_node.values()]
        return {
            host if hosts.count(host) == 1 else f"{host} (node {node})": ranks
            for host, (node, ranks) in zip(hosts, by_node.items(), strict=True)
        }


class Check(NamedTuple):
    """One check, with the name of its facts, and its title in the table.

    ``local`` returns the facts that a rank finds by itself, before MPI is started, and ``exchange`` facts from messages
    between ranks. The result of rank 0 counts.
    """

    name: str
    title: str
    judge: Callable[[CheckedJob], Finding]
    local: Callable[[CheckOptions], Any] | None = None
    exchange: Callable[[TimedExchange, CheckOptions], Any] | None = None


class SilenceError(RuntimeError):
    """A message was not received, or could not be sent, within the time limit."""


class TimedExchange:
    """Messages of checks between the ranks of a job, with a time limit of each message in seconds.

    ``leaders`` are the first ranks of the nodes.
    """

    def __init__(self, comm: Any, limit: float):
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.limit = limit
        self.topology: Any = None
        self.leaders: tuple[int, ...] = ()

    def send(self, data: Any, to: int) -> None:
        """Send bytes. Raise SilenceError if the receiver does not take them within the time limit."""
        self._wait(self.comm.Isend(data, to, _TAG), f"no message to rank {to} was received")

    def receive(self, source: int, count: int) -> bytearray:
        """Receive ``count`` bytes. Raise SilenceError if they do not arrive within the time limit."""
        data = bytearray(count)
        self.receive_into(data, source)
        return data

    def receive_into(self, data: Any, source: int) -> None:
        """Receive bytes into a buffer. Raise SilenceError as `receive` does."""
        self._wait(self.comm.Irecv(data, source, _TAG), f"no message from rank {source}")

    def gather(self, value: Any) -> list[Any] | None:
        """Return the JSON values of all ranks on rank 0, and None on other ranks.

        Raise SilenceError on rank 0, with the ranks whose value did not arrive within the time limit.
        """
        from mpi4py import MPI

        if self.rank:
            self.send(json.dumps(value).encode(), 0)
            return None
        values = {0: value}
        status = MPI.Status()
        end = time.monotonic() + self.limit
        while len(values) < self.size:
            if mpi.has_come(self.comm, MPI.ANY_SOURCE, _TAG, status):
                data = self.receive(status.source, status.Get_count(MPI.BYTE))
                values[status.source] = json.loads(data)
            elif time.monotonic() > end:
                missing = [rank for rank in range(self.size) if rank not in values]
                raise SilenceError(f"no message from ranks {missing} in {self.limit:g} s")
            else:
                time.sleep(0.0005)
        return [values[rank] for rank in range(self.size)]

    def broadcast(self, value: Any) -> Any:
        """Return the JSON value of rank 0 on every rank.

        Raise SilenceError if it is not sent, or does not arrive, within the time limit.
        """
        if self.rank:
            count = int.from_bytes(self.receive(0, 8), "little")
            return json.loads(self.receive(0, count))
        data = json.dumps(value).encode()
        for rank in range(1, self.size):
            self.send(len(data).to_bytes(8, "little"), rank)
            self.send(data, rank)
        return value

    def barrier(self) -> None:
        """Wait for all ranks. Sleep between tests: other ranks may need the core."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(0.001)

    def _wait(self, request: Any, problem: str) -> None:
        start = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - start
            if waited > self.limit:
                raise SilenceError(f"{problem} in {self.limit:g} s")
            # Latency is measured by this loop: it spins for 5 ms. Ranks that share a core need it after that.
            if waited > 0.005:
                time.sleep(0)


def rounds(nodes: Sequence[int], most: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which each node occurs once per round (round-robin tournament).

    With more than ``most`` rounds some pairs are left out.

    >>> rounds([0, 1, 2], 9)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    players: list[int | None] = [*nodes] + [None] * (len(nodes) % 2)
    result = []
    for _ in range(min(most, max(0, len(players) - 1))):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        result.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        players[1:] = [players[-1], *players[1:-1]]
    return result
