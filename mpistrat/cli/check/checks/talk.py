"""Messages between ranks with a time limit."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from mpistrat.process import mpi

_TAG = 23


class SilenceError(RuntimeError):
    """A message was not received, or could not be sent, within the time limit."""


class Talk:
    """Communication of checks between the ranks of a job, with a time limit of each message in seconds.

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

    def collect(self, value: Any) -> list[Any] | None:
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

    def tell(self, value: Any) -> Any:
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

    def meet(self) -> None:
        """Wait for all ranks. Sleep between tests: other ranks may need the core."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(0.001)

    def _wait(self, request: Any, what: str) -> None:
        start = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - start
            if waited > self.limit:
                raise SilenceError(f"{what} in {self.limit:g} s")
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
    found = []
    for _ in range(min(most, max(0, len(players) - 1))):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        players[1:] = [players[-1], *players[1:-1]]
    return found
