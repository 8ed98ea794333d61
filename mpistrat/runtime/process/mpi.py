"""MPI, started on first use."""

from __future__ import annotations

import os
from typing import Any

from mpistrat.runtime.process import failure, launch, log

_mpi: Any = None


def start() -> Any:
    """The module ``mpi4py.MPI``, with MPI running.

    Raises
    ------
    RuntimeError
        If MPI was finalized already, or if this process is alone although its launcher started several
        tasks (each of them would believe to be the whole job).
    """
    global _mpi
    if _mpi is None:
        from mpi4py import MPI

        if MPI.Is_finalized():
            raise RuntimeError("MPI was finalized: create strategies before MPI.Finalize() is called")
        if not MPI.Is_initialized():
            MPI.Init_thread()
        launch.check_singleton(MPI.COMM_WORLD.size, MPI.Get_library_version(), os.environ)
        _mpi = MPI
        world = MPI.COMM_WORLD
        log.set_rank(world.rank, world.size)
        if world.size > 1:
            failure.arm(world.rank, world.size)
    elif _mpi.Is_finalized():
        raise RuntimeError("MPI was finalized: create strategies before MPI.Finalize() is called")
    return _mpi


def running() -> bool:
    """Whether MPI was started by this library, and not finalized since."""
    return _mpi is not None and not _mpi.Is_finalized()
