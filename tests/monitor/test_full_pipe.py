"""Reports to a standard error that takes no more."""

import subprocess
import sys

PROGRAM = """
import sys
from mpistrat.monitor import watchdog
watchdog._PATIENCE = 0.2
watchdog.say("x" * 1_000_000)
print("goes on", flush=True)
import os
os._exit(0)
"""


def test_a_reader_that_does_not_read_is_given_up():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "goes on\n"
        assert process.wait() == 0
        assert set(process.stderr.read()) == {"x"}


def test_a_reader_gets_all_of_a_long_report():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("0.2", "60")], capture_output=True, text=True, check=True
    )
    assert ended.stderr == "x" * 1_000_000
