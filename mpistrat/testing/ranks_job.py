"""A job of some ranks that run the tests for which a session of pytest asks them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

from mpistrat.process import children
from mpistrat.representation import grouped
from mpistrat.testing.channel import WAITS
from mpistrat.testing.programs import OWN_GROUP

_LAUNCHER_S = 5.0  # for the launcher to end a job, once a rank has ended
_END_S = 30.0  # for ranks that have nothing left to do
_LONGEST_FOLDER = 60  # characters: the path of a socket has at most 107
_MOST_OUTPUT = 20_000  # bytes of the output of a job that are shown


class JobEndError(Exception):
    """A job has ended before its test. ``title`` is a line with the cause, and ``text`` has messages of its ranks."""

    def __init__(self, title: str, text: str):
        super().__init__(title)
        self.title, self.text = title, text


class RanksJob:
    """A job of some ranks that collect tests of ``files``, by the arguments of a session of pytest."""

    def __init__(
        self,
        size: int,
        arguments: list[str],
        directory: Path,
        files: list[str],
        environ: dict[str, str],
        *,
        shown: bool,
    ):
        self._size = size
        self._files = files
        short = "/tmp" if len(tempfile.gettempdir()) > _LONGEST_FOLDER else None
        self._folder = tempfile.TemporaryDirectory("", "mpistrat-ranks-", short, ignore_cleanup_errors=True)
        address = os.path.join(self._folder.name, "socket")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(address)
        self._server.listen(size)
        self._channels: dict[Any, int] = {}  # of ranks that run
        self._ended: list[int] = []  # ranks, the first one first
        self._first: list[int] = []  # ranks that the first look saw ended: a launcher kills the others
        self._abort_reasons: dict[int, tuple[str, str]] = {}
        self._tests: list[frozenset[str]] = []  # by rank
        self._collected = ""
        self._output_before = 0  # bytes before this test
        self._output = open(os.path.join(self._folder.name, "output"), "a+b")  # noqa: SIM115 - `end` closes it
        # Like this session, the ranks import from the current directory or do not.
        program = ["-m", "pytest"] if {"", str(directory)} & set(sys.path) else children.words("pytest")
        self._process = subprocess.Popen(
            children.running("mpistrat", "run", "-n", str(size), *program, *arguments, f"--ranks-job={address}"),
            cwd=directory,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=None if shown else self._output,
            stderr=None if shown else subprocess.STDOUT,
            **OWN_GROUP,  # Ctrl-C is for the session, which then ends its jobs
        )

    def runs(self) -> bool:
        """Return whether no rank has ended. Between two tests a rank sends only why it ends the job."""
        return not self._ended and self._process.poll() is None and not connection.wait([*self._channels], 0)

    def wait_for_start(self, seconds: float) -> None:
        """Wait until the ranks have collected their tests. Raise JobEndError if they do not in time."""
        for kind, content in self._messages(seconds):
            if kind == "ready":
                tests, self._collected = content
                self._tests = list(map(frozenset, tests))
                return
        raise self._error("the collection", seconds)

    def run(self, test: str | None, following: str | None, seconds: float) -> Iterator[tuple[str, Any]]:
        """Run a test, and yield its reports and warnings. Raise JobEndError if the job ends or takes too long.

        Without a test, tear down what the last one has left.
        """
        if without := [rank for rank, tests in enumerate(self._tests) if test and test not in tests]:
            title = f"{self._name(*without)} did not collect this test"
            raise JobEndError(title, f"{title}\n{self._collected}")
        self._output_before = self._output.seek(0, os.SEEK_END)
        for channel in self._channels:
            with contextlib.suppress(OSError):  # a rank that has just ended
                channel.send((test, following))
        for kind, content in self._messages(seconds):
            if kind == "done":
                return
            yield kind, content
        raise self._error(test or "the last teardown", seconds)

    def _messages(self, seconds: float) -> Iterator[tuple[str, Any]]:
        """Yield the messages of rank 0, until the job has ended or the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            ready: list[Any] = connection.wait([self._server, *self._channels], 0.2)
            for channel in ready:
                if channel is self._server:
                    self._accept()
                    continue
                try:
                    kind, content = channel.recv()
                except (EOFError, OSError):
                    self._ended.append(self._channels.pop(channel))
                    deadline = min(deadline, time.monotonic() + _LAUNCHER_S)
                    continue
                if kind == "aborts":
                    self._abort_reasons[self._channels[channel]] = content
                elif not self._abort_reasons:  # else the test may still end, but too late
                    yield kind, content
            self._first = self._first or self._ended.copy()
            if not ready and (self._process.poll() is not None or time.monotonic() > deadline):
                return

    def _accept(self) -> None:
        channel = connection.Connection(self._server.accept()[0].detach())
        self._channels[channel] = channel.recv()
        channel.send(self._files)

    def _error(self, activity: str, seconds: float) -> JobEndError:
        """End the job, and return why it has ended."""
        status = self._process.poll()
        self._end_process()
        self._output.seek(max(self._output_before, self._output.seek(0, os.SEEK_END) - _MOST_OUTPUT))
        output = self._output.read().decode(errors="replace").strip()
        alike = grouped((title, rank) for rank, (title, _) in sorted(self._abort_reasons.items()))
        if alike:  # what one rank says first: the others wait for it
            titles = sorted(alike.items(), key=lambda pair: (pair[0].startswith(WAITS), len(pair[1])))
            title = "; ".join(f"{self._name(*ranks)}: {title}" for title, ranks in titles)
        elif self._ended:
            reasons = [line.partition(": ")[2] for line in output.splitlines() if line.startswith("mpistrat run: ")]
            first = sorted(self._first or self._ended)
            title = ": ".join([f"{self._name(*first)} {'have' if len(first) > 1 else 'has'} ended", *reasons[:1]])
        elif status is not None:
            title = f"a job of {self._size} ranks has ended with exit status {status}, in {activity}"
        else:
            title = f"{activity} has taken longer than {seconds:g} s under {self._size} ranks, which did not react"
        texts = [
            title,
            *(f"\n{self._name(rank)}: {title}\n{text}" for rank, (title, text) in sorted(self._abort_reasons.items())),
        ]
        if output:
            texts.append(f"{' output of the job ':-^80}\n{output}")
        self.end(at_once=True)
        return JobEndError(title, "\n".join(texts))

    def _name(self, *ranks: int) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self._size}"

    def end(self, *, at_once: bool) -> None:
        """End the job, ``at_once`` or after the ranks have ended by themselves."""
        for channel in self._channels:
            channel.close()  # a rank that has no test ends then
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        self._end_process()
        self._channels.clear()
        self._ended.append(-1)  # no rank, but `runs` is False from now on
        self._server.close()
        self._output.close()
        self._folder.cleanup()

    def _end_process(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):  # a launcher that is killed may leave its ranks behind
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LAUNCHER_S)
