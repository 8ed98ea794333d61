"""Ranks that others wait for: ``hangs.py CAUSE...``. One rank does each cause in turn, until it was reported.

The causes that do not end by themselves come last: ``order``, ``killed``, ``exits``, ``link``, ``node``. The last two
are made from outside: the ranks reduce for ever.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import hang_reports
import numpy as np

import mpistrat
from mpistrat.record import read
from mpistrat.runtime.agreement.operation import ranks_in_words

strategy = mpistrat.MultiWorkerMirroredStrategy()
comm = strategy.comm
other = mpistrat.MultiWorkerMirroredStrategy(comm=comm.Dup())
FOLDER = os.environ["MPISTRAT_RECORD_DIR"]
CULPRIT = int(os.environ.get("CULPRIT", "2")) % comm.size
OTHERS = ranks_in_words([rank for rank in range(comm.size) if rank != CULPRIT])
# The reports on a fault. There may be others: on a busy machine a rank may be late for a barrier.
REPORTS = (FOLDER, f"{OTHERS} of {comm.size} have waited for rank {CULPRIT}", "all_reduce ")


def was_reported():
    return len(hang_reports.first_reports(*REPORTS)) > before or time.monotonic() > limit


def python():
    while not was_reported():
        for _ in range(1000000):
            pass


def c_code():
    while not was_reported():
        sum(range(250_000_000))  # seconds without releasing the lock of the interpreter


def sleep():
    while not was_reported():
        time.sleep(3)


def stopped():
    arguments = [*REPORTS, str(before + 1), str(os.getpid())]
    subprocess.Popen(
        [sys.executable, hang_reports.__file__, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.kill(os.getpid(), signal.SIGSTOP)


def lock():
    held = threading.Lock()
    taken = threading.Event()

    def hold():
        with held:
            taken.set()
            while not was_reported():
                time.sleep(0.1)

    threading.Thread(target=hold, daemon=True).start()
    taken.wait()
    with held:
        pass


def pipe():
    reader, writer = os.pipe()

    def end():
        while not was_reported():
            time.sleep(0.1)
        os.write(writer, b"x")

    threading.Thread(target=end, daemon=True).start()
    os.read(reader, 1)


def others_wait():
    """Whether the other ranks of this node are in a collective."""
    records = read.records()
    own = next(each for each in records if each.pid == os.getpid())
    return all(each.waits for each in records if each.launch == own.launch and each != own)


def killed():
    wait_until(others_wait)
    os.kill(os.getpid(), signal.SIGKILL)


def exits():
    wait_until(others_wait)
    os._exit(0)


def order():
    first, second = (other, strategy) if comm.rank == CULPRIT else (strategy, other)
    first.barrier()
    second.barrier()


def skipped():
    try:
        if comm.rank == CULPRIT:
            raise OSError("a file that only this rank reads")
        strategy.reduce("SUM", np.ones(3), axis=None)
    except OSError:
        while not was_reported():
            time.sleep(0.2)
        strategy.reduce("SUM", np.ones(3), axis=None)


def link():
    """The ranks reduce until their link is cut, or their node is gone."""
    for step in range(1 << 30):
        strategy.reduce("SUM", np.ones(100_000, np.float32), axis=None)
        if step == 3 and comm.rank == 0:
            print("in step", flush=True)


node = link


def wait_until(condition):
    while not condition():
        time.sleep(0.05)


def reports():
    """Whether the watchdog of this process makes a report."""
    watchdog = next(each.ident for each in threading.enumerate() if each.name == "mpistrat-watchdog")
    stack = traceback.extract_stack(sys._current_frames()[watchdog])
    return any(frame.name == "_report" for frame in stack)


for name in sys.argv[1:]:
    strategy.barrier()
    before, limit = len(hang_reports.first_reports(*REPORTS)), time.monotonic() + hang_reports.PATIENCE
    begun = Path(FOLDER, f"begun-{name}")
    strategy.barrier()
    # The others begin to wait when the cause is there: else a rank that is slow might be reported as that.
    if comm.rank == CULPRIT:
        begun.touch()
    else:
        wait_until(begun.exists)
    cause = globals()[name]
    if name in ("order", "skipped", "link", "node") or comm.rank == CULPRIT:
        cause()
    strategy.reduce("SUM", np.ones(5, np.float32), axis=None)
wait_until(lambda: not reports())  # each report is printed
if comm.rank == 0:
    print("all done")
