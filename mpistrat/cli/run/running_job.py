"""A running job: its signals, its end and its exit status, and the files that ranks leave behind.

MPI libraries unlink their shared memory late, some only when the program ends. Left-over files use memory until the
machine restarts, and soon fill the small /dev/shm of a container.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from mpistrat.cli.run.job import Job
from mpistrat.cli.run.streams import Death, LauncherMessages, Streams
from mpistrat.launch.launchers import rank_of, ranks_below
from mpistrat.process import children, standby
from mpistrat.record import layout, lifetime
from mpistrat.record.layout import Phase

if TYPE_CHECKING:
    from mpistrat.monitor.last import End
    from mpistrat.record.read import Record

_CLOSES_DOWNWARD = (4, 4)  # the Linux since which a process that ends closes its last files first
_CLOSED = 0x8  # IN_CLOSE_WRITE
_EVENT = struct.Struct("iIII")  # then a name of as many bytes as the last number says
# Without signals of the terminal. The pipe on its input ends with the process that started it.
_GUARD = 'trap "" HUP INT QUIT TERM; read process; while read _; do :; done; kill -s "$0" "$process" 2>/dev/null'
# In order: MPICH, Open MPI 5, Open MPI 4, and this library, used if ranks may not open each other's files.
_SHARED_NAMES = ("mpich_shm_", "sm_segment.", "vader_segment.", "mpistrat-")
SHARED = Path("/dev/shm")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_TICK = 0.25  # seconds between looks at the ranks
_PAUSE = 0.02  # seconds between signals to a launcher
_REACTED = 3.0  # seconds for ranks to end after a SIGINT
_DRAINED = 2.0  # seconds after which the messages of a launcher that has ended are complete
# More likely causes of a death than other signals.
_USUAL = (signal.SIGABRT, signal.SIGBUS, signal.SIGUSR1, signal.SIGUSR2)
_NO_ROOM = (
    "SIGBUS comes from a file in memory that has no room, often /dev/shm of a container (`df -h /dev/shm`; fix: "
    "`docker run --shm-size=1g`), or from a mapped file that another process has cut"
)
_SESSIONS = "PRTE_MCA_prte_tmpdir_base"


class EndOrder:
    """The order in which the ranks of a job end.

    MPICH kills all ranks a few milliseconds after the first one, and does not report which one that was. Each rank
    keeps a file open (`mpistrat.record.lifetime`), and Linux queues a notice when it is closed (inotify). So one look
    at the end of the job is enough. The order in which processes exit is not: on a busy machine the first one may still
    be exiting when the launcher has killed others. The order is empty if inotify is unavailable.

    The directory of these files exists, and holds nothing else.
    """

    def __init__(self, folder: Path):
        self._notices: int | None = None
        if sys.platform == "linux" and _version() >= _CLOSES_DOWNWARD:
            system = ctypes.CDLL(None)
            notices = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if notices >= 0:  # this user may have too many
                self._notices = notices
                system.inotify_add_watch(notices, os.fsencode(folder), _CLOSED)

    def wait(self, seconds: float) -> bool:
        """Wait until a process ends, at most so long. Return whether one has ended."""
        notices = self._notices  # another thread may close it
        return notices is not None and bool(select.select([notices], [], [], seconds)[0])

    def close(self) -> list[int]:
        """Return the processes that have ended, the first one first."""
        if self._notices is None:
            return []
        data = b""
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self._notices, 1 << 16):
                data += block
        os.close(self._notices)
        self._notices = None
        return _processes(data)


def _processes(data: bytes) -> list[int]:
    """Return the process ids in the events of inotify: the names of the files."""
    processes, offset = [], 0
    while offset < len(data):
        _, _, _, length = _EVENT.unpack_from(data, offset)
        offset += _EVENT.size
        name = data[offset : offset + length].rstrip(b"\0")
        offset += length
        # Other names: the directory itself, and what a file system makes of a removed file.
        if name.isdigit():
            processes.append(int(name))
    return processes


def _version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


class Guard:
    """A process that sends one signal to the launcher when this process dies, however it dies.

    Linux could send the signal (``PR_SET_PDEATHSIG``), but sends it once for each thread of the dead process. At a
    second signal the launcher of Open MPI ends at once, and its ranks go on without it. The signal ``number`` must end
    the launcher and its ranks.
    """

    def __init__(self, number: signal.Signals):
        source, self._target = os.pipe()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, number.name[len("SIG") :]],
            stdin=source,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(source)

    def watch_this_process(self) -> None:
        """Make the calling process the guarded one, with a process group of its own.

        The launcher calls it before its program begins. Signals of the terminal reach it through `mpistrat run` only.
        """
        os.setpgid(0, 0)
        os.write(self._target, b"%d\n" % os.getpid())

    def end(self) -> None:
        """End the guard after the launcher has ended."""
        self._process.kill()
        self._process.wait()
        os.close(self._target)


def remove_leftovers(since: float) -> list[Path]:
    """Remove, and return, files of ranks in shared memory that are newer than ``since`` and that no process uses."""
    leftovers = _shared_files_of_ranks(since)
    if leftovers:
        used = _used()
        leftovers = [path for path in leftovers if str(path) not in used]
    for path in leftovers:
        with contextlib.suppress(OSError):
            path.unlink()
    return leftovers


def _shared_files_of_ranks(since: float) -> list[Path]:
    try:
        entries = list(os.scandir(SHARED))
    except OSError:
        return []
    user = os.geteuid()
    paths = []
    for entry in entries:
        if not entry.name.startswith(_SHARED_NAMES) or entry.name.startswith(layout.PREFIX):
            continue  # a dead rank of a job that still runs is found by its record
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if status.st_uid == user and status.st_ctime >= since:
                paths.append(Path(entry.path))
    return paths


def _used() -> set[str]:
    """Return the files in shared memory that processes of this user have open or map.

    A process of another job may just have made a file. It has the file open until it maps it, so its descriptors are
    looked at before its maps.
    """
    files = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    files.add(os.readlink(descriptor))
            for line in (process / "maps").read_bytes().splitlines():
                if b" /dev/shm/" in line:
                    files.add(os.fsdecode(line.split(maxsplit=5)[5].removesuffix(b" (deleted)")))
    return files


class JobEnd(NamedTuple):
    """The exit status of a job, whether a signal to this process ended it, and the rank that was killed, in words."""

    status: int
    by_signal: bool
    lost: str


def run(job: Job, environ: dict[str, str], output: str | None = None, *, tag: bool = False) -> JobEnd:
    """Run a job to its end, and return how it ended."""
    with contextlib.closing(RunningJob(job, environ, output, tag=tag)) as running:
        return running.finish()


class RunningJob:
    """A launcher and its ranks. ``ranks`` has the ones that were seen in /proc: process id -> rank.

    The settings of the job are added to ``environ``. ``output`` names a file for each rank, as `Streams` takes it. With
    ``tag`` each line of a rank begins with its number. ``run`` is the number of the run of an elastic job. With
    ``imports`` each rank imports what the file of this name and the suffix of its number has noted, and waits for
    `begin` (`mpistrat.process.standby`).
    """

    def __init__(
        self,
        job: Job,
        environ: dict[str, str],
        output: str | None = None,
        *,
        tag: bool = False,
        run: int | None = None,
        imports: Path | None = None,
    ):
        self._job = job
        # Open MPI 5 names its files after the process id of its launcher. A launcher that was killed leaves them
        # behind, and one that gets the same process id later refuses to start. So its files lie in a directory of the
        # job.
        settings = {name: value for name, value, _ in job.settings}
        self._temporary = _temporary_folder({**environ, **settings}.get(_SESSIONS))
        self._folder = folder = Path(self._temporary.name)
        self.ranks: dict[int, int] = {}
        ends = folder / "ends"
        ends.mkdir()
        self._ends = EndOrder(ends)
        self._passed_on: set[int] = set()
        self._interrupted: float | None = None  # when the first SIGINT came, until ranks that go on are named
        self._keep: Callable[[], object] = bool  # does nothing
        self._failed = False
        self._unnamed = False  # whether the launcher reports a death without its rank
        family = job.launcher.family
        self._open_mpi = family == "openmpi"
        self._hurries = self._open_mpi and run is not None
        self._streams = Streams(folder, job.ranks, output=output, tag=tag, appends=bool(run))
        self._go: int | None = None  # the pipe from which ranks that wait read
        self._finished = False
        program = job.program
        if imports is not None:
            os.mkfifo(folder / standby.GO, 0o600)
            self._go = os.open(folder / standby.GO, os.O_RDWR)
            program = (*children.running(standby.__name__, str(folder), str(imports)), *program[1:])
        self._guard = Guard(signal.SIGTERM if self._open_mpi else signal.SIGKILL)
        self._started = time.time()
        self._process = subprocess.Popen(
            [*job.command, *self._streams.around(program, waits=imports is not None)],
            env={**environ, **settings, _SESSIONS: str(folder), lifetime.VARIABLE: str(ends)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=self._guard.watch_this_process,
        )
        assert self._process.stdout is not None
        self._messages = LauncherMessages(self._process.stdout, family, socket.gethostname())

    def begin(self) -> bool:
        """Let ranks that wait run the program. Return False if not all are ready, or their launcher has ended."""
        ready = len([*self._folder.glob(f"{standby.READY}.*")])
        if self._go is None or ready < self._job.ranks or self._process.poll() is not None:
            return False
        self._started = time.time()
        os.write(self._go, bytes(self._job.ranks))
        return True

    def finish(self, meanwhile: Callable[[], object] = bool) -> JobEnd:
        """Let the job run to its end, and return how it ended. Call a function now and then until it ends.

        Standard input goes to rank 0, and signals go to the ranks. What launchers print about a failure is left out.
        The status is 128 + signal if a rank was killed by one, and never 0 if the job failed. If the launcher does not
        say which rank was killed, and a rank of this node had left by ``os._exit`` before, it is the status of that.
        """
        self._run(meanwhile)
        order = self._ends.close()
        records: list[Record] = []
        if any(SHARED.glob(f"{layout.PREFIX}*")):
            from mpistrat.monitor import last  # a late import: seldom needed

            records = last.left(self._started, self.ranks.keys())
        status = self._status_of_output() or self._status(self._process.returncode, records, order)
        if records:
            status = self._status_by_records(status, records, order)
        self._failed = bool(status)
        return JobEnd(status, not self._passed_on.isdisjoint(_ENDING), self.lost)

    def close(self) -> None:
        """Remove what the job has left. Kill the launcher and the ranks if the job was not finished: they may wait."""
        if self._go is not None:
            os.close(self._go)
        if not self._finished:
            ranks = ranks_below(self._process.pid) if self._process.poll() is None else {}
            self._process.kill()
            for rank in ranks:  # one may be in a long import
                _kill(rank, signal.SIGKILL)
            self._process.wait()
            self._guard.end()
            self._streams.close()
            self._messages.join(_DRAINED)
        self._ends.close()
        try:
            self._keep()
        except OSError as error:
            self._say(f"the last records of this job stay in {layout.FOLDER} for an hour: {error}")
        if self._failed:
            remove_leftovers(self._started)
        self._temporary.cleanup()

    def _run(self, meanwhile: Callable[[], object]) -> None:
        self._streams.start(self._process.terminate)
        with handlers(self._pass_on, self._stop):
            # A thread waits for the launcher, so that its end is seen at once and handlers of signals run meanwhile.
            end = threading.Thread(target=self._process.wait, daemon=True)
            end.start()
            if self._hurries:
                threading.Thread(target=self._hurry, daemon=True).start()
            until_look = 0.02
            while end.is_alive():
                if self._starting:
                    end.join(until_look)
                    until_look = min(1.25 * until_look, 5.0)
                    self._look()
                else:
                    end.join(_TICK)
                    self._watch_interrupt()
                    meanwhile()
        self._guard.end()
        self._streams.finish()
        self._messages.join(_DRAINED)
        self._finished = True
        if self._process.returncode < 0:  # the launcher was killed: end the ranks that still run
            for process, rank in self.ranks.items():
                if rank_of(process) == rank:
                    _kill(process, signal.SIGKILL)

    def _hurry(self) -> None:
        """End the pauses of Open MPI, which sleeps for 0.25 s before each signal to the ranks that are left.

        Its sleep ends when a child does. It looks for children that have ended then, and nothing else.
        """
        with contextlib.suppress(OSError, ValueError):  # the job has ended
            while self._process.poll() is None:
                if self._ends.wait(_TICK):
                    self._process.send_signal(signal.SIGCHLD)
                    time.sleep(_PAUSE)

    @property
    def lost(self) -> str:
        """The rank that was killed first, in words; empty if none is known."""
        deaths = self._messages.banners.deaths
        return self._name(deaths[0]) if deaths else ""

    def _status_by_records(self, status: int, records: Sequence[Record], order: Sequence[int]) -> int:
        """Return the exit status by the flight records that ranks have left. `close` keeps these for ``mpistrat top``.

        A rank that ends without an error removes its record. A rank that leaves by ``os._exit`` lets some launchers
        succeed, and others report the ranks that they kill then.
        """
        from mpistrat.monitor import accounting, last  # a late import: seldom needed

        left = self._messages.banners.left
        end = self._end(records, order)
        texts = last.unfinished(records, left, end.first)
        if left and len(records) == self._job.ranks and all(record.exit_status == 0 for record in records):
            status = 0  # all ranks meant to succeed. MPICH takes that for success, Open MPI does not
        exited = any(record.exit_status is not None for record in records)
        if texts and (not status or left or exited or self._unnamed):
            if not self._job.survives:  # the other ranks decide whether they can do without a lost one
                status = status or 1
            for text in texts:
                self._say(text)
        if (
            self._messages.banners.deaths
            and not self._passed_on  # the signal was meant to end the job
            and self._job.launcher.can_survive
            and any(record.phase == Phase.SERVING for record in records)
        ):
            self._say("with --ft (mpirun --with-ft ulfm) a coordinator goes on without a lost worker")
        killed = [rank for rank in map(self._rank_of, self._messages.banners.deaths) if rank is not None]
        accounting.end_of_killed(records, killed, status)
        self._keep = partial(last.keep, records, [f"mpistrat run ended with exit status {status}"], bool(status), end)
        return status

    def _end(self, records: Sequence[Record], order: Sequence[int]) -> End:
        """Return what has ended the job. After a signal or a call of MPI_Abort the ranks end in any order."""
        from mpistrat.monitor import last  # a late import: seldom needed

        if self._passed_on:
            ending = [signal.Signals(number).name for number in _ENDING if number in self._passed_on]
            return last.End(by=f"the signal {ending[0]}" if ending else "")
        if self._messages.banners.aborted:
            return last.End(by="the call of MPI_Abort")
        named = [self._rank_of(death) for death in self._messages.banners.deaths]
        if named and named[0] is not None:
            return last.End(named[0])
        return last.End(last.first_to_end(records, order, self._job.ranks))

    @property
    def _starting(self) -> bool:
        return len(self.ranks) < self._job.ranks

    def _look(self) -> dict[int, int]:
        """Return the running ranks, and record them: one that ends is not found later."""
        ranks = ranks_below(self._process.pid)
        self.ranks.update(ranks)
        return ranks

    def _watch_interrupt(self) -> None:
        """Name the ranks that do not react to a SIGINT: Python calls no handler while a rank is in a call of MPI."""
        if self._interrupted is not None and time.monotonic() - self._interrupted > _REACTED:
            self._interrupted = None
            if ranks := self._look():
                running = ", ".join(f"{rank} (process {process})" for process, rank in ranks.items())
                self._say(
                    f"ranks that have not ended {_REACTED:g} s after SIGINT: {running}. They may be in a call of MPI "
                    "or of compiled code, or handle the signal. A second SIGINT (Ctrl-C) kills them"
                )

    def _pass_on(self, number: int, frame: Any) -> None:
        """Send a signal to the ranks, not the launcher: some launchers pass it on, some end the job, some die."""
        repeated = number in self._passed_on
        again = number == signal.SIGINT and repeated
        ended_before = not self._passed_on.isdisjoint(_ENDING)
        self._passed_on.update((number, signal.SIGKILL) if again else (number,))
        ranks = self._look()
        if number == signal.SIGINT:
            self._interrupted = None if repeated else time.monotonic()
        if number in _ENDING:
            if self._starting:
                self._process.send_signal(signal.SIGKILL if again else signal.SIGTERM)
            elif not ranks:
                self._process.kill() if ended_before else self._process.terminate()
            elif repeated and not again:
                running = ", ".join(f"{rank} (process {process})" for process, rank in ranks.items())
                self._say(f"ranks that still run: {running}; SIGINT twice kills them")
        for rank in ranks:
            _kill(rank, signal.SIGKILL if again else number)

    def _stop(self, number: int, frame: Any) -> None:
        """Stop this process and all ranks at ^Z of the terminal, and continue them together."""
        ranks = self._look()
        for rank in ranks:
            _kill(rank, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in ranks:
            _kill(rank, signal.SIGCONT)

    def _status(self, code: int, records: Sequence[Record], order: Sequence[int]) -> int:
        if deaths := self._messages.banners.deaths:
            death = deaths[0]
            for number in (death.signal, *death.or_signals):
                if number in self._passed_on:
                    return 128 + number
            if self._rank_of(death) is None:
                # MPICH kills the others when a rank ends, and reports one of these.
                by_process = {record.pid: record.exit_status for record in records}
                first = next((by_process[process] for process in order if process in by_process), None)
                if first is not None:
                    return first or 1
            others = [number for number in death.or_signals if number in _USUAL]
            numbers = " or ".join(map(_signal, (death.signal, *others)))
            self._say(f"{self._name(death)} was killed by signal {numbers}")
            if death.signal == signal.SIGBUS:
                self._say(_NO_ROOM)
            return 128 + death.signal
        if code < 0:
            if -code not in self._passed_on:
                self._say(f"{self._job.launcher.path} was killed by signal {_signal(-code)}")
            return 128 - code
        return code or int(self._messages.banners.failed)

    def _status_of_output(self) -> int:
        """Return 1 if output was lost, since its reader has ended or the disk is full: the job was ended then."""
        errors = self._streams.write_errors
        for error in errors:
            if not isinstance(error, BrokenPipeError):  # the reader has seen what it wanted, as `head` does
                self._say(f"the output of the ranks cannot be written: {error.strerror}")
        return int(bool(errors))

    def _rank_of(self, death: Death) -> int | None:
        return death.rank if death.rank is not None else self.ranks.get(death.pid or 0)

    def _name(self, death: Death) -> str:
        rank = self._rank_of(death)
        self._unnamed = rank is None
        return "a rank" if rank is None else f"rank {rank}"

    def _say(self, text: str) -> None:
        start = "" if self._streams.line_ended else "\n"
        with contextlib.suppress(OSError):
            os.write(2, f"{start}mpistrat run: {text}\n".encode())


def _temporary_folder(parent: str | None) -> tempfile.TemporaryDirectory[str]:
    try:
        parent = parent or tempfile.gettempdir()
        os.makedirs(parent, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="mpistrat-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise click.ClickException(
            f"a directory for the files of this job cannot be made: {error}; fix: set TMPDIR to a directory on this "
            "machine that can be written to"
        ) from None


def _signal(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


def _kill(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


@contextlib.contextmanager
def handlers(pass_on: Callable[[int, Any], None], stop: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle the signals that are for the ranks. A signal that this process ignores stays ignored."""
    before = {}
    for number in (*_PASSED_ON, signal.SIGTSTP):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop if number == signal.SIGTSTP else pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
