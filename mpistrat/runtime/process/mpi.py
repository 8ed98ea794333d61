"""The MPI library, started on first use."""

from __future__ import annotations

import atexit
import logging
import os
from typing import Any

from mpistrat.runtime.process import failure, launch, log

_ULFM = "OMPI_MCA_mpi_ft_enable"  # which ``mpirun --with-ft ulfm`` sets for each rank
_FINALIZED = "MPI was finalized: create strategies before MPI.Finalize() is called"

_mpi: Any = None
_leaver = -1  # id of the process that ends without finalizing it
_starter = -1  # id of the process in which this library started MPI and must finalize it


def start() -> Any:
    """Return the module ``mpi4py.MPI``, and start MPI if needed.

    Raises
    ------
    RuntimeError
        If MPI was finalized already, or if this process is rank 0 of 1 although its launcher started several
        tasks.
    """
    global _mpi, _starter
    if _mpi is None:
        from mpi4py import MPI, rc

        if MPI.Is_finalized():
            raise RuntimeError(_FINALIZED)
        if not MPI.Is_initialized():  # mpi4py.rc.initialize = False
            MPI.Init_thread(
                getattr(MPI, f"THREAD_{rc.thread_level.upper()}") if rc.threads else MPI.THREAD_SINGLE
            )
            if rc.finalize is None or rc.finalize:
                _starter = os.getpid()
        launch.check_singleton(MPI.COMM_WORLD.size, MPI.Get_library_version(), os.environ)
        _mpi = MPI
        world = MPI.COMM_WORLD
        log.set_rank(world.rank, world.size)
        if world.size > 1:
            failure.arm(world.rank, world.size)
            if survives_losses():
                failure.revoke_at_end(world)
    elif _mpi.Is_finalized():
        raise RuntimeError(_FINALIZED)
    return _mpi


def running() -> bool:
    """Return whether `start` has succeeded and MPI is not finalized."""
    return _mpi is not None and not _mpi.Is_finalized()


def survives_losses() -> bool:
    """Return whether the launcher was told to let the other ranks go on when one is lost: ``--with-ft ulfm``."""
    return os.environ.get(_ULFM, "").lower() in ("1", "true", "yes")


def leave_without_finalize() -> None:
    """End this process without ``MPI_Finalize``, if its program succeeds.

    After a loss ``MPI_Finalize`` of Open MPI 5.0 waits for ever for the lost ranks, if there are several nodes.
    """
    global _leaver
    _leaver = os.getpid()


def among_several() -> bool:
    """Return whether other ranks run the same program. Does not start MPI."""
    if running():
        return bool(start().COMM_WORLD.size > 1)
    started = launch.started_tasks(os.environ)
    return started is not None and started.tasks > 1


@atexit.register  # Registered before any strategy, so it runs after the handlers of strategies.
def _finalize() -> None:
    """Finalize MPI if this library started it: mpi4py finalizes only if mpi4py started MPI."""
    if not running() or failure.pending():
        return
    if os.getpid() == _leaver:
        logging.shutdown()
        failure.flush()
        os._exit(0)  # a program with another status has failed
    if os.getpid() == _starter:
        _mpi.Finalize()
