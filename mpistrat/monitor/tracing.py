"""A trace of a part of a program."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from mpistrat.record import flight_record, ring
from mpistrat.runtime import topology
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.environment import rc

_CLOCKS = operation("trace")
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def trace(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Context in which this rank writes a trace, for ``mpistrat trace``.

    Enter and leave it on all ranks: ranks with different clocks compare them then. A rank that cannot write its file
    logs a warning, and goes on without a trace. So does one that is traced already, for ``MPISTRAT_TRACE``.

    Parameters
    ----------
    directory : path-like
        Made if it does not exist. Each rank adds one file, of ``mpistrat.rc.trace_bytes``.

    Examples
    --------
    >>> import mpistrat, tempfile
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> with tempfile.TemporaryDirectory() as directory, mpistrat.experimental.trace(directory):
    ...     _ = strategy.reduce("SUM", 1.0, axis=None)
    """
    began = _begin(os.fspath(directory))
    _compare_clocks()
    try:
        yield
        _compare_clocks()
    finally:
        if began:
            flight_record.end_trace()


def _begin(directory: str) -> bool:
    record = flight_record.current()
    if record is None and rc.record:  # before the first strategy
        record = flight_record.start(0, 1, rc.stack_signal)
    if ring.ring is not None:
        problem = f"it is traced already, in {os.path.dirname(ring.ring.path)}"
    elif record is None:
        problem = "it keeps no flight record (MPISTRAT_RECORD=0)"
    else:
        try:
            record.trace(directory, rc.trace_bytes)
            return True
        except OSError as error:
            problem = str(error)
    _log.warning("no trace of this rank in %s: %s; the program goes on", directory, problem)
    return False


def _compare_clocks() -> None:
    ranks = topology.of_all_ranks()
    if ranks is not None and len(set(ranks.clocks)) > 1:
        with ranks.lock.collective(_CLOCKS):
            ranks.compare_clocks()
