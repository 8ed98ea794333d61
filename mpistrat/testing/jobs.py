"""A session that is not a rank: tests that ask for ranks run in jobs, one for each number of ranks.

In the ranks of a job pytest collects the files of these tests, and then runs the tests for which the session asks, one
after the other. Rank 0 sends its reports, and the session reports them as its own. If a job ends in a test, that test
has failed, and the next one gets a new job.
"""

from __future__ import annotations

import builtins
import time
import warnings
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from mpistrat.testing import other_plugins, requirements

if TYPE_CHECKING:
    from mpistrat.testing.ranks_job import JobEndError, RanksJob

_START_LIMIT_S = 300.0  # for imports from a file system that is slow
_GRACE_AFTER_TIMEOUT_S = 15.0  # after the limit at which the ranks end themselves


class RanksJobs:
    """Runs the tests that ask for ranks, and leaves the others to pytest."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._preferred = config.getoption("--ranks")
        self._jobs: dict[int, RanksJob] = {}
        self._items: dict[int, list[pytest.Item]] = {}  # by the number of ranks
        self._following: dict[str, str] = {}  # a test -> the next one of the same job
        self._last: dict[int, pytest.Item] = {}
        self._not_started: dict[int, JobEndError] = {}

    # --- collection --------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)  # the number of ranks ends the name of a test
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if (sizes := requirements.sizes_of(metafunc.definition)) is not None:
            requirements.parametrize(metafunc, sizes.chosen(self._preferred))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        other_plugins.mark_items(config, items, None)
        requirements.mark_sizes(config, items, None)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if (size := requirements.size_of(item, self._preferred)) is not None:
                items = self._items.setdefault(size, [])
                if items:
                    self._following[requirements.name_of(items[-1])] = requirements.name_of(item)
                items.append(item)
        if self._items and self._config.getoption("usepdb") and not self._config.getoption("collectonly"):
            raise pytest.UsageError(
                "--pdb does not reach the ranks of a job: write breakpoint() in the test under `if comm.rank == 0:`, "
                f"and start `mpistrat run -n {min(self._items)} -m pytest -s --ranks-timeout 0` and the test"
            )

    # --- the run -----------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        size = requirements.size_of(item, self._preferred)
        if size is None:
            return None
        if self._config.pluginmanager.hasplugin("timeout"):  # the ranks have it, too, and name the one that is late
            item.ihook.pytest_timeout_cancel_timer(item=item)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, size, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _reports(self, item: pytest.Item, size: int, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        from _pytest.runner import pytest_runtest_teardown

        from mpistrat.testing.ranks_job import JobEndError

        # This test runs elsewhere, so here nothing tears down what the tests before it have left.
        teardown = pytest.CallInfo.from_call(lambda: pytest_runtest_teardown(item, nextitem), "teardown")
        if teardown.excinfo is not None:
            yield item.ihook.pytest_runtest_makereport(item=item, call=teardown)
        start, phase = time.time(), "call"
        try:
            job = self._job(size)
            name = requirements.name_of(item)
            following = self._following.get(name)
            if hasattr(self._config, "workerinput"):  # pytest-xdist shares the tests out
                same = nextitem is not None and requirements.size_of(nextitem, self._preferred) == size
                following = requirements.name_of(nextitem) if nextitem is not None and same else None
            self._last[size] = item
            for report in self._reports_of_job(job, item, name, following):
                if report.when == "call" or not report.passed:
                    phase = "teardown"
                yield report
        except JobEndError as error:
            yield _failure(item, phase, error.title, error.text, start)
        except BaseException:
            self._end(at_once=True)
            raise

    def _reports_of_job(
        self, job: RanksJob, item: pytest.Item, name: str | None, following: str | None
    ) -> Iterator[pytest.TestReport]:
        """Let a job run a test, or the teardown of ``item`` if ``name`` is None."""
        for kind, content in job.run(name, following, requirements.seconds_of(item) + _GRACE_AFTER_TIMEOUT_S):
            if kind == "warning":
                self._warn(item, *content)
            else:
                yield self._config.hook.pytest_report_from_serializable(config=self._config, data=content)

    def _job(self, size: int) -> RanksJob:
        """Return the job of some ranks. Start it if it does not run."""
        from mpistrat.testing.ranks_job import JobEndError, RanksJob

        if size in self._not_started:
            raise self._not_started[size]
        job = self._jobs.get(size)
        if job is None or not job.runs():
            if job is not None:
                job.end(at_once=True)
            files = list(dict.fromkeys(str(item.path) for item in self._items[size]))
            directory = self._config.invocation_params.dir
            shown = self._config.getoption("capture") == "no"
            try:
                job = RanksJob(size, self._arguments(), directory, files, self._environ(), shown=shown)
                self._jobs[size] = job
                job.wait_for_start(
                    max(_START_LIMIT_S, self._config.getoption("--ranks-timeout")) + _GRACE_AFTER_TIMEOUT_S
                )
            except JobEndError as error:
                self._not_started[size] = error
                raise
            except OSError as error:
                self._not_started[size] = JobEndError(f"a job of {size} ranks has not started: {error}", repr(error))
                raise self._not_started[size] from error
        return job

    def _arguments(self) -> list[str]:
        """Return the arguments of this session for its ranks."""
        worker = getattr(self._config, "workerinput", None)  # of pytest-xdist
        own = self._config.invocation_params.args if worker is None else worker["mainargv"][1:]
        without = {"xdist": "-n0", "_cov": "--no-cov"}
        plugins = self._config.pluginmanager
        return [*map(str, own), *(option for name, option in without.items() if plugins.hasplugin(name))]

    def _environ(self) -> dict[str, str]:
        """Return variables by which coverage measures the ranks, if pytest-cov measures this session."""
        controller = getattr(self._config.pluginmanager.getplugin("_cov"), "cov_controller", None)
        if controller is None or not hasattr(controller.cov.config, "serialize"):  # before coverage 7.10
            return {}
        controller.cov.set_option("run:parallel", True)  # a file for each rank, which pytest-cov then combines
        return {"COVERAGE_PROCESS_CONFIG": controller.cov.config.serialize()}

    def _warn(self, item: pytest.Item, text: str, kind: str, file: str, line: int, *details: Any) -> None:
        """Show a warning of rank 0 among the warnings of this session."""
        category = getattr(builtins, kind, None)
        if category is None:  # of a module that only the ranks may have
            text, category = f"{kind}: {text}", UserWarning
        message = warnings.WarningMessage(category(text), category, file, line)
        names = ("when", "nodeid", "location")
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, **dict(zip(names, details, strict=True))}
        )

    @pytest.hookimpl(wrapper=True, trylast=True)  # before pytest-cov combines what the ranks have written at their end
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            self._tear_down()
            self._end(at_once=False)

    def _tear_down(self) -> None:
        """Let each job tear down what its last test has left, since a session may end before the test that follows."""
        if not self._jobs:
            return
        from mpistrat.testing.ranks_job import JobEndError

        for size, job in self._jobs.items():
            if not job.runs() or (item := self._last.get(size)) is None:
                continue
            start = time.time()
            try:
                reports = list(self._reports_of_job(job, item, None, None))
            except JobEndError as error:
                reports = [_failure(item, "teardown", error.title, error.text, start)]
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)

    def _end(self, *, at_once: bool) -> None:
        while self._jobs:
            self._jobs.popitem()[1].end(at_once=at_once)


def _failure(item: pytest.Item, phase: Any, title: str, text: str, start: float) -> pytest.TestReport:
    """Return the report of a test whose job has ended."""
    from mpistrat.testing.channel import error_shown

    path, line, _ = item.location
    stop = time.time()
    return pytest.TestReport(
        item.nodeid,
        item.location,
        dict.fromkeys(item.keywords, 1),
        "failed",
        error_shown(path, (line or 0) + 1, title, text),
        phase,
        duration=stop - start,
        start=start,
        stop=stop,
    )
