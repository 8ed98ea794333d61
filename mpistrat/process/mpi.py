"""The MPI library, started on first use."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mpistrat.launch import launch
from mpistrat.launch.machine_mpi import without_library
from mpistrat.process import failure, program_end
from mpistrat.process.program_end import EndStep

_ULFM = "OMPI_MCA_mpi_ft_enable"  # which ``mpirun --with-ft ulfm`` sets for each rank
_FINALIZED = "MPI was finalized: create strategies before MPI.Finalize() is called"

_mpi: Any = None
_refusal = ""  # of a process that is no rank
_around_start: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
_PROBES = 16
_starting = threading.RLock()  # other threads run while MPI starts
_NO = (False, "no")  # as mpi4py reads its options
_LEVELS = ("single", "funneled", "serialized", "multiple")


def around_start(context: Callable[[], AbstractContextManager[object]]) -> None:
    """Start MPI inside of a context, in which other threads run."""
    global _around_start
    _around_start = context


def refuse_start(kind: str) -> None:
    """Let `start` raise in this process, which a rank has started, and which is one of some ``kind``."""
    global _refusal
    _refusal = f"this process is not a rank, but one of {kind}: use MPI outside of it"


def start() -> Any:
    """Return the module ``mpi4py.MPI``, and start MPI if needed.

    Raise RuntimeError if MPI was finalized already, if this process is rank 0 of 1 although there are several tasks,
    or after `refuse_start`.
    """
    if _mpi is None:
        with _starting:
            if _mpi is None:
                _start()
    elif _mpi.Is_finalized():
        raise RuntimeError(_FINALIZED)
    return _mpi


def loaded_library() -> str:
    """Return the file of the MPI library that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    return min((line.split(maxsplit=5)[5] for line in lines if "/libmpi" in line), default="unknown")


def end_job_on_error() -> None:
    """End the job at an uncaught error of this rank from now on, if the program has started MPI.

    Else the rank would wait in ``MPI_Finalize`` for the other ranks, and they for it. Does not start MPI.
    """
    if (world := _running_world()) is not None and world.size > 1:
        _end_job_on_error(world.rank, world.size)


def end_job_on_later_error() -> None:
    """End the job at an uncaught error of this rank, as its launcher numbers it, if MPI runs by then.

    A job that survives the loss of ranks ends also if MPI does not run: its launcher would leave the other ranks in
    ``MPI_Init`` for ever.
    """
    numbered = launch.rank_and_size(os.environ)
    if numbered is not None and numbered[1] > 1:
        _end_job_on_error(*numbered)


def _end_job_on_error(rank: int, size: int) -> None:
    if survives_losses():
        failure.arm(rank, size, lambda: True, start)
    else:
        failure.arm(rank, size, lambda: (world := _running_world()) is not None and world.size > 1)


def _running_world() -> Any:
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI.COMM_WORLD if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized() else None


def _start() -> None:
    global _mpi
    if _refusal:
        raise RuntimeError(_refusal)
    from mpi4py import rc

    finalizes = "mpi4py.MPI" not in sys.modules and rc.initialize not in _NO and rc.finalize not in _NO
    MPI = _loaded(rc)
    if MPI.Is_finalized():
        raise RuntimeError(_FINALIZED)
    if not MPI.Is_initialized():
        try:
            launch.check_wheel(MPI.Get_library_version(), loaded_library, os.environ)
        except launch.AloneError:
            failure.fold()
            raise
        with _around_start():
            _initialize(MPI, rc)
        if not finalizes and rc.finalize not in _NO:  # mpi4py.rc.initialize = False
            program_end.register(EndStep.MPI, MPI.Finalize)
    if MPI.COMM_WORLD.size == 1:
        failure.fold()
    launch.check_singleton(MPI.COMM_WORLD.size, MPI.Get_library_version(), os.environ)
    _mpi = MPI
    world = MPI.COMM_WORLD
    _add_rank_to_logs(world.rank, world.size)
    if world.size > 1:
        end_job_on_error()
        if survives_losses():
            failure.revoke_at_end(world)


def _add_rank_to_logs(rank: int, size: int) -> None:
    """Add the attributes ``rank`` and ``size`` to all later log records, for ``%(rank)d`` in a format."""
    previous = logging.getLogRecordFactory()

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = previous(*args, **kwargs)
        record.rank, record.size = rank, size
        return record

    logging.setLogRecordFactory(factory)


def _loaded(rc: Any) -> Any:
    """Return the module ``mpi4py.MPI``. If it is loaded here, it does not start MPI, but finalizes it as usual.

    Raise RuntimeError or ImportError if it can load no MPI library.
    """
    initialize, finalize = rc.initialize, rc.finalize
    rc.initialize, rc.finalize = False, initialize if finalize is None else finalize
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        kind = ImportError if isinstance(error, ImportError) else RuntimeError
        raise kind(
            f"mpi4py finds no MPI library ({error}): {without_library(os.environ)}; `mpistrat check` says more"
        ) from error
    finally:
        rc.initialize, rc.finalize = initialize, finalize
    return MPI


def _initialize(MPI: Any, rc: Any) -> None:
    """Start MPI as mpi4py does, but without the lock of the interpreter: it waits for ranks that have not come.

    Raise RuntimeError if MPI does not start.
    """
    name = "multiple" if rc.thread_level not in _LEVELS else rc.thread_level
    level = getattr(MPI, f"THREAD_{name.upper()}") if rc.threads not in _NO else MPI.THREAD_SINGLE
    start_library = _start_function(MPI)
    if start_library is None:
        MPI.Init_thread(level)
        return
    with _without_stack_of_a_crash():
        status = start_library(None, None, level, ctypes.byref(ctypes.c_int()))
    if status:
        raise RuntimeError(f"MPI_Init_thread failed with {status}: look at the messages of the launcher")
    handler = {
        "default": None,
        "abort": MPI.ERRORS_ABORT or MPI.ERRORS_ARE_FATAL,  # the first is of MPI 4
        "fatal": MPI.ERRORS_ARE_FATAL,
    }.get(rc.errors, MPI.ERRORS_RETURN)
    if handler is not None:
        for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
            comm.Set_errhandler(handler)


@contextlib.contextmanager
def _without_stack_of_a_crash() -> Iterator[None]:
    """Where ranks survive losses, let a crash of the library in here pass without a Python stack.

    The launcher ends such a job by signals, at which Open MPI crashes in its start now and then (2 of 18 jobs). The
    stack would follow the error that ended the job.
    """
    shown = survives_losses() and "PYTHONFAULTHANDLER" in os.environ and faulthandler.is_enabled()
    if shown:
        faulthandler.disable()
    try:
        yield
    finally:
        if shown:
            faulthandler.enable()


def _start_function(MPI: Any) -> Any:
    """Return the function ``MPI_Init_thread`` that mpi4py would call, or None if it is not found.

    None, the first, stands for the libraries of the whole process: a tool that was loaded before MPI, such as a
    profiler by ``LD_PRELOAD`` or `mpi4py.profile`, must see MPI start. A library of another ABI has other constants: if
    one is in the process, mpi4py starts MPI by the function that it is bound to.
    """
    if launch.library_family(MPI.Get_library_version()) == "spectrum":
        return None  # mpi4py loads that library again before it starts MPI
    for library in (None, MPI.__file__):
        with contextlib.suppress(AttributeError, OSError):
            found = ctypes.CDLL(library)
            return found.MPI_Init_thread if _abi_of(found) == MPI.Get_abi_version()[0] else None
    return None


def _abi_of(library: ctypes.CDLL) -> int:
    """Return the major version of the MPI ABI of a library, -1 for an ABI of its own (MPI 5.0 section 20.3)."""
    major, minor = ctypes.c_int(-1), ctypes.c_int(-1)
    with contextlib.suppress(AttributeError):  # older than MPI 5
        library.MPI_Abi_get_version(ctypes.byref(major), ctypes.byref(minor))
    return major.value


def running() -> bool:
    """Return whether `start` has succeeded and MPI is not finalized."""
    return _mpi is not None and not _mpi.Is_finalized()


def has_come(comm: Any, source: int, tag: int, status: Any = None) -> bool:
    """Return whether a message has come, also a long time ago. ``status`` gets its source and size.

    A probe looks first, and lets MPI take messages from the wire afterwards. Of messages that had come to Open MPI 5,
    the first probe found a half through shared memory and a fifth through TCP, and the second one the others. More are
    made for slower networks. An empty probe takes 0.5 to 2 us.
    """
    return any(comm.Iprobe(source, tag, status) for _ in range(_PROBES))


def messages(comm: Any, tag: int) -> Iterator[tuple[int, Any]]:
    """Receive the objects that have come with a tag. Yield the rank and the object of each."""
    MPI = start()
    status = MPI.Status()
    while has_come(comm, MPI.ANY_SOURCE, tag, status):
        rank = status.source
        yield rank, comm.recv(source=rank, tag=tag)


def survives_losses() -> bool:
    """Return whether the launcher was told to let the other ranks go on when one is lost: ``--with-ft ulfm``."""
    return os.environ.get(_ULFM, "").lower() in ("1", "true", "yes")


def leave_without_finalize() -> None:
    """End this process without ``MPI_Finalize``, if its program succeeds.

    After a loss ``MPI_Finalize`` of Open MPI 5.0 waits for ever for the lost ranks, if there are several nodes.
    """
    program_end.register(EndStep.MPI, _leave)


def _leave() -> None:
    logging.shutdown()
    failure.flush()
    os._exit(0)  # a program with another status has failed


def among_several() -> bool:
    """Return whether other ranks run the same program. Does not start MPI."""
    if running():
        return bool(start().COMM_WORLD.size > 1)
    started = launch.started_tasks(os.environ)
    return started is not None and started.tasks > 1
