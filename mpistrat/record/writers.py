"""What a process writes to its flight record, and to its trace if there is one.

`Flight.enter`, `meet` and `leave` together take 0.9 us. So they read names of this file instead of `layout` and `Word`,
and what several of them need lies in slots.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import sys
import time
from types import CodeType, FrameType
from typing import Any

from mpistrat.process.own_files import is_own
from mpistrat.record import layout
from mpistrat.record.layout import NO_COMMUNICATOR, Kind, Phase, Texts, Word
from mpistrat.record.ring import TraceRing

_now, _frame_of = time.monotonic, sys._getframe
_pack_event, _pack_step = layout.EVENT.pack_into, layout.STEP.pack_into
_EVENTS, _MOST_EVENTS, _EVENT_BYTES = layout.RECORD_EVENTS, layout.MOST_EVENTS, layout.EVENT.size
_STEPS, _MOST_STEPS, _STEP_BYTES = layout.STEPS, layout.MOST_STEPS, layout.STEP.size
_AT_EVENTS, _AT_BYTES = int(Word.EVENTS), int(Word.BYTES)  # a number: an enum takes 30 ns more as an index
_AT_STEPS = int(Word.STEPS)
_AT_PHASE, _AT_PHASE_SINCE = int(Word.PHASE), int(Word.PHASE_SINCE)
_NUMBER, _BEGAN, _ENDED = (at // 8 for at in (layout.NUMBER, layout.BEGAN, layout.ENDED))
_FROM_MET = (layout.ENDED - layout.MET) // 8
_COLLECTIVE = int(Kind.COLLECTIVE)
_TRACED_PHASES = {int(Phase.INPUT): Kind.INPUT_WAIT, int(Phase.SAVING): Kind.SAVE}
_is_own = functools.cache(is_own)


class Sites:
    """The lines of the program that call operations, as texts of the record.

    ``forgotten`` counts the lines whose texts were overwritten: at another count an operation looks for its line again.
    """

    __slots__ = ("_numbers", "_texts", "forgotten")

    def __init__(self, texts: Texts):
        self.forgotten = 0
        self._texts = texts
        self._numbers: dict[int, int] = {}

    def find(self, operation: Any) -> int:
        """Return the number of the line that calls the package, and store in the operation how to find it again.

        The line is where the first frame outside of the package stands.
        """
        depth, frame, inner = 2, sys._getframe(2), sys._getframe(1)
        while _is_own(frame.f_code.co_filename) and frame.f_back is not None:
            depth, frame, inner = depth + 1, frame.f_back, frame
        number = self._number(frame)
        operation.site = depth - 1, frame.f_code, frame.f_lasti, inner.f_code, number, self.forgotten
        return number

    def _number(self, frame: FrameType) -> int:
        code = frame.f_code
        key = (id(code) << 20) + frame.f_lasti
        number = self._numbers.get(key)
        if number is None:

            def forget(_: CodeType = code) -> None:  # keeps the code alive: another one could get its id
                self._numbers.pop(key, None)
                self.forgotten += 1

            text = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
            number = self._numbers[key] = self._texts.add(text, forget)
        return number


class Flight:
    """The entries of one communicator, whose place in the table is ``index``, and whose random number is ``token``.

    A caller that makes the same operation again and again may call `keep` after an entry. While the record has
    ``kept`` events, that entry is its last one: an operation that ends without a wait may set ``passed`` to its number,
    in place of an entry (0.04 us in place of 0.9). The heartbeat writes that into the entry.
    """

    __slots__ = ("_end", "_entered", "_event", "_index", "_last", "_met", "_ring", "_token", "kept", "passed", "writer")

    def __init__(self, writer: RecordWriter, index: int, token: int):
        self.writer, self._index, self._token = writer, index, token
        self._last = (layout.COMMUNICATORS + index * layout.COMMUNICATOR.size) // 8 + 3
        self._end = 0  # the index in `seconds` of the end of the present entry
        self._entered = self._met = 0.0  # 0 in no collective; before the meeting
        self._ring: TraceRing | None = None  # with the event of this entry
        self._event = self.passed = self.kept = 0

    def enter(self, operation: Any, number: int) -> None:
        """Note that this rank is in a collective."""
        writer = self.writer
        # Mostly the same line of the program made the last such operation. So compare two frames with the ones that
        # `Sites.find` has kept: to look for the line costs 0.1 us for each frame.
        try:
            depth, code, last, inner, line, known = operation.site
            frame = _frame_of(depth)
            is_same = (
                frame.f_code is code
                and frame.f_lasti == last
                and _frame_of(depth - 1).f_code is inner
                and known == writer.sites.forgotten
            )
        except ValueError:  # the stack is not as deep, or there was no such operation
            is_same = False
        if not is_same:
            line = writer.sites.find(operation)
        entry, at, self._end = writer.next_entry()
        nbytes = operation.nbytes
        self._entered = entered = _now()
        self._met = 0.0
        text = operation.record or writer.texts.add_operation(operation)
        _pack_event(writer.memory, at, _COLLECTIVE, self._index, 0, text, line, number, nbytes, entered, 0.0, 0.0)
        words = writer.words
        # Published last: a reader may look at any time, also after this process was killed in the middle of an entry.
        words[self._last] = words[_AT_EVENTS] = entry
        words[_AT_BYTES] = writer.total_bytes = writer.total_bytes + nbytes
        if (ring := writer.trace) is not None:
            communicator, text_of = ring.communicators.get(self._token, NO_COMMUNICATOR), writer.texts.of
            traced_text, traced_site = ring.text(text, text_of), ring.text(line, text_of)
            self._event = ring.begin(_COLLECTIVE, communicator, number, traced_text, traced_site, nbytes, entered)
            self._ring = ring

    def meet(self) -> None:
        """Note that all ranks are in it."""
        if self._entered and not self._met:  # later meetings are part of the work
            self.writer.seconds[self._end - _FROM_MET] = self._met = _now()

    def leave(self) -> None:
        """Note that this rank has left it, also by an error."""
        entered = self._entered
        if entered:
            writer, time, self._entered = self.writer, _now(), 0.0
            writer.seconds[self._end] = time
            writer.in_collectives += time - entered
            if self._ring is not None:
                self._ring.end(self._event, self._met, time)
                self._ring = None

    def keep(self) -> None:
        """Let the last entry of this communicator stand for later operations of the same name."""
        writer = self.writer
        if writer.trace is None:  # which has all entries
            self.kept = writer.words[self._last]
            writer.keeper = self

    def publish(self) -> None:
        """Write `passed` into the last entry, if that is of this communicator. For the thread of the heartbeat.

        It writes to a slot that `enter` has published, which the main thread does not use again for long.
        """
        words, seconds = self.writer.words, self.writer.seconds
        entry = words[self._last]
        at = (_EVENTS + (entry - 1) % _MOST_EVENTS * _EVENT_BYTES) >> 3
        if entry == words[_AT_EVENTS] and seconds[at + _ENDED] and self.passed > words[at + _NUMBER]:
            words[at + _NUMBER] = self.passed
            seconds[at + _BEGAN] = seconds[at + _ENDED] = _now()

    def end(self) -> None:
        """Remove the communicator from the record."""
        self.writer.words[self._last - 3] = 0  # the token: without one the place is free


class RecordWriter:
    """What a process writes to the memory of its record while it runs.

    ``words`` and ``seconds`` are views of the memory. ``next_entry()`` returns the number of a new entry from 1 on,
    its offset in the memory, and the index of its end in ``seconds``. No two threads get the same.
    ``in_collectives`` are the seconds of this process in collectives, ``in_phase`` those in each phase, and
    ``total_bytes`` the bytes that collectives were given: reading the totals from the memory takes longer.
    ``trace`` gets all that the record gets, and has room for more. ``keeper`` is the communicator that last called
    `Flight.keep`.
    """

    __slots__ = (
        "_phase_event",
        "_phase_ring",
        "_steps",
        "_unit",
        "in_collectives",
        "in_phase",
        "keeper",
        "memory",
        "next_entry",
        "seconds",
        "sites",
        "texts",
        "total_bytes",
        "trace",
        "words",
    )

    def __init__(self, memory: mmap.mmap, texts: Texts):
        self.texts, self.sites = texts, Sites(texts)
        offsets = range(_EVENTS, _EVENTS + _MOST_EVENTS * _EVENT_BYTES, _EVENT_BYTES)
        ends = itertools.cycle([(offset >> 3) + _ENDED for offset in offsets])
        self.next_entry = zip(itertools.count(1), itertools.cycle(offsets), ends, strict=True).__next__
        self.in_collectives, self.total_bytes = 0.0, 0
        self.in_phase = [0.0] * len(Phase)
        self._unit = self._steps = 0
        self.keeper: Flight | None = None
        self.trace: TraceRing | None = None
        self._phase_ring: TraceRing | None = None  # with the event of the present phase
        self._phase_event = 0
        self.move(memory)

    def move(self, memory: mmap.mmap) -> None:
        """Write to other memory from now on."""
        self.memory, self.words, self.seconds = (memory, memoryview(memory).cast("q"), memoryview(memory).cast("d"))

    def join(self, token: int, size: int, rank: int) -> Flight | None:
        """Add a communicator whose ranks share a random number. Return None if there are too many communicators."""
        words = self.words
        for index in range(layout.MOST_COMMUNICATORS):
            first_word = (layout.COMMUNICATORS + index * layout.COMMUNICATOR.size) // 8
            if not words[first_word]:
                break
        else:
            return None
        words[first_word + 1], words[first_word + 2], words[first_word + 3] = size, rank, 0
        words[first_word] = token  # last: a place without a token is free, for readers too
        if self.trace is not None:
            self.trace.add_communicator(token, size, rank)
        return Flight(self, index, token)

    def step(self, unit: int) -> None:
        """Note the end of a step. Only the largest unit so far counts."""
        if unit != self._unit:
            if unit < self._unit:
                return
            self._unit, self._steps = unit, 0  # steps of the smaller unit do not count any more
        number, in_phase, now = self._steps, self.in_phase, _now()
        at = _STEPS + number % _MOST_STEPS * _STEP_BYTES
        _pack_step(self.memory, at, now, self.in_collectives, in_phase[1], in_phase[2])
        self.words[_AT_STEPS] = self._steps = number + 1
        if self.trace is not None:
            self.trace.begin(Kind.STEP, NO_COMMUNICATOR, number, 0, 0, 0, now)

    def phase(self, phase: int) -> int:
        """Begin a phase, and return the former one."""
        last, now = self.words[_AT_PHASE], _now()
        if self._phase_ring is not None:
            self._phase_ring.end(self._phase_event, 0.0, now)
            self._phase_ring = None
        if self.trace is not None and phase in _TRACED_PHASES:
            kind = _TRACED_PHASES[phase]
            self._phase_event = self.trace.begin(kind, NO_COMMUNICATOR, 0, 0, 0, 0, now)
            self._phase_ring = self.trace
        self.in_phase[last] += now - self.seconds[_AT_PHASE_SINCE]
        self.words[_AT_PHASE], self.seconds[_AT_PHASE_SINCE] = phase, now
        return last
