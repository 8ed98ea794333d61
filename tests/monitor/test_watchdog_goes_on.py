"""What must not stop the watchdog: a full pipe, an unreadable option, a file system that does not answer."""

import os
import subprocess
import sys

import pytest

from mpistrat.monitor import stacks
from mpistrat.monitor.stacks import source_line, source_lines

PROGRAM = """
import sys
from mpistrat.monitor import watchdog
watchdog._WRITE_TIMEOUT_S = 1.0
watchdog.say("x" * 1_000_000)
print("goes on", flush=True)
import os
os._exit(0)
"""


@pytest.mark.full
def test_a_reader_that_does_not_read_is_given_up():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "goes on\n"
        assert process.wait() == 0
        assert set(process.stderr.read()) == {"x"}


def test_a_reader_gets_all_of_a_long_report():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("1.0", "60")], capture_output=True, text=True, check=True
    )
    assert ended.stderr == "x" * 1_000_000


OPTION = """
import os, time
from mpistrat.monitor import watchdog
from mpistrat.record import flight_record, read
os.environ["MPISTRAT_HANG_SECONDS"] = "soon"
record = flight_record.FlightRecord(0, 2)
started = watchdog.Watchdog(record)
started.start()
while started.is_alive() and not read.parse(record.contents()).beat_every:
    time.sleep(0.01)
print(started.is_alive(), flush=True)
record.close()
"""


def test_an_option_that_cannot_be_read():
    """The program may change its environment after the options were checked."""
    ended = subprocess.run([sys.executable, "-c", OPTION], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_a_file_system_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    """A pipe without a writer stands for it: to open one waits."""
    monkeypatch.setattr(stacks, "_SOURCE_TIMEOUT_S", 0.05)
    pipe = tmp_path / "train.py"
    os.mkfifo(pipe)
    try:
        assert source_line(str(pipe), 1) == ""
        monkeypatch.setattr(stacks, "_SOURCE_TIMEOUT_S", 60.0)
        (tmp_path / "other.py").write_text("answers = True\n")
        assert source_lines(str(tmp_path / "other.py")) == []  # it is not asked again
        assert source_line(__file__, 1).startswith('"""What must not')
        assert source_line(__file__, 9999) == ""
    finally:
        os.close(os.open(pipe, os.O_WRONLY))  # the thread that waits ends
