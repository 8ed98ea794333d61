"""Facts from the system about processes and network links: states, system calls, ranks without a record, lost links."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpistrat.launch import proc
from mpistrat.launch.launchers import LAUNCHERS, hashed, key_of
from mpistrat.record import read
from mpistrat.record.read import Record

_ESTABLISHED, _RETRANSMITS = "01", "01"  # a state, and a timer, as /proc/net/tcp gives them
_FLAGS_OF, _ADDRESS_OF = 0x8913, 0x8915  # SIOCGIFFLAGS, SIOCGIFADDR
_UP, _RUNNING = 1, 0x40  # IFF_UP, IFF_RUNNING
FILE, SLEEP, LOCK, MESSAGE = "file", "sleep", "lock", "message"
CHILD, FILE_LOCK, SIGNAL, UNKNOWN = "child", "file lock", "signal", ""


class Links(NamedTuple):
    """The links of one node."""

    host: str
    ranks: tuple[int, ...]
    addresses: tuple[str, ...]  # its own ends of this user's connections
    dead: tuple[str, ...]  # the interfaces with one of these addresses that have no carrier
    # the addresses of other nodes that do not acknowledge what was sent to them
    unacknowledged: tuple[str, ...]


def look_at_links(ranks: Sequence[int]) -> Links:
    """Return the links of this node, which has these ranks. They are empty without /proc/net."""
    addresses, silent = set(), set()
    for own, other, resends in _connections():
        if not own.startswith("127.") and own != "::1":  # the loopback is no link to another node
            addresses.add(own)
            if resends:
                silent.add(other)
    dead = [name for name, address in _without_carrier() if address in addresses]
    return Links(socket.gethostname(), tuple(ranks), tuple(sorted(addresses)), tuple(dead), tuple(sorted(silent)))


def at_fault(nodes: Sequence[Links]) -> list[Links]:
    """Return the nodes whose links do not work: with a dead interface, or else common to all unacknowledged links."""
    dead = [node for node in nodes if node.dead]
    if dead:
        return dead
    of_address = {address: node for node in nodes for address in node.addresses}
    pairs = {
        frozenset((node.host, of_address[address].host))
        for node in nodes
        for address in node.unacknowledged
        if address in of_address
    }
    common = frozenset.intersection(*pairs) if pairs else frozenset()
    return [node for node in nodes if node.host in common]


def _connections() -> Iterator[tuple[str, str, bool]]:
    """Yield this user's connections: both addresses, and whether data is sent again."""
    user = str(os.geteuid())
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/self/net/{name}").read_text("utf-8").splitlines()[1:]:
                words = line.split()
                if words[3] == _ESTABLISHED and words[7] == user:
                    resends = words[5].startswith(_RETRANSMITS + ":") and int(words[6], 16) > 0
                    yield _address(words[1]), _address(words[2]), resends


def _address(text: str) -> str:
    """Return an address that the system gives as the hexadecimal digits of its 4-byte words."""
    digits = text.partition(":")[0]
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    address = socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
    return address.removeprefix("::ffff:")  # a socket for both versions of IP


def _without_carrier() -> Iterator[tuple[str, str]]:
    """Yield the interfaces that are up but have no carrier, and their addresses."""
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])  # IFNAMSIZ without its NUL
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket, _FLAGS_OF, request)
                (flags,) = struct.unpack("h", answer[16:18])
                if flags & _UP and not flags & _RUNNING:
                    answer = fcntl.ioctl(any_socket, _ADDRESS_OF, request)
                    yield name, socket.inet_ntoa(answer[20:24])


class SystemCall(NamedTuple):
    """A system call."""

    name: str
    waits_for: str  # one of the names above
    # whether Linux begins it again after a handler of a signal (signal(7), SA_RESTART). All others return early with
    # EINTR, and a program that does not look at that goes on as if it had waited.
    restarts: bool = False
    has_descriptor: bool = False  # whether its first argument is a descriptor


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
# A part of the kernel function in which a process sleeps, and its call: where the call's number may not be read.
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


def _calls_of(machine: str) -> dict[int, SystemCall]:
    if machine not in _MACHINES:
        return {}
    column = _MACHINES.index(machine)
    return {numbers[column]: SystemCall(name, *kind) for kind, calls in _NUMBERS.items() for name, *numbers in calls}


_BY_NUMBER = _calls_of(platform.machine())
_BY_NAME = {call[0]: SystemCall(call[0], *kind) for kind, calls in _NUMBERS.items() for call in calls}


def waits_for(name: str) -> str:
    """Return what a call of this name waits for."""
    return _BY_NAME[name].waits_for if name in _BY_NAME else UNKNOWN


@dataclass(frozen=True)
class ProcessFacts:
    """The state of a process at one time, from /proc."""

    # state of the main thread: R (running), S (sleeping), D (waits for a device), T or t (stopped), Z (ended, not
    # waited for), X (the process does not exist)
    state: str
    call: str = ""  # the system call that the main thread is in, empty if it is in none or if that is unknown
    file: str = ""  # the file, pipe or socket of that call, empty if it has none
    wchan: str = ""  # the kernel function in which it sleeps
    descriptor: int = -1  # the descriptor of that call, -1 if it has none
    timed: bool = False  # whether that call waits for a lock with a time limit, as for the interpreter's lock
    # whether a handler of a signal does not end what the main thread waits for: it waits for nothing, or in a call that
    # Linux begins again
    restarts: bool = False
    others_run: bool = False  # whether another thread of it computes
    replaced: bool = False  # whether the process runs another program by now: it has called ``exec``
    # the status with which a process ended that was not waited for: as of `os.waitpid`
    ended_by: int | None = None
    resident: int = 0  # bytes of memory in use
    # of a process that has ended: how many processes of its cgroup the system has killed for want of memory
    out_of_memory_kills: int | None = None


def look(process: int, started: int, path: str = "") -> ProcessFacts:
    """Return the facts of the process with this number that started at this time. ``path`` is its record."""
    if proc.started(process) != started:
        return gone()
    state = proc.state(process)
    if state == "X":
        return gone()
    if state == "Z":
        return ProcessFacts("Z", ended_by=_status(process), out_of_memory_kills=proc.out_of_memory_kills())
    threads = (int(entry.name) for entry in Path(f"/proc/{process}/task").glob("*"))
    memory = proc.text(process, "statm").split()
    return dataclasses.replace(
        _waiting(process, state),
        others_run=any(proc.state(process, thread) == "R" for thread in threads if thread != process),
        # It has called exec() if it has another memory than the one that mapped its record.
        replaced=bool(path and proc.text(process, "maps")) and not proc.maps(process, path),
        resident=int(memory[1]) * os.sysconf("SC_PAGE_SIZE") if memory else 0,
    )


def gone() -> ProcessFacts:
    """Return the facts of a process that does not exist."""
    return ProcessFacts("X", out_of_memory_kills=proc.out_of_memory_kills())


def _waiting(process: int, state: str) -> ProcessFacts:
    """Return in which call a main thread waits. Without the call where this user may not read it."""
    wchan = proc.text(process, "wchan").strip().removeprefix("0")
    number, *words = proc.text(process, "syscall").split() or ["unreadable"]
    if not number.isdigit():  # "running", or -1 where it waits outside of a call
        name = next((name for text, name in _KERNEL_PLACES if text in wchan), "")
        return ProcessFacts(state, name, "", wchan, restarts=state == "R")
    call = _BY_NUMBER.get(int(number), SystemCall(f"system call {number}", UNKNOWN))
    arguments = [int(word, 16) for word in words[:6]]
    descriptor, file = -1, ""
    if call.has_descriptor and arguments:
        descriptor = arguments[0]
        with contextlib.suppress(OSError, ValueError):
            file = os.readlink(f"/proc/{process}/fd/{descriptor}")
    timed = call.name == _FUTEX and len(arguments) > 3 and arguments[3] != 0  # as a wait for Python's lock
    restarts = call.restarts and not timed and not file.startswith("socket:")
    return ProcessFacts(state, call.name, file, wchan, descriptor, timed, restarts)


def _status(process: int) -> int | None:
    fields = proc.stat(process)
    return int(fields[49]) if len(fields) > 49 else None  # field 52 of proc(5)


def without_record(own: Record, job: Sequence[Record], one_node: bool) -> list[Record]:
    """Return a record of each rank of this node that was started with this process and is not in ``job``.

    Such ranks share no communicator with the others yet: they may not have started MPI, or have ended before they did.
    The record is empty if the rank keeps none. If ``one_node``, the launcher has started all ranks on this node: a rank
    without a process has ended, and its record has process number 0.
    """
    variables = [name for launcher in LAUNCHERS for name in launcher.rank if os.environ.get(name) == str(own.rank)]
    if not own.launch or not variables:
        return []
    known = {record.rank for record in job}
    recorded = {(record.pid, record.started): record for record in read.records()}
    records = []
    for process in proc.process_ids():
        environ = proc.environ(process)
        rank = environ.get(variables[0], "")
        parent = proc.parent(process)
        if (
            rank.isdecimal()
            and int(rank) not in known
            and _mount_namespace(process) == _mount_namespace(os.getpid())
            and variables[0] not in proc.environ(parent)  # else it was started by the rank
            and hashed(key_of(environ, one_node=True, parent=parent) or "") == own.launch
        ):
            empty = _empty_record(process, int(rank), own)
            records.append(recorded.get((process, empty.started), empty))
    if one_node:
        missing = set(range(own.size)) - known - {record.rank for record in records}
        records += [_empty_record(0, rank, own) for rank in missing]
    return sorted(records, key=lambda record: record.rank)


def _empty_record(process: int, rank: int, own: Record) -> Record:
    return Record(
        process,
        rank,
        own.size,
        proc.started(process),
        host=socket.gethostname(),
        launch=own.launch,
        job=own.job,
        phase_since=time.monotonic(),
        clock=own.clock,
    )


def _mount_namespace(process: int) -> str:
    """Return the mount namespace of a process. With another one, it has another /dev/shm: its record is not here."""
    try:
        return os.readlink(f"/proc/{process}/ns/mnt")
    except OSError:
        return ""
