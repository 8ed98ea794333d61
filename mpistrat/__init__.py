"""The API of tf.distribute on MPI: one rank, one device, one replica.

Names load when they are first used: importing the package starts no MPI, h5py or cupy.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import lazy_loader

from mpistrat import absent
from mpistrat.record import lifetime
from mpistrat.version import __version__

if TYPE_CHECKING:
    from mpistrat.record.flight_record import FlightRecord

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = absent.explained(__name__, __getattr__, absent.OF_DISTRIBUTE)
__all__ += ["__version__"]


def _watch(record: FlightRecord) -> None:
    from mpistrat.monitor import watchdog

    watchdog.watch(record)


if any(name.endswith(("RANK", "RANKID", "PROCID", "vpid")) for name in os.environ):  # as launchers number their ranks
    from mpistrat.process import mpi as _mpi  # a late import: takes 15 ms

    _mpi.end_job_on_later_error()
lifetime.when_started(_watch)  # here, since any part of the package may be the first that communicates
