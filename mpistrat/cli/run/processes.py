"""The processes of a job, from /proc. Where there is none (macOS) they are simply not known."""

from __future__ import annotations

from pathlib import Path

from mpistrat.runtime.process.launchers import HYDRA, OPEN_MPI

_RANKS = tuple(f"{launcher.rank[0]}=".encode() for launcher in (OPEN_MPI, HYDRA))


def ranks_below(launcher: int) -> dict[int, int]:
    """The ranks that a launcher has started: process id -> rank."""
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
    """The rank that a process was started as, None if it was not, or is not there."""
    try:
        environ = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    value = next((each.partition(b"=")[2] for each in environ if each.startswith(_RANKS)), b"")
    return int(value) if value.isdigit() else None


def _parent(directory: Path) -> int | None:
    try:
        # The name of the program stands in parentheses and may contain anything.
        return int((directory / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None
