"""The end of a program: the steps of this library, in one order, whatever was registered first.

`atexit` calls functions in the reverse order of their registration, so each file would have to know when the others
register. Here a file names its step instead. No other file registers an exit handler.

Exit functions of the program come in between, so `atexit` enters the list at three places:

- Threads that read ahead end before the exit functions of all modules that were imported before the last of these
  threads started. They may be inside such a module while it tears itself down.
- The steps from `EndStep.SAVES` to `EndStep.UNREAD` begin where the first of their functions was registered: with the
  first strategy. Exit functions of the program that were registered later may still make collective calls.
- Records and MPI end where this file was imported. Exit functions that were registered before the strategy may use MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial

from mpistrat.process import failure


class EndStep(enum.IntEnum):
    """The steps, in their order. A step may use what no step before it has ended."""

    READERS = enum.auto()
    """End threads that read ahead. They may be in any library: all libraries still work, and collectives too."""
    SAVES = enum.auto()
    """Report saves that failed while no call waited for them. Python has ended their threads. Only writes logs."""
    EXECUTORS = enum.auto()
    """Wait for the calls of executors, or serve them. Sends messages and runs functions of the program."""
    SERVERS = enum.auto()
    """Let workers and parameter servers go. Their programs go on, so they come to `GOODBYES`. Sends messages."""
    TORCH = enum.auto()
    """Tell other ranks that this one makes no more groups of torch. Sends, but does not wait: they may not be here."""
    GOODBYES = enum.auto()
    """Meet the other ranks of each topology, of the last one first. The last step that waits for them, or sends."""
    UNREAD = enum.auto()
    """Receive what is left of the messages to this rank: MPICH ends a job with an error otherwise. Does not wait."""
    NOTICES = enum.auto()
    """Take down the notices of the watchdog. Until here it reports ranks that do not come. Only touches files."""
    RECORD = enum.auto()
    """Close the trace and the flight record, and remove its file: all steps before note what they do in these."""
    MPI = enum.auto()
    """Finalize MPI, if mpi4py does not, or leave the process without it. Nothing else is left."""

    @property
    def communicates(self) -> bool:
        """Whether the step uses MPI. It is left out once MPI was finalized, and after an error of this rank.

        An error ends the whole job (`failure`): no rank waits for another then.
        """
        return self not in (EndStep.READERS, EndStep.SAVES, EndStep.NOTICES, EndStep.RECORD)

    @property
    def stop(self) -> EndStep:
        """The last of the steps that begin at the same place among the exit functions of the program."""
        return next(step for step in (EndStep.READERS, EndStep.UNREAD, EndStep.MPI) if self <= step)


_Functions = dict[EndStep, list[Callable[[], object]]]
_functions: _Functions = {step: [] for step in EndStep}
_of_parents: list[_Functions] = []


def register(step: EndStep, function: Callable[[], object]) -> None:
    """Call a function once in a step of the end; in one step, the last registered is called first.

    A function that is registered already becomes the last one. During the end, a function of an earlier step is the
    next to be called. An error of a function is reported as `atexit` reports it, and the next function is called. A
    forked child does not call the functions of its parent.
    """
    unregister(step, function)
    stop = step.stop
    if stop is not EndStep.MPI and not any(_functions[other] for other in EndStep if other.stop is stop):
        _enter_at_exit(stop)
    _functions[step].append(function)


def unregister(step: EndStep, function: Callable[[], object]) -> None:
    """Do not call a function in a step, if it was registered."""
    with contextlib.suppress(ValueError):
        _functions[step].remove(function)


def _run(last: EndStep) -> None:
    """Call what is registered in the steps up to ``last``. Functions that these register are called, too."""
    while step := next((candidate for candidate in EndStep if candidate <= last and _functions[candidate]), None):
        function = _functions[step].pop()
        if step.communicates and not _may_communicate():
            continue
        try:
            function()
        except BaseException as error:  # also an interrupt: the other ranks wait for the step `GOODBYES`
            trace = traceback.format_exception(type(error), error, error.__traceback__)
            failure.write("".join([f"Exception ignored in atexit callback: {function!r}\n", *trace]))


def _may_communicate() -> bool:
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized() and not failure.pending()


_entries = {stop: partial(_run, stop) for stop in {step.stop for step in EndStep}}


def _enter_at_exit(stop: EndStep) -> None:
    atexit.unregister(_entries[stop])
    atexit.register(_entries[stop])


_enter_at_exit(EndStep.MPI)


def _leave_to_parent() -> None:
    """Forget the functions of the parent in a forked child. They are kept: the child must not free what they hold."""
    _of_parents.append(dict(_functions))
    _functions.update({step: [] for step in EndStep})


os.register_at_fork(after_in_child=_leave_to_parent)
