"""What the system tells about a process: its state, the system call that it is in, and the file of that call."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from mpistrat.monitor import system_calls
from mpistrat.runtime.process import process_facts


@dataclass(frozen=True)
class ProcessFacts:
    """What the system tells about a process at one time.

    Attributes
    ----------
    state : str
        Of its main thread: R (running), S (sleeping), D (waits for a device), T or t (stopped), Z (ended, not waited
        for), X (the process does not exist).
    call : str
        The system call that the main thread is in, empty if it is in none or if that is unknown.
    file : str
        The file, pipe or socket of that call, empty if it has none.
    place : str
        Where the kernel lets it sleep.
    descriptor : int
        The descriptor of that call, -1 if it has none.
    timed : bool
        Whether that call waits for a lock with a time limit, as for the interpreter's lock.
    restarts : bool
        Whether a handler of a signal does not end what the main thread waits for: it waits for nothing, or in a call
        that Linux begins again.
    others_run : bool
        Whether another thread of it computes.
    replaced : bool
        Whether the process runs another program by now: it has called ``exec``.
    ended_by : int or None
        The status with which a process ended that was not waited for: as of `os.waitpid`.
    resident : int
        Bytes of memory in use.
    out_of_memory_kills : int or None
        Of a process that has ended: how many processes of this cgroup the system has killed for want of memory.
    """

    state: str
    call: str = ""
    file: str = ""
    place: str = ""
    descriptor: int = -1
    timed: bool = False
    restarts: bool = False
    others_run: bool = False
    replaced: bool = False
    ended_by: int | None = None
    resident: int = 0
    out_of_memory_kills: int | None = None


def look(process: int, started: int, path: str = "") -> ProcessFacts:
    """Return what the system tells about the process with this number that started at this time, with this record."""
    if process_facts.started(process) != started:
        return gone()
    if process_facts.state(process) == "Z":
        return ProcessFacts(
            "Z", ended_by=_status(process), out_of_memory_kills=process_facts.out_of_memory_kills()
        )
    main = Path(f"/proc/{process}/task/{process}")
    try:
        fields = (main / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return gone()
    found = dataclasses.replace(
        _waiting(main, process, fields[0]),
        others_run=any(_thread_state(each) == "R" for each in main.parent.glob("*") if each != main),
        replaced=_replaced(process, path),
    )
    with contextlib.suppress(OSError, ValueError, IndexError):
        resident = int(_text(Path(f"/proc/{process}/statm")).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return dataclasses.replace(found, resident=resident)
    return found


def _thread_state(thread: Path) -> str:
    return _text(thread / "stat").rpartition(")")[2][1:2]


def _replaced(process: int, path: str) -> bool:
    """Return whether a process has another memory than the one that mapped this record."""
    return bool(path and _text(Path(f"/proc/{process}/maps"))) and not process_facts.maps(process, path)


def gone() -> ProcessFacts:
    """Return what is known of a process that does not exist."""
    return ProcessFacts("X", out_of_memory_kills=process_facts.out_of_memory_kills())


def _waiting(main: Path, process: int, state: str) -> ProcessFacts:
    """Return in which call a main thread waits. Without the call where this user may not read it."""
    place = _text(main / "wchan")
    place = place if place != "0" else ""
    number, *words = _text(main / "syscall").split() or ["unreadable"]
    if not number.isdigit():  # "running", or -1 where it waits outside of a call
        call = system_calls.of_place(place)
        return ProcessFacts(state, call.name if call else "", "", place, restarts=state == "R")
    call = system_calls.of_number(int(number))
    arguments = [int(each, 16) for each in words[:6]]
    descriptor, file = -1, ""
    if call.has_descriptor and arguments:
        descriptor = arguments[0]
        with contextlib.suppress(OSError, ValueError):
            file = os.readlink(f"/proc/{process}/fd/{descriptor}")
    timed = system_calls.is_timed(call, arguments)
    restarts = call.restarts and not timed and not file.startswith("socket:")
    return ProcessFacts(state, call.name, file, place, descriptor, timed, restarts)


def _status(process: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[49])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
