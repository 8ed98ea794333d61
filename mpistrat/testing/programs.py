"""Programs that tests start: alone or under several ranks, with a time limit."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mpistrat.process.children import running

# A group of its own, not a session: Linux shares cores out between sessions. A rank that waits yields its core only to
# processes of its own session, and three jobs of three ranks took 52 s as sessions, 44 s as groups.
OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


@dataclasses.dataclass
class EndedProgram:
    """How a program ended: its status (None: it was stopped at its limit) and all that it printed."""

    command: list[str]
    status: int | None
    output: str
    seconds: float

    def __str__(self) -> str:
        end = "stopped at its limit" if self.status is None else f"exit status {self.status}"
        return f"$ {shlex.join(self.command)}\n{self.output}\n[{end} after {self.seconds:.1f} s]"

    def check(self) -> EndedProgram:
        """Fail the test, with the whole output, unless the program succeeded."""
        __tracebackhide__ = True
        if self.status != 0:
            pytest.fail(str(self), pytrace=False)
        return self

    def shows(self, *texts: str) -> None:
        """Fail the test, with the whole output, unless each of the texts is in it."""
        __tracebackhide__ = True
        missing = [text for text in texts if text not in self.output]
        if missing:
            pytest.fail(f"The output lacks {missing}:\n{self}")


def run_program(command: list[str], limit: float, cwd: Path | None = None, **environ: str) -> EndedProgram:
    """Run a program to its end, or to its limit in seconds. Standard output and error come as one text."""
    # By names: `dict(os.environ)` in a thread may list PYTEST_CURRENT_TEST and then miss it, which is a KeyError,
    # because pytest takes it away between two tests.
    environment = {name: os.environ.get(name, "") for name in os.environ} | environ
    start = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        **OWN_GROUP,
    ) as process:
        try:
            output = process.communicate(timeout=limit)[0]
            status = process.returncode
        except subprocess.TimeoutExpired:
            status = None
            # A launcher that is asked ends its ranks; one that is killed may leave them behind.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                output = process.communicate(timeout=10)[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output = process.communicate()[0]
    return EndedProgram(command, status, output, time.monotonic() - start)


def run_ranks(
    size: int, *arguments: str | Path, limit: float = 120, cwd: Path | None = None, **environ: str
) -> EndedProgram:
    """Run this Python with some arguments under ``size`` ranks, to its end or to its limit in seconds."""
    return run_program(running("mpistrat", "run", "-n", str(size), *map(str, arguments)), limit, cwd, **environ)
