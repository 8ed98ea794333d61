"""The processes of a job, read from /proc. Without /proc (macOS) the functions find no processes."""

from __future__ import annotations

from mpistrat.launch import proc
from mpistrat.launch.launchers import HYDRA, OPEN_MPI


def ranks_below(launcher: int) -> dict[int, int]:
    """Return the ranks that a launcher has started: process id -> rank."""
    children: dict[int, list[int]] = {}
    for process in proc.everyone():
        children.setdefault(proc.parent(process), []).append(process)
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
    environ = proc.environ(process)
    value = next((environ[name] for name in (*OPEN_MPI.rank, *HYDRA.rank) if name in environ), "")
    return int(value) if value.isdecimal() else None
