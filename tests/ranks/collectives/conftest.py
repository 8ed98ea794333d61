"""What tests of collectives share."""

import pytest
from mpi4py import MPI

SIZE = MPI.COMM_WORLD.size


@pytest.fixture
def in_step(strategy):
    """After the test, in which something may have been refused, the replicas still understand each other."""
    yield
    assert strategy.reduce("SUM", 1, axis=None) == SIZE
