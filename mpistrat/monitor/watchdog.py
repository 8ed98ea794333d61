"""The thread of each rank that notices when its rank waits too long, and reports why.

It never calls MPI and needs nothing from the main thread. Of the ranks of a node that wait, the lowest whose watchdog
runs writes the report.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from mpistrat.runtime.environment import rc
from mpistrat.runtime.process import exit_status
from mpistrat.runtime.record import flight_record
from mpistrat.runtime.record.flight_record import FlightRecord

if TYPE_CHECKING:
    from mpistrat.runtime.record.read import Record
    from mpistrat.runtime.topology import Topology

_LONGEST_NAP, _SHORTEST_NAP = 5.0, 0.05
_SAMPLES = 5  # of the main thread, when it is in no collective
_ABORTED = 5.0  # seconds that MPI_Abort may take
_GRACE = 5.0  # seconds that the rank which reports has to end the job, before the others do it
_COMPARE_EVERY, _LOG_EVERY = 5.0, 600.0  # seconds between two comparisons of speed, and of two logs of one
_SHARE = 1000  # of the time between two comparisons, one part at most is spent in them
_log = logging.getLogger(__name__)
_watchdog: Watchdog | None = None


def start(topology: Topology) -> None:
    """Watch the collectives of these ranks, if there are several and this process has a record."""
    global _watchdog
    record = flight_record.current()
    if record is None or topology.size == 1:
        return
    if _watchdog is None:
        _watchdog = Watchdog(record)
        _watchdog.start()
    _watchdog.topologies.add(topology)


class Watchdog(threading.Thread):
    """The watchdog of this process. Make it by `start`.

    Attributes
    ----------
    topologies : weakref.WeakSet of Topology
        The ranks whose collectives are watched.
    """

    def __init__(self, record: FlightRecord):
        super().__init__(name="mpistrat-watchdog", daemon=True)
        self.topologies: weakref.WeakSet[Topology] = weakref.WeakSet()
        self._record = record
        self._reports: tuple[float, int] = (0.0, 0)  # when the wait began, and how many reports are due
        self._next_comparison = 0.0
        self._writes = False  # whether this rank writes the reports

    def run(self) -> None:
        """Look from time to time, until the process ends."""
        # A signal that the main thread blocks, to wait for it, must not be delivered here.
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        while True:
            every = (
                min(_LONGEST_NAP, max(_SHORTEST_NAP, rc.hang_seconds / 4))
                if rc.hang_seconds
                else _LONGEST_NAP
            )
            self._record.beat(every)
            time.sleep(every)
            try:
                self._look(every)
                self._compare_speeds()
            except Exception:  # a program must not notice that its watchdog fails
                _log.debug("the watchdog failed", exc_info=True)

    def _look(self, every: float) -> None:
        self._record.beat(every)
        taken = any(each.taken for each in list(self.topologies))
        self._record.moves(None if taken else _main_thread_moves())
        since = self._record.in_collective() if taken else math.inf
        waited = time.monotonic() - since
        last = rc.hang_abort_seconds
        limit = min(rc.hang_seconds, last or math.inf)  # the report comes before the end
        if limit and waited > limit:
            due = 1 + int(math.log2(waited / limit))
            began, made = self._reports
            if began != since or due > made:
                self._reports = since, due
                self._report(waited, due)
        if last and waited > last and (self._writes or waited > last + _GRACE):
            self._end_job(waited)

    def _report(self, waited: float, number: int) -> None:
        from mpistrat.monitor import folder, report, waits
        from mpistrat.runtime.record import read

        everyone = read.records()
        own = next((each for each in everyone if each.path == self._record.path), None)
        if own is None:  # /dev/shm is full, say: other ranks cannot see this record
            own = read.parse(self._record.contents())
            assert own is not None
            everyone.append(own)
        job = waits.of_one_job(own, everyone)
        self._writes = _is_mine(own, job)
        if not self._writes:
            return
        seen = report.view(job)
        found = report.waits_in(seen)
        if not found or not waits.wait_of(next(each for each in seen.records if each.pid == own.pid), found):
            return  # it goes on
        if all(not wait.missing and 0 in wait.unseen for wait in found):
            return  # the missing rank and the chief are on other nodes, which report
        text = report.text(seen, found, own.rank)
        first = found[0]
        try:
            path = folder.write_new(
                f"hang-{first.token:x}-{first.entry.number}-{number}-{own.host}.txt", text
            )
            text += f"This report is in {path}.\n"
        except FileExistsError:
            return  # another rank of the node was faster
        except OSError as error:
            text += f"This report is in no file: {error}\n"
        _say(text)

    def _compare_speeds(self) -> None:
        """Log the ranks of this node that are slower than its others. The first rank of the node does."""
        now = time.monotonic()
        if now < self._next_comparison or not any(
            each.rank == min(_node(each)) for each in list(self.topologies)
        ):
            return
        from mpistrat.monitor import stragglers, waits
        from mpistrat.runtime.record import read

        self._next_comparison = now + _COMPARE_EVERY
        everyone = read.records()
        own = next((each for each in everyone if each.path == self._record.path), None)
        if own is None:
            return
        job = [
            stragglers.Measured(each.rank, each.host, each.steps) for each in waits.of_one_job(own, everyone)
        ]
        slow = [each for each in stragglers.compare(job) if each.slow]
        # 1 ms for each rank of the node. This thread must not slow down the rank that it runs in.
        self._next_comparison += _SHARE * (time.monotonic() - now)
        if slow:
            self._next_comparison = now + _LOG_EVERY
            for each in slow:
                _log.warning("%s", each)

    def _end_job(self, waited: float) -> None:
        from mpi4py import MPI

        _say(
            f"mpistrat: ends the job after {waited:.0f} s in one collective (MPISTRAT_HANG_ABORT_SECONDS), with exit "
            f"status {exit_status.RESTART}\n"
        )

        def leave() -> None:
            time.sleep(_ABORTED)
            os._exit(exit_status.RESTART)

        threading.Thread(target=leave, daemon=True).start()
        MPI.COMM_WORLD.Abort(exit_status.RESTART)


def _node(topology: Topology) -> tuple[int, ...]:
    return next(ranks for ranks in topology.nodes if topology.rank in ranks)


def _is_mine(own: Record, job: list[Record]) -> bool:
    """Return whether this rank reports: no lower rank that runs has waited as long."""
    now = time.monotonic()
    return not any(
        each.rank < own.rank
        and each.lives
        and now - each.heartbeat <= 2 * each.beat_every
        and any(now - wait.last.entered > rc.hang_seconds for wait in each.waits if wait.last is not None)
        for each in job
    )


def _main_thread_moves() -> bool:
    """Return whether the main thread runs Python code, not one function in C."""
    import dis

    main = threading.main_thread().ident
    seen = set()
    for _ in range(_SAMPLES):
        frame = sys._current_frames().get(main or 0)
        if frame is None:
            return False
        seen.add((id(frame), frame.f_lasti))
        instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if len(seen) > 1 or instruction.startswith(("JUMP", "POP_JUMP", "RESUME")):
            return True
        time.sleep(0.002)
    return False


def _say(text: str) -> None:
    """Write to standard error, past Python's own streams: the main thread may hold their lock."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
