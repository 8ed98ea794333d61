"""Collectives that are interrupted once at each place where Python serves signals. See ``test_interrupts.py``.

    python -m mpistrat run -n 2 tests/faults/interrupted_places.py KIND LENGTH

``interrupts.py`` has the calls, and interrupts them at random moments. Here the signal comes before an instruction that
is given by its number. First one rank is interrupted at each place of its call, one place in each draw. Then rank 1 is
interrupted in the middle, so that the ranks are out of step, and rank 0 at each place, also where it handles that
error. Finally the calls of the ranks differ, which leaves them in step, and rank 0 is interrupted at each place.
"""

import ctypes
import dis
import gc
import signal
import sys
from functools import cache, partial

import numpy as np
from interrupts import RANK, WORLD, Draw, InterruptError, made, played, prepared

from mpistrat.runtime.agreement.operation import MismatchError, ValueMismatchError

# Before these instructions. Python serves a signal where a function begins, after a call into C, and in a jump back.
INSTRUCTIONS = ("CALL", "RETURN", "JUMP_BACKWARD", "BEFORE_WITH", "LOAD_ATTR", "LOAD_SPECIAL")


class Sender:
    """Sends a signal to this process when it is deleted: without a call, after which Python would serve it."""

    __del__ = staticmethod(partial(ctypes.PyDLL(None)["raise"], signal.SIGALRM))


class Interrupt:
    """Send a signal at one place of some calls, given by its number; 0 for none."""

    sender = Sender()

    def __init__(self, place):
        self.place, self.passed = place, 0

    def make(self, call):
        """Return the result of the call, and the error that it was left by.

        Without garbage collection: an error in one of its callbacks is lost, and Python 3.11.2 sometimes crashes.
        """
        result = error = None
        gc.disable()
        try:
            if self.place:
                sys.settrace(self._function)
            try:
                result = call()
            except (InterruptError, RuntimeError) as caught:
                error = caught
            sys.settrace(None)
        except InterruptError:
            pass  # after the call
        finally:
            gc.enable()
        return result, error

    def _function(self, frame, event, argument):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame, event, argument):
        if event == "opcode" and _name(frame).startswith(INSTRUCTIONS):
            self.passed += 1
            if self.passed == self.place:
                sys.settrace(None)
                Interrupt.sender = None
        return self._instruction

    @property
    def reached(self):
        return self.passed >= self.place


@cache
def _instructions(code):
    return code.co_code


def _name(frame):
    return dis.opname[_instructions(frame.f_code)[frame.f_lasti]]


def handler(*_):
    raise InterruptError


def interrupted(draw, interrupt):
    """Make the calls of a draw. The third is interrupted and repeated. Return how often it was interrupted."""
    for step in (1, 2):
        made(draw, step)
    call, check = prepared(draw, 3)
    result, error = interrupt.make(call)
    if isinstance(error, RuntimeError):
        raise error
    if error is not None:
        result = call()
    check(result)
    for step in (4, 5, 6):
        made(draw, step)
    return int(error is not None)


def refused(draw, interrupt):
    """As `interrupted`, but the third call is one that the ranks refuse."""
    for step in (1, 2):
        made(draw, step)
    values, times, error = np.zeros(5 + RANK), -1, None
    while not isinstance(error, ValueMismatchError):
        times += 1
        _, error = interrupt.make(lambda: draw.strategy.reduce("SUM", values, axis=None))
        if type(error) is MismatchError:
            raise error
    for step in (4, 5, 6):
        made(draw, step)
    return times


def ended(kind, length, *places, play=interrupted):
    """Return whether the ranks raise if interrupted at these places, and whether each of them came to its place."""
    comm, interrupt = WORLD.Dup(), Interrupt(places[RANK])
    Interrupt.sender = Interrupt.sender or Sender()
    cause = "was interrupted by InterruptError" if play is interrupted else ""
    times = played(
        Draw(comm, kind, length), partial(play, interrupt=interrupt), is_shared_memory_only=True, cause=cause
    )
    comm.Free()
    return None in times, all(WORLD.allgather(interrupt.reached))


def main(kind, length):
    ended(kind, length, 0, 0)  # what is done once, such as the text of a line of this program
    for victim in (0, 1):
        raised, place, reached = [], 0, True
        while reached:
            place += 1
            raises, reached = ended(kind, length, *((place, 0) if victim == 0 else (0, place)))
            if raises:
                raised.append(place)
        report(f"rank {victim} interrupted at {place - 1} places, both raise after {len(raised)} of them")
    at_each_place("both interrupted", lambda place: ended(kind, length, place, raised[0]))
    if kind == "reduce_to":
        at_each_place("refused", lambda place: ended(kind, length, place, 0, play=refused))


def at_each_place(what, interrupted_at):
    place, reached = 0, True
    while reached:
        place += 1
        _, reached = interrupted_at(place)
    report(f"{what}, rank 0 at {place - 1} places")


def report(text):
    if RANK == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for this when a trace begins
    signal.signal(signal.SIGALRM, handler)
    try:
        main(sys.argv[1], int(sys.argv[2]))
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
