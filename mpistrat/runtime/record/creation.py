"""The creation of a communicator, as flight records have it: the ranks share no random number yet."""

from __future__ import annotations

import collections
import hashlib
import os
from typing import Any

from mpistrat.runtime.process.launch_key import key_of
from mpistrat.runtime.record.flight_record import FlightRecord
from mpistrat.runtime.record.writers import Flight

_made: collections.Counter[int] = collections.Counter()  # by token


class _Named:
    """What the entry names."""

    record = 0
    site: tuple[Any, ...] = ()
    nbytes = 0

    def __str__(self) -> str:
        return "the creation of a strategy"


_CREATION = _Named()


class Creation:
    """A context in which the ranks of ``comm`` make their first collectives. ``world`` is ``MPI.COMM_WORLD``."""

    def __init__(self, record: FlightRecord | None, comm: Any, world: Any):
        self._flight: Flight | None = None
        if record is not None and comm.size > 1:
            token = _token(comm, world)
            _made[token] += 1
            self._number = _made[token]
            self._flight = record.join(token, comm.size, comm.rank)

    def __enter__(self) -> None:
        if self._flight is not None:
            self._flight.enter(_CREATION, self._number)

    def __exit__(self, *exc_info: object) -> None:
        if self._flight is not None:
            self._flight.leave()
            self._flight.end()


def _token(comm: Any, world: Any) -> int:
    """Return a number that the ranks of a communicator can find without a message: from their launch and ranks."""
    launch = key_of(os.environ, one_node=True) or ""
    ranks = comm.group.Translate_ranks(None, world.group)
    digest = hashlib.sha256(f"{launch} {list(ranks)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2 | 1
