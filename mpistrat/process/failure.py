"""Hooks that end the whole job when an uncaught error ends one rank's program.

Without them, the other ranks would wait for ever in their next collective. The failing rank prints its traceback in
one piece. If several ranks of a node fail together, only the first one prints. ``MPI_Abort`` then ends the job.
mpi4py calls it at the very end of the interpreter, after this rank's ``atexit`` handlers have run and its files are
closed. A watchdog thread calls it after a second if that takes longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

from mpistrat.process import private_file
from mpistrat.process.own_files import is_own

_GRACE = 1.0  # seconds that the failing rank's own exit may take

ENDS = "_MPISTRAT_ENDS_OF_RANKS"
"""The variable with a file for the exit statuses of ranks. A script of ``mpistrat slurm write --elastic`` sets it."""

_FOLDED = "({} line{} inside mpistrat left out; MPISTRAT_DEBUG=1 shows all)\n"

shows_all: Callable[[], bool] = bool  # set by the options, a layer above
explanations: dict[str, str] = {}
"""Lines to print below errors of other libraries, by a part of their text."""
_name = ""
_process = -1  # the rank's process id: a forked child is not a rank
_shared = False
_claim: int | None = None
_pending = 0
_revoked_at_end: list[Any] = []
_waited_for: Callable[[], bool] = bool
_start: Callable[[], object] | None = None


def arm(rank: int, size: int, waited_for: Callable[[], bool], start: Callable[[], object] | None = None) -> None:
    """Install the hooks by which an uncaught error of this rank ends the job, if others wait for it by then.

    ``start`` starts MPI once the rank has failed, where the other ranks wait in ``MPI_Init``: only MPI can tell
    them.
    """
    global _name, _process, _waited_for, _start
    if _name:
        return
    _process = os.getpid()
    _name = f"rank {rank} of {size}"
    _waited_for, _start = waited_for, start
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _ends_job():
            previous(kind, error, trace)
            return
        try:
            if _is_revoked(error):
                pass  # another rank ends the job, and says why
            elif not first_failure():
                time.sleep(2 * _GRACE)  # the first rank that failed is about to end the job
            elif previous is sys.__excepthook__:
                flush()
                write("".join([f"\n{_name} failed, which ends the job:\n", *_in_lines(kind, error, trace)]))
            else:
                flush()
                previous(kind, error, trace)
        finally:
            _abort_at_exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = excepthook
    _watch_system_exit()


def fold() -> None:
    """Leave the lines of the package out of the traceback of an uncaught error, in a job of one rank."""
    if sys.excepthook is sys.__excepthook__ and not _interactive():
        sys.excepthook = lambda kind, error, trace: write("".join(_in_lines(kind, error, trace)))


def _in_lines(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> list[str]:
    """Return a traceback of the user's own lines, unless `shows_all()`."""
    top = traceback.TracebackException(kind, error, trace)
    chain: list[traceback.TracebackException | None] = [top]
    folded = 0
    while chain and not shows_all():
        link = chain.pop()
        if link is None:
            continue
        user_frames = [frame for frame in link.stack if not is_own(frame.filename)]
        if user_frames or link is not top:  # an error of a thread of the package has no other lines
            folded += len(link.stack) - len(user_frames)
            link.stack = traceback.StackSummary.from_list(user_frames)
        chain += [link.__cause__, link.__context__]
        if link.__context__ and all(is_own(frame.filename) for frame in link.__context__.stack):
            link.__suppress_context__ = True  # an error that the package has handled
    lines = [*top.format(), *(f"{line}\n" for fragment, line in explanations.items() if fragment in str(error))]
    if not folded:
        return lines
    lines.insert(0, _FOLDED.format(folded, "s" * (folded > 1)))
    if not kind.__module__.startswith("mpistrat."):
        return lines
    private = f"{kind.__module__}.{kind.__qualname__}: "
    return [line.replace(private, f"{kind.__qualname__}: ") for line in lines]


def share(node: Any) -> None:
    """Make ranks of a node that fail together print only one traceback. Collective over ``node``."""
    global _claim, _shared
    if not _shared:
        _shared, _claim = True, _shared_file(node)


def revoke_at_end(comm: Any) -> None:
    """Revoke a communicator before this rank ends the whole job, so that calls of other ranks on it raise an error.

    With ULFM ``MPI_Abort`` of Open MPI 5.0 does not end all other ranks: an error of the revoked communicator does.
    """
    _revoked_at_end.append(comm)


def end_job(text: str) -> None:
    """Print ``text`` and end all ranks, for a program that ends while other ranks wait for it."""
    from mpi4py import MPI

    _revoke_all()
    flush()
    if text:
        write(f"\n{text}\n")
    MPI.COMM_WORLD.Abort(1)


def _revoke_all() -> None:
    while _revoked_at_end:
        with contextlib.suppress(Exception):  # it may be freed
            _revoked_at_end.pop().Revoke()


def _is_revoked(error: BaseException) -> bool:
    """Return whether an error says that another rank ends the job."""
    if not _revoked_at_end:
        return False
    from mpi4py import MPI

    if not isinstance(error, MPI.Exception):
        return False
    return bool(error.Get_error_class() == MPI.ERR_REVOKED)


def pending() -> int:
    """Return the exit status with which this rank exits because of an error; 0 if it does not."""
    return _pending


def _ends_job() -> bool:
    return not _interactive() and os.getpid() == _process and _waited_for()


def _interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def flush() -> None:
    """Flush standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def write(text: str) -> None:
    """Write a text to standard error in one call, so that output of other ranks does not split it."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def _shared_file(node: Any) -> int | None:
    """Return the descriptor of a non-empty file that all ranks of a node have open, or None on failure."""
    for folder in ("/dev/shm", os.environ.get("TMPDIR") or "/tmp"):
        with contextlib.suppress(OSError):
            return private_file.share(node, folder, 0)
    return None


@functools.cache
def first_failure() -> bool:
    """Return whether this rank is the first one of its node that fails."""
    if _claim is None:
        return True
    try:
        fcntl.flock(_claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The lock ends with the rank that printed. The empty file still tells the ranks that fail after it.
        if not os.fstat(_claim).st_size:
            return False
        os.ftruncate(_claim, 0)
    except BlockingIOError:  # another rank has the lock
        return False
    except OSError:  # no locks on this file system, or no space: two tracebacks are better than none
        return True
    return True


def record_end(status: int) -> None:
    """Write the exit status of this rank to the memory of its node, for an elastic job of Slurm.

    On MPI_Abort, Slurm kills the step at once, with the shell that would write it.
    """
    if path := os.environ.get(ENDS):
        with contextlib.suppress(OSError), open(path, "a", encoding="ascii") as file:
            file.write(f"{status}\n")


def _abort_at_exit(status: int) -> None:
    global _pending
    _pending = status = status % 256 or 1  # the 8 bits that the system keeps, never 0 (success)
    if _start is not None:
        with contextlib.suppress(Exception):  # this rank fails anyway
            _start()
    _revoke_all()
    record_end(status)
    from mpi4py.run import set_abort_status

    set_abort_status(status)

    def abort() -> None:
        time.sleep(_GRACE)
        from mpi4py import MPI

        flush()
        MPI.COMM_WORLD.Abort(status)

    threading.Thread(target=abort, name="mpistrat-abort", daemon=True).start()


def _watch_system_exit() -> None:
    """Watch for the status of an uncaught SystemExit."""
    if sys.version_info < (3, 12):
        if sys.implementation.name == "cpython":
            _watch_code_of_system_exit()
        return
    monitoring = sys.monitoring
    for tool in (4, 3):  # those that no kind of tool has for its own
        if monitoring.get_tool(tool) is None:
            monitoring.use_tool_id(tool, "mpistrat")
            # Costs 0.3 us for each frame that an error leaves, and nothing else.
            monitoring.register_callback(tool, monitoring.events.PY_UNWIND, _on_unwind)
            monitoring.set_events(tool, monitoring.events.PY_UNWIND)
            return


def _on_unwind(code: CodeType, offset: int, error: BaseException) -> None:
    """End the job if a SystemExit leaves the last frame of the program.

    Once the program has ended, the main thread counts as ended. Functions of ``atexit`` run later: Python ignores
    their SystemExit.
    """
    if isinstance(error, SystemExit) and sys._getframe(1).f_back is None:
        main = threading.main_thread()
        if main.ident == threading.get_ident() and main.is_alive():
            _end_by(error.code)


def _end_by(code: object) -> None:
    """End the job by the status of an uncaught SystemExit."""
    status = code if isinstance(code, int) else 0 if code is None else 1
    if status and _ends_job():
        flush()
        _abort_at_exit(status)


def _watch_code_of_system_exit() -> None:
    """Watch for the status where `sys.monitoring` does not exist yet.

    No hook gets it (``tests/process/test_system_exit.py`` shows it): not an excepthook, an audit hook or an atexit
    handler. But once no frame is left, CPython reads the attribute ``code`` of the exception. So the built-in
    descriptor of ``code`` is replaced by a property with the same value that also notices this read. Only a dict that
    the garbage collector knows lets a built-in type change. A subclass would miss ``raise SystemExit(1)``.
    ``sys.exit`` raises an exception that is not an object yet, so it is replaced as well.
    """
    members = gc.get_referents(SystemExit.__dict__)[0]
    stored = members["code"]

    def code(self: SystemExit) -> Any:
        value = stored.__get__(self)
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            _end_by(value)
        return value

    members["code"] = property(code, stored.__set__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))

    # The same signature as the builtin's.
    def exit(status: Any = None, /) -> None:
        raise SystemExit(status)

    sys.exit = exit  # type: ignore[assignment]  # it never returns
