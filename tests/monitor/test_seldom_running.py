"""A rank in a loop that sleeps between two looks runs when it is looked at, now and then."""

import itertools

import pytest
from monitor.records import new_record

from mpistrat.monitor import process, view
from mpistrat.monitor.process import ProcessFacts
from mpistrat.record import read

RUNS, SLEEPS = ProcessFacts("R"), ProcessFacts("S", "clock_nanosleep")


@pytest.fixture
def record():
    with new_record(2) as made:
        yield made


@pytest.mark.parametrize(
    ("samples", "moves", "expected"),
    [
        ([RUNS, SLEEPS, SLEEPS, SLEEPS], False, SLEEPS),
        ([RUNS, RUNS, RUNS, SLEEPS], False, RUNS),  # it computes, and waits for its threads now and then
        ([RUNS, SLEEPS, SLEEPS, SLEEPS], True, RUNS),  # a loop in Python
    ],
)
def test_what_it_does_most_of_the_time(record, monkeypatch, samples, moves, expected):
    record.moves(moves)
    sequence = itertools.cycle(samples)
    monkeypatch.setattr(process, "look", lambda *of: next(sequence))
    seen = view.look([read.read(record.path)])
    assert list(seen.facts.values()) == [expected]
