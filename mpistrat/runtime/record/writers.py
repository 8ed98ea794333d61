"""The functions that write the entries of a flight record, and the texts that entries name.

The functions are closures, which read a name in half the time of an attribute. Totals are kept in names, too: reading
them back from the memory takes longer.
"""

from __future__ import annotations

import itertools
import mmap
import struct
import sys
import time
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple, Protocol

from mpistrat.runtime.process.own_files import is_own
from mpistrat.runtime.record import layout
from mpistrat.runtime.record.layout import Phase, Word
from mpistrat.runtime.trace import ring as trace
from mpistrat.runtime.trace.layout import NO_COMMUNICATOR, Kind


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


class Texts:
    """The texts in the memory of a record. A text of the table gives its place to another, long after.

    Parameters
    ----------
    memory : mmap.mmap
    """

    def __init__(self, memory: mmap.mmap):
        self._numbers = itertools.count(1).__next__
        self._owners: list[Callable[[], object]] = [_nothing] * layout.MOST_TEXTS
        self.move(memory)

    def move(self, memory: mmap.mmap) -> None:
        """Write to other memory from now on."""
        self._bytes, self._words = memoryview(memory), memoryview(memory).cast("q")

    def write(self, offset: int, text: str) -> None:
        """Write a text of the header."""
        data = text.encode(errors="replace")[: layout.TEXT_BYTES]
        self._bytes[offset + 8 : offset + 8 + len(data)] = data
        self._words[offset // 8] = len(data)

    def add(self, text: str, forget: Callable[[], object]) -> int:
        """Return the number of a new text. ``forget`` is called when the text gives its place to another."""
        number = self._numbers()
        slot = number % layout.MOST_TEXTS
        self._owners[slot]()
        self._owners[slot] = forget
        offset = layout.TEXTS + slot * layout.SLOT_BYTES
        self._words[offset // 8] = 0
        data = text.encode(errors="replace")
        if len(data) > layout.TEXT_BYTES:
            half = layout.TEXT_BYTES // 2 - 2
            data = data[:half] + b"..." + data[-half:]
        self.write(offset + 8, data.decode(errors="replace"))
        self._words[offset // 8] = number
        return number

    def add_operation(self, operation: Described) -> int:
        """Return the number of the text of an operation, which keeps it."""

        def forget() -> None:
            operation.record = 0

        operation.record = self.add(str(operation), forget)
        return operation.record

    def of(self, number: int) -> str:
        """Return a text that is in the table."""
        at = layout.TEXTS + number % layout.MOST_TEXTS * layout.SLOT_BYTES
        return bytes(self._bytes[at + 16 : at + 16 + self._words[at // 8 + 1]]).decode(errors="replace")


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


class Writers(NamedTuple):
    """The functions of a record that note what the process does.

    Attributes
    ----------
    join : callable
        ``join(token, size, rank)`` adds a communicator whose ranks share a random number. Returns a `Flight`, or None
        if there are too many communicators.
    step : callable
        ``step(unit)`` notes the end of a step. Only the largest unit so far counts.
    phase : callable
        ``phase(Phase)`` begins a phase, and returns the former one.
    move : callable
        ``move(memory)`` writes to other memory from now on.
    """

    join: Callable[[int, int, int], Flight | None]
    step: Callable[[int], None]
    phase: Callable[[int], int]
    move: Callable[[mmap.mmap], None]


def writers(memory: mmap.mmap, texts: Texts) -> Writers:
    """Return the functions that write to the memory of a record."""
    words, seconds = memoryview(memory).cast("q"), memoryview(memory).cast("d")
    now, next_entry, frame_of = time.monotonic, itertools.count().__next__, sys._getframe
    pack_entry, pack_step = struct.Struct("=5q3d").pack_into, struct.Struct("=4d").pack_into
    ours = _OwnFiles()
    places: dict[int, int] = {}
    operation_text, add_text, text_of = texts.add_operation, texts.add, texts.of
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

    def move(other: mmap.mmap) -> None:
        nonlocal memory, words, seconds
        memory, words, seconds = other, memoryview(other).cast("q"), memoryview(other).cast("d")

    return Writers(join, step, phase, move)


class _OwnFiles(dict[str, bool]):
    """Whether a file of a code object is not the user's."""

    def __missing__(self, name: str) -> bool:
        self[name] = found = is_own(name)
        return found


def _nothing() -> None:
    pass
