"""Tests of the places that communicators take in a flight record."""

import numpy as np
import pytest

import mpistrat
from mpistrat.record import flight_record, layout, read
from mpistrat.runtime.agreement.operation import Checksum, Operation, operation


@pytest.fixture
def record():
    made = flight_record.FlightRecord(0, 2)
    yield made
    made.close()


def test_communicators_of_one_rank_take_one_place(record):
    alone = [record.of(number, 1, 0) for number in range(1, 2 * layout.MOST_COMMUNICATORS)]
    assert all(each is alone[0] for each in alone)
    several = [record.of(number, 2, 0) for number in range(100, 100 + layout.MOST_COMMUNICATORS - 1)]
    assert None not in several
    assert record.of(99, 2, 0) is None
    several[7].end()  # a communicator that is freed gives its place back
    assert record.of(99, 2, 0) is not None


def test_strategies_on_one_device_leave_room_for_others():
    """Each took a place for ever, and so did each exact reduction of a mirrored value."""
    for _ in range(2 * layout.MOST_COMMUNICATORS):
        strategy = mpistrat.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0])
    for _ in range(layout.MOST_COMMUNICATORS):
        assert strategy.reduce("MEAN", v, axis=0) == 1.5
    current = flight_record.current()
    added = [current.of(number, 2, 0) for number in range(1, 4)]
    assert None not in added
    for each in added:
        each.end()
    assert read.parse(current.contents()).entries


def test_texts_have_no_internals():
    """Of a call the record has what its reader knows. An error has more, by which calls of ranks differ."""
    what = operation("broadcast", 0, "of the variable", "w", False, (np.dtype("float64"), (3,)), Checksum("7"))
    assert what.label == "broadcast of the variable w float64[3]"
    assert str(what).startswith("broadcast 0 of the variable w False float64[3] (checksum ")


def test_calls_that_end_at_once_share_an_entry(record):
    """The heartbeat writes how far they have come, if the last entry is of their communicator and has ended."""
    flight, other = record.of(1, 2, 0), record.of(2, 2, 0)
    halo, reduce = Operation("halo"), Operation("reduce")

    def noted():
        record.beat(1.0)
        found = read.parse(record.contents())
        return [(each.operation, each.number) for each in found.entries], found.entries[-1]

    flight.enter(halo, 1)
    flight.passed = 5
    assert noted()[0] == [("halo", 1)]  # which this rank is in
    flight.leave()
    flight.keep()
    before = noted()[1]
    assert before.number == 5
    flight.passed = 7
    entries, last = noted()
    assert entries == [("halo", 7)]
    assert before.left < last.entered == last.left
    assert noted()[1] == last  # nothing new: the time stays
    other.enter(reduce, 1)
    other.leave()
    flight.passed = 8
    assert noted()[0] == [("halo", 7), ("reduce", 1)]
    for number in range(9, 9 + layout.MOST_EVENTS):
        flight.enter(halo, number)
        flight.leave()
    flight.passed = number + 1
    entries, last = noted()
    assert [each[1] for each in entries] == [*range(9, number), number + 1]
