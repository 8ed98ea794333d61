"""The half of `mpistrat check` that talks to nobody, and therefore always ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NoReturn

from mpistrat.cli.check.checks import library
from mpistrat.cli.check.checks.finding import START, Alone, Blame, CheckedJob, CheckOptions, Trouble
from mpistrat.cli.check.checks.mailbox import Inbox, Outbox

_LOOK_AROUND = 0.5  # seconds between two looks at the mailbox
_GATHER = 3.0  # seconds that the others' letters may take
_START = 4.0  # seconds after which ranks with different MPI libraries are not expected to find each other
_END = 5.0  # seconds that the end of a process may take


class _Ended(Exception):
    """The launcher ends the job, and leaves the time to say so: a second with Open MPI."""


class Watcher:
    """Runs the checks of one rank in a process of its own, and learns how that goes.

    Parameters
    ----------
    options : CheckOptions
    rank, size : int
        What the environment says.
    key : str or None
        See `mailbox.key_of`.
    """

    def __init__(self, options: CheckOptions, rank: int, size: int, key: str | None):
        self._options = options
        self._rank, self._size = rank, size
        self._inbox = Inbox(key) if rank == 0 else None
        self._outbox = Outbox(key, rank) if rank else None
        self._stage = "the start of Python"
        self._facts: dict[str, Any] | None = None
        self._told: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._reading = False
        self._gather = _GATHER

    def run(self) -> CheckedJob | None:
        """Run the checks to their end, whatever that is.

        Returns
        -------
        CheckedJob or None
            What is known, on the one rank that reports.
        """
        trouble = self._follow()
        if trouble is None:
            if self._inbox is not None:
                self._inbox.close()
            if self._outbox is not None:
                self._outbox.close()
            if "everyone" not in self._told:
                return None
            everyone = dict(enumerate(self._told["everyone"]))
            return CheckedJob(len(everyone), everyone, self._told["talked"], options=self._options)
        alone = self._told.get("alone")
        self._tell({"facts": self._facts, "trouble": trouble, "alone": alone})
        if self._inbox is None:
            self._wait_for_report(". ".join(alone) if alone else trouble.text)
        return self._report(self._inbox)

    def __enter__(self) -> Watcher:
        self._previous = signal.signal(signal.SIGTERM, self._end)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Only now: MPICH's launcher ends the job when a process that talks to it is killed."""
        signal.signal(signal.SIGTERM, self._previous)
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a file system cannot die
                self._process.wait(1)

    def _end(self, number: int, frame: Any) -> None:
        self._gather = 0.2
        if self._reading:
            self._reading = False
            raise _Ended

    def _follow(self) -> Trouble | None:
        """Read what the checks tell. What kept them from their end, None if nothing did."""
        reader, writer = os.pipe()
        arguments = [str(writer), json.dumps(dataclasses.asdict(self._options))]
        with tempfile.TemporaryFile() as errors, open(reader, "rb", buffering=0) as wire:
            os.set_inheritable(writer, True)
            # The launcher's own descriptors (PMI_FD) are the checks' as well.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mpistrat.cli.check.checks.child", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                close_fds=False,
            )
            os.close(writer)
            try:
                self._reading = True
                trouble = self._read(wire)
                self._reading = False
            except _Ended:
                trouble = self._trouble(Blame.STOOD, "stood in", " when the launcher ended the job")
            if trouble is not None:
                return trouble
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END)  # MPICH says goodbye to its launcher at the very end
            if self._told.get("done"):
                return None
            return self._death(self._process.poll(), errors)

    def _read(self, wire: Any) -> Trouble | None:
        """Read until there is no more, or for too long nothing new. What was the matter then."""
        pending = b""
        end = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(wire, selectors.EVENT_READ)
            while True:
                if selector.select(_LOOK_AROUND):
                    data = wire.read(65536)
                    if not data:
                        return None
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        self._hear(json.loads(line))
                    if "alone" in self._told:
                        return Trouble(Blame.ALONE, "every task is alone")
                    if "trouble" in self._told:
                        blame, text, _ = self._told["trouble"]
                        return self._trouble(blame, f"{text}, in")
                    end = time.monotonic()
                elif self._told.get("done"):
                    return None
                elif time.monotonic() - end > self._options.limit:
                    return self._trouble(Blame.STANDS, "stands in", f" for {self._options.limit:g} s")
                elif self._others_are_in_trouble(time.monotonic() - end):
                    return self._trouble(Blame.STOOD, "stood in", " when others were in trouble")

    def _trouble(self, blame: int, before: str, after: str = "") -> Trouble:
        return Trouble(blame, f"{before} '{self._stage}'{after}", self._stage)

    def _hear(self, told: dict[str, Any]) -> None:
        if "stage" in told:
            self._stage = told["stage"]
        elif "facts" in told:
            if self._facts is None:
                self._tell({"facts": told["facts"]})
            self._facts = told["facts"]
        else:
            self._told.update(told)

    def _tell(self, letter: dict[str, Any]) -> None:
        """Let rank 0 know, whether MPI works or not."""
        if self._inbox is not None:
            self._inbox.letters[0] = letter
        elif self._outbox is not None:
            self._outbox.put(letter)

    def _others_are_in_trouble(self, waited: float) -> bool:
        """Whether it makes no sense to wait any longer, as rank 0 sees it."""
        if self._outbox is not None:
            return self._outbox.announced("stop")
        assert self._inbox is not None
        self._inbox.collect()
        letters = self._inbox.letters
        if any(each.get("trouble") for each in letters.values()) or (
            self._stage == START and waited > _START and _mixed(letters)
        ):
            time.sleep(1)  # the others may be about to tell the same
            self._inbox.announce("stop")
            return True
        return False

    def _death(self, status: int | None, errors: Any) -> Trouble:
        """How the checks ended, and the last that they said."""
        errors.seek(0)
        lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines()]
        lines = [line for line in lines if any(map(str.isalnum, line))]
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        said = f": {' '.join(lines)[-400:]}" if lines else ""
        return self._trouble(Blame.ENDED, "ended in", f" ({how}){said}")

    def _report(self, inbox: Inbox) -> CheckedJob:
        """All that rank 0 can know without MPI."""

        def all_have_told() -> bool:
            inbox.collect()
            return len(inbox.letters) >= self._size and all(
                "trouble" in each for each in inbox.letters.values()
            )

        inbox.announce("stop")
        if inbox.works:
            _until(all_have_told, self._gather)
        letters = inbox.letters
        facts = {rank: each["facts"] for rank, each in letters.items() if each["facts"] is not None}
        alone = next((Alone(*each["alone"]) for each in letters.values() if each.get("alone")), None)
        troubles = {rank: Trouble(*each["trouble"]) for rank, each in letters.items() if each.get("trouble")}
        unheard = Trouble(Blame.UNHEARD, "was not heard of")
        troubles.update({rank: unheard for rank in range(self._size) if rank not in letters})
        if _mixed(letters):
            alone = None  # that is the reason, and not the launcher
        if not facts:
            facts = {0: {"host": os.uname().nodename}}
        return CheckedJob(self._size, facts, {}, troubles, alone, self._options)

    def reported(self) -> None:
        """Rank 0 has printed all: the others may go."""
        if self._inbox is not None:
            self._inbox.announce("read")
            _until(self._inbox.all_have_gone, self._gather)
            self._inbox.close()

    def _wait_for_report(self, trouble: str) -> NoReturn:
        """Stay until rank 0 has printed: a launcher ends the job when one rank leaves it."""
        outbox = self._outbox
        assert outbox is not None
        limit = (self._options.limit if outbox.works else 2.0) + _GATHER
        if _until(lambda: outbox.announced("read"), limit):
            outbox.put(None, goes=True)
            _until(outbox.is_closed, _GATHER)
        else:
            print(f"mpistrat check: rank {self._rank} ({os.uname().nodename}): {trouble}", file=sys.stderr)
        outbox.close()
        sys.exit(1)


def _mixed(letters: dict[int, Any]) -> bool:
    """Whether the ranks load different MPI libraries, and may never find each other."""
    facts = {rank: each["facts"] for rank, each in letters.items()}
    return library.mixed({rank: each["library"] for rank, each in facts.items() if each is not None})


def _until(condition: Callable[[], bool], limit: float) -> bool:
    """Wait for something, so many seconds at most: whether it came."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
