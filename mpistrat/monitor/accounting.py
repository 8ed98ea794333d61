"""One line at the end of a job of several ranks, for the accounting of a site (``rc.accounting``).

Ranks that end together meet, and the first one writes. Where they do not, the rank that ends the job by an error
writes what it knows of itself and of its node. `mpistrat run` writes where all ranks were killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from mpistrat.launch import launch
from mpistrat.process import failure, program_end
from mpistrat.process.program_end import EndStep
from mpistrat.process.waiting import within
from mpistrat.record import flight_record, read
from mpistrat.record.flight_record import FlightRecord
from mpistrat.record.layout import Phase
from mpistrat.record.read import Record
from mpistrat.runtime import topology
from mpistrat.runtime.environment import rc
from mpistrat.runtime.topology import Topology
from mpistrat.version import __version__

SYSLOG = "syslog"
_WRITE_TIMEOUT_S = 5.0
_OTHER_WRITES = 1.0  # seconds
_KIB = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss
_ENDED = (Phase.FAILED, Phase.FINISHED)
_log = logging.getLogger(__name__)


class Totals(NamedTuple):
    """What one rank has measured from the start of its record on: seconds, and its largest memory in bytes."""

    rank: int
    seconds: float
    collectives: float
    input: float
    memory: int


class Accounting:
    """The line of this process's job, which is written at most once."""

    def __init__(self, record: FlightRecord):
        self._record, self._began, self._written = record, time.monotonic(), False
        topology.at_end.append(self._meet)
        program_end.register(EndStep.RECORD, self.end)
        flight_record.before_exit(self.end)

    def _meet(self, ranks: Topology) -> None:
        """Write the line of all ranks, on the first one. Collective over all ranks of the job."""
        totals = ranks.world.gather(self._totals(ranks.rank))
        if totals is not None:
            self._write(ranks.size, {"nodes": len(ranks.nodes), **_shares(totals)}, 0)
        self._written = True

    def end(self, status: int | None = None) -> None:
        """Write the line of a job whose ranks do not meet, where this rank ends the job, or is the first one."""
        own = read.parse(self._record.contents(), self._record.path or "")
        if self._written or own is None:
            return
        status = status or failure.pending() or own.exit_status or 0
        if failure.first_failure() if status else own.rank == 0:
            ranks = topology.of_all_ranks()
            gone = {other.pid for other in read.records() if other.launch == own.launch and not other.lives}
            # Read again: one that ended after it was read has noted since how it ended.
            ends = [other for other in read.records() if other.pid in gone]
            lost = [other.rank for other in ends if other.exit_status is None and other.phase not in _ENDED]
            facts = {"nodes": ranks and len(ranks.nodes), **_shares([self._totals(own.rank)]), "lost_ranks": lost}
            self._write(own.size, facts, status)
        elif status:
            time.sleep(_OTHER_WRITES)  # two ranks may end a hanging job at once: this one must not end the other before
        self._written = True

    def _totals(self, rank: int) -> Totals:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        return Totals(rank, time.monotonic() - self._began, *self._record.totals(), memory)

    def _write(self, size: int, facts: dict[str, Any], status: int) -> None:
        own = read.parse(self._record.contents())
        assert own is not None
        write(own, size, facts, status)


_accounting: Accounting | None = None


def begin(record: FlightRecord) -> None:
    """Account for the job of this process, if the options say so."""
    global _accounting
    if rc.accounting:
        _accounting = Accounting(record)


def end(status: int) -> None:
    """Write the line of a job that this rank is about to end with an exit status."""
    if _accounting is not None:
        _accounting.end(status)


def end_of_killed(records: Sequence[Record], lost: Sequence[int], status: int) -> None:
    """Write the line of a job of which ``lost`` ranks were killed, by the ``records`` that its ranks have left.

    Ranks that fail, or leave by ``os._exit``, write it themselves.
    """
    wrote = any(record.phase == Phase.FAILED or record.exit_status is not None for record in records)
    with contextlib.suppress(ValueError):  # of an option: the ranks have raised it
        if records and status not in (0, launch.HANG) and not wrote and rc.accounting:
            write(records[0], records[0].size, {"lost_ranks": list(lost)}, status)


def _shares(ranks: Sequence[Totals]) -> dict[str, Any]:
    """Return the shares of the ranks' time, the rank for which the others wait, and the largest memory.

    The slowest rank is the shortest time in collectives. What the others are in them for longer, they wait for it.
    """
    seconds = sum(rank.seconds for rank in ranks) or 1.0
    slowest, largest = min(ranks, key=lambda rank: rank.collectives), max(ranks, key=lambda rank: rank.memory)
    in_collectives = sum(rank.collectives for rank in ranks)
    return {
        "seconds": round(max(rank.seconds for rank in ranks), 3),
        "collectives": round(in_collectives / seconds, 4),
        "waiting": round((in_collectives - len(ranks) * slowest.collectives) / seconds, 4),
        "input": round(sum(rank.input for rank in ranks) / seconds, 4),
        "slowest_rank": slowest.rank,
        "memory": largest.memory,
        "memory_rank": largest.rank,
        "lost_ranks": [],
        "measured_ranks": len(ranks),
    }


def write(own: Record, size: int, facts: dict[str, Any], status: int) -> None:
    """Write the line, within some seconds. A program must not fail by it: what goes wrong is logged."""
    line = {"job": own.job, "user": os.geteuid(), "host": own.host, "program": own.program, "version": __version__}
    line |= {"end": round(time.time(), 3), "ranks": size, **facts, "exit": status, "restart": rc.restart}
    try:
        within(_WRITE_TIMEOUT_S, partial(_append, rc.accounting, json.dumps(line)))
    except OSError as error:
        _log.warning("no line of accounting is written to %s: %s", rc.accounting, error)


def _append(where: str, line: str) -> None:
    if where == SYSLOG:
        import syslog  # a late import: seldom needed

        syslog.openlog("mpistrat", syslog.LOG_PID)
        syslog.syslog(line)
        return
    # O_NONBLOCK: a pipe without a reader would wait for one. In one call, so that lines of other jobs do not split it.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(os.path.expandvars(where), flags, 0o666)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)
