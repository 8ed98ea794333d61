"""Reading of trace files whose header is damaged."""

import resource
import struct

import pytest

from mpistrat.cli import trace_files
from mpistrat.record import layout
from mpistrat.record.layout import Kind, Word
from mpistrat.record.ring import TraceRing


@pytest.fixture
def trace(tmp_path):
    """A function that writes a number of events, and numbers of the header, to a trace, and returns its path."""

    def written(events, **numbers):
        ring = TraceRing(str(tmp_path), 0, 1, layout.TRACE_EVENTS + 100 * layout.EVENT.size)
        for number in range(events):
            ring.end(ring.begin(Kind.STEP, 0, number, 0, 0, 0, 1.0 + number), 0.0, 1.5 + number)
        ring.close()
        with open(ring.path, "r+b") as file:
            for name, number in numbers.items():
                file.seek(8 * Word[name])
                file.write(struct.pack("=q", number))
        return tmp_path / ring.path

    return written


@pytest.mark.parametrize("events", [0, 1, 99, 100, 101, 250])
def test_the_last_events_in_their_order(trace, events):
    found = trace_files.read(trace(events))
    oldest = events - 99 if events > 100 else 0
    assert found.events["number"].tolist() == list(range(oldest, events))
    assert found.problem == ""


def test_a_capacity_far_beyond_the_file_costs_no_memory(trace):
    path = trace(50, CAPACITY=1 << 28, EVENTS=1 << 28)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = trace_files.read(path)
    assert found.events["number"].tolist() == list(range(50))
    assert f"{(1 << 28) - 50} of its events are missing" in found.problem
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # of kilobytes
