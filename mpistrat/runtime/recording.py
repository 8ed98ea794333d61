"""The flight record and the trace of this process, begun as the options say."""

from __future__ import annotations

import contextlib
import logging

from mpistrat.runtime import environment
from mpistrat.runtime.record import flight_record
from mpistrat.runtime.record.flight_record import FlightRecord
from mpistrat.runtime.trace import ring as trace

_untraced = False  # whether a trace of this process could not be made
_log = logging.getLogger(__name__)


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
    if record is not None and rc.trace and trace.ring is None and not _untraced:
        try:
            record.trace(rc.trace, rc.trace_bytes)
        except OSError as error:
            _untraced = True
            _log.warning("rank %d is not traced: %s; the program goes on without a trace", rank, error)
    return record
