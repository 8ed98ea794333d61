"""The layout of a trace: one file for each rank, in the byte order of the machine.

A trace is a header, a table of communicators, samples of the clock, texts, and a ring of events. A writer fills an
event before it publishes the number of events. So a reader may look at any time, also after the writer was killed.
"""

from __future__ import annotations

import enum
import struct

SUFFIX = ".mpistrat-trace"
MAGIC = 0x6563617274697073  # "spitrace"
VERSION = 1


class HeaderWord(enum.IntEnum):
    """The place of each number of the header, of 8 bytes. Those with a comment are floats, in seconds."""

    MAGIC = 0
    VERSION = 1
    PID = 2
    RANK = 3
    SIZE = 4
    CLOCK = 5  # a number that is equal for processes with the same monotonic clock
    EPOCH = 6  # float, what to add to the monotonic clock for the time since the epoch
    BEGAN = 7  # float, by the monotonic clock
    ENDED = 8  # float; 0 if the trace did not end: the process was killed, or still runs
    CAPACITY = 9  # events of the ring
    EVENTS = 10  # events that were written, of which the ring has the last
    COMMUNICATORS = 11
    SAMPLES = 12
    TEXTS = 13  # bytes of texts


class Kind(enum.IntEnum):
    """What an event is."""

    COLLECTIVE = 0
    INPUT_WAIT = 1
    SAVE = 2
    REDUCE_PACK = 3
    REDUCE_UNPACK = 4
    REDUCE_WIRE = 5  # the wait for a reduction in flight
    STEP = 6  # the end of a step


# --- texts of the header: a length of 8 bytes, then the text -------------------------------------------

HOST, PROGRAM = 256, 512
TEXT_BYTES = 200

# --- communicators: token, size, this rank ---------------------------------------------------------------

COMMUNICATORS = 1024
MOST_COMMUNICATORS = 120
COMMUNICATOR = struct.Struct("=3q")
NO_COMMUNICATOR = 255

# --- samples: the time by this clock, what the clock of the first rank is ahead, how exactly, that clock ---

SAMPLES = COMMUNICATORS + MOST_COMMUNICATORS * COMMUNICATOR.size
MOST_SAMPLES = 32
SAMPLE = struct.Struct("=3dq")

# --- texts: a length of 2 bytes, then the text. The number of a text is 1 + its place ----------------------

TEXTS = -(-(SAMPLES + MOST_SAMPLES * SAMPLE.size) // 4096) * 4096
TEXTS_BYTES = 128 << 10

# --- the ring: kind, communicator, thread, number, operation, place, bytes, began, met, ended --------------

EVENTS = TEXTS + TEXTS_BYTES
EVENT = struct.Struct("=BBHIIIqddd")
MET = 32  # the place of `met`, and of `ended` behind it
