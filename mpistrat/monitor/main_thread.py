"""What the main thread of this process does, as another thread of it sees."""

from __future__ import annotations

import dis
import os
import sys
import threading
import time

from mpistrat.runtime.record import process_facts

_BETWEEN = 0.002  # seconds between two samples
_FEWEST = 5  # samples
_RAN = 0.002  # seconds on a core in which Python code comes to another place
_IDLE, _BUSY = 0.1, 0.5  # seconds for a thread that sleeps, and for one that waits for a core
_KEPT = 0.25  # seconds on a core without releasing the lock of the interpreter. Python code releases it after 0.005


def moves() -> bool:
    """Return whether the main thread runs Python code, not one function in C.

    A thread that stays at one place is in C only if it had a core meanwhile, or sleeps. On a busy machine it may wait
    for a core for longer than all samples take.
    """
    main = threading.main_thread().ident or 0
    seen = set()
    began, ran = time.monotonic(), _seconds_on_core(main)
    while True:
        frame = sys._current_frames().get(main)
        if frame is None:
            return False
        seen.add((id(frame), frame.f_lasti))
        instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if len(seen) > 1 or instruction.startswith(("JUMP", "POP_JUMP", "RESUME")):
            return True
        waited = time.monotonic() - began
        waits_for_core = process_facts.state(os.getpid()) == "R"
        if waited > (_FEWEST - 1) * _BETWEEN and _seconds_on_core(main) - ran > _RAN:
            return False
        if waited > (_BUSY if waits_for_core else _IDLE):
            return False
        time.sleep(_BETWEEN)


def kept_lock(nap: float) -> bool:
    """Sleep for so many seconds. Return whether the main thread has then let this thread wait for the lock.

    Seconds on a core count, not those of the clock: on a busy machine a thread may wait long for a core.
    """
    main = threading.main_thread().ident or 0
    ran = _seconds_on_core(main)
    time.sleep(nap)
    return sys.platform == "linux" and _seconds_on_core(main) - ran > nap + _KEPT


def _seconds_on_core(thread: int) -> float:
    """Return how long a thread had a core, and the time where the system does not tell that."""
    if sys.platform != "linux":
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
