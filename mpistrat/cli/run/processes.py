"""The processes of a job, read from /proc. Without /proc (macOS) the functions find no processes."""

from __future__ import annotations

from pathlib import Path

from mpistrat.launch.launchers import HYDRA, OPEN_MPI
from mpistrat.launch.proc import parent

_RANKS = tuple(f"{launcher.rank[0]}=".encode() for launcher in (OPEN_MPI, HYDRA))


def ranks_below(launcher: int) -> dict[int, int]:
    """Return the ranks that a launcher has started: process id -> rank."""
    children: dict[int, list[int]] = {}
    for process in _all():
        children.setdefault(parent(process), []).append(process)
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
    value = next(
        (each.partition(b"=")[2] for each in _words(process, "environ") if each.startswith(_RANKS)), b""
    )
    return int(value) if value.isdigit() else None


def _all() -> list[int]:
    return sorted(int(each.name) for each in Path("/proc").glob("[0-9]*"))


def _words(process: int, name: str) -> list[bytes]:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes().split(b"\0")
    except OSError:
        return []
