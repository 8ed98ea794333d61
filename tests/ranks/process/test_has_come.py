"""A message that came while this rank made no MPI call is reported when the rank looks for it first."""

import time

import numpy as np
import pytest

from mpistrat.process import mpi

ROUNDS = 20
TAG = 7


def wait_for(path):
    """Wait for a file: a wait that calls MPI would take the message from the wire."""
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not made"
        time.sleep(0.001)


def test_at_the_first_look(comm, tmp_path):
    if comm.size == 1:
        pytest.skip("for several ranks")
    MPI = mpi.start()
    late = []
    for number in range(ROUNDS):
        comm.Barrier()
        if comm.rank == 1:
            comm.Send(np.array([number]), 0, TAG)  # small, so that it is on its way when this returns
            (tmp_path / str(number)).touch()
        elif comm.rank == 0:
            wait_for(tmp_path / str(number))
            time.sleep(0.002)
            status, value = MPI.Status(), np.empty(1, int)
            if not mpi.has_come(comm, MPI.ANY_SOURCE, TAG, status):
                late.append(number)
            comm.Recv(value, 1, TAG)
            assert value[0] == number
    if comm.rank == 0:
        assert not late
