"""The thread of each rank that notices when its rank waits too long, and reports why.

It never calls MPI and needs nothing from the main thread. Of the ranks that wait, the lowest whose watchdog runs writes
the report, also for other nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mpistrat.launch import launch
from mpistrat.launch.launchers import LAUNCHERS, MPIRUN, key_of
from mpistrat.monitor import accounting, main_thread
from mpistrat.process import failure, program_end
from mpistrat.process.files import write_all
from mpistrat.process.program_end import EndStep
from mpistrat.process.waiting import within
from mpistrat.record import flight_record, read
from mpistrat.record.flight_record import FlightRecord
from mpistrat.runtime import topology
from mpistrat.runtime.environment import rc

if TYPE_CHECKING:
    from mpistrat.monitor.view import JobView, Notices
    from mpistrat.record.read import Record
    from mpistrat.runtime.topology import Topology

_LONGEST_NAP, _SHORTEST_NAP = 5.0, 0.05
_LAST_WORD = 1.0  # seconds for the notice that this rank leaves
_WRITE_TIMEOUT_S = 5.0  # for the file of a report, and for standard error
_ABORTED = 5.0  # seconds that MPI_Abort may take
_SILENCE = 15.0  # seconds after which a node that gives no sign of life counts as silent, at least
_GRACE = 5.0  # seconds that the rank which reports has to end the job, before the others do it
_COMPARE_EVERY, _LOG_EVERY = 5.0, 600.0  # seconds between two comparisons of speed, and of two logs of one
_RAREST = 6  # a rank looks for questions of other nodes at least every 64th time
_SHARE = 1000  # of the time between two comparisons, one part at most is spent in them
_log = logging.getLogger(__name__)


def watch(record: FlightRecord) -> None:
    """Watch the process of a record, from its start on: the start of MPI may hang, too."""
    watchdog = Watchdog(record)
    flight_record.before_exit(watchdog.announce_exit)
    watchdog.start()
    accounting.begin(record)


class Watchdog(threading.Thread):
    """The watchdog of this process."""

    def __init__(self, record: FlightRecord):
        super().__init__(name="mpistrat-watchdog", daemon=True)
        self._record = record
        self._reports: tuple[float, int] = (0.0, 0)  # when the wait began, and how many reports are due
        self._next_comparison = 0.0
        self._still: tuple[object, float] = (None, 0.0)  # where the main thread waits in a library, and since when
        self._every = _LONGEST_NAP
        self._writes = False  # whether this rank writes the reports
        self._notices: Notices | None = None
        self._answered: set[str] = set()
        # Whether the launcher says that it has started all ranks on this node.
        names = (name for launcher in MPIRUN for name in launcher.local_size)
        self._launched_here = any(os.environ.get(name) == str(record.size) for name in names)
        self._idle = 0  # naps while this rank was in no collective for long

    def run(self) -> None:
        """Look from time to time, until the process ends."""
        # A signal that the main thread blocks, to wait for it, must not be delivered here.
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        ready = self._record.size == 1
        while True:
            with contextlib.suppress(ValueError):  # the program may change the environment to what is not a number
                self._every = _nap()
            self._beat()
            self._record.kept_lock(main_thread.kept_lock(self._every))
            try:
                ready = ready or _import_ahead()
                self._look()
                self._compare_speeds()
            except Exception:  # a program must not notice that its watchdog fails
                _log.debug("the watchdog failed", exc_info=True)

    @property
    def _one_node(self) -> bool:
        """Whether this node is known to have all ranks."""
        size = self._record.size
        return self._launched_here or any(len(ranks.nodes) == 1 and ranks.size == size for ranks in topology.several())

    def announce_exit(self) -> None:
        """Tell the other nodes that this rank ends by ``os._exit``: some launchers end all ranks of its node then."""
        if not self._one_node:
            within(_LAST_WORD, self._post_exit)  # the file system may hang

    def _post_exit(self) -> None:
        from mpistrat.monitor import process, view

        own = self._own()
        seen = view.JobView(time.monotonic(), (own,), {own.key: process.gone()}, {}, frozenset())
        self._ready_notices(own).announce_exit(seen)

    def _beat(self) -> None:
        self._record.beat(self._every)
        self._record.write_requested_stacks()

    def _look(self) -> None:
        self._beat()
        since = self._record.in_collective()
        if since != math.inf:
            self._record.moves(None)
        elif (moves := main_thread.moves()) is not None:  # else the last answer stays
            self._record.moves(moves)
        now = time.monotonic()
        waited = now - since
        last, limit = rc.hang_abort_seconds, _limit()
        began, count = self._reports
        if began not in (0.0, since):
            self._reports = 0.0, 0
            if self._notices is not None:
                self._notices.take_down()
        if limit and waited > limit:
            due = 1 + int(math.log2(waited / limit))  # reports come after 1, 2, 4, 8 ... limits
            if began != since or due > count:
                self._reports = since, due
                self._report(since, due)
        if limit and since == math.inf:
            self._look_into_libraries(now, limit)
        if limit and now - self._record.idle_since() > limit / 4:
            self._idle += 1
            if self._idle % self._naps_per_look() == 0:
                self._answer()
        if last and waited > last and (self._writes or waited > last + _GRACE):
            self._end_job(waited)

    def _look_into_libraries(self, now: float, limit: float) -> None:
        """Report once that the main thread waits in C code of a library with collectives of its own, such as torch."""
        place, since = self._still
        if (here := main_thread.place_in_library()) != place:
            self._still = here, now
        elif here is not None and now - since > limit:
            self._still = here, math.inf  # no second report
            from mpistrat.monitor import report

            own = self._own()
            say(report.text_outside(self._see(own, [own], lambda: None), now - since))

    def _report(self, since: float, number: int) -> None:
        from mpistrat.monitor import report, waits
        from mpistrat.monitor.last import write_new

        own, job = self._job()
        self._writes = _is_reporter(own, job)
        if not self._writes:
            return
        notices = None if self._one_node else self._ready_notices(own)
        with notices.looking() if notices else contextlib.nullcontext(lambda: None) as sign:
            seen = self._see(own, job, sign)
            own_now = next(record for record in seen.records if record.key == own.key)
            own_wait = waits.wait_of(own_now, report.waits_in(seen))
            if own_wait is None or self._record.in_collective() != since:
                return  # it goes on
            call = f"{own_wait.token:x}-{own_wait.entry.number}-{number}"
            notices = notices if len(seen.ranks) < own.size else None
            if notices:
                notices.ask(call, seen)
        if notices:
            seen = self._of_all_nodes(notices, seen, since, call)
        stuck = [wait for wait in report.waits_in(seen) if self._writes and not wait.goes_on(seen.now)]
        if not stuck or self._record.in_collective() != since:
            return  # another rank reports, or it goes on
        if len(seen.links) == 1 and all(not wait.missing and 0 in wait.unseen for wait in stuck):
            return  # the missing rank and the chief are on other nodes, which report
        text = report.text(seen, stuck, own.rank)
        try:
            path = within(_WRITE_TIMEOUT_S, lambda: write_new(f"hang-{call}-{own.host}.txt", text))
            text += f"This report is in {path}.\n"
        except FileExistsError:
            return  # another rank of the node was faster
        except OSError as error:
            text += f"This report is in no file: {error}\n"
        say(text)

    def _see(self, own: Record, job: list[Record], sign: Callable[[], None]) -> JobView:
        """Return the view of this node, which takes seconds. ``sign`` is called now and then."""
        from mpistrat.monitor import process, view

        def beat() -> None:
            self._beat()
            sign()

        return view.look([*job, *process.without_record(own, job, self._one_node)], beat)

    def _job(self) -> tuple[Record, list[Record]]:
        """Return the record of this process, and the records of the job's ranks on this node."""
        from mpistrat.monitor import waits

        everyone = read.records()
        own = next((record for record in everyone if record.path == self._record.path), None)
        if own is None:  # /dev/shm is full, say: other ranks cannot see this record
            own = self._own()
            everyone.append(own)
        return own, waits.of_one_job(own, everyone)

    def _own(self) -> Record:
        own = read.parse(self._record.contents(), self._record.path or "")
        assert own is not None
        return own

    def _of_all_nodes(self, notices: Notices, own: JobView, since: float, call: str) -> JobView:
        """Return the views of all nodes that answer, as one. Another rank may be the one that writes the report."""
        self._writes = notices.collects(own)
        if not self._writes:
            return own
        # Other nodes look for questions only when they have been idle for a quarter of the limit.
        patience = max(_SILENCE, 2 * self._every + _limit() / 4) + notices.delay

        def waits() -> bool:
            self._beat()
            return self._record.in_collective() == since

        seen = notices.collect(call, own, self._record.size, patience, waits)
        self._writes = notices.collects(own) and notices.claim(call)
        ranks = _largest_topology()
        return dataclasses.replace(seen, hosts=ranks.hosts if ranks else (), searched=notices.searched)

    def _naps_per_look(self) -> int:
        """Return after how many naps this rank looks for questions of other nodes.

        The first rank of a node looks each time. The next ones look half as often each, in case the first cannot:
        many ranks would slow down a file system that they share.
        """
        ranks = _largest_topology()
        index = _local_rank() if ranks is None else _ranks_of_node(ranks).index(ranks.rank)
        return 1 << min(_RAREST, index)

    def _answer(self) -> None:
        """Post the view of this node if others ask for it. The lowest rank of the node whose watchdog runs does."""
        if self._one_node:
            return
        notices = self._notices or self._ready_notices(self._own())
        if not notices.any():
            return
        own, job = self._job()
        node = [record.rank for record in job]
        if len(node) >= own.size or any(record.rank < own.rank and record.watches for record in job):
            return
        new = [call for call in notices.unanswered(node) if call not in self._answered]
        if new:
            with notices.looking() as sign:
                seen = self._see(own, job, sign)
                for call in new:
                    self._answered.add(call)
                    notices.say(call, seen)

    def _ready_notices(self, own: Record) -> Notices:
        """Return the notices of the job: all its ranks know the launch, or else the random number of a communicator."""
        if self._notices is None:
            from mpistrat.monitor.view import Notices

            key = key_of(os.environ, one_node=False)
            if key is None:
                key = f"{max(own.memberships, key=lambda membership: membership.size).token:x}"
            self._notices = Notices(key, own.rank)
            program_end.register(EndStep.NOTICES, self._notices.leave)
        return self._notices

    def _compare_speeds(self) -> None:
        """Log the ranks of this node that are slower than its others. The first rank of the node does."""
        now, ranks = time.monotonic(), _largest_topology()
        if now < self._next_comparison or ranks is None or ranks.rank != min(_ranks_of_node(ranks)):
            return
        from mpistrat.monitor import stragglers

        self._next_comparison = now + _COMPARE_EVERY
        _, records = self._job()
        job = [stragglers.RankSteps(record.rank, record.host, record.steps) for record in records]
        slow = [rank for rank in stragglers.compare(job) if rank.slow]
        # 1 ms for each rank of the node. This thread must not slow down the rank that it runs in.
        self._next_comparison += _SHARE * (time.monotonic() - now)
        if slow:
            self._next_comparison = now + _LOG_EVERY
            for rank in slow:
                within(_WRITE_TIMEOUT_S, partial(_log.warning, "%s", rank))  # the main thread may wait in a handler

    def _end_job(self, waited: float) -> None:
        from mpi4py import MPI

        say(
            f"mpistrat: ends the job after {waited:.0f} s in one collective (MPISTRAT_HANG_ABORT_SECONDS), with exit "
            f"status {launch.HANG}\n"
        )

        accounting.end(launch.HANG)
        failure.record_end(launch.HANG)

        def leave() -> None:
            time.sleep(_ABORTED)
            os._exit(launch.HANG)

        if self._notices is not None:
            self._notices.remove()
        if not MPI.Is_initialized():
            os._exit(launch.HANG)
        threading.Thread(target=leave, daemon=True).start()
        MPI.COMM_WORLD.Abort(launch.HANG)


def _limit() -> float:
    """Return after how many seconds a hang is reported, 0 for never: before its end, at the latest."""
    return min(rc.hang_seconds, rc.hang_abort_seconds or math.inf)


def _nap() -> float:
    limit = _limit()
    return min(_LONGEST_NAP, max(_SHORTEST_NAP, limit / 4)) if limit else _LONGEST_NAP


def _local_rank() -> int:
    """Return the rank of this process on its node, 0 if its launcher does not tell."""
    values = (os.environ.get(name, "") for launcher in LAUNCHERS for name in launcher.local_rank)
    return next((int(value) for value in values if value.isdecimal()), 0)


def _largest_topology() -> Topology | None:
    """Return the topology with the most ranks, None before there is one."""
    return max(topology.several(), key=lambda ranks: ranks.size, default=None)


def _ranks_of_node(job: Topology) -> tuple[int, ...]:
    return next(ranks for ranks in job.nodes if job.rank in ranks)


def _is_reporter(own: Record, job: list[Record]) -> bool:
    """Return whether this rank reports: no lower rank that runs has waited as long."""
    now, limit = time.monotonic(), _limit()
    return not any(
        record.rank < own.rank
        and record.watches
        and any(now - wait.last.entered > limit for wait in record.waits if wait.last is not None)
        for record in job
    )


def _import_ahead() -> bool:
    """Import the modules of a report: the file system of this package may hang later. Takes 30 ms."""
    from mpistrat.monitor import last, report, view  # noqa: F401

    return True


def say(text: str) -> None:
    """Write to standard error, past Python's own streams: the main thread may hold their lock.

    A pipe that is full and whose reader does not read is given up after a while: the job may still have to be ended.
    """
    with contextlib.suppress(OSError):
        within(_WRITE_TIMEOUT_S, partial(write_all, 2, text.encode(errors="replace")))
