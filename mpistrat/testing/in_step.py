"""A rank of pytest: all ranks run the same tests, and all of them know how each test went.

The ranks exchange their verdicts when a test has run and when it is torn down. What failed anywhere fails everywhere,
rank 0 shows the traceback of every rank that failed, and the run goes on. A rank that failed waits only
``--ranks-patience`` seconds: the others may stand in a collective call that it never reached. It then shows its
traceback and ends the job. A test that takes longer than ``--ranks-timeout`` shows where each rank stands, and ends the
job as well. Only rank 0 reports: to the terminal, or to the session outside that has started this job.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np
import pytest
from _pytest.runner import pytest_runtest_teardown
from mpi4py import MPI

from mpistrat.process.own_files import is_own
from mpistrat.process.waiting import within
from mpistrat.record import flight_record
from mpistrat.representation import grouped
from mpistrat.runtime.process_record import start_record
from mpistrat.testing.channel import WAITS, RankEnd, error_shown
from mpistrat.testing.requirements import OPTIONS, name_of, needs_ranks, seconds_of

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
_COLLECTION_LIMIT_S = 300.0  # at least: a file system may be slow in imports
_ABORT_S = 5.0
_END = "the end of the run"
_OTHER_RANKS_REPORT_S = 2.0  # for the other ranks to show where they stand as well
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


class Outcome(NamedTuple):
    """How a test went on a rank: its verdict, its error as a line and as a text, and the place of the error."""

    verdict: str = "passed"
    message: str = ""
    text: str = ""
    path: str = ""
    line: int = 0

    @classmethod
    def of(cls, report: pytest.TestReport) -> Outcome:
        """Return the outcome in a report. The traceback of a rank other than 0 gets its output beside it."""
        expected = hasattr(report, "wasxfail")
        if report.passed:
            return cls("xpassed") if expected else cls()
        if report.skipped and not expected:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            return cls("skipped", text=reason)
        crash = getattr(report.longrepr, "reprcrash", None)
        text = report.longreprtext
        if RANK > 0:
            text += "".join(f"\n{f' {name} ':-^80}\n{content}" for name, content in report.sections)
        verdict = "xfailed" if expected else "failed"
        verdict += f" in {report.when}" * (report.when != "call")
        if crash is None:
            return cls(verdict, text.partition("\n")[0], text, report.location[0], (report.location[1] or 0) + 1)
        return cls(verdict, crash.message, text, crash.path, crash.lineno)

    @property
    def comparable(self) -> tuple[str, str]:
        """The verdict, and the text without addresses, which differ between ranks."""
        return self.verdict, re.sub("0x[0-9a-f]+", "", self.text)


def merge(outcomes: list[Outcome]) -> Outcome:
    """Return the outcomes of all ranks as one. A text that several ranks have is in it once."""
    alike = grouped((outcome.comparable, rank) for rank, outcome in enumerate(outcomes))
    texts, summary = [], Outcome("failed", "the ranks disagree")
    for ranks in sorted(alike.values(), key=lambda ranks: outcomes[ranks[0]].verdict.startswith("xfailed")):
        outcome = outcomes[ranks[0]]
        name = f"{outcome.verdict} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {SIZE}"
        texts.append(f"{f' {name} ':-^100}\n{outcome.text}".rstrip())
        if outcome.verdict.startswith(("failed", "xfailed")) and not summary.path:
            summary = outcome._replace(message=f"{name}: {outcome.message}")
    return summary._replace(text="\n\n".join(texts))


class InStep:
    """Keeps all ranks of this run in step: they exchange their outcomes at the same points."""

    def __init__(self, config: pytest.Config, outside: RankEnd | None, leave: Callable[[], None]):
        self._config = config
        self._outside = outside
        self._leave = leave  # called where no test or option of this run is of this plugin
        self._comm = MPI.COMM_WORLD.Dup()
        self._patience = config.getoption("--ranks-patience")
        self._timeout = config.getoption("--ranks-timeout") or math.inf
        self._stderr = os.dup(2)  # the real one: pytest captures the other
        self._collect_errors: list[str] = []
        self._in_time = threading.Lock()  # never released after a deadline: the main thread then does no more
        self._expect("the collection", max(_COLLECTION_LIMIT_S, self._timeout))
        threading.Thread(target=self._watch, name="mpistrat-ranks-timeout", daemon=True).start()
        if outside is None and SIZE > 1:
            flight_record.before_exit(self._abort_early_exit)

    # --- verdicts ----------------------------------------------------------------------------------------

    def exchange(self, point: str, own: Outcome) -> list[Outcome]:
        """Return the outcome of every rank. A rank that did not pass waits for a limited time."""
        with self._in_time:
            limit = math.inf if own.verdict in ("passed", "xpassed") else time.monotonic() + self._patience
        # Most have passed: one small collective call, and a second one only where a rank has more to send.
        encoded = b"" if own == Outcome() else json.dumps(own).encode()
        head = np.array([zlib.crc32(point.encode()), len(encoded)], np.int64)
        heads = np.empty((SIZE, 2), np.int64)
        title, text = f"{own.verdict} at {point}", own.text
        if limit < math.inf:
            title, text = f"{own.verdict}: {own.message}", f"{point}\n{own.text}"
        if not _wait(self._comm.Iallgather(head, heads), limit):
            self._abort(
                title,
                f"{text}\nThe others did not come so far within {self._patience:g} s: they may wait for this rank.",
            )
        if (heads[:, 0] != heads[0, 0]).any():
            self._abort(title, f"{text}\nThe ranks are out of step.")
        counts = heads[:, 1]
        if not counts.any():
            return [Outcome()] * SIZE
        encoded_by_all = np.empty(counts.sum(), np.uint8)
        _wait(self._comm.Iallgatherv(np.frombuffer(encoded, np.uint8), [encoded_by_all, counts]), math.inf)
        texts = np.split(encoded_by_all, np.cumsum(counts)[:-1])
        return [Outcome(*json.loads(encoded.tobytes())) if encoded.size else Outcome() for encoded in texts]

    def _abort(self, title: str, text: str) -> None:
        sys.stdout.flush()
        self._send_reason(title, text)
        time.sleep(1)  # for the launcher to pass it on, and for others that failed as well
        self._comm.Abort(1)

    def _abort_early_exit(self) -> None:
        """End the job where a rank leaves by ``os._exit`` before all tests have run.

        Hydra kills the other ranks then, and returned the status 0 of this one in 6 of 12 runs: the suite seemed to
        pass.
        """
        _, activity, _ = self._deadline
        if activity not in ("", _END):
            self._send_reason("ended by os._exit", activity)
            within(_ABORT_S, lambda: self._comm.Abort(1))  # this may be the end of a rank whose MPI hangs

    def _send_reason(self, title: str, text: str) -> None:
        """Show why this rank ends the job."""
        if self._outside is not None:
            self._outside.send("aborts", (title, text))
            return
        # In one piece: no output of another rank comes between.
        block = f"\n{'=' * 100}\nrank {RANK} of {SIZE}: {title}\n{text.rstrip()}\n{'=' * 100}\n"
        rest = block.encode(errors="backslashreplace")
        while rest:
            rest = rest[os.write(self._stderr, rest) :]

    # --- time --------------------------------------------------------------------------------------------

    def _expect(self, activity: str, seconds: float) -> None:
        """End the job unless this method is called again within some seconds."""
        with self._in_time:
            self._deadline = time.monotonic() + seconds, activity, seconds

    def _watch(self) -> None:
        """Wait until a deadline has passed, then show where this rank stands, and end it."""
        while True:
            with self._in_time:
                end, activity, seconds = self._deadline
                if time.monotonic() > end:
                    self._end_late(activity, seconds)
            time.sleep(0.2)

    def _end_late(self, activity: str, seconds: float) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        location, stacks = "", []
        for thread, frame in sys._current_frames().items():
            if thread != threading.get_ident():
                stack = traceback.extract_stack(frame)
                users = [number for number, entry in enumerate(stack) if _is_users(entry.filename)]
                if thread == threading.main_thread().ident and not users and stack[-1].name == _wait.__name__:
                    location = WAITS
                    continue
                users = users or [0, -1]
                stacks += [f"{names.get(thread, thread)}:\n", *traceback.format_list(stack[users[0] :])]
                if thread == threading.main_thread().ident:
                    last = stack[users[-1]]
                    location = f"at {os.path.basename(last.filename)}:{last.lineno} in {last.name} "
        self._send_reason(f"{location}after {seconds:g} s", "".join([f"{activity}\n", *stacks]))
        time.sleep(_OTHER_RANKS_REPORT_S)
        self._deadline = math.inf, "", math.inf
        os._exit(1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._expect(item.nodeid, seconds_of(item))
        try:
            return (yield)
        finally:
            self._expect("", math.inf)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Take over from the thread of pytest-timeout, which would end this rank and not say which rank is late."""
        if settings.method != "thread":
            return None
        self._expect(item.nodeid, min(settings.timeout, seconds_of(item)))
        item.cancel_timeout = lambda: self._expect(item.nodeid, seconds_of(item))  # type: ignore[attr-defined]
        return True

    # --- collection --------------------------------------------------------------------------------------

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collect_errors.append(report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep only the tests that all ranks have collected."""
        items = {name_of(item): item for item in session.items}
        own = Outcome(message="\n".join(items), text="\n".join(self._collect_errors))
        outcomes = self.exchange("collection", own)
        self._expect("", math.inf)
        if self._outside is None and not self._comm.allreduce(self._is_asked_for(session.items), MPI.LOR):
            self._config.pluginmanager.unregister(self)
            self._leave()
            return
        if self._outside is None:  # before a crash, after which a launcher ends all: the last line names the test
            self._config.option.verbose = self._config.option.verbose or 1
            start_record(RANK, SIZE)  # by which `mpistrat run` names the rank that ends first
        self._names_by_rank = [outcome.message.splitlines() for outcome in outcomes]
        everywhere = set.intersection(*map(set, self._names_by_rank))
        for rank, names in enumerate(self._names_by_rank):
            text = "\n".join([outcomes[rank].text, *(name for name in names if name not in everywhere)])
            outcomes[rank] = Outcome("collected", text=text)
        self._collected = merge(outcomes).text
        if self._outside is None and any(outcome.comparable != outcomes[RANK].comparable for outcome in outcomes):
            pytest.exit("The ranks did not collect the same tests.\n" + self._collected, returncode=2)
        session.items[:] = [items[name] for name in self._names_by_rank[0] if name in everywhere]

    def _is_asked_for(self, items: list[pytest.Item]) -> bool:
        """Return whether a test or an option of this run is of this plugin."""
        return any(map(needs_ranks, items)) or any(
            self._config.getoption(name) != default for name, (default, *_) in OPTIONS.items()
        )

    # --- the run -----------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the tests that the session outside asks for."""
        if self._outside is None:
            return None
        items = {name_of(item): item for item in session.items}
        self._tell_outside("ready", (self._names_by_rank, self._collected))
        item = following = None
        while (request := self._outside.receive()) is not None:
            last, announced = item, following
            item, following = (items.get(name) for name in request)
            if announced not in (item, None):  # what the last test has left for a test that did not follow
                teardown = pytest.CallInfo.from_call(functools.partial(pytest_runtest_teardown, last, item), "teardown")
                report = self._config.hook.pytest_runtest_makereport(item=item or last, call=teardown)
                if report.failed:
                    self._config.hook.pytest_runtest_logreport(report=report)
            if item is not None:
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._tell_outside("done", None)
        return True

    def _tell_outside(self, kind: str, content: object) -> None:
        if self._outside is not None and RANK == 0:
            with self._in_time:
                self._outside.send(kind, content)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.passed and call.when == "setup":
            return report  # the call follows
        own = Outcome.of(report)
        if own.verdict == "skipped" and not needs_ranks(item):
            own = Outcome()  # such a test may run on one rank only
        outcomes = self.exchange(f"{name_of(item)}, {'teardown' if call.when == 'teardown' else 'call'}", own)
        verdicts = {outcome.verdict for outcome in outcomes}
        if len(verdicts) > 1 or (report.failed and len({outcome.comparable for outcome in outcomes}) > 1):
            merged = merge(outcomes)
            report.longrepr = error_shown(merged.path, merged.line, merged.message, merged.text)
            if all(verdict.startswith(("xfailed", "xpassed")) for verdict in verdicts):
                report.outcome = "skipped"
                return report
            report.outcome = "failed"
            if hasattr(report, "wasxfail"):
                del report.wasxfail
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._outside is not None:
            hook = self._config.hook.pytest_report_to_serializable
            self._tell_outside("report", hook(config=self._config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if self._outside is not None:
            shown = str(warning_message.message), warning_message.category.__name__
            source = warning_message.filename, warning_message.lineno
            self._tell_outside("warning", (*shown, *source, when, nodeid, location))

    def pytest_unconfigure(self) -> None:
        # The ranks whose program fails may be ended at once: rank 0 has to have reported before.
        sys.stdout.flush()
        self._expect(_END, self._timeout)
        self.exchange("the end", Outcome())

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Show the cause that has ended the run on this rank, unless the run has ended on all ranks."""
        crash = excinfo.getrepr(style="native").reprcrash  # the other styles parse each file
        self.exchange("an end of the run", Outcome("ended", excinfo.exconly(), str(crash)))

    def pytest_internalerror(self, excrepr: object) -> None:
        if SIZE > 1:
            self._abort("an error of pytest itself", str(excrepr))


def _wait(request: MPI.Request, limit: float) -> bool:
    """Wait until a request is complete, and return whether it is before the limit."""
    start = time.monotonic()
    try:
        while not request.Test():
            now = time.monotonic()
            if now > limit:
                return False
            time.sleep(0 if now - start < 0.002 else 0.001)  # spin for 2 ms, then leave the core to other ranks
    except pytest.fail.Exception:  # pytest-timeout fires once, also in a rank that only waits for a slow one
        return _wait(request, limit)
    return True


def _is_users(file: str) -> bool:
    """Return whether a file is neither of a library nor of this package."""
    return not (file.startswith((*_LIBRARIES, "<")) or is_own(file))
