"""What the main thread of this process does, as another thread sees it."""

from __future__ import annotations

import dis
import itertools
import os
import sys
import threading
import time

from mpistrat.launch import proc
from mpistrat.process.own_files import is_of_library

_BETWEEN = 0.002  # seconds between two samples
_FEWEST = 5  # samples before a thread is said to stay
_MIN_CPU_S = 0.01  # on a core in the same line: longer than Python code stays there. Reported up to 0.004 late
_IDLE, _BUSY = 0.1, 0.5  # seconds for a thread that sleeps, and for one that waits for a core
_KEPT = 0.25  # seconds on a core while another thread waits for the lock. Python code releases it after 0.005


def moves() -> bool | None:
    """Return whether the main thread runs Python code, not one function in C. None if it had no core meanwhile.

    A thread that stays at one place is in C only if it had a core meanwhile, or sleeps. On a busy machine it may wait
    for a core, or for the lock of the interpreter, for longer than all samples take, and so may the thread that asks.
    So only the time on a core between the first and the last sample counts.
    """
    thread = threading.main_thread()
    main = thread.ident or 0
    seen = set()
    began, before = time.monotonic(), _scheduled(thread)
    for sample in itertools.count(1):
        waited, now = time.monotonic() - began, _scheduled(thread)
        asleep = now == before and proc.state(os.getpid()) != "R"
        frame = sys._current_frames().get(main)
        if frame is None:
            break
        seen.add((id(frame), frame.f_lasti))
        instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if len(seen) > 1 or instruction.startswith(("JUMP", "POP_JUMP", "RESUME")):
            return True
        if sample == 1:
            began, before = time.monotonic(), _scheduled(thread)
        # A thread that waits for the lock of the interpreter looks asleep, too, but wakes every few milliseconds.
        elif sample >= _FEWEST and (now[0] - before[0] > _MIN_CPU_S or (asleep and waited > _IDLE)):
            return False
        elif waited > _BUSY:
            break
        time.sleep(_BETWEEN)
    return None


def place_in_library() -> tuple[object, ...] | None:
    """Return where the main thread is, if C code of a library that makes collectives runs; equal while it sleeps."""
    thread = threading.main_thread()
    frame = sys._current_frames().get(thread.ident or 0)
    ran = _scheduled(thread)[0]
    if frame is None or not ran or not is_of_library(frame.f_code.co_filename):
        return None
    return id(frame), frame.f_lasti, ran


def kept_lock(nap: float) -> bool:
    """Sleep for so many seconds. Return whether the main thread has then let this thread wait for the lock.

    On a busy machine both threads wait for a core, too. Such time of this thread does not count. Of its time without
    the lock, the part counts in which the main thread had a core.
    """
    main, own = threading.main_thread(), threading.current_thread()
    began, (main_ran, _), (own_ran, waited) = time.monotonic(), _scheduled(main), _scheduled(own)
    time.sleep(nap)
    ran, (own_ran_now, waited_now) = _scheduled(main)[0] - main_ran, _scheduled(own)
    elapsed = time.monotonic() - began
    without_lock = elapsed - nap - (own_ran_now - own_ran) - (waited_now - waited)
    return without_lock * ran / elapsed > _KEPT


def _scheduled(thread: threading.Thread) -> tuple[float, float]:
    """Return for how many seconds a thread had a core, and waited for one. Zeros where the system does not tell."""
    words = proc.text(os.getpid(), f"task/{thread.native_id}/schedstat").split()
    return (int(words[0]) / 1e9, int(words[1]) / 1e9) if words else (0.0, 0.0)
