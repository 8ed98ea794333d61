"""System calls in which a rank may wait: their numbers, what they wait for, and whether a signal leaves them alone."""

from __future__ import annotations

import platform
from typing import NamedTuple

FILE, SLEEP, LOCK, MESSAGE = "file", "sleep", "lock", "message"
CHILD, FILE_LOCK, SIGNAL, UNKNOWN = "child", "file lock", "signal", ""


class SystemCall(NamedTuple):
    """A system call.

    Attributes
    ----------
    name : str
    waits_for : str
        One of the names above.
    restarts : bool
        Whether Linux begins it again after a handler of a signal (signal(7), SA_RESTART). All others return early
        with EINTR, and a program that does not look at that goes on as if it had waited.
    has_descriptor : bool
        Whether its first argument is a descriptor.
    """

    name: str
    waits_for: str
    restarts: bool = False
    has_descriptor: bool = False


# The name, and the number on x86-64 and on 64-bit ARM; -1 where the system has no such call.
_NUMBERS: dict[tuple[str, bool, bool], tuple[tuple[str, int, int], ...]] = {
    (FILE, True, True): (
        ("read", 0, 63), ("write", 1, 64), ("pread64", 17, 67), ("pwrite64", 18, 68), ("readv", 19, 65),
        ("writev", 20, 66), ("fsync", 74, 82), ("fdatasync", 75, 83), ("preadv", 295, 69), ("pwritev", 296, 70),
    ),
    (FILE, True, False): (("openat", 257, 56), ("newfstatat", 262, 79), ("statx", 332, 291)),
    (FILE, False, False): (("io_getevents", 208, 4), ("io_uring_enter", 426, 426)),
    (FILE_LOCK, True, True): (("fcntl", 72, 25), ("flock", 73, 32)),
    (CHILD, True, False): (("wait4", 61, 260), ("waitid", 247, 95)),
    (LOCK, True, False): (("futex", 202, 98),),  # without a time limit
    (LOCK, False, False): (("semop", 65, 193), ("semtimedop", 220, 192)),
    (SLEEP, False, False): (("nanosleep", 35, 101), ("clock_nanosleep", 230, 115)),
    (SIGNAL, False, False): (
        ("pause", 34, -1), ("rt_sigtimedwait", 128, 137), ("rt_sigsuspend", 130, 133),
    ),
    # A socket may have a time limit of its own (SO_RCVTIMEO), which /proc does not show: then it does not restart.
    (MESSAGE, False, True): (
        ("connect", 42, 203), ("accept", 43, 202), ("sendto", 44, 206), ("recvfrom", 45, 207), ("sendmsg", 46, 211),
        ("recvmsg", 47, 212), ("accept4", 288, 242), ("recvmmsg", 299, 243),
    ),
    (MESSAGE, False, False): (
        ("poll", 7, -1), ("select", 23, -1), ("epoll_wait", 232, -1), ("pselect6", 270, 72), ("ppoll", 271, 73),
        ("epoll_pwait", 281, 22), ("epoll_pwait2", 441, 441), ("msgsnd", 69, 189), ("msgrcv", 70, 188),
    ),
}  # fmt: skip
_MACHINES = ("x86_64", "aarch64")
_FUTEX = "futex"
# What the kernel calls the place where a process sleeps, where the number of the call may not be read.
_KERNEL_PLACES = (
    ("nanosleep", "clock_nanosleep"),
    ("futex", _FUTEX),
    ("pipe_read", "read"),
    ("pipe_write", "write"),
    ("do_wait", "wait4"),
    ("poll_schedule", "poll"),
    ("ep_poll", "epoll_wait"),
    ("do_select", "select"),
    ("flock", "flock"),
    ("sigtimedwait", "rt_sigtimedwait"),
)


def _of(machine: str) -> dict[int, SystemCall]:
    if machine not in _MACHINES:
        return {}
    column = _MACHINES.index(machine)
    return {
        numbers[column]: SystemCall(name, *kind)
        for kind, calls in _NUMBERS.items()
        for name, *numbers in calls
    }


_BY_NUMBER = _of(platform.machine())
_BY_NAME = {each[0]: SystemCall(each[0], *kind) for kind, calls in _NUMBERS.items() for each in calls}


def of_number(number: int) -> SystemCall:
    """Return a call by its number on this machine."""
    return _BY_NUMBER.get(number, SystemCall(f"system call {number}", UNKNOWN))


def of_place(place: str) -> SystemCall | None:
    """Return the call in which a process sleeps at this place of the kernel, None if the place does not tell."""
    return next((_BY_NAME[name] for text, name in _KERNEL_PLACES if text in place), None)


def waits_for(name: str) -> str:
    """Return what a call of this name waits for."""
    return _BY_NAME[name].waits_for if name in _BY_NAME else UNKNOWN


def is_timed(call: SystemCall, arguments: list[int]) -> bool:
    """Return whether a call on a futex has a time limit: then it does not restart. A wait for Python's lock has one."""
    return call.name == _FUTEX and len(arguments) > 3 and arguments[3] != 0
