"""The flight record of this process: what it writes while it runs.

An entry costs about 2 us. Nothing here communicates, waits or raises.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import math
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Protocol

from mpistrat.runtime.process import failure, private_file
from mpistrat.runtime.process.launch_key import hashed, key_of
from mpistrat.runtime.record import layout, process_facts, read
from mpistrat.runtime.record.layout import Phase, Word
from mpistrat.runtime.trace import ring as trace
from mpistrat.runtime.trace.layout import NO_COMMUNICATOR, Kind

_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")) + os.sep
RUN, UPDATE, EXPLICIT = range(3)  # the units of steps, the smallest first
_KEPT = 3600.0  # seconds for which the record of a process that was killed stays for `mpistrat top --last`


class Described(Protocol):
    """What an entry names: an operation of the ranks.

    Attributes
    ----------
    record : int
        The number of its text in the record, and 0 before it has one. Set by the record.
    nbytes : int
        The bytes that a rank gives to it.
    """

    record: int

    @property
    def nbytes(self) -> int: ...


class Flight:
    """The entries of one communicator.

    Attributes
    ----------
    enter : callable
        ``enter(operation, number)`` notes that this rank is in a collective.
    meet : callable
        Note that all ranks are in it.
    leave : callable
        Note that this rank has left it, also by an error.
    end : callable
        Remove the communicator from the record.
    """

    __slots__ = ("end", "enter", "leave", "meet")

    def __init__(
        self,
        enter: Callable[[Any, int], None],
        meet: Callable[[], None],
        leave: Callable[[], None],
        end: Callable[[], None],
    ):
        self.enter, self.meet, self.leave, self.end = enter, meet, leave, end


class FlightRecord:
    """The record of one process.

    Parameters
    ----------
    rank, size : int
        Of this process in its job.

    Attributes
    ----------
    path : str or None
        The file, None if other processes cannot read the record.
    join : callable
        ``join(token, size, rank)`` adds a communicator whose ranks share a random number. Returns a `Flight`, or None
        if there are too many communicators.
    step : callable
        ``step(unit)`` notes the end of a step: of `RUN`, `UPDATE` or `EXPLICIT`. Only the largest unit so far counts.
    phase : callable
        ``phase(Phase)`` begins a phase, and returns the former one.
    """

    def __init__(self, rank: int, size: int):
        self.path, descriptor, self._memory = _memory()
        self._words = words = memoryview(self._memory).cast("q")
        self._seconds = memoryview(self._memory).cast("d")
        self._texts = itertools.count(1).__next__
        self._owners: list[Callable[[], object]] = [_nothing] * layout.MOST_TEXTS
        words[Word.VERSION] = layout.VERSION
        words[Word.PID] = self._process = os.getpid()
        words[Word.STARTED] = process_facts.started(self._process)
        words[Word.RANK], words[Word.SIZE] = rank, size
        words[Word.MAIN_THREAD] = threading.main_thread().ident or 0
        words[Word.MOVES] = -1
        words[Word.OUT_OF_MEMORY_KILLS] = 1 + kills if (kills := process_facts.out_of_memory_kills()) else 0
        self._seconds[Word.CLOCK] = time.time() - time.monotonic()
        self._seconds[Word.HEARTBEAT] = self._seconds[Word.PHASE_SINCE] = time.monotonic()
        self._write(layout.HOST, socket.gethostname())
        self._write(
            layout.PROGRAM, " ".join(getattr(sys, "argv", [])[:4])
        )  # an embedded interpreter has none
        self._write(layout.JOB, process_facts.batch_job())
        self._note_launch(size)
        self.join, self.step, self.phase, self._detach = self._writers()
        self._stacks = descriptor
        words[Word.MAGIC] = layout.MAGIC

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return int(self._words[Word.SIZE])

    def belongs_to(self, rank: int, size: int) -> None:
        """Note the rank of a process that was taken for one alone."""
        if size > self._words[Word.SIZE]:
            self._words[Word.RANK], self._words[Word.SIZE] = rank, size
            self._note_launch(size)
            if trace.ring is not None:
                trace.ring.belongs_to(rank, size)

    def _note_launch(self, size: int) -> None:
        if size > 1:  # processes that are alone may have one parent, too
            self._write(layout.LAUNCH, hashed(key_of(os.environ, one_node=True) or ""))

    def trace(self, directory: str, nbytes: int) -> None:
        """Trace this process from now on, in a new file of a directory.

        Raises
        ------
        OSError
            If the file cannot be made, or the disk is full.
        """
        words = self._words
        ring = trace.TraceRing(directory, words[Word.RANK], words[Word.SIZE], nbytes)
        for i in range(layout.MOST_COMMUNICATORS):
            at = layout.COMMUNICATORS // 8 + i * layout.COMMUNICATOR_WORDS
            token, size, rank = words[at : at + 3].tolist()
            if token:
                ring.communicator(token, size, rank)
        trace.ring = ring

    def answer(self, number: int) -> None:
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

    def tell_stacks(self) -> None:
        """Write the stacks of all threads to the record if another process has asked. Needs the interpreter's lock."""
        asked = self._words[Word.ASKED]
        if asked != self._words[Word.ANSWERED] and self._stacks is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                os.lseek(self._stacks, 0, os.SEEK_END)
                faulthandler.dump_traceback(self._stacks, all_threads=True)
            self._words[Word.ANSWERED] = asked

    def beat(self, every: float) -> None:
        """Note that the threads of this process run, and that the next such note comes after ``every`` seconds."""
        number = self._words[Word.SIGNAL]
        if number and signal.getsignal(number) is not signal.SIG_DFL:
            self._words[Word.SIGNAL] = (
                0  # the program has a handler of its own by now: do not send it this signal
            )
        self._seconds[Word.BEAT_EVERY] = every
        self._seconds[Word.HEARTBEAT] = time.monotonic()

    def moves(self, value: bool | None) -> None:
        """Note whether the main thread runs Python code."""
        self._words[Word.MOVES] = -1 if value is None else int(value)

    def note(self, text: str) -> None:
        """Keep a text: how a call of the program was left by an error."""
        self._write(layout.NOTE, text)

    def exits(self, status: int) -> None:
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
        words, seconds = self._words, self._seconds
        for i in range(layout.MOST_COMMUNICATORS):
            at = layout.COMMUNICATORS // 8 + i * layout.COMMUNICATOR_WORDS
            entry = words[at + 3] - 1
            if words[at] and words[at + 1] > 1 and entry >= 0:
                place = layout.RING // 8 + entry % layout.RING_ENTRIES * layout.ENTRY_WORDS
                yield seconds[place + layout.ENTERED], seconds[place + layout.LEFT]

    def finish(self) -> None:
        """Note that this rank has told the others of its end."""
        self.phase(Phase.FAILED if failure.pending() else Phase.FINISHED)

    def close(self) -> None:
        """Remove the record of a program that ends as it should. That of one that failed stays."""
        if os.getpid() != self._process:
            return
        self.finish()
        end_trace()
        if self.path is not None and not failure.pending():
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def detach(self) -> None:
        """Write to private memory from now on: this is a forked process."""
        self._memory = memory = mmap.mmap(-1, layout.STACKS)
        self._words, self._seconds = memoryview(memory).cast("q"), memoryview(memory).cast("d")
        self._detach(memory)

    # --- texts ---------------------------------------------------------------------------------------------

    def _write(self, offset: int, text: str) -> None:
        data = text.encode(errors="replace")[: layout.TEXT_BYTES]
        memory = memoryview(self._memory)
        memory[offset + 8 : offset + 8 + len(data)] = data
        self._words[offset // 8] = len(data)

    def _add_text(self, text: str, forget: Callable[[], object]) -> int:
        """Return the number of a new text. ``forget`` is called when the text gives its place to another."""
        number = self._texts()
        slot = number % layout.MOST_TEXTS
        self._owners[slot]()
        self._owners[slot] = forget
        offset = layout.TEXTS + slot * layout.SLOT_BYTES
        self._words[offset // 8] = 0
        data = text.encode(errors="replace")
        if len(data) > layout.TEXT_BYTES:
            half = layout.TEXT_BYTES // 2 - 2
            data = data[:half] + b"..." + data[-half:]
        self._write(offset + 8, data.decode(errors="replace"))
        self._words[offset // 8] = number
        return number

    def _text(self, number: int) -> str:
        """Return a text that is in the table."""
        at = layout.TEXTS + number % layout.MOST_TEXTS * layout.SLOT_BYTES
        return self._memory[at + 16 : at + 16 + self._words[at // 8 + 1]].decode(errors="replace")

    def _operation(self, operation: Described) -> int:
        def forget() -> None:
            operation.record = 0

        operation.record = self._add_text(str(operation), forget)
        return operation.record

    # --- the writers -----------------------------------------------------------------------------------------

    def _writers(self) -> tuple[Any, Any, Any, Any]:
        """Return `join`, `step`, `phase` and a function that moves them to other memory.

        They are closures, which read a name in half the time of an attribute. Totals are kept in names, too: reading
        them back from the memory takes longer.
        """
        memory, words, seconds = self._memory, self._words, self._seconds
        now, next_entry, frame_of = time.monotonic, itertools.count().__next__, sys._getframe
        pack_entry, pack_step = struct.Struct("=5q3d").pack_into, struct.Struct("=4d").pack_into
        ours = _OwnFiles()
        places: dict[int, int] = {}
        operation_text, add_text, text_of = self._operation, self._add_text, self._text
        traced_phases = {int(Phase.INPUT): Kind.INPUT_WAIT, int(Phase.SAVING): Kind.SAVE}
        end_phase, phase_event, no_communicator = None, 0, NO_COMMUNICATOR
        ring, entry_bytes, entries = layout.RING, layout.ENTRY_WORDS * 8, layout.RING_ENTRIES
        first_step, step_bytes, most_steps = layout.STEPS, layout.STEP_WORDS * 8, layout.RING_STEPS
        word = {each.name: int(each) for each in Word}
        at_steps, at_step_since, at_phase, at_phase_since = (
            word[name] for name in ("STEPS", "STEP_SINCE", "PHASE", "PHASE_SINCE")
        )
        at_bytes, at_entries = word["BYTES"], word["ENTRIES"]
        in_collectives, in_phase, total_bytes = 0.0, [0.0] * len(Phase), 0
        before = 0.0, 0.0, 0.0, 0.0  # time, in collectives, in input, in saving: when the last step ended
        unit = count = 0
        forgotten = 0  # places that gave their texts to others

        def place_of(frame: Any) -> int:
            code = frame.f_code
            key = (id(code) << 20) + frame.f_lasti
            found = places.get(key)
            if found is None:

                def forget(_: CodeType = code) -> None:  # keeps the code alive: another one could get its id
                    nonlocal forgotten
                    places.pop(key, None)
                    forgotten += 1

                text = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
                found = places[key] = add_text(text, forget)
            return found

        def find_site(operation: Any) -> int:
            depth, frame, inner = 2, frame_of(2), frame_of(1)
            while ours[frame.f_code.co_filename] and frame.f_back is not None:
                depth, frame, inner = depth + 1, frame.f_back, frame
            place = place_of(frame)
            operation.site = depth - 1, frame.f_code, frame.f_lasti, inner.f_code, place, forgotten
            return place

        def join(token: int, size: int, rank: int) -> Flight | None:
            for index in range(layout.MOST_COMMUNICATORS):
                home = layout.COMMUNICATORS // 8 + index * layout.COMMUNICATOR_WORDS
                if not words[home]:
                    break
            else:
                return None
            words[home + 1], words[home + 2], words[home + 3] = size, rank, 0
            words[home] = token
            if trace.ring is not None:
                trace.ring.communicator(token, size, rank)
            at, inside = ring, False
            entered, met, nbytes = 0.0, 0.0, 0
            end_event, event = None, 0  # of the trace, if there is one

            def enter(operation: Any, number: int) -> None:
                nonlocal at, inside, entered, met, nbytes, end_event, event
                # The line of the program that called the package is that of the last such operation, mostly. Each
                # frame that is looked at costs 0.1 us.
                try:
                    depth, code, last, inner, place, known = operation.site
                    frame = frame_of(depth)
                    is_same = (
                        frame.f_code is code
                        and frame.f_lasti == last
                        and frame_of(depth - 1).f_code is inner
                        and known == forgotten
                    )
                except ValueError:  # the stack is not as deep, or there was no such operation
                    is_same = False
                if not is_same:
                    place = find_site(operation)
                entry = next_entry()
                at = ring + entry % entries * entry_bytes
                nbytes, entered = operation.nbytes, now()
                text = operation.record or operation_text(operation)
                pack_entry(memory, at, number, index, text, place, nbytes, entered, 0.0, 0.0)
                words[home + 3] = words[at_entries] = entry + 1
                inside, met = True, 0.0
                if (ring_of_trace := trace.ring) is not None:
                    whose = ring_of_trace.communicator(token, size, rank)
                    what, where = ring_of_trace.text(text, text_of), ring_of_trace.text(place, text_of)
                    event = ring_of_trace.begin(0, whose, number, what, where, nbytes, entered)
                    end_event = ring_of_trace.end

            def meet() -> None:
                nonlocal met
                if inside and not met:  # later meetings are part of the work
                    seconds[(at >> 3) + 6] = met = now()

            def leave() -> None:
                nonlocal inside, in_collectives, total_bytes, end_event
                if inside:
                    inside = False
                    seconds[(at >> 3) + 7] = time = now()
                    in_collectives += time - entered
                    total_bytes += nbytes
                    words[at_bytes] = total_bytes
                    if end_event is not None:
                        end_event(event, met, time)
                        end_event = None

            def end() -> None:
                words[home] = 0

            return Flight(enter, meet, leave, end)

        def step(of: int) -> None:
            nonlocal unit, count, before
            if of != unit:
                if of < unit:
                    return
                unit, count, before = of, 0, (0.0, 0.0, 0.0, 0.0)
                words[at_steps] = 0  # steps of the smaller unit do not count any more
            began, collectives, input, saving = before
            before = now(), in_collectives, in_phase[1], in_phase[2]
            if began:
                to = first_step + count % most_steps * step_bytes
                pack_step(
                    memory,
                    to,
                    before[0] - began,
                    in_collectives - collectives,
                    before[2] - input,
                    before[3] - saving,
                )
                count += 1
                words[at_steps] = count
            seconds[at_step_since] = before[0]
            if trace.ring is not None:
                trace.ring.begin(Kind.STEP, no_communicator, count, 0, 0, 0, before[0])

        def phase(of: int) -> int:
            nonlocal end_phase, phase_event
            last, time = words[at_phase], now()
            if end_phase is not None:
                end_phase(phase_event, 0.0, time)
                end_phase = None
            if trace.ring is not None and of in traced_phases:
                phase_event = trace.ring.begin(traced_phases[of], no_communicator, 0, 0, 0, 0, time)
                end_phase = trace.ring.end
            in_phase[last] += time - seconds[at_phase_since]
            words[at_phase], seconds[at_phase_since] = of, time
            return last

        def detach(other: mmap.mmap) -> None:
            nonlocal memory, words, seconds
            memory, words, seconds = other, memoryview(other).cast("q"), memoryview(other).cast("d")

        return join, step, phase, detach


class _OwnFiles(dict[str, bool]):
    """Whether a file of a code object is of this package."""

    def __missing__(self, name: str) -> bool:
        self[name] = found = name.startswith(_PACKAGE)
        return found


def _find_main_thread() -> None:
    """Keep the main thread, which two functions return; of a forked process, it is the one that forked."""
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
_at_start: list[Callable[[FlightRecord], object]] = []
_at_exit: list[Callable[[], object]] = []


def when_started(function: Callable[[FlightRecord], object]) -> None:
    """Call a function with the record of this process when it is made, if the process is one of several ranks."""
    _at_start.append(function)


def start(rank: int, size: int, stack_signal: int) -> FlightRecord | None:
    """Return the record of this process, and make it when it is asked for first. None if that is impossible.

    Parameters
    ----------
    rank, size : int
        Of this process in its job.
    stack_signal : int
        The signal that makes the process write its stacks; 0 for none.
    """
    global _record, _off, step
    if _record is not None:
        _record.belongs_to(rank, size)
    elif not _off:
        try:
            _record = FlightRecord(rank, size)
        except Exception:  # the program goes on without a record
            _off = True
            return None
        step = _record.step
        read.remove_old(_KEPT)
        _record.answer(stack_signal)
        atexit.register(_record.close)
        os.register_at_fork(after_in_child=_record.detach)
        _watch_exit(_record)
    if _record is not None and size > 1:
        while _at_start:
            _at_start.pop()(_record)
    return _record


def current() -> FlightRecord | None:
    """Return the record of this process, or None if it keeps no record."""
    return _record


def end_trace() -> None:
    """End the trace of this process, if there is one."""
    traced, trace.ring = trace.ring, None
    if traced is not None:
        traced.close()


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


def when_left(function: Callable[[], object]) -> None:
    """Call a function before this process ends by ``os._exit``."""
    _at_exit.append(function)


def _watch_exit(record: FlightRecord) -> None:
    """Replace ``os._exit``, which ends a process without a trace, by a function that notes it before.

    Without that nothing tells it from a kill: once the parent of a process has waited for it, the system has
    forgotten how it ended.
    """
    leave, process = os._exit, os.getpid()

    def _exit(status: int) -> None:
        record.exits(status)
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
        os.posix_fallocate(
            descriptor, 0, layout.STACKS
        )  # a lack of memory is an error here, not a SIGBUS later
        return path, descriptor, mmap.mmap(descriptor, layout.STACKS)
    except (OSError, ValueError):
        os.close(descriptor)
        os.unlink(path)
        return None, None, mmap.mmap(-1, layout.STACKS)


def _nothing() -> None:
    pass
