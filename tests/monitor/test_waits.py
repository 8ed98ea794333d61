"""Which ranks wait for which, from records."""

import dataclasses

import pytest

from mpistrat.monitor import waits
from mpistrat.record.read import Entry, Membership, Record


def record(rank, *memberships):
    """A record of a process: (token, size, number of its collective, whether it is inside)."""
    return Record(
        pid=1000 + rank,
        rank=rank,
        size=4,
        memberships=tuple(
            Membership(
                token, size, rank, Entry(token, number, "barrier", "a.py:1 in f", 0, 5.0, 0.0, 0.0 if inside else 6.0)
            )
            for token, size, number, inside in memberships
        ),
    )


def ranks(records):
    return [each.rank for each in records]


def test_ranks_that_are_behind_are_missing():
    records = [record(0, (7, 4, 3, True)), record(1, (7, 4, 2, False)), record(2, (7, 4, 3, True))]
    (wait,) = waits.waits(records, ())
    assert (ranks(wait.waiting), ranks(wait.missing), wait.unseen) == ([0, 2], [1], (3,))
    assert wait.entry.number == 3


@pytest.mark.parametrize("halted", [(), (" 1001",)])
def test_a_rank_that_is_gone_inside_a_collective_is_missing(halted):
    records = [record(0, (7, 2, 3, True)), record(1, (7, 2, 3, True))]
    (wait,) = waits.waits(records, halted)
    assert ranks(wait.missing) == ([1] if halted else [])


def test_nothing_waits_between_collectives_or_alone():
    assert waits.waits([record(0, (7, 2, 3, False)), record(1, (7, 2, 3, False))], ()) == []
    assert waits.waits([record(0, (7, 1, 3, True))], ()) == []


def test_a_circle_of_two_communicators():
    first, second = record(0, (7, 2, 3, True), (8, 2, 1, False)), record(1, (7, 2, 2, False), (8, 2, 2, True))
    found = waits.waits([first, second], ())
    assert [ranks(each.missing) for each in found] == [[1], [0]]
    assert waits.ends_in_itself(first, found)
    assert waits.ends_in_itself(second, found)


def test_a_chain_is_no_circle():
    last = record(2, (7, 3, 1, False), (8, 2, 1, False))
    middle = dataclasses.replace(record(1, (7, 3, 1, False), (8, 2, 2, True)))
    found = waits.waits([record(0, (7, 3, 2, True)), middle, last], ())
    assert not waits.ends_in_itself(middle, found)


def test_jobs_are_told_apart_by_their_communicators():
    records = [record(0, (7, 2, 1, False)), record(1, (7, 2, 1, False), (8, 2, 1, False)), record(2, (8, 2, 1, False))]
    other = record(3, (9, 1, 1, False))
    assert waits.of_one_job(records[0], [*records, other]) == records
    assert waits.of_one_job(other, [*records, other]) == [other]
