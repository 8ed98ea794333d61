"""Ranks that others wait for: ``hangs.py CAUSE...``. One rank does each cause in turn, until it was reported.

The causes that do not end by themselves come last: ``order``, ``killed``, ``exits``, ``link``, ``node``. The last two
are made from outside: the ranks reduce for ever.
"""

import glob
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
comm = strategy.comm
other = mpistrat.MultiWorkerMirroredStrategy(comm=comm.Dup())
FOLDER = os.environ["MPISTRAT_RECORD_DIR"]
CULPRIT = int(os.environ.get("CULPRIT", "2")) % comm.size
PATIENCE = 60  # seconds for the report on one fault


def reports():
    return len(glob.glob(f"{FOLDER}/hang-*"))


def was_reported():
    return reports() > before or time.monotonic() > limit


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
    subprocess.Popen(
        f"for i in $(seq 600); do test $(ls {FOLDER} | grep -c hang-) -gt {before} && break; sleep 0.1; done; "
        f"kill -CONT {os.getpid()}",
        shell=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
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


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def exits():
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

for name in sys.argv[1:]:
    strategy.barrier()
    before, limit = reports(), time.monotonic() + PATIENCE
    strategy.barrier()
    cause = globals()[name]
    if name in ("order", "skipped", "link", "node") or comm.rank == CULPRIT:
        cause()
    strategy.reduce("SUM", np.ones(5, np.float32), axis=None)
if comm.rank == 0:
    print("all done")
