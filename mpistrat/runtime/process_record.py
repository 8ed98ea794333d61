"""The flight record and the trace of this process, also for what ranks make before they have a topology."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from mpistrat.launch import launch, proc
from mpistrat.process import mpi
from mpistrat.record import flight_record, layout, ring
from mpistrat.record.flight_record import Creation, FlightRecord
from mpistrat.runtime import environment

_log = logging.getLogger(__name__)
_untraced = False  # whether a trace of this process could not be made


def creation(comm: Any, activity: str) -> Creation:
    """Return a context in which the ranks of ``comm`` make ``activity`` together, without a topology, and the record.

    A rank that does not come is reported.
    """
    world = mpi.start().COMM_WORLD
    ranks = comm.group.Translate_ranks(None, world.group)
    record = start_record(world.rank, world.size)
    if record is not None:
        # Its launcher may have told of other ranks: that around an mpiexec of one task.
        record.set_rank(world.rank, world.size)
    return Creation(record, ranks, comm.rank, activity)


def _start_of_mpi() -> contextlib.AbstractContextManager[object]:
    """Return a context in which all ranks start MPI. Each rank waits there for the other ranks."""
    rank, size = launch.rank_and_size(os.environ) or (0, 1)
    if size == 1 or _is_started_by_rank():
        return contextlib.nullcontext()
    return Creation(start_record(rank, size), range(size), rank, "the start of MPI")


def _is_started_by_rank() -> bool:
    """Return whether a process between this one and its launcher keeps a record: it is the rank, not this one."""
    started = launch.started_tasks(os.environ)
    process = os.getppid()
    while started is not None and started.variable in proc.environ(process):
        if proc.maps(process, os.path.join(layout.FOLDER, layout.PREFIX)):
            return True
        process = proc.parent(process)
    return False


mpi.around_start(_start_of_mpi)


def start_record(rank: int, size: int) -> FlightRecord | None:
    """Return the flight record of this process, or None if it is off. Begin the trace if the options say so."""
    with contextlib.suppress(ValueError):  # of an option: `environment.agree` raises it on all ranks
        return _started(rank, size)
    return None


def _started(rank: int, size: int) -> FlightRecord | None:
    global _untraced
    rc = environment.rc
    if not (rc.record or rc.trace):
        return None
    record = flight_record.start(rank, size, rc.stack_signal)
    if record is not None and rc.trace and ring.ring is None and not _untraced:
        try:
            record.trace(rc.trace, rc.trace_bytes)
        except OSError as error:
            _untraced = True
            _log.warning("rank %d is not traced: %s; the program goes on without a trace", rank, error)
    return record


def finish() -> None:
    """Complete the record, if this process has one: after the end of MPI no collective follows."""
    record = flight_record.current()
    if record is not None:
        record.finish()
