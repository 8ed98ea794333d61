"""The end of a launcher whose `mpistrat run` was killed."""

import signal
import subprocess
import sys
import time

import pytest

from mpistrat.cli.run.running_job import Guard

LIMIT = 250
# A launcher that counts its signals, below a process with many threads: each of them is a parent that ends.
LAUNCHER = """
import signal, sys, time
count = 0
def receive(number, frame):
    global count
    count += 1
signal.signal(signal.SIGTERM, receive)
print("ready", flush=True)
while not count:
    time.sleep(0.01)
time.sleep(0.3)
print("signals", count, flush=True)
"""
PARENT = f"""
import signal, subprocess, sys, threading, time
from mpistrat.cli.run.running_job import Guard
guard = Guard(signal.SIGTERM)
child = subprocess.Popen([sys.executable, "-c", {LAUNCHER!r}], preexec_fn=guard.watch_this_process)
for _ in range(20):
    threading.Thread(target=time.sleep, args=[{LIMIT}], daemon=True).start()
time.sleep({LIMIT})
"""


@pytest.mark.fault
def test_one_signal_from_a_killed_process_of_many_threads():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        time.sleep(0.1)
        parent.kill()
        assert parent.stdout.readline() == "signals 1\n"


def test_no_signal_to_a_process_that_outlives_its_guard():
    guard = Guard(signal.SIGKILL)
    sleep = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(sleep, stdin=subprocess.PIPE, preexec_fn=guard.watch_this_process) as child:
        guard.end()
        child.stdin.close()
        assert child.wait(LIMIT) == 0
