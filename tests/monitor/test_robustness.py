"""A monitor that never harms the program it looks at."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from mpistrat.monitor import last, stacks
from mpistrat.record import flight_record, layout, read
from mpistrat.runtime.agreement.operation import operation

needs_memory = pytest.mark.skipif(not Path(layout.FOLDER).is_dir(), reason="this machine has no /dev/shm")


@pytest.fixture
def record():
    made = flight_record.FlightRecord(0, 1)
    yield made
    if made.path is not None:
        os.unlink(made.path)


@needs_memory
def test_a_handler_that_the_program_installs_later_is_not_sent_the_signal(record):
    number = signal.SIGRTMIN + 9
    record.register_stack_signal(number)
    record.beat(1.0)
    assert read.read(record.path).signal == number
    before = signal.signal(number, lambda *_: None)
    try:
        record.beat(1.0)
        assert read.read(record.path).signal == 0
    finally:
        signal.signal(number, before)


@needs_memory
def test_a_record_that_disappears_while_it_is_looked_at_is_left_out():
    program = (
        "import signal, sys; from mpistrat.record import flight_record as f; r = f.start(0, 1, 41)\n"
        "print(r.path, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        path = process.stdout.readline().strip()
        gone = read.read(path)
        os.unlink(path)
        assert stacks.ask([gone]) == {}
        process.stdin.close()
        assert process.wait() == 0


def test_a_phase_of_another_thread_does_not_change_that_of_the_process():
    """A thread that writes a checkpoint, while the main thread reads its input."""
    record = flight_record.start(0, 1, 0)
    inside, leave = threading.Event(), threading.Event()

    def save():
        with flight_record.phase(layout.Phase.SAVING):
            inside.set()
            leave.wait()

    def phase():
        return read.parse(record.contents()).phase

    before = phase()
    thread = threading.Thread(target=save)
    thread.start()
    inside.wait()
    with flight_record.phase(layout.Phase.INPUT):
        leave.set()
        thread.join()
        assert phase() == layout.Phase.INPUT
    assert phase() == before


def test_code_that_was_forgotten_is_freed(record):
    """Each call comes from a line of its own, as in a notebook or ``exec``."""
    flight = record.join(5, 1, 0)
    barrier = operation("barrier")
    codes = []
    for number in range(layout.RECORD_TEXTS + 10):
        scope = {}
        exec(f"def call(flight, barrier):\n    flight.enter(barrier, {number})\n    flight.leave()", scope)
        call = scope.pop("call")
        call(flight, barrier)
        codes.append(weakref.ref(call.__code__))
        del call
    gc.collect()
    assert sum(code() is not None for code in codes) <= layout.RECORD_TEXTS


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MPISTRAT_RECORD_DIR", str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError, match="MPISTRAT_RECORD_DIR"):
        last.write_new("hang.txt", "text")


KILLED = """
import os
from mpistrat.record import flight_record
record = flight_record.FlightRecord(0, 1)
record.phase(0)
print(record.path, flush=True)
os.kill(os.getpid(), 9)
"""


@needs_memory
def test_old_records_of_processes_that_ended_are_removed(tmp_path):
    """The age counts from the last sign of life: the time of the file is that of the start."""
    ended = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    path = ended.stdout.strip()
    copy = tmp_path / os.path.basename(path)
    copy.write_bytes(Path(path).read_bytes())
    os.unlink(path)
    os.utime(copy, (0, 0))
    assert abs(read.read(copy).last_sign - time.time()) < 600
    read.remove_old(3600, str(tmp_path))
    assert copy.exists()
    read.remove_old(-3600, str(tmp_path))
    assert not copy.exists()


def test_a_damaged_record_is_left_out(record):
    data = bytearray(record.contents())
    memoryview(data).cast("q")[layout.Word.PHASE] = 77
    assert read.parse(bytes(data)) is None
