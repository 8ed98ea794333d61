"""Why a rank does not come to a collective: the causes that fit the evidence, the surest first.

A cause says in words what is seen of the rank and what to do. A new cause is an `if` in one of the functions of
`CAUSES`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mpistrat.monitor import process
from mpistrat.monitor.process import ProcessFacts
from mpistrat.monitor.stacks import Frame, Stacks, source_line
from mpistrat.record.layout import Phase
from mpistrat.record.read import Record
from mpistrat.runtime.agreement.operation import ranks_in_words

_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..")) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
CIRCLE = "other order"
_CHILD_MODULES = ("subprocess.py", "popen_fork.py")  # of the standard library: wait for a child's output, too


@dataclass(frozen=True)
class Evidence:
    """What is known of a rank that others wait for."""

    record: Record
    facts: ProcessFacts
    stacks: Stacks
    # whether no other thread of the process could run for a while, though the process runs
    holds_interpreter: bool = False
    in_circle: bool = False  # whether it waits in a collective for a rank that waits for it
    waits_elsewhere: str = ""  # the collective of another communicator that it waits in, or an empty string
    stuck: bool = False  # whether all ranks are in that collective, or have left it
    passed: bool = False  # whether it has gone on without making the call of the others
    # what has ended the job, if all its processes are gone, such as ranks that had failed or left; empty if unknown
    ended_after: str = ""
    # ranks of which one ended first, and the launcher then ended the others: the one with the oldest sign of life
    # comes first. Empty if the rank that ended first is known
    one_of: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Why a rank does not come."""

    cause: str  # one of a fixed set of names
    observed: str  # what the rank does, to follow "rank 2:"
    remedy: str  # what to do, as a sentence


def verdict(evidence: Evidence) -> Verdict:
    """Return the surest cause that fits the evidence."""
    surest = next((candidate for rule in CAUSES for candidate in rule(evidence)), None)
    return surest or Verdict("unknown", _at(evidence), "See its stack below.")


def user_frame(stacks: Stacks) -> Frame | None:
    """Return the innermost frame of the main thread that is code of the user."""
    return next((frame for frame in stacks.main if _is_users(frame)), stacks.main[0] if stacks.main else None)


def of_package(frame: Frame) -> bool:
    """Return whether a frame is code of this package."""
    return frame.file.startswith(_PACKAGE)


def _is_users(frame: Frame) -> bool:
    # Frames of the standard library below the program (runpy, pdb, cProfile) are not the user's, nor are frozen ones:
    # a report that names them says nothing of the line that waits. What pip installed counts as the user's choice.
    # This package may be there, too.
    return not of_package(frame) and (
        "site-packages" in frame.file or not frame.file.startswith((_STANDARD_LIBRARY, "<frozen"))
    )


def _of_an_end(evidence: Evidence) -> Iterator[Verdict]:
    """Yield why a process is gone, stopped, or has failed."""
    facts, record = evidence.facts, evidence.record
    if facts.state in "ZX":
        yield _gone(evidence)
    if facts.state in "Tt":
        yield Verdict(
            "stopped",
            "is stopped by a signal (SIGSTOP, SIGTSTP, or a debugger)",
            f"On {record.host} `kill -CONT {record.pid}` lets it go on.",
        )
    if record.phase == Phase.FAILED:
        yield Verdict(
            "failed",
            "has failed and does not get to its end",
            "Its traceback is in the output; a thread or an atexit handler of it does not end.",
        )
    if record.phase == Phase.FINISHED:
        yield Verdict(
            "finished",
            f"has finalized MPI, or is at the end of its program, {_at(evidence)}",
            "Call MPI.Finalize() after the last call of a strategy, on all ranks.",
        )


def _gone(evidence: Evidence) -> Verdict:
    facts, record = evidence.facts, evidence.record
    if record.exit_status is not None:
        return Verdict(
            "exited",
            f"has ended its program by os._exit({record.exit_status}), which tells no other rank",
            "End programs by sys.exit() or an error: then all ranks hear of it.",
        )
    if not record.pid:
        return Verdict(
            "ended early",
            "has ended before its first strategy, it seems: no process of it is on this node",
            "Look at the lines before that for what lets a rank leave. In a container of its own it may not be seen.",
        )
    if record.phase == Phase.FAILED:
        return Verdict("failed", "has ended its program by an error", "Look for its traceback in the output.")
    kills = facts.out_of_memory_kills
    if record.out_of_memory_kills is not None and kills is not None and kills > record.out_of_memory_kills:
        return Verdict(
            "out of memory",
            "is gone: its process has ended, and the system has killed processes of this job for want of memory",
            "Give each rank less data or the job more memory.",
        )
    if facts.ended_by is not None and os.WIFSIGNALED(facts.ended_by):
        number = os.WTERMSIG(facts.ended_by)
        return Verdict("killed", f"was killed by signal {number} ({signal_name(number)})", "Look for what sent it.")
    if facts.ended_by is not None and os.WIFEXITED(facts.ended_by):
        return Verdict(
            "exited",
            f"has ended with exit status {os.WEXITSTATUS(facts.ended_by)} without telling other ranks",
            "Look for C code that calls exit().",
        )
    if evidence.ended_after:
        return Verdict(
            "ended",
            f"is gone: the launcher has ended it with the job, it seems, after {evidence.ended_after}",
            f"Look at {evidence.ended_after} first.",
        )
    observed, ranks = "is gone: its process has ended. It", evidence.one_of
    if ranks:
        observed = (
            f"is gone. One of {ranks_in_words(ranks)} has ended first, and the launcher has ended the others then: it "
            f"is not known which one, and rank {ranks[0]} gave the oldest sign of life. The first one"
        )
    return Verdict(
        "killed",
        f"{observed} was killed by a signal, such as `kill -9` or for want of memory, or C code has called _exit()",
        "Look into the system's log (`dmesg`, `journalctl -k`) and the messages of the launcher.",
    )


def _among_ranks(evidence: Evidence) -> Iterator[Verdict]:
    """Yield what follows from the collectives of all ranks."""
    if evidence.in_circle:
        yield Verdict(
            CIRCLE,
            f"waits itself, {evidence.waits_elsewhere}: the ranks make calls of two communicators in different orders",
            "Use two strategies in the same order on all ranks.",
        )
    if evidence.stuck:
        yield Verdict(
            "network",
            f"waits itself, {evidence.waits_elsewhere}: other ranks have left that call, and it gets no further",
            "Look at the links of its node, and at MPI itself (`mpistrat check`).",
        )
    if evidence.waits_elsewhere:
        observed = f"waits itself, {evidence.waits_elsewhere}"
        yield Verdict("waits for others", observed, "See for which ranks it waits.")
    if evidence.facts.replaced:
        yield Verdict(
            "another program",
            f"runs another program by now, which has no part in the job: it has called exec(), {_at(evidence)}",
            "Start that program beside this one (`subprocess.run`), or after the job has ended.",
        )
    if evidence.passed:
        note = f" (earlier, {evidence.record.note})" if evidence.record.note else ""
        yield Verdict(
            "skipped",
            f"has passed the call of the others without making it, and is {_at(evidence)}{note}",
            "Look for an error that is caught there, or a condition that differs between ranks; `strategy.agree(ok)` "
            "lets all ranks take one way.",
        )


def _by_call(evidence: Evidence) -> Iterator[Verdict]:
    """Yield what follows from the system call that the main thread is in."""
    facts, at = evidence.facts, _at(evidence)
    waits_for, runs = process.waits_for(facts.call), facts.state == "R"
    # A wait for the interpreter's lock ends every 5 ms, to ask for it again.
    if evidence.holds_interpreter and waits_for == process.LOCK and not runs and (facts.timed or facts.others_run):
        yield Verdict(
            "C code",
            f"waits {at}; another thread of it is in C code that does not release the interpreter's lock",
            "Find out which call of that thread does not return: `gdb -p` shows it, and `py-spy dump --native`.",
        )
    if evidence.holds_interpreter:
        call = f" ({facts.call}())" if facts.call and not runs else ""
        yield Verdict(
            "C code",
            f"is in C code that does not release the interpreter's lock{call}, called {at}",
            "Find out why that call does not return.",
        )
    if facts.state == "D":
        of, function = f" of {facts.file}" if facts.file else "", f" ({facts.wchan})" if facts.wchan else ""
        yield Verdict(
            "file system",
            f"waits for a disk or a file system in {facts.call or 'a system call'}(){of}{function}, {at}",
            "Look whether that file system answers: `ls` there, or `lfs df` and `df`.",
        )
    files = (frame.file for frame in evidence.stacks.main)
    through_pipe = any(file.startswith(_STANDARD_LIBRARY) and file.endswith(_CHILD_MODULES) for file in files)
    if waits_for == process.CHILD or through_pipe:
        yield Verdict("child", f"waits for a process that it has started, {at}", "Look at that process.")
    if waits_for == process.FILE:
        yield from _reading(facts, at)
    if waits_for == process.FILE_LOCK and not runs:
        yield Verdict(
            "file lock",
            f"waits in {facts.call}() for the lock of {facts.file or 'a file'}, {at}",
            "Look for the process that has it: `lslocks`, or `fuser` with that file.",
        )
    if waits_for == process.SIGNAL:
        yield Verdict("signal", f"waits for a signal, {at}", "Look for the process that should send it.")
    if waits_for == process.SLEEP:
        yield Verdict("sleep", f"sleeps, {at}", "Look for what that line waits for.")
    # A thread that runs also waits for the interpreter's lock now and then.
    if waits_for == process.LOCK and not runs and not evidence.record.moves:
        others = len(evidence.stacks.others)
        if others > 1:
            advice = f"Its {others} other threads are shown below: one has the lock, or should set what is waited for."
        elif others:
            advice = "Its other thread is shown below: it has the lock, or should set what is waited for."
        else:
            advice = "No other Python thread of it runs: the lock is never released."
        yield Verdict("lock", f"waits for a lock or for another thread of its own, {at}", advice)
    if waits_for in (process.MESSAGE, process.FILE) and not runs:
        yield Verdict(
            "message",
            f"waits for a message or a file descriptor in {facts.call}(), {at}",
            "Look for the process that should send it.",
        )


def _reading(facts: ProcessFacts, at: str) -> Iterator[Verdict]:
    """Yield what follows from the file that a call reads or writes. A socket is looked at as a message."""
    if facts.descriptor == 0 and facts.call == "read":
        yield Verdict(
            "standard input",
            f"waits for standard input, {at}",
            "Only rank 0 has any. Write there what it waits for, or start the job with `</dev/null`.",
        )
    elif facts.file.startswith("pipe:"):
        yield Verdict(
            "pipe",
            f"waits in {facts.call}() of a pipe ({facts.file}), {at}",
            "Look for the process at the other end of the pipe: it writes or reads nothing.",
        )
    elif not facts.file.startswith("socket:"):
        of = f" of {facts.file}" if facts.file else ""
        yield Verdict("file", f"is in {facts.call}(){of}, {at}", "Look whether that file can be read with `cat`.")


def _by_phase(evidence: Evidence) -> Iterator[Verdict]:
    """Yield what follows from the part of its program that a rank is in, and from whether it runs."""
    record, at = evidence.record, _at(evidence)
    if record.phase == Phase.SAVING:
        yield Verdict("saving", f"writes a checkpoint, {at}", "Look whether the file system is slow.")
    if record.phase == Phase.INPUT:
        yield Verdict("input", f"reads its input, {at}", "Look whether the data's file system is slow.")
    if evidence.facts.state != "R" and not record.moves:
        return
    if not record.path:
        yield Verdict(
            "no record",
            f"runs, {at}",
            "It keeps no flight record, or has not come to its first strategy: look at it with `py-spy dump`.",
        )
    if record.moves is False:
        yield Verdict(
            "compiled code",
            f"computes, or waits actively, in a function that is not Python, called {at}",
            "If that is a call of MPI, look for its partner; else find out why it does not return.",
        )
    yield Verdict("Python code", f"runs Python code, {at}", "Look whether that loop ends.")


# Facts of the process before its place in the program, a call that the system names before a guess from stacks. A rank
# that skipped a call may also sleep or read by now: "skipped" comes first, because the remedy is to make the call.
CAUSES: tuple[Callable[[Evidence], Iterable[Verdict]], ...] = (_of_an_end, _among_ranks, _by_call, _by_phase)


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "not known"


def _at(evidence: Evidence) -> str:
    frame = user_frame(evidence.stacks)
    if frame is None:
        entry = evidence.record.entries[-1] if evidence.record.entries else None
        return f"after its call at {entry.place}" if entry else "before its first collective"
    line = source_line(frame.file, frame.line)
    return f"at {frame.file}:{frame.line} in {frame.function}" + (f": {line}" if line else "")
