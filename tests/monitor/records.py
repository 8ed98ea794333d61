"""Records for tests: of ranks that wait, made by hand, and of this process."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from mpistrat.record.flight_record import FlightRecord
from mpistrat.record.read import Entry, Membership, Record


def record_of(rank: int, entry: Entry) -> Record:
    """Return the record of one of two ranks, which is in an entry of the communicator 7 or left it last."""
    return Record(pid=1000 + rank, rank=rank, size=2, memberships=(Membership(7, 2, rank, entry),), entries=(entry,))


@contextlib.contextmanager
def new_record(size: int) -> Iterator[FlightRecord]:
    """Return a context with a record of this process, as rank 0 of ``size``, which other processes can read."""
    made = FlightRecord(0, size)
    if made.path is None:
        pytest.skip("this machine has no /dev/shm")
    try:
        yield made
    finally:
        if os.path.exists(made.path):
            os.unlink(made.path)
