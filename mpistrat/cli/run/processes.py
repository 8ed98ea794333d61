"""The processes of a job, read from /proc. Without /proc (macOS) the functions find no processes."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from mpistrat.runtime.process.launchers import HYDRA, OPEN_MPI

_RANKS = tuple(f"{launcher.rank[0]}=".encode() for launcher in (OPEN_MPI, HYDRA))
_LONGEST = 60  # characters of a command


def ranks_below(launcher: int) -> dict[int, int]:
    """Return the ranks that a launcher has started: process id -> rank."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        parent = _parent(directory)
        if parent is not None:
            children.setdefault(parent, []).append(int(directory.name))
    found, pending = {}, [launcher]
    while pending:
        for process in children.get(pending.pop(), []):
            rank = rank_of(process)
            if rank is None:
                pending.append(process)  # a daemon of the launcher
            else:
                found[process] = rank
    return found


def rank_of(process: int) -> int | None:
    """Return the rank of a process, or None if the process is not a rank or does not exist."""
    try:
        environ = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    value = next((each.partition(b"=")[2] for each in environ if each.startswith(_RANKS)), b"")
    return int(value) if value.isdigit() else None


def outputs(process: int) -> dict[str, int]:
    """Return the pipes or terminals of a process's standard output and standard error: name in /proc -> time.

    The time is that at which a terminal was made, since its name is reused later; 0 for a pipe.
    """
    found = {}
    for number in (1, 2):
        path = f"/proc/{process}/fd/{number}"
        with contextlib.suppress(OSError):
            found[os.readlink(path)] = _made(path)
    return found


def writers(outputs: Mapping[str, int]) -> list[int]:
    """Return the processes that have one of these pipes or terminals open for writing."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            made = outputs.get(os.readlink(descriptor))
            if made is not None and descriptor.lstat().st_mode & stat.S_IWUSR and _made(descriptor) == made:
                found.add(int(descriptor.parts[2]))
    return sorted(found)


def _made(path: str | Path) -> int:
    status = os.stat(path)
    return status.st_ctime_ns if stat.S_ISCHR(status.st_mode) else 0


def command_of(process: int) -> str:
    """Return the command of a process, shortened; empty if it cannot be read."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    text = os.fsdecode(b" ".join(words).strip())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _parent(directory: Path) -> int | None:
    try:
        # The name of the program is in parentheses and may contain any character.
        return int((directory / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None
