"""``mpistrat check``: find what will break a job. Its process never calls MPI, and therefore always ends."""

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

import click

from mpistrat.bench import under_ranks
from mpistrat.cli import table
from mpistrat.cli.check.checks import CHECKS, mixed
from mpistrat.cli.check.job import START, Blame, Check, CheckedJob, CheckOptions, Finding, Severity, Trouble
from mpistrat.cluster_resolver import resolve
from mpistrat.launch.launchers import key_of
from mpistrat.process import children
from mpistrat.runtime.environment import rc
from mpistrat.runtime.without_mpi.board import FileQueue, Inbox

_LOOK_AROUND = 0.5  # seconds between two reads of the mailbox
_GATHER = 3.0  # seconds to wait for messages of other ranks
_START = 4.0  # seconds after which ranks with different MPI libraries count as unable to start together
_END = 5.0  # seconds to wait for the end of a process
_ENDING = 0.2  # seconds to wait for it when the launcher ends the job


class _LauncherEndsJob(Exception):
    """The launcher ends the job. The time for a report is short: one second with Open MPI."""


class Watcher:
    """The watcher of one rank: it runs the checks in a child process and follows them.

    Rank and size are as the environment gives them. For ``key`` see `launchers.key_of`.
    """

    def __init__(self, options: CheckOptions, rank: int, size: int, key: str | None):
        self._options = options
        self._rank, self._size = rank, size
        self._inbox = Inbox(key) if rank == 0 else None
        self._outbox = FileQueue(key, rank) if rank else None
        self._stage = "the start of Python"
        self._facts: dict[str, Any] | None = None
        self._outcome: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._reading = False
        self._gather = _GATHER

    def run(self) -> CheckedJob | None:
        """Run the checks until they end, fail or hang. Return the facts of all ranks on the rank that reports."""
        trouble = self._follow()
        if trouble is None:
            if self._inbox is not None:
                self._inbox.close()
            if self._outbox is not None:
                self._outbox.close()
            if "everyone" not in self._outcome:
                return None
            everyone = dict(enumerate(self._outcome["everyone"]))
            return CheckedJob(len(everyone), everyone, self._outcome["exchanged"], options=self._options)
        alone = self._outcome.get("alone")
        self._tell({"facts": self._facts, "trouble": trouble, "alone": alone})
        if self._inbox is None:
            self._wait_for_report(". ".join(alone) if alone else trouble.text)
        return self._report(self._inbox)

    def __enter__(self) -> Watcher:
        self._previous = signal.signal(signal.SIGTERM, self._end)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill the checks after the report: MPICH's launcher ends the job when a process of MPI is killed."""
        signal.signal(signal.SIGTERM, self._previous)
        if self._process is not None:
            self._process.kill()
            # A process cannot be killed while it hangs in a file system.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)

    def _end(self, number: int, frame: Any) -> None:
        self._gather = 0.2  # the launcher kills this process soon
        if self._reading:
            self._reading = False
            raise _LauncherEndsJob

    def _follow(self) -> Trouble | None:
        """Start the checks and read their messages. Return what went wrong, or None."""
        reader, writer = os.pipe()
        arguments = [str(writer), json.dumps(dataclasses.asdict(self._options))]
        with tempfile.TemporaryFile() as errors, open(reader, "rb", buffering=0) as wire:
            os.set_inheritable(writer, True)
            # The checks inherit the descriptors of the launcher (PMI_FD): MPI needs them.
            self._process = subprocess.Popen(
                children.running("mpistrat.cli.check.child", *arguments),
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
            except _LauncherEndsJob:
                trouble = self._ended_with_job(errors)
            if trouble is not None:
                return trouble
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END)  # MPICH contacts its launcher at the very end
            if self._outcome.get("done"):
                return None
            return self._death(self._process.poll(), errors)

    def _read(self, wire: Any) -> Trouble | None:
        """Read messages until the end or the time limit. Return what went wrong, or None."""
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
                    if "alone" in self._outcome:
                        return Trouble(Blame.ALONE, "every task is alone")
                    if "trouble" in self._outcome:
                        blame, text, _ = self._outcome["trouble"]
                        return self._trouble(blame, f"{text}, in")
                    end = time.monotonic()
                elif self._outcome.get("done"):
                    return None
                elif time.monotonic() - end > self._options.limit:
                    return self._trouble(Blame.STUCK, "no progress in", f" for {self._options.limit:g} s")
                elif self._others_are_in_trouble(time.monotonic() - end):
                    return self._trouble(Blame.WAS_STUCK, "was in", " when other ranks failed")

    def _trouble(self, blame: int, before: str, after: str = "") -> Trouble:
        return Trouble(blame, f"{before} '{self._stage}'{after}", self._stage)

    def _hear(self, message: dict[str, Any]) -> None:
        if "stage" in message:
            self._stage = message["stage"]
        elif "facts" in message:
            if self._facts is None:
                self._tell({"facts": message["facts"]})
            self._facts = message["facts"]
        else:
            self._outcome.update(message)

    def _tell(self, message: dict[str, Any]) -> None:
        """Send a message to rank 0 without MPI."""
        if self._inbox is not None:
            self._inbox.messages[0] = message
        elif self._outbox is not None:
            self._outbox.put(message)

    def _others_are_in_trouble(self, waited: float) -> bool:
        """Return whether waiting is useless because other ranks failed. Rank 0 decides."""
        if self._outbox is not None:
            return self._outbox.announced("stop")
        assert self._inbox is not None
        self._inbox.collect()
        messages = self._inbox.messages
        if any(message.get("trouble") for message in messages.values()) or (
            self._stage == START and waited > _START and _mixed(messages)
        ):
            time.sleep(1)  # other ranks may be about to report as well
            self._inbox.announce("stop")
            return True
        return False

    def _ended_with_job(self, errors: Any) -> Trouble:
        """Return the trouble of this rank when the launcher ended the job, perhaps because this rank's checks ended.

        Its signal may come before their end is seen. Some launchers send it to the checks, too.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert self._process is not None
            status = self._process.wait(_ENDING)
            if status not in (0, -signal.SIGTERM, -signal.SIGKILL):
                return self._death(status, errors)
        return self._trouble(Blame.WAS_STUCK, "was in", " when the launcher ended the job")

    def _death(self, status: int | None, errors: Any) -> Trouble:
        """Return the exit status of the checks and their last output."""
        errors.seek(0)
        lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines()]
        lines = [line for line in lines if any(map(str.isalnum, line))]
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        output = f": {' '.join(lines)[-400:]}" if lines else ""
        return self._trouble(Blame.ENDED, "ended in", f" ({how}){output}")

    def _report(self, inbox: Inbox) -> CheckedJob:
        """Return the facts that rank 0 can get without MPI."""

        def all_have_told() -> bool:
            inbox.collect()
            arrived = inbox.messages.values()
            return len(arrived) >= self._size and all("trouble" in message for message in arrived)

        inbox.announce("stop")
        if inbox.works:
            _until(all_have_told, self._gather)
        messages = inbox.messages
        facts = {rank: message["facts"] for rank, message in messages.items() if message["facts"] is not None}
        reason = next((message["alone"] for message in messages.values() if message.get("alone")), None)
        # Where the libraries differ, they are the cause, not the launcher.
        alone = Finding(reason[0], Severity.FIX, reason[1]) if reason and not _mixed(messages) else None
        troubles = {rank: Trouble(*message["trouble"]) for rank, message in messages.items() if message.get("trouble")}
        unheard = Trouble(Blame.UNHEARD, "sent no report")
        troubles.update({rank: unheard for rank in range(self._size) if rank not in messages})
        if not facts:
            facts = {0: {"host": os.uname().nodename}}
        return CheckedJob(self._size, facts, {}, troubles, alone, self._options)

    def reported(self) -> None:
        """Let the other ranks end, after rank 0 has printed the report."""
        if self._inbox is not None:
            self._inbox.announce("read")
            _until(self._inbox.all_have_gone, self._gather)
            self._inbox.close()

    def _wait_for_report(self, trouble: str) -> NoReturn:
        """Wait until rank 0 has printed: a launcher ends the job when one rank ends."""
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


def _mixed(messages: dict[int, Any]) -> bool:
    """Return whether the ranks load different MPI libraries: then MPI may never start."""
    return mixed({rank: message["facts"]["library"] for rank, message in messages.items() if message["facts"]})


def _until(condition: Callable[[], bool], limit: float) -> bool:
    """Wait for a condition, at most ``limit`` seconds. Return whether it became true."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


_COLOURS = {"ok": "green", "look": "yellow", "fix": "bold red", "not checked": "dim"}


@click.command()
@click.option(
    "--data",
    metavar="DIR",
    help="The directory where the program reads data and writes checkpoints.  [default: rc.scratch]",
)
@click.option(
    "--limit",
    type=click.FloatRange(1),
    default=60,
    show_default=True,
    help="Seconds after which a rank without progress is reported.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--gpu-direct",
    is_flag=True,
    help="Only test which operations of the MPI library work on GPU memory, and store the result.",
)
@click.option("--site", is_flag=True, help="Only print a site file for this machine: --site > FILE")
def command(data: str | None, limit: float, as_json: bool, gpu_direct: bool, site: bool) -> None:
    """Find what will break a job. Start it like the job itself.

    \b
    srun -N 3 --ntasks-per-node=4 --mpi=pmix python -m mpistrat check --data /scratch/me
    mpistrat run -n 4 -m mpistrat check

    mpistrat check --gpu-direct  # or under srun: once for each kind of node with GPUs

    Rank 0 prints the findings and what to do. The exit status is 1 if anything must be fixed. A rank that
    cannot communicate with the others is reported, and the others wait for it no longer than the limit.
    """
    if gpu_direct:
        raise SystemExit(_probe(limit))
    try:
        if site:
            from mpistrat.cli.check.site import text  # a late import: seldom needed

            click.echo(text(), nl=False)
            return
        data = data or os.path.expandvars(os.path.expanduser(rc.scratch)) or None
        placement = resolve().placement
    except (RuntimeError, ValueError) as error:
        raise click.ClickException(f"the environment of this process cannot be read: {error}") from error
    one_node = placement.local_size == placement.size
    key = key_of(os.environ, one_node=one_node) if placement.size > 1 else None
    with Watcher(CheckOptions(data, limit), placement.rank, placement.size, key) as watcher:
        job = watcher.run()
        if job is None:
            return
        findings = [(check, check.judge(job)) for check in CHECKS]
        must_fix = any(finding.severity is Severity.FIX for _, finding in findings)
        if as_json:
            _print_json(job.size, findings, must_fix)
        else:
            _print_table(findings, must_fix)
        watcher.reported()
    if must_fix:
        raise SystemExit(1)


def _probe(limit: float) -> int:
    """Run the GPU probe: on these ranks, or on two new ones if there is one rank. The MPI library may crash."""
    if under_ranks.under_several_ranks():
        from mpistrat.cli.check import gpu_probe

        return gpu_probe.main(limit)
    program = under_ranks.command(2, None, ["-m", "mpistrat.cli.check.gpu_probe"])
    try:
        status = subprocess.run(program, env=under_ranks.environment(), timeout=limit).returncode
    except subprocess.TimeoutExpired:
        click.echo(f"the probe did not end within {limit:g} s and was stopped")
        return 1
    if status not in (0, 1):
        click.echo(f"the probe ended with status {status}: device pointers will not be passed to this MPI library")
    return min(1, abs(status))


def _print_json(ranks: int, findings: list[tuple[Check, Finding]], must_fix: bool) -> None:
    checks = {
        check.name: {"found": finding.text, "verdict": finding.severity.value, "advice": finding.advice}
        for check, finding in findings
    }
    click.echo(json.dumps({"ranks": ranks, "must fix": must_fix, "checks": checks}, indent=2))


def _print_table(findings: list[tuple[Check, Finding]], must_fix: bool) -> None:
    from rich.markup import escape

    console = table.console()
    rows = table.grid("check", "found", "verdict", "what to do", apart=True)
    for check, finding in findings:
        verdict = finding.severity.value
        coloured = f"[{_COLOURS[verdict]}]{verdict}[/{_COLOURS[verdict]}]"
        rows.add_row(check.title, escape(finding.text), coloured, escape(finding.advice))
    console.print(rows)
    count = sum(finding.severity.value == "fix" for _, finding in findings)
    console.print(f"{count} to fix" if must_fix else "nothing to fix")
