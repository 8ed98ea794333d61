"""The layout of a flight record and of a trace: one file for each rank, in the byte order of the machine.

Both have a header, a table of communicators, samples of the clock, a ring of steps, a table of texts, and a ring of
events. A trace has room for more texts and events. A flight record is followed by stacks, which faulthandler writes. A
writer fills an event before it publishes the number of events, so a reader may look at any time, also after the writer
was killed. `mapped`, `fill_header` and `Texts` write what both have in common.
"""

from __future__ import annotations

import enum
import itertools
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

FOLDER = "/dev/shm"  # of flight records
PREFIX = "mpistrat-record-"
SUFFIX = ".mpistrat-trace"
MAGIC = 0x6D70697374726174  # "mpistrat"
VERSION = 3


class Word(enum.IntEnum):
    """The place of each number of the header, of 8 bytes. Those with a comment are floats, in seconds."""

    MAGIC = 0
    VERSION = 1
    PID = 2
    STARTED = 3  # of the process, in ticks as /proc gives it: process numbers repeat
    RANK = 4
    SIZE = 5
    MAIN_THREAD = 6
    SIGNAL = 7  # that makes faulthandler write stacks; 0 for none
    PHASE = 8
    PHASE_SINCE = 9  # float, by the monotonic clock of the node
    HEARTBEAT = 10  # float, by the monotonic clock of the node
    BEAT_EVERY = 11  # float
    EPOCH = 12  # float, what to add to the monotonic clock for the time since the epoch
    CAPACITY = 13  # events of the ring
    EVENTS = 14  # events that were written, of which the ring has the last
    STEPS = 15  # ends of steps that were written, of which the ring has the last. 16 is free
    BYTES = 17  # that collectives were given, total
    MOVES = 18  # whether the main thread ran Python code when the watchdog looked: 1, 0; -1 if it did not look
    EXIT_STATUS = 19  # 1 + the status given to os._exit; 0 if it was not called
    OUT_OF_MEMORY_KILLS = 20  # 1 + what the cgroup had counted when the record was made; 0 if unknown
    ASKED = 21  # how often another process has asked for the stacks of all threads
    ANSWERED = 22  # how often they were written
    KEPT_LOCK = 23  # whether the main thread let the watchdog wait for the interpreter's lock before this beat: 1 or 0
    CLOCK = 24  # a number that is equal for processes with the same monotonic clock
    BEGAN = 25  # float, when the trace began, by the monotonic clock
    ENDED = 26  # float; 0 if the trace did not end: the process was killed, or still runs
    COMMUNICATORS = 27  # of a trace: it has those that were freed, too
    SAMPLES = 28


class Phase(enum.IntEnum):
    """What a rank does while it is in no collective."""

    USER_CODE = 0
    INPUT = 1
    SAVING = 2
    FAILED = 3
    FINISHED = 4
    SERVING = 5  # a coordinator, as a worker or a parameter server


class Kind(enum.IntEnum):
    """What an event is. A flight record has collectives only."""

    COLLECTIVE = 0
    INPUT_WAIT = 1
    SAVE = 2
    REDUCE_PACK = 3
    REDUCE_UNPACK = 4
    REDUCE_WIRE = 5  # the wait for a reduction in flight
    STEP = 6  # the end of a step


# --- texts of the header: a length of 8 bytes, then the text -------------------------------------------

HOST, LAUNCH, JOB, PROGRAM, NOTE = (1024 + 192 * i for i in range(5))
TEXT_BYTES = 184  # the longest text

# --- communicators: token, size, this rank, 1 + number of the event that this rank is in or left last ----

COMMUNICATORS = 2048
MOST_COMMUNICATORS = 120
COMMUNICATOR = struct.Struct("=4q")
NO_COMMUNICATOR = 255

# --- samples: the time by this clock, how far the first rank's clock is ahead, the error, its clock's number ---

SAMPLES = COMMUNICATORS + MOST_COMMUNICATORS * COMMUNICATOR.size
MOST_SAMPLES = 32
SAMPLE = struct.Struct("=3dq")

# --- the ring of ends of steps: the time, and seconds in collectives, in input, in saving until then ---------

STEPS = SAMPLES + MOST_SAMPLES * SAMPLE.size
MOST_STEPS = 200
STEP = struct.Struct("=4d")

# --- texts: operations and places. The number of a text, a length, the text ------------------------------

TEXTS = STEPS + MOST_STEPS * STEP.size
SLOT_BYTES = 16 + TEXT_BYTES
RECORD_TEXTS, TRACE_TEXTS = 192, 1024

# --- the ring: kind, communicator, thread, operation, place, number, bytes, began, met, ended --------------

EVENT = struct.Struct("=BBHII4xqqddd")
NUMBER, BEGAN, MET, ENDED = 16, 32, 40, 48  # places in an event
RECORD_EVENTS, TRACE_EVENTS = (TEXTS + slots * SLOT_BYTES for slots in (RECORD_TEXTS, TRACE_TEXTS))
MOST_EVENTS = 512  # of a flight record

# The size of the rest of a flight record.
STACKS = -(-(RECORD_EVENTS + MOST_EVENTS * EVENT.size) // 4096) * 4096


# --- what a record and a trace fill in the same way ------------------------------------------------------


class Texts:
    """The texts in the memory of a record or a trace. The table has room for ``most``.

    A text of the table is overwritten when ``most`` others have been added.
    """

    def __init__(self, memory: mmap.mmap, most: int):
        self._most = most
        self._numbers = itertools.count(1).__next__
        self._owners: list[Callable[[], object]] = [_nothing] * most
        self.move(memory)

    def move(self, memory: mmap.mmap) -> None:
        """Write to other memory from now on."""
        self._bytes, self._words = memoryview(memory), memoryview(memory).cast("q")

    def write(self, offset: int, text: str) -> None:
        """Write a text of the header."""
        data = text.encode(errors="replace")[:TEXT_BYTES]
        self._bytes[offset + 8 : offset + 8 + len(data)] = data
        self._words[offset // 8] = len(data)

    def add(self, text: str, forget: Callable[[], object] | None = None) -> int:
        """Return the number of a new text. ``forget`` is called when the text gives its place to another."""
        number = self._numbers()
        slot = number % self._most
        self._owners[slot]()
        self._owners[slot] = forget or _nothing
        offset = TEXTS + slot * SLOT_BYTES
        self._words[offset // 8] = 0  # until it is complete: a reader of the former text gets none, not half of each
        data = text.encode(errors="replace")
        if len(data) > TEXT_BYTES:
            half = TEXT_BYTES // 2 - 2
            data = data[:half] + b"..." + data[-half:]
        self.write(offset + 8, data.decode(errors="replace"))
        self._words[offset // 8] = number
        return number

    def add_operation(self, operation: Any) -> int:
        """Return the number of the text ``label`` of an operation, which keeps it as its ``record``."""

        def forget() -> None:
            operation.record = 0

        operation.record = self.add(operation.label, forget)
        return operation.record

    def of(self, number: int) -> str:
        """Return a text that is in the table."""
        at = TEXTS + number % self._most * SLOT_BYTES
        return bytes(self._bytes[at + 16 : at + 16 + self._words[at // 8 + 1]]).decode(errors="replace")


def mapped(descriptor: int, path: str, nbytes: int) -> mmap.mmap:
    """Return the memory of a new file. Remove the file if the memory cannot be reserved.

    Raise OSError if the disk or the memory is full: a write to the memory would end the process by SIGBUS later.
    """
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    except (OSError, ValueError):
        os.unlink(path)
        raise


def fill_header(memory: mmap.mmap, texts: Texts, rank: int, size: int, capacity: int) -> None:
    """Fill the words that the headers of a record and of a trace share, but for the one that makes it valid."""
    words, seconds = memoryview(memory).cast("q"), memoryview(memory).cast("d")
    words[Word.VERSION] = VERSION
    words[Word.PID] = os.getpid()
    words[Word.RANK], words[Word.SIZE] = rank, size
    words[Word.CAPACITY] = capacity
    seconds[Word.EPOCH] = time.time() - time.monotonic()
    texts.write(HOST, socket.gethostname())
    arguments = getattr(sys, "argv", [])  # an embedded interpreter has none
    texts.write(PROGRAM, " ".join(arguments[:4]))


def _nothing() -> None:
    pass
