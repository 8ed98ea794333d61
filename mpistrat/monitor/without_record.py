"""Ranks that keep no flight record, as the system shows them: those that have not made a strategy yet, say."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from mpistrat.runtime.process.launch_key import hashed, key_of
from mpistrat.runtime.process.launchers import LAUNCHERS
from mpistrat.runtime.record import process_facts
from mpistrat.runtime.record.layout import Phase
from mpistrat.runtime.record.read import Membership, Record


def find(own: Record, job: Sequence[Record]) -> list[Record]:
    """Return an empty record for each rank of this node that was started with this process and has none in ``job``."""
    variables = [name for each in LAUNCHERS for name in each.rank if os.environ.get(name) == str(own.rank)]
    if not own.launch or not variables:
        return []
    known = {each.rank for each in job}
    memberships = _of_all_ranks(own.size, job)
    found = []
    for process in _processes():
        environ = _environ(process)
        rank = environ.get(variables[0], "")
        parent = process_facts.parent(process)
        if (
            rank.isdigit()
            and int(rank) not in known
            and _place(process) == _place(os.getpid())
            and variables[0] not in _environ(parent)  # else it was started by the rank
            and hashed(key_of(environ, one_node=True, parent=parent) or "") == own.launch
        ):
            found.append(_empty(process, int(rank), own, memberships))
    return sorted(found, key=lambda each: each.rank)


def _of_all_ranks(size: int, job: Sequence[Record]) -> dict[int, int]:
    """Return the communicators of all ranks of the job, in the same order: size by token."""
    found = {each.token: each.size for record in job for each in record.memberships if each.size == size}
    other = {each.token for record in job for each in record.memberships if each.rank != record.rank}
    return {token: size for token, size in found.items() if token not in other}


def _empty(process: int, rank: int, own: Record, memberships: dict[int, int]) -> Record:
    return Record(
        path="",
        pid=process,
        started=process_facts.started(process),
        rank=rank,
        size=own.size,
        main_thread=0,
        signal=0,
        host=socket.gethostname(),
        launch=own.launch,
        job=own.job,
        program="",
        note="",
        phase=Phase.USER_CODE,
        phase_since=time.monotonic(),
        heartbeat=0.0,
        beat_every=0.0,
        clock=own.clock,
        step=0,
        step_since=0.0,
        bytes=0,
        moves=None,
        exit_status=None,
        out_of_memory_kills=None,
        memberships=tuple(Membership(token, size, rank, None) for token, size in memberships.items()),
        steps=(),
        entries=(),
    )


def _place(process: int) -> str:
    """Return what differs for a process in another container: its /dev/shm, and so its record, cannot be seen here."""
    try:
        return os.readlink(f"/proc/{process}/ns/mnt")
    except OSError:
        return ""


def _processes() -> list[int]:
    return [int(each.name) for each in Path("/proc").glob("[0-9]*")]


def _environ(process: int) -> dict[str, str]:
    """Return the environment with which a process was started, empty if it is not a process of this user."""
    try:
        text = Path(f"/proc/{process}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(each.partition("=")[::2] for each in text.split("\0") if "=" in each)
