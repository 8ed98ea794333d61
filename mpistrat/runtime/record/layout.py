"""The layout of a flight record: one file for each rank, of 8-byte words in the order of the machine.

A record is a header, a table of communicators, a ring of collectives, two tables of texts, and a ring of steps. Stacks
that faulthandler writes follow. A writer fills an entry before it publishes the entry's number, so a reader may look
at any time, also after the writer was killed.
"""

from __future__ import annotations

import enum

FOLDER = "/dev/shm"
PREFIX = "mpistrat-record-"
MAGIC = 0x6D70697374726174  # "mpistrat"
VERSION = 1


class Word(enum.IntEnum):
    """The place of each number of the header. Those with a comment are floats, in seconds."""

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
    CLOCK = 12  # float, what to add to the monotonic clock for the time since the epoch
    ENTRIES = 13  # collectives that were entered
    TEXTS = 14  # texts that were written
    STEPS = 15
    STEP_SINCE = 16  # float
    BYTES = 17  # that collectives were given, total
    MOVES = (
        18  # whether the main thread ran Python code when the watchdog looked: 1, 0, or -1 if it did not look
    )
    EXIT_STATUS = 19  # 1 + the status given to os._exit; 0 if it was not called
    OUT_OF_MEMORY_KILLS = 20  # 1 + what the cgroup had counted when the record was made; 0 if unknown
    ASKED = 21  # how often another process has asked for the stacks of all threads
    ANSWERED = 22  # how often they were written
    KEPT_LOCK = 23  # whether the main thread let the watchdog wait for the interpreter's lock before this beat: 1 or 0


class Phase(enum.IntEnum):
    """What a rank does while it is in no collective."""

    USER_CODE = 0
    INPUT = 1
    SAVING = 2
    FAILED = 3
    FINISHED = 4
    SERVING = 5  # a coordinator, as a worker or a parameter server


# --- texts of the header: a length of 8 bytes, then the text -------------------------------------------

HOST, LAUNCH, JOB, PROGRAM, NOTE = (1024 + 192 * i for i in range(5))
TEXT_BYTES = 184  # the longest text

# --- communicators: token, size, this rank, 1 + number of the entry that this rank is in or left last ----

COMMUNICATORS = 2048
MOST_COMMUNICATORS = 32
COMMUNICATOR_WORDS = 8

# --- the ring of collectives ---------------------------------------------------------------------------

RING = 4096
RING_ENTRIES = 512
ENTRY_WORDS = (
    8  # number, communicator, operation, place, bytes, entered, met, left: the last three are floats
)
NUMBER, COMMUNICATOR, OPERATION, PLACE, NBYTES, ENTERED, MET, LEFT = range(ENTRY_WORDS)

# --- texts: operations and places. The number of a text, a length, the text ------------------------------

TEXTS = RING + RING_ENTRIES * ENTRY_WORDS * 8
MOST_TEXTS = 192
SLOT_BYTES = 16 + TEXT_BYTES

# --- the ring of steps: seconds in all, in collectives, in input, in saving ---------------------------------

STEPS = TEXTS + MOST_TEXTS * SLOT_BYTES
RING_STEPS = 200
STEP_WORDS = 4

STACKS = -(-(STEPS + RING_STEPS * STEP_WORDS * 8) // 4096) * 4096  # where stacks begin: the size of the rest
