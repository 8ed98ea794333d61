"""An error that leaves one rank's program ends the whole job.

Without this, the other ranks would wait for ever in their next collective. The failing rank prints its
traceback in one piece; where several ranks of a node fail together, the first one alone does, and
``MPI_Abort`` then ends the job. The abort itself is left to mpi4py, at the very end of the interpreter,
so that ``atexit`` handlers and open files of this rank are served; a watchdog sees to it that this cannot
take long.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

from mpistrat.runtime.process import private_file

_GRACE = 1.0  # seconds that the failing rank's own exit may take

_who = ""
_process = -1  # a child that was forked is no rank
_shared = False
_claim: int | None = None
_pending = False


def arm(rank: int, size: int) -> None:
    """From now on an uncaught error of this rank, one of several, ends the job."""
    global _who, _process
    if _who:
        return
    _process = os.getpid()
    _who = f"rank {rank} of {size}"
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _interactive() or os.getpid() != _process:
            previous(kind, error, trace)
            return
        try:
            if not _first_failure():
                time.sleep(2 * _GRACE)  # the first one is about to end the job
            elif previous is sys.__excepthook__:
                _flush()
                lines = traceback.format_exception(kind, error, trace)
                _write("".join([f"\n{_who} failed, which ends the job:\n", *lines]))
            else:
                _flush()
                previous(kind, error, trace)
        finally:
            _abort_at_exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = excepthook
    _watch_system_exit()


def share(node: Any) -> None:
    """From now on only one of the ranks of a node that fail together shows its traceback. Collective."""
    global _claim, _shared
    if not _shared:
        _shared, _claim = True, _shared_file(node)


def end_job(text: str) -> None:
    """End all ranks, at the end of a program for which others wait in vain."""
    from mpi4py import MPI

    _flush()
    _write(f"\n{text}\n")
    MPI.COMM_WORLD.Abort(1)


def pending() -> bool:
    """Whether this rank is on its way out because of an error."""
    return _pending


def _interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _write(text: str) -> None:
    """All of a text in one call, so that no other rank's output comes between."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def _shared_file(node: Any) -> int | None:
    """A descriptor of one file, not empty at first, that all ranks of a node have open; None if they cannot."""
    for folder in ("/dev/shm", os.environ.get("TMPDIR") or "/tmp"):
        with contextlib.suppress(OSError):
            return private_file.share(node, folder, 0)
    return None


def _first_failure() -> bool:
    if _claim is None:
        return True
    try:
        fcntl.flock(_claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(_claim).st_size:
            return False
        os.ftruncate(_claim, 0)
    except BlockingIOError:  # another rank has the lock
        return False
    except OSError:  # no locks on this file system, or no room: twice is better than never
        return True
    return True


def _abort_at_exit(status: int) -> None:
    global _pending
    _pending = True
    status = status % 256 or 1  # what the system keeps of it, and never success
    from mpi4py.run import set_abort_status

    set_abort_status(status)

    def abort() -> None:
        time.sleep(_GRACE)
        from mpi4py import MPI

        _flush()
        MPI.COMM_WORLD.Abort(status)

    threading.Thread(target=abort, name="mpistrat-abort", daemon=True).start()


def _watch_system_exit() -> None:
    """See the status of a SystemExit that nobody catches.

    CPython tells it to no hook. But once no frame is left it asks the exception for its ``code``, and
    that can be listened to: the built-in descriptor is replaced by a property that answers the same.
    Before Python 3.12 ``sys.exit`` raises an exception that is not an object yet, hence its stand-in.
    """
    if sys.implementation.name != "cpython":
        return
    members = gc.get_referents(SystemExit.__dict__)[0]
    stored = members["code"]

    def code(self: SystemExit) -> Any:
        value = stored.__get__(self)
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            status = value if isinstance(value, int) else 0 if value is None else 1
            if status and not _interactive() and os.getpid() == _process:
                _flush()
                _abort_at_exit(status)
        return value

    members["code"] = property(code, stored.__set__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    if sys.version_info < (3, 12):
        # The builtin has no signature to keep but this one.
        def exit(status: Any = None, /) -> None:
            raise SystemExit(status)

        sys.exit = exit  # type: ignore[assignment]  # it never returns
