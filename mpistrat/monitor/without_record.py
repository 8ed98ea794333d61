"""Ranks that share no communicator with the others yet, as the system shows them.

They may not have started MPI, or have ended before they did.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from mpistrat.launch import proc
from mpistrat.launch.launch_key import hashed, key_of
from mpistrat.launch.launchers import LAUNCHERS
from mpistrat.record import read
from mpistrat.record.read import Record


def find(own: Record, job: Sequence[Record], one_node: bool) -> list[Record]:
    """Return a record of each rank of this node that was started with this process and is not in ``job``.

    It is empty if the rank keeps none. If ``one_node``, the launcher has started all ranks on this node: those
    without a process have ended, and have a record of process 0.
    """
    variables = [name for each in LAUNCHERS for name in each.rank if os.environ.get(name) == str(own.rank)]
    if not own.launch or not variables:
        return []
    known = {each.rank for each in job}
    recorded = {(each.pid, each.started): each for each in read.records()}
    found = []
    for process in proc.everyone():
        environ = proc.environ(process)
        rank = environ.get(variables[0], "")
        parent = proc.parent(process)
        if (
            rank.isdecimal()
            and int(rank) not in known
            and _place(process) == _place(os.getpid())
            and variables[0] not in proc.environ(parent)  # else it was started by the rank
            and hashed(key_of(environ, one_node=True, parent=parent) or "") == own.launch
        ):
            empty = _empty(process, int(rank), own)
            found.append(recorded.get((process, empty.started), empty))
    if one_node:
        missing = set(range(own.size)) - known - {each.rank for each in found}
        found += [_empty(0, rank, own) for rank in missing]
    return sorted(found, key=lambda each: each.rank)


def _empty(process: int, rank: int, own: Record) -> Record:
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


def _place(process: int) -> str:
    """Return what differs for a process in another container: its /dev/shm, and so its record, cannot be seen here."""
    try:
        return os.readlink(f"/proc/{process}/ns/mnt")
    except OSError:
        return ""
