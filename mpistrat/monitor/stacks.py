"""The Python stacks of other processes, which their faulthandler writes at a signal.

Its handler is C code and needs no lock of the interpreter: it answers also where the main thread is stuck in C.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpistrat.runtime.process import process_facts
from mpistrat.runtime.record import read
from mpistrat.runtime.record.read import Record

_LONGEST = 1.0  # seconds that processes may take to answer
_QUIET = 0.05  # seconds without a new line after which an answer counts as complete
_THREAD = re.compile(r"(?:(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*|Stack) \(most recent call first\):")
_WATCHDOG = os.path.join("mpistrat", "monitor", "watchdog.py")
_FRAME = re.compile(r' *File "(.*)", line (\d+) in (.*)')


class Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str


class Stacks(NamedTuple):
    """The stacks of a process, the innermost call first: of the main thread, and of all others."""

    main: tuple[Frame, ...] = ()
    others: tuple[tuple[Frame, ...], ...] = ()


def ask(records: Sequence[Record], beat: Callable[[], object] = lambda: None) -> dict[str, Stacks]:
    """Return the stacks of processes, by the keys of their records. Those that do not answer are left out.

    At the signal a process writes the stack of its main thread, also if that holds the interpreter's lock. Its watchdog
    then writes the stacks of all threads, if it runs. ``beat`` is called now and then.
    """
    found, sizes = {}, {}
    for record in records:
        if record.pid == os.getpid():
            found[record.key] = own()
        elif _asks(record):
            with contextlib.suppress(OSError):  # it may end while it is looked at
                size = os.stat(record.path).st_size
                os.kill(record.pid, record.signal)
                sizes[record.path] = size
    _wait_for_signals(sizes, beat)
    asked = {each.path: each.beat_every for each in records if each.path in sizes}
    for path in list(asked):
        with contextlib.suppress(OSError):
            read.ask_for_stacks(path)
    end = time.monotonic() + max(asked.values(), default=0.0) + _LONGEST
    while time.monotonic() < end and not all(map(read.have_stacks, asked)):
        time.sleep(_QUIET)
        beat()
    for record in records:
        if record.path in sizes:
            stacks = parse(read.stacks(record.path, sizes[record.path]), record.main_thread)
            if stacks.main or stacks.others:
                found[record.key] = stacks
    return found


def _wait_for_signals(sizes: dict[str, int], beat: Callable[[], object]) -> None:
    """Wait until all files have grown beyond these sizes and grow no more, but not for long."""
    last = dict(sizes)
    end = time.monotonic() + _LONGEST
    while sizes and time.monotonic() < end:
        time.sleep(_QUIET)
        beat()
        now = {path: _size(path) for path in sizes}
        if now == last and all(now[path] > sizes[path] for path in sizes):
            break
        last = now


def _asks(record: Record) -> bool:
    """Return whether a process may be sent its signal: without a handler it would be killed."""
    return (
        record.signal in signal.valid_signals()
        and process_facts.started(record.pid) == record.started
        and process_facts.state(record.pid) not in "TtZX"
        and _handles(record)
    )


def _handles(record: Record) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{record.pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (record.signal - 1) & 1)
    return False


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def own() -> Stacks:
    """Return the stacks of this process, but for the thread that calls."""
    main: tuple[Frame, ...] = ()
    others: list[tuple[Frame, ...]] = []
    for ident, frame in sys._current_frames().items():
        stack = []
        at = frame
        while at is not None:
            stack.append(Frame(at.f_code.co_filename, at.f_lineno or 0, at.f_code.co_name))
            at = at.f_back  # type: ignore[assignment]
        if ident == threading.main_thread().ident:
            main = tuple(stack)
        elif not _is_watchdog(stack):
            others.append(tuple(stack))
    return Stacks(main, tuple(others))


def parse(text: str, main_thread: int) -> Stacks:
    """Return the stacks in a text of faulthandler. ``main_thread`` is the number of the main thread.

    That of the main thread is the first one, which its signal handler has written.

    Examples
    --------
    >>> stacks = parse('Thread 0x00007f10 (most recent call first):\\n  File "a.py", line 3 in f\\n', 0x7f10)
    >>> stacks.main
    (Frame(file='a.py', line=3, function='f'),)
    """
    main: tuple[Frame, ...] = ()
    others = []
    heads = list(_THREAD.finditer(text))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        body = text[head.end() : following.start() if following else len(text)]
        stack = tuple(
            Frame(found[1], int(found[2]), found[3])
            for line in body.splitlines()
            if (found := _FRAME.match(line))
        )
        if head[1] is None or int(head[1], 16) == main_thread:
            main = main or stack
        elif stack and not _is_watchdog(stack):
            others.append(stack)
    return Stacks(main, tuple(others))


def _is_watchdog(stack: Sequence[Frame]) -> bool:
    return any(each.file.endswith(_WATCHDOG) for each in stack)
