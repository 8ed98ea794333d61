"""The Python stacks of other processes: their watchdog writes them, or their faulthandler at a signal.

The handler of the signal is C code and needs no lock of the interpreter: it answers also where the main thread computes
in C. But a signal ends what a thread waits for in about half of all calls of the system, so a thread that waits in such
a call is not sent it.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpistrat.launch import proc
from mpistrat.monitor import process
from mpistrat.process.waiting import within
from mpistrat.record import read
from mpistrat.record.read import Record

_SOURCE_TIMEOUT_S = 2.0  # for the file system of a program
_silent: set[str] = set()  # directories that did not answer
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

    The watchdog of a process writes the stacks of all threads, if it runs. If the main thread holds the interpreter's
    lock, it does not: then a signal makes the process write the stack of its main thread. ``beat`` is called meanwhile.
    """
    answers, asked, sizes = {}, {}, {}
    for record in records:
        if record.pid == os.getpid():
            answers[record.key] = own()
        elif _runs(record):
            with contextlib.suppress(OSError):  # it may end while it is looked at
                sizes[record.path] = os.stat(record.path).st_size  # first: the answer is what comes behind that
                read.ask_for_stacks(record.path)
                asked[record.path] = record
    longest = max((record.beat_every for record in asked.values()), default=0.0)
    end = time.monotonic() + longest + _LONGEST
    while time.monotonic() < end and not all(map(read.have_stacks, asked)):
        time.sleep(_QUIET)
        beat()
    waiting = {}
    for path, record in asked.items():
        if not read.have_stacks(path) and _survives_signal(record):
            with contextlib.suppress(OSError):
                os.kill(record.pid, record.signal)
                waiting[path] = sizes[path]
    _wait_for_signals(waiting, beat)
    for record in records:
        if record.path in sizes:
            stacks = parse(read.stacks(record.path, sizes[record.path]), record.main_thread)
            if stacks.main or stacks.others:
                answers[record.key] = stacks
    return answers


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


def _runs(record: Record) -> bool:
    return proc.started(record.pid) == record.started and proc.state(record.pid) not in "TtZX"


def _survives_signal(record: Record) -> bool:
    """Return whether the signal of a process would neither kill it nor end what it waits for.

    A process-wide signal goes to the main thread, unless that blocks it: other threads may wait in any call.
    """
    return (
        record.signal in signal.valid_signals()
        and _mask(record, "SigCgt")
        and not _mask(record, "SigBlk")
        and process.look(record.pid, record.started).restarts
    )


def _mask(record: Record, name: str) -> bool:
    """Return whether a mask of the main thread in /proc has the signal of a record."""
    lines = proc.text(record.pid, "status").splitlines()
    mask = next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "0")
    return bool(int(mask, 16) >> (record.signal - 1) & 1)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def own() -> Stacks:
    """Return the stacks of this process, but for the thread that calls."""
    main: tuple[Frame, ...] = ()
    others: list[tuple[Frame, ...]] = []
    for ident, innermost in sys._current_frames().items():
        frames = traceback.walk_stack(innermost)
        stack = tuple(Frame(frame.f_code.co_filename, line or 0, frame.f_code.co_name) for frame, line in frames)
        if ident == threading.main_thread().ident:
            main = stack
        elif not _is_watchdog(stack):
            others.append(stack)
    return Stacks(main, tuple(others))


def parse(text: str, main_thread: int) -> Stacks:
    """Return the stacks in a text of faulthandler. ``main_thread`` is the number of the main thread.

    The first stack of the main thread counts: its signal handler has written it.

    >>> stacks = parse('Thread 0x00007f10 (most recent call first):\\n  File "a.py", line 3 in f\\n', 0x7f10)
    >>> stacks.main
    (Frame(file='a.py', line=3, function='f'),)
    """
    main: tuple[Frame, ...] = ()
    others = []
    heads = list(_THREAD.finditer(text))
    for head, following in itertools.zip_longest(heads, heads[1:]):  # none if nothing was written
        body = text[head.end() : following.start() if following else len(text)]
        stack = tuple(
            Frame(match[1], int(match[2]), match[3]) for line in body.splitlines() if (match := _FRAME.match(line))
        )
        if head[1] is None or int(head[1], 16) == main_thread:
            main = main or stack
        elif stack and not _is_watchdog(stack):
            others.append(stack)
    return Stacks(main, tuple(others))


def _is_watchdog(stack: Sequence[Frame]) -> bool:
    return any(frame.file.endswith(_WATCHDOG) for frame in stack)


# --- the source of programs, as far as its file system answers: it may be what the job waits for


def source_lines(file: str) -> list[str]:
    """Return the lines of a file, none if it cannot be read soon."""
    directory = os.path.dirname(file)
    if directory in _silent:
        return []
    try:
        return within(_SOURCE_TIMEOUT_S, lambda: linecache.getlines(file))
    except TimeoutError:
        _silent.add(directory)
        return []


def source_line(file: str, number: int) -> str:
    """Return one line of a file without the spaces around it, empty if it cannot be read soon."""
    return next(iter(source_lines(file)[number - 1 : number]), "").strip() if number > 0 else ""
