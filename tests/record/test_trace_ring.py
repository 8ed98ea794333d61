"""The file in which a process writes its trace."""

import errno
import os
import stat
import threading

import numpy as np
import pytest

from mpistrat.cli import trace_files
from mpistrat.record import layout, ring
from mpistrat.record.layout import Kind
from mpistrat.record.ring import TraceRing

SMALL = layout.TRACE_EVENTS + 100 * layout.EVENT.size


def text_of(number):
    return f"text {number}"


@pytest.fixture
def written(tmp_path):
    return TraceRing(str(tmp_path), 3, 8, SMALL)


def collective(written, number, began, met=0.0, ended=None):
    written.add_communicator(77, 8, 3)
    whose = written.communicators[77]
    event = written.begin(0, whose, number, written.text(5, text_of), written.text(6, text_of), 24, began)
    if ended is not None:
        written.end(event, met, ended)
    return event


def test_an_event_is_small():
    assert layout.EVENT.size <= 64


def test_what_is_written_is_read(written):
    collective(written, 41, 10.0, 11.0, 12.0)
    written.end(written.begin(Kind.SAVE, 255, 0, 0, 0, 0, 13.0), 0.0, 14.0)
    trace = trace_files.read(written.path)
    assert (trace.rank, trace.size, trace.pid, trace.complete) == (3, 8, os.getpid(), False)
    assert trace.communicators == ((77, 8, 3),)
    first, second = trace.events
    assert (first["number"], first["nbytes"], first["met"], first["ended"]) == (41, 24, 11.0, 12.0)
    assert (trace.text(first["operation"]), trace.text(first["place"])) == ("text 5", "text 6")
    assert (second["kind"], second["began"], second["ended"]) == (Kind.SAVE, 13.0, 14.0)
    assert trace.last >= 14.0
    written.close()
    assert trace_files.read(written.path).complete


def test_other_users_cannot_read_it(written):
    assert stat.S_IMODE(os.stat(written.path).st_mode) == 0o600


def test_the_last_events_stay(written):
    for i in range(250):
        collective(written, i, 1.0 + i, 0.0, 1.5 + i)
    trace = trace_files.read(written.path)
    # The writer may be at the place of the oldest one.
    assert trace.events["number"].tolist() == list(range(151, 250))
    assert trace.forgotten == 150
    assert trace.began == trace.events["began"][0]


def test_the_end_of_a_forgotten_event_changes_no_other(written):
    long = collective(written, 1, 1.0)
    for i in range(100):
        collective(written, 2 + i, 2.0 + i, 0.0, 2.5 + i)
    written.end(long, 0.0, 500.0)
    trace = trace_files.read(written.path)
    assert trace.events["ended"].max() == 101.5


def test_threads_have_numbers(written):
    collective(written, 1, 1.0, 0.0, 1.5)
    other = threading.Thread(target=collective, args=(written, 2, 2.0, 0.0, 2.5))
    other.start()
    other.join()
    assert trace_files.read(written.path).events["thread"].tolist() == [0, 1]


def test_too_many_texts_and_communicators(written):
    numbers = [written.text(i, lambda i: f"{i}" * 90) for i in range(2000)]
    assert numbers[0] == 1
    assert numbers[-1] == 0  # there is no room, and the trace goes on
    for i in range(300):
        written.add_communicator(1000 + i, 2, 0)
    assert 1000 in written.communicators
    assert 1299 not in written.communicators
    assert len(trace_files.read(written.path).communicators) == layout.MOST_COMMUNICATORS


def test_samples_of_the_clock(written):
    for i in range(layout.MOST_SAMPLES + 3):
        written.sample(ring.Sample(float(i), 5.0, 1e-6, 9))
    samples = trace_files.read(written.path).samples
    assert len(samples) == layout.MOST_SAMPLES
    assert samples[0] == (0.0, 5.0, 1e-6, 9)
    assert samples[-1].at == layout.MOST_SAMPLES + 2


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        TraceRing(str(tmp_path), 0, 1, SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_does_not_write(written, monkeypatch):
    monkeypatch.setattr(ring, "ring", written)
    child = os.fork()
    if not child:
        os._exit(0 if ring.ring is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_functions_are_timed_only_in_a_trace(written, monkeypatch):
    double = ring.timed(Kind.REDUCE_PACK, lambda x: 2 * x)
    assert double(2) == 4
    monkeypatch.setattr(ring, "ring", written)
    assert double(3) == 6
    (event,) = trace_files.read(written.path).events
    assert event["kind"] == Kind.REDUCE_PACK
    assert event["ended"] >= event["began"] > 0


def test_ranks_of_one_machine_have_one_clock():
    assert ring.clock_number() == ring.clock_number() > 0


class World:
    """Rank 0 of two, the other of which has a clock that is behind by 1000 seconds."""

    rank = 0

    def __init__(self):
        self.answers = 0

    def Send(self, buffer, rank):
        pass

    def Recv(self, buffer, rank):
        import time

        self.answers += 1
        buffer[0] = time.monotonic() - 1000

    def Bcast(self, told):
        self.told = told.copy()


def test_what_a_clock_is_ahead():
    world = World()
    sample = ring.measure_clocks(world, (1, 2, 2))
    assert (sample.ahead, sample.error, sample.reference) == (0.0, 0.0, 1)
    assert world.answers > 1
    ahead, error = world.told[0]
    assert abs(ahead - 1000) <= error + 1e-9
    assert np.isfinite(error)
    assert ring.measure_clocks(World(), (1, 1)).ahead == 0.0
