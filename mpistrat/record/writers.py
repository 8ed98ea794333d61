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
_AT_STEPS, _AT_STEP_SINCE = int(Word.STEPS), int(Word.STEP_SINCE)
_AT_PHASE, _AT_PHASE_SINCE = int(Word.PHASE), int(Word.PHASE_SINCE)
_NUMBER, _BEGAN, _MET, _ENDED = (at // 8 for at in (layout.NUMBER, layout.BEGAN, layout.MET, layout.ENDED))
_COLLECTIVE = int(Kind.COLLECTIVE)
_TRACED_PHASES = {int(Phase.INPUT): Kind.INPUT_WAIT, int(Phase.SAVING): Kind.SAVE}
_is_own = functools.cache(is_own)


class Sites:
    """The lines of the program that call operations, as texts of the record.

    ``forgotten`` says how many lines have given their texts to others: what is kept of a line is valid until then.
    """

    __slots__ = ("_numbers", "_texts", "forgotten")

    def __init__(self, texts: Texts):
        self.forgotten = 0
        self._texts = texts
        self._numbers: dict[int, int] = {}

    def find(self, operation: Any) -> int:
        """Return the number of the line that calls what calls this, and let the operation keep how it was found.

        The line is that of the first frame outside of the package.
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
        found = self._numbers.get(key)
        if found is None:

            def forget(_: CodeType = code) -> None:  # keeps the code alive: another one could get its id
                self._numbers.pop(key, None)
                self.forgotten += 1

            text = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
            found = self._numbers[key] = self._texts.add(text, forget)
        return found


class Flight:
    """The entries of one communicator, whose place in the table is ``index``, and whose random number is ``token``.

    ``latest`` is the name of the operation of the record's last entry, if that is of this communicator and there is no
    trace, which has all entries; else it is empty. A caller of the same operation that ends without a wait may set
    ``passed`` to its number, in place of an entry (0.04 us in place of 0.9). The heartbeat writes that into the entry.
    """

    __slots__ = (
        "_at",
        "_entered",
        "_event",
        "_home",
        "_index",
        "_inside",
        "_met",
        "_nbytes",
        "_ring",
        "_token",
        "_writer",
        "latest",
        "passed",
    )

    def __init__(self, writer: RecordWriter, index: int, token: int):
        self._writer, self._index, self._token = writer, index, token
        self._home = (layout.COMMUNICATORS + index * layout.COMMUNICATOR.size) // 8 + 3
        self._at, self._inside = _EVENTS, False
        self._entered, self._met, self._nbytes = 0.0, 0.0, 0
        self._ring: TraceRing | None = None  # with the event of this entry
        self._event = self.passed = 0
        self.latest = ""

    def enter(self, operation: Any, number: int) -> None:
        """Note that this rank is in a collective."""
        writer = self._writer
        # The line of the program that called the package is that of the last such operation, mostly. Each frame that
        # is looked at costs 0.1 us.
        try:
            depth, code, last, inner, place, known = operation.site
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
            place = writer.sites.find(operation)
        entry = writer.next_entry()
        self._at = at = _EVENTS + entry % _MOST_EVENTS * _EVENT_BYTES
        self._nbytes = nbytes = operation.nbytes
        self._entered = entered = _now()
        text = operation.record or writer.texts.add_operation(operation)
        _pack_event(writer.memory, at, _COLLECTIVE, self._index, 0, text, place, number, nbytes, entered, 0.0, 0.0)
        words = writer.words
        # Published last: a reader may look at any time, also after this process was killed in the middle of an entry.
        words[self._home] = words[_AT_EVENTS] = entry + 1
        self._inside, self._met = True, 0.0
        if writer.latest is not self:
            if writer.latest is not None:
                writer.latest.latest = ""  # its last entry is not the record's last any more
            writer.latest = self
        self.latest = operation.name
        if (ring := writer.trace) is not None:
            whose, text_of = ring.communicators.get(self._token, NO_COMMUNICATOR), writer.texts.of
            what, where = ring.text(text, text_of), ring.text(place, text_of)
            self._event = ring.begin(_COLLECTIVE, whose, number, what, where, nbytes, entered)
            self._ring = ring
            self.latest = ""

    def meet(self) -> None:
        """Note that all ranks are in it."""
        if self._inside and not self._met:  # later meetings are part of the work
            self._writer.seconds[(self._at >> 3) + _MET] = self._met = _now()

    def leave(self) -> None:
        """Note that this rank has left it, also by an error."""
        if self._inside:
            self._inside = False
            writer, time = self._writer, _now()
            writer.seconds[(self._at >> 3) + _ENDED] = time
            writer.in_collectives += time - self._entered
            writer.total_bytes = total = writer.total_bytes + self._nbytes
            writer.words[_AT_BYTES] = total
            if self._ring is not None:
                self._ring.end(self._event, self._met, time)
                self._ring = None

    def publish(self) -> None:
        """Write `passed` into the last entry, if that is of this communicator. For the thread of the heartbeat.

        It writes to a slot that `enter` has published, which the main thread does not use again for long.
        """
        words, seconds = self._writer.words, self._writer.seconds
        entry = words[self._home]
        at = (_EVENTS + (entry - 1) % _MOST_EVENTS * _EVENT_BYTES) >> 3
        if entry == words[_AT_EVENTS] and seconds[at + _ENDED] and self.passed > words[at + _NUMBER]:
            words[at + _NUMBER] = self.passed
            seconds[at + _BEGAN] = seconds[at + _ENDED] = _now()

    def end(self) -> None:
        """Remove the communicator from the record."""
        self._writer.words[self._home - 3] = 0


class RecordWriter:
    """What a process writes to the memory of its record while it runs.

    ``words`` and ``seconds`` are views of the memory. ``next_entry()`` returns the number of a new entry: a different
    one for each thread. ``in_collectives`` are the seconds of this process in collectives, and ``total_bytes`` those
    that collectives were given. Totals are kept here, too: reading them from the memory takes longer. ``trace`` gets
    what the record gets, and keeps more of it. ``latest`` is the communicator of the last entry.
    """

    __slots__ = (
        "_before",
        "_in_phase",
        "_phase_event",
        "_phase_ring",
        "_steps",
        "_unit",
        "in_collectives",
        "latest",
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
        self.next_entry = itertools.count().__next__
        self.in_collectives, self.total_bytes = 0.0, 0
        self._in_phase = [0.0] * len(Phase)
        # When the last step ended: time, in collectives, in input, in saving.
        self._before = (0.0, 0.0, 0.0, 0.0)
        self._unit = self._steps = 0
        self.latest: Flight | None = None
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
            home = (layout.COMMUNICATORS + index * layout.COMMUNICATOR.size) // 8
            if not words[home]:
                break
        else:
            return None
        words[home + 1], words[home + 2], words[home + 3] = size, rank, 0
        words[home] = token  # last: a place without a token is free, for readers too
        if self.trace is not None:
            self.trace.add_communicator(token, size, rank)
        return Flight(self, index, token)

    def step(self, unit: int) -> None:
        """Note the end of a step. Only the largest unit so far counts."""
        if unit != self._unit:
            if unit < self._unit:
                return
            self._unit, self._steps, self._before = unit, 0, (0.0, 0.0, 0.0, 0.0)
            self.words[Word.STEPS] = 0  # steps of the smaller unit do not count any more
        began, collectives, input, saving = self._before
        in_phase = self._in_phase
        ends = now, in_collectives, in_input, in_saving = (_now(), self.in_collectives, in_phase[1], in_phase[2])
        self._before = ends
        if began:
            at = _STEPS + self._steps % _MOST_STEPS * _STEP_BYTES
            _pack_step(self.memory, at, now - began, in_collectives - collectives, in_input - input, in_saving - saving)
            self._steps += 1
            self.words[_AT_STEPS] = self._steps
        self.seconds[_AT_STEP_SINCE] = now
        if self.trace is not None:
            self.trace.begin(Kind.STEP, NO_COMMUNICATOR, self._steps, 0, 0, 0, now)

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
        self._in_phase[last] += now - self.seconds[_AT_PHASE_SINCE]
        self.words[_AT_PHASE], self.seconds[_AT_PHASE_SINCE] = phase, now
        return last
