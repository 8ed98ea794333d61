"""Messages between ranks that a check can wait for without hanging."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

_TAG = 23


class SilenceError(RuntimeError):
    """No message came from a rank, or none could be sent to it, within the time limit."""


class Talk:
    """The ranks of a job, for checks.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
    topology : Topology
    rank, size : int
    leaders : tuple of int
        The first rank of each node.
    limit : float
        Seconds that a message may take.
    """

    def __init__(self, comm: Any, limit: float):
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.limit = limit
        self.topology: Any = None
        self.leaders: tuple[int, ...] = ()

    def send(self, data: Any, to: int) -> None:
        """Send bytes.

        Raises
        ------
        SilenceError
            If they are not taken within the time limit.
        """
        self._wait(self.comm.Isend(data, to, _TAG), f"rank {to} takes no message")

    def receive(self, source: int, count: int) -> bytearray:
        """Receive that many bytes.

        Raises
        ------
        SilenceError
            If they do not come within the time limit.
        """
        data = bytearray(count)
        self.receive_into(data, source)
        return data

    def receive_into(self, data: Any, source: int) -> None:
        """Receive as many bytes as there is room for; SilenceError as in `receive`."""
        self._wait(self.comm.Irecv(data, source, _TAG), f"no message from rank {source}")

    def collect(self, value: Any) -> list[Any] | None:
        """Every rank's value (of JSON) on rank 0, None elsewhere.

        Raises
        ------
        SilenceError
            On rank 0, naming the ranks whose value did not come within the time limit.
        """
        from mpi4py import MPI

        if self.rank:
            self.send(json.dumps(value).encode(), 0)
            return None
        values = {0: value}
        status = MPI.Status()
        end = time.monotonic() + self.limit
        while len(values) < self.size:
            if self.comm.Iprobe(MPI.ANY_SOURCE, _TAG, status):
                data = self.receive(status.source, status.Get_count(MPI.BYTE))
                values[status.source] = json.loads(data)
            elif time.monotonic() > end:
                missing = [rank for rank in range(self.size) if rank not in values]
                raise SilenceError(f"no message from ranks {missing} in {self.limit:g} s")
            else:
                time.sleep(0.0005)
        return [values[rank] for rank in range(self.size)]

    def tell(self, value: Any) -> Any:
        """Rank 0's value (of JSON), on every rank.

        Raises
        ------
        SilenceError
            If it is not taken, or does not come, within the time limit.
        """
        if self.rank:
            count = int.from_bytes(self.receive(0, 8), "little")
            return json.loads(self.receive(0, count))
        data = json.dumps(value).encode()
        for rank in range(1, self.size):
            self.send(len(data).to_bytes(8, "little"), rank)
            self.send(data, rank)
        return value

    def meet(self, comm: Any = None) -> None:
        """Wait for all ranks without keeping a core busy, which others may need."""
        request = (self.comm if comm is None else comm).Ibarrier()
        while not request.Test():
            time.sleep(0.001)

    def _wait(self, request: Any, what: str) -> None:
        start = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - start
            if waited > self.limit:
                raise SilenceError(f"{what} in {self.limit:g} s")
            if waited > 0.005:
                time.sleep(0)


def rounds(nodes: Sequence[int], most: int) -> list[list[tuple[int, int]]]:
    """Who measures with whom, so that each is in one pair at a time: the rounds of a tournament.

    Parameters
    ----------
    nodes : sequence of int
    most : int
        How many rounds at most: with more nodes not every pair meets.

    Examples
    --------
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
