"""The copy of what a launcher prints: complete for a slow reader, and read to its end if it cannot be written."""

import os
import threading

import pytest

from mpistrat.cli.run.banners import Forwarded

TEXT = b"x" * 99 + b"\n"
LINES = 5000  # more than two pipes and a block hold
SILENCE = 3  # seconds after which a stream counts as kept open: longer than its writer rests


@pytest.fixture
def launcher():
    """What stands for the output of a launcher: its reading end, and the thread that prints `LINES` lines."""
    out, end = os.pipe()
    printing = threading.Thread(target=print_lines, args=(end,), daemon=True)
    with open(out, "rb", buffering=0) as pipe:
        yield pipe, printing


def print_lines(end):
    with open(end, "wb", buffering=0) as launcher:
        for _ in range(LINES):
            launcher.write(TEXT)


def test_a_slow_reader_gets_all(launcher):
    pipe, printing = launcher
    out, target = os.pipe()
    errors = []
    forwarded = Forwarded(pipe, target, (), lambda: errors.append("write"))
    joining = threading.Thread(target=lambda: (forwarded.join(SILENCE), os.close(target)), daemon=True)
    printing.start()
    joining.start()
    joining.join(1.5 * SILENCE)  # nothing is read meanwhile
    with open(out, "rb") as reader:
        assert len(reader.read()) == LINES * len(TEXT)
    joining.join()
    assert forwarded.line_ended
    assert not errors


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is a device of Linux")
def test_a_full_disk_does_not_stop_the_launcher(launcher):
    pipe, printing = launcher
    errors = []
    with open("/dev/full", "wb", buffering=0) as full:
        forwarded = Forwarded(pipe, full.fileno(), (), lambda: errors.append("write"))
        printing.start()
        printing.join(60)
        assert not printing.is_alive()
        forwarded.join(60)
    assert errors


def test_a_stream_that_another_process_keeps_open_is_not_waited_for():
    out, end = os.pipe()
    with open(out, "rb", buffering=0) as pipe, open(os.devnull, "wb", buffering=0) as target:
        forwarded = Forwarded(pipe, target.fileno(), (), lambda: None)
        os.write(end, TEXT)
        forwarded.join(0.05)
        os.close(end)
        forwarded.join(60)
    assert forwarded.line_ended
