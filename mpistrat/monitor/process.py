"""What the system tells about a process: its state, the system call that it is in, and the file of that call."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from mpistrat.runtime.process import process_facts

# System calls that a rank may be stuck in, by number: x86-64, then 64-bit ARM.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 23: "select",
        35: "nanosleep", 42: "connect", 43: "accept", 45: "recvfrom", 47: "recvmsg", 61: "wait4", 72: "fcntl",
        73: "flock", 74: "fsync", 75: "fdatasync", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait",
        247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
        332: "statx",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 56: "openat", 63: "read", 64: "write", 65: "readv",
        66: "writev", 67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 82: "fsync",
        83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept",
        203: "connect", 207: "recvfrom", 212: "recvmsg", 260: "wait4", 291: "statx",
    },
}.get(platform.machine(), {})  # fmt: skip
_WITH_DESCRIPTOR = {
    *("read", "write", "pread64", "pwrite64", "readv", "writev", "recvfrom", "recvmsg", "accept", "connect"),
    *("fcntl", "flock", "fsync", "fdatasync"),
}
# What the kernel calls the place where a process sleeps, where the number of the call may not be read.
_KERNEL_PLACES = (
    ("nanosleep", "clock_nanosleep"),
    ("futex", "futex"),
    ("pipe_read", "read"),
    ("pipe_write", "write"),
    ("do_wait", "wait4"),
    ("poll_schedule", "poll"),
    ("ep_poll", "epoll_wait"),
    ("do_select", "select"),
    ("flock", "flock"),
)


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
    ended_by: int | None = None
    resident: int = 0
    out_of_memory_kills: int | None = None


def look(process: int, started: int) -> ProcessFacts:
    """Return what the system tells about the process with this number that started at this time."""
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
    place = _text(main / "wchan")
    call, file = _call(main, process)
    if not call:
        call = next((name for text, name in _KERNEL_PLACES if text in place), "")
    with contextlib.suppress(OSError, ValueError, IndexError):
        resident = int(_text(Path(f"/proc/{process}/statm")).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return ProcessFacts(fields[0], call, file, place if place != "0" else "", None, resident)
    return ProcessFacts(fields[0], call, file, place if place != "0" else "")


def gone() -> ProcessFacts:
    """Return what is known of a process that does not exist."""
    return ProcessFacts("X", out_of_memory_kills=process_facts.out_of_memory_kills())


def _call(main: Path, process: int) -> tuple[str, str]:
    """Return the system call of a thread, and its file. Empty where this user may not read that."""
    words = _text(main / "syscall").split()
    if not words or not words[0].lstrip("-").isdigit():
        return "", ""
    number = int(words[0])
    if number < 0:
        return "", ""
    call = _CALLS.get(number, f"system call {number}")
    file = ""
    if call in _WITH_DESCRIPTOR:
        with contextlib.suppress(OSError, ValueError):
            file = os.readlink(f"/proc/{process}/fd/{int(words[1], 16)}")
    return call, file


def _status(process: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[49])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
