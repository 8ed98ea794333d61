"""The flight record of this process: what it writes while it runs.

An entry costs about 2 us. Nothing here communicates, waits or raises.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import functools
import hashlib
import math
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

from mpistrat.launch import proc
from mpistrat.launch.launchers import hashed, key_of
from mpistrat.process import failure, private_file, program_end
from mpistrat.process.program_end import EndStep
from mpistrat.record import layout, lifetime, read
from mpistrat.record import ring as trace
from mpistrat.record.layout import Phase, Texts, Word, fill_header, mapped
from mpistrat.record.writers import Flight, RecordWriter

RUN, UPDATE, EXPLICIT = range(3)  # the units of steps, the smallest first
_creations: collections.Counter[int] = collections.Counter()  # what ranks have made together, by token
_KEPT = 3600.0  # seconds for which the record of a process that was killed stays for `mpistrat top --last`


class FlightRecord:
    """The record of one process, with its rank in its job and the job's size.

    ``path`` is the file, None if other processes cannot read the record. ``join``, ``step`` and ``phase`` are methods
    of its `RecordWriter`. The units of steps are `RUN`, `UPDATE` and `EXPLICIT`.
    """

    def __init__(self, rank: int, size: int):
        self.path, descriptor, self._memory = _memory()
        self._words = words = memoryview(self._memory).cast("q")
        self._seconds = memoryview(self._memory).cast("d")
        self._texts = Texts(self._memory, layout.RECORD_TEXTS)
        self._alone: Flight | None = None
        fill_header(self._memory, self._texts, rank, size, layout.MOST_EVENTS)
        self._process = os.getpid()
        words[Word.STARTED] = proc.started(self._process)
        words[Word.MAIN_THREAD] = threading.main_thread().ident or 0
        words[Word.MOVES] = -1
        words[Word.OUT_OF_MEMORY_KILLS] = 1 + kills if (kills := proc.out_of_memory_kills()) else 0
        self._seconds[Word.HEARTBEAT] = self._seconds[Word.PHASE_SINCE] = time.monotonic()
        self._texts.write(layout.JOB, proc.batch_job())
        self._note_launch(size)
        self._writer = RecordWriter(self._memory, self._texts)
        self.join, self.step, self.phase = self._writer.join, self._writer.step, self._writer.phase
        self._stacks = descriptor
        words[Word.MAGIC] = layout.MAGIC  # last: from now on a reader takes the record for complete

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return int(self._words[Word.SIZE])

    def set_rank(self, rank: int, size: int) -> None:
        """Correct the rank of a process that seemed to be alone, or that its launcher has numbered differently."""
        if self._words[Word.RANK : Word.SIZE + 1].tolist() != [rank, size]:
            self._words[Word.RANK], self._words[Word.SIZE] = rank, size
            self._note_launch(size)
            if trace.ring is not None:
                trace.ring.set_rank(rank, size)

    def _note_launch(self, size: int) -> None:
        # Processes that are alone may have one parent, too.
        launch = hashed(key_of(os.environ, one_node=True) or "") if size > 1 else ""
        self._texts.write(layout.LAUNCH, launch)

    def of(self, token: int, size: int, rank: int) -> Flight | None:
        """Return the entries of a communicator, as `join` does. All communicators of one rank share one entry.

        The table has room for 120 communicators. Strategies on one device filled it, though nothing waits in theirs.
        """
        if size > 1:
            return self.join(token, size, rank)
        if self._alone is None:
            self._alone = self.join(token, size, rank)
        return self._alone

    def trace(self, directory: str, nbytes: int) -> None:
        """Trace this process from now on, in a new file of a directory.

        Raise OSError if the file cannot be made, or the disk is full.
        """
        words = self._words
        ring = trace.TraceRing(directory, words[Word.RANK], words[Word.SIZE], nbytes)
        for token, size, rank, _ in self._communicators():
            ring.add_communicator(token, size, rank)
        trace.ring = self._writer.trace = ring

    def end_trace(self) -> None:
        """End the trace of this process, if there is one."""
        ring, self._writer.trace, trace.ring = self._writer.trace, None, None
        if ring is not None:
            ring.close()

    def register_stack_signal(self, number: int) -> None:
        """Write the stack of the main thread to the record when the process gets signal ``number``.

        Only that: the handler does not hold the lock of the interpreter, and another thread may run. To follow its
        frames has crashed one process in a hundred.
        """
        if self._stacks is None or not number or signal.getsignal(number) is not signal.SIG_DFL:
            return
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            os.lseek(self._stacks, layout.STACKS, os.SEEK_SET)
            faulthandler.register(number, self._stacks, all_threads=False, chain=False)
            self._words[Word.SIGNAL] = number

    def write_requested_stacks(self) -> None:
        """Write the stacks of all threads to the record if another process has asked. Needs the interpreter's lock."""
        asked = self._words[Word.ASKED]
        if asked != self._words[Word.ANSWERED] and self._stacks is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                os.lseek(self._stacks, 0, os.SEEK_END)
                faulthandler.dump_traceback(self._stacks, all_threads=True)
            self._words[Word.ANSWERED] = asked

    def beat(self, every: float) -> None:
        """Note that the threads of this process run. The next note comes after ``every`` seconds."""
        number = self._words[Word.SIGNAL]
        # The program may have a handler of its own by now: others must not send it this signal.
        if number and signal.getsignal(number) is not signal.SIG_DFL:
            self._words[Word.SIGNAL] = 0
        if self._writer.keeper is not None:
            self._writer.keeper.publish()
        self._seconds[Word.BEAT_EVERY] = every
        self._seconds[Word.HEARTBEAT] = time.monotonic()

    def moves(self, value: bool | None) -> None:
        """Note whether the main thread runs Python code."""
        self._words[Word.MOVES] = -1 if value is None else int(value)

    def kept_lock(self, value: bool) -> None:
        """Note whether the main thread has let another thread wait for the interpreter's lock."""
        self._words[Word.KEPT_LOCK] = int(value)

    @property
    def steps(self) -> int:
        """The number of steps that have ended."""
        return self._words[Word.STEPS]

    def note(self, text: str) -> None:
        """Keep a text: how a call of the program was left by an error."""
        self._texts.write(layout.NOTE, text)

    def note_exit(self, status: int) -> None:
        """Note that the process ends by `os._exit`."""
        if os.getpid() == self._process:
            self._words[Word.EXIT_STATUS] = 1 + (status & 255)

    def contents(self) -> bytes:
        """Return a copy of the record."""
        return self._memory[: layout.STACKS]

    def in_collective(self) -> float:
        """Return since when this process is in a collective of several ranks, by the monotonic clock; else infinity."""
        return min((entered for entered, left in self._last_times() if not left), default=math.inf)

    def idle_since(self) -> float:
        """Return when this process last used the communicator that it has used least recently."""
        return min(map(max, self._last_times()), default=math.inf)

    def _last_times(self) -> Iterator[tuple[float, float]]:
        """Return when the last collective of each communicator was entered and left, 0 if it was not.

        Communicators of one rank are left out.
        """
        for _, size, _, after in self._communicators():
            if size > 1 and after:
                at = layout.RECORD_EVENTS + (after - 1) % layout.MOST_EVENTS * layout.EVENT.size
                *_, began, _, ended = layout.EVENT.unpack_from(self._memory, at)
                yield began, ended

    def _communicators(self) -> Iterator[list[int]]:
        for at in range(layout.COMMUNICATORS, layout.SAMPLES, layout.COMMUNICATOR.size):
            row = self._words[at // 8 : at // 8 + 4].tolist()
            if row[0]:
                yield row

    def totals(self) -> tuple[float, float]:
        """Return for how many seconds this process has been in collectives, and in input."""
        return self._writer.in_collectives, self._writer.in_phase[Phase.INPUT]

    def finish(self) -> None:
        """Note that this rank has announced its end to the others."""
        self.phase(Phase.FAILED if failure.pending() else Phase.FINISHED)

    def close(self) -> None:
        """Remove the record, unless the program has failed: `mpistrat top --last` reads it then."""
        if os.getpid() != self._process:
            return
        self.finish()
        self.end_trace()
        if self.path is not None and not failure.pending():
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def detach(self) -> None:
        """Write to private memory from now on: this is a forked process."""
        self._memory = memory = mmap.mmap(-1, layout.STACKS)
        self._words, self._seconds = memoryview(memory).cast("q"), memoryview(memory).cast("d")
        self._texts.move(memory)
        self._writer.move(memory)
        self._writer.trace = None  # its file belongs to the parent


class Creation:
    """A context in which ranks make something together. Its value is the record.

    ``ranks`` take part, by their numbers in the job and in the same order on all of them. This rank is number ``index``
    of these. ``name`` says what they make, the same on all of them.
    """

    def __init__(self, record: FlightRecord | None, ranks: Sequence[int], index: int, name: str):
        self._record = record
        self._flight: Flight | None = None
        if record is not None and len(ranks) > 1:
            token = _token(ranks, name)
            _creations[token] += 1
            self._number = _creations[token]
            self._operation = SimpleNamespace(name=name, label=name, record=0, site=(), nbytes=0)  # of its entry
            self._flight = record.join(token, len(ranks), index)

    def __enter__(self) -> FlightRecord | None:
        if self._flight is not None:
            self._flight.enter(self._operation, self._number)
        return self._record

    def __exit__(self, *exc_info: object) -> None:
        if self._flight is not None:
            self._flight.leave()
            self._flight.end()


def _token(ranks: Sequence[int], name: str) -> int:
    """Return a token that the ranks compute alike without a message: from their launch and what they make."""
    launch = key_of(os.environ, one_node=True) or ""
    digest = hashlib.sha256(f"{launch} {name} {list(ranks)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2 | 1  # positive in a signed word, and not 0, which means none


def _find_main_thread() -> None:
    """Store the main thread. In a forked process it is the thread that forked."""
    global _main_thread
    _main_thread = threading.main_thread().ident


_main_thread: int | None = None
_find_main_thread()
os.register_at_fork(after_in_child=_find_main_thread)


def _no_step(unit: int) -> None:
    pass


step: Callable[[int], object] = _no_step  # of the record: `FlightRecord.step`, without a function around it
_record: FlightRecord | None = None
_off = False
_at_exit: list[Callable[[], object]] = []


def start(rank: int, size: int, stack_signal: int) -> FlightRecord | None:
    """Return the record of this process, and make it when it is asked for first. None if that is impossible.

    The process writes its stacks at ``stack_signal``; 0 for none. Rank and size are those in its job.
    """
    global _record, _off, step
    if _record is None and not _off:
        try:
            _record = FlightRecord(rank, size)
        except Exception:  # the program goes on without a record
            _off = True
            return None
        step = _record.step
        read.remove_old(_KEPT)
        _record.register_stack_signal(stack_signal)
        program_end.register(EndStep.RECORD, _record.close)
        os.register_at_fork(after_in_child=_record.detach)
        _watch_exit()
        lifetime.keep_open()
    if _record is not None and size > 1:
        _record.set_rank(rank, size)
        lifetime.notify_started(_record)
    return _record


def current() -> FlightRecord | None:
    """Return the record of this process, or None if it keeps no record."""
    return _record


def end_trace() -> None:
    """End the trace of this process, if there is one."""
    if _record is not None:
        _record.end_trace()


def note(text: str) -> None:
    """Keep a text, if there is a record: how a call of the program was left by an error."""
    if _record is not None:
        _record.note(text)


class phase:
    """Context in which this process is in a phase. Other threads than the main one do not change the phase."""

    __slots__ = ("_before", "_of")

    def __init__(self, of: Phase):
        self._of = of
        self._before: int | None = None

    def __enter__(self) -> None:
        if _record is not None and threading.get_ident() == _main_thread:
            self._before = _record.phase(self._of)

    def __exit__(self, *error: object) -> None:
        if self._before is not None and _record is not None:
            _record.phase(self._before)


def before_exit(function: Callable[[], object]) -> None:
    """Call a function before this process ends by ``os._exit``."""
    _watch_exit()
    _at_exit.append(function)


@functools.cache  # once in a process
def _watch_exit() -> None:
    """Replace ``os._exit``, which ends a process without a trace, by a function that notes it before.

    Otherwise it looks like a kill: once the parent of a process has waited for it, the system has
    forgotten how it ended.
    """
    leave, process = os._exit, os.getpid()

    def _exit(status: int) -> None:
        if _record is not None:
            _record.note_exit(status)
        while _at_exit and os.getpid() == process:
            with contextlib.suppress(Exception):
                _at_exit.pop()()
        leave(status)

    os._exit = _exit  # type: ignore[assignment]


def _memory() -> tuple[str | None, int | None, mmap.mmap]:
    """Return the path, a descriptor for stacks, and the memory of a new record: private memory without a file."""
    try:
        descriptor, path = private_file.create(layout.FOLDER, layout.PREFIX)
    except OSError:
        return None, None, mmap.mmap(-1, layout.STACKS)
    try:
        return path, descriptor, mapped(descriptor, path, layout.STACKS)
    except (OSError, ValueError):
        os.close(descriptor)
        return None, None, mmap.mmap(-1, layout.STACKS)
