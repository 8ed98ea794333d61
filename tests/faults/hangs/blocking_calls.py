"""Calls in which ranks wait until the report on them is written: none may end before that.

A signal for its stack would end 13 of them with EINTR, and the rank would go on. A line of ``CALLS`` is a call, and the
cause that the report must name. Rank 0 waits for the others, of which each makes another call. ``blocking_calls.py
PLACE...`` makes the calls at these places only.
"""

import ctypes
import fcntl
import multiprocessing
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import mpistrat

LONG = 100  # seconds, more than a report takes
FOLDER = Path(os.environ["MPISTRAT_RECORD_DIR"])
C = ctypes.CDLL(None, use_errno=True)


class WasReportedError(Exception):
    """Raised in the main thread, to leave what it waits for."""


def time_limit(seconds):
    return struct.pack("ll", seconds, 0)


def later():
    now = time.clock_gettime(time.CLOCK_REALTIME)
    return struct.pack("ll", int(now) + LONG, 0)


def child():
    children.append(subprocess.Popen(["sleep", str(LONG)]))
    return children[-1]


def rival():
    """Return a descriptor of a file of which another process has the lock."""
    children.append(
        subprocess.Popen([sys.executable, "-c", RIVAL, locked], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )
    children[-1].stdout.readline()
    return os.open(locked, os.O_RDWR)


children = []
RIVAL = """
import fcntl, sys

file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
input()
"""


strategy = mpistrat.MultiWorkerMirroredStrategy()
pipe, _pipe_end = os.pipe()
ours, theirs = socket.socketpair()
ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time_limit(LONG))
theirs.settimeout(LONG)
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(1)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time_limit(LONG))
epoll = select.epoll()
epoll.register(pipe, select.EPOLLIN)
poll = select.poll()
poll.register(pipe, select.POLLIN)
buffer = ctypes.create_string_buffer(100)
semaphore = ctypes.create_string_buffer(64)
C.sem_init(semaphore, 0, 0)
messages, semaphores = C.msgget(0, 0o1600), C.semget(0, 1, 0o600)
lock = threading.Lock()
lock.acquire()
holder, locked = tempfile.mkstemp()
fcntl.flock(holder, fcntl.LOCK_EX)
shared = multiprocessing.Semaphore(0)
connection, _connection_end = multiprocessing.Pipe()

CALLS = (
    ("sleep", lambda: C.sleep(LONG)),
    ("sleep", lambda: C.usleep(LONG * 1_000_000)),
    ("sleep", lambda: C.nanosleep(time_limit(LONG), None)),
    ("message", lambda: C.poll(struct.pack("ihh", pipe, 1, 0), 1, LONG * 1000)),
    ("message", lambda: C.select(0, None, None, None, time_limit(LONG))),
    ("message", lambda: C.epoll_wait(epoll.fileno(), buffer, 1, LONG * 1000)),
    ("message", lambda: C.recv(ours.fileno(), buffer, 1, 0)),
    ("message", lambda: C.accept(listener.fileno(), None, None)),
    ("lock", lambda: C.sem_timedwait(semaphore, later())),
    ("lock", lambda: C.semop(semaphores, struct.pack("HhH", 0, -1, 0), 1)),
    ("message", lambda: C.msgrcv(messages, buffer, 8, 0, 0)),
    ("pipe", lambda: C.read(pipe, buffer, 1)),
    ("signal", lambda: C.pause()),
    ("child", lambda: C.waitpid(child().pid, None, 0)),
    ("sleep", lambda: time.sleep(LONG)),
    ("message", lambda: select.select([], [], [], LONG)),
    ("message", lambda: poll.poll(LONG * 1000)),
    ("signal", lambda: signal.pause()),
    ("signal", lambda: signal.sigtimedwait([signal.SIGUSR2], LONG)),
    ("signal", lambda: signal.sigwait([signal.SIGUSR2])),
    ("child", lambda: subprocess.run(["sleep", str(LONG)])),
    ("child", lambda: subprocess.run(["sleep", str(LONG)], capture_output=True)),
    ("message", lambda: theirs.recv(1)),
    ("lock", lambda: threading.Event().wait(LONG)),
    ("lock", lambda: lock.acquire(timeout=LONG)),
    ("pipe", lambda: os.read(pipe, 1)),
    ("lock", lambda: shared.acquire(timeout=LONG)),
    ("message", lambda: connection.poll(LONG)),
    ("file lock", lambda: fcntl.flock(os.open(locked, os.O_RDONLY), fcntl.LOCK_EX)),
    ("file lock", lambda: fcntl.lockf(rival(), fcntl.LOCK_EX)),
)


def causes_of(line):
    """The causes of this rank in the reports that show it at a line of this program."""
    place = rf"{re.escape(Path(__file__).name)}:{line} in "
    told = rf"^  rank {strategy.comm.rank} \(.*\n  cause: ([^.]+)\."
    texts = [path.read_text() for path in FOLDER.glob("hang-*")]
    return [found[1] for text in texts if re.search(place, text) and (found := re.search(told, text, re.MULTILINE))]


def leave_when_reported(line, seen, left):
    """Interrupt the main thread once there is a report that shows it at a line, until it has left its call."""
    while not left.is_set():
        if not seen and (found := causes_of(line)):
            seen += found
        if seen:
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                signal.pthread_kill(threading.main_thread().ident, number)
        time.sleep(0.1)


def interrupted(number, frame):
    if waits:
        waits.clear()
        raise WasReportedError


def wait_in(cause, call):
    seen, left = [], threading.Event()
    line = call.__code__.co_firstlineno
    watcher = threading.Thread(target=leave_when_reported, args=(line, seen, left), daemon=True)
    waits.add(line)
    watcher.start()
    try:
        call()
    except WasReportedError:
        pass
    finally:
        waits.clear()
        left.set()
        watcher.join()
    while signal.SIGUSR2 in signal.sigpending():
        signal.sigwait([signal.SIGUSR2])
    assert seen, f"line {line}: the call ended before it was reported"
    return "" if seen[0] == cause else f"line {line}: called {seen[0]!r} for {cause!r}\n"


waits = set()
signal.signal(signal.SIGUSR1, interrupted)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
wrong = ""
try:
    places = [*map(int, sys.argv[1:] or range(len(CALLS)))]
    others = strategy.comm.size - 1
    for start in range(0, len(places), others):
        strategy.barrier()
        mine = start + strategy.comm.rank - 1
        if not strategy.is_chief and mine < len(places):
            wrong += wait_in(*CALLS[places[mine]])
finally:
    os.unlink(locked)
    C.msgctl(messages, 0, None)
    C.semctl(semaphores, 0, 0)
    for each in children:
        each.kill()
strategy.barrier()
assert not wrong, wrong
if strategy.is_chief:
    print(f"{len(places)} calls waited until they were reported")
