"""What ranks make together before they have a communicator with a random number, as flight records have it."""

from __future__ import annotations

import collections
import hashlib
import os
from collections.abc import Sequence
from types import SimpleNamespace

from mpistrat.launch.launch_key import key_of
from mpistrat.record.flight_record import FlightRecord
from mpistrat.record.writers import Flight

_made: collections.Counter[int] = collections.Counter()  # by token


class Creation:
    """A context in which ranks make something together. Its value is the record.

    ``ranks`` are those of the job that take part, in the same order on all of them. ``place`` is that of this rank
    among them. ``what`` they make is a text, the same on all of them.
    """

    def __init__(self, record: FlightRecord | None, ranks: Sequence[int], place: int, what: str):
        self._record = record
        self._flight: Flight | None = None
        if record is not None and len(ranks) > 1:
            token = _token(ranks, what)
            _made[token] += 1
            self._number = _made[token]
            self._what = SimpleNamespace(label=what, record=0, site=(), nbytes=0)  # what its entry names
            self._flight = record.join(token, len(ranks), place)

    def __enter__(self) -> FlightRecord | None:
        if self._flight is not None:
            self._flight.enter(self._what, self._number)
        return self._record

    def __exit__(self, *exc_info: object) -> None:
        if self._flight is not None:
            self._flight.leave()
            self._flight.end()


def _token(ranks: Sequence[int], what: str) -> int:
    """Return a number that the ranks can find without a message: from their launch and what they make."""
    launch = key_of(os.environ, one_node=True) or ""
    digest = hashlib.sha256(f"{launch} {what} {list(ranks)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2 | 1
