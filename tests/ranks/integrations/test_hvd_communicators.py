"""`init` with communicators of the program, which may be freed."""

import pytest
from mpi4py import MPI

import mpistrat.integrations.hvd as hvd

WORLD = MPI.COMM_WORLD


@pytest.fixture(autouse=True)
def _not_in_use():
    hvd.shutdown()
    yield
    hvd.shutdown()


def test_a_communicator_may_take_the_handle_of_a_freed_one():
    for _ in range(4):
        everyone = WORLD.Split(0, WORLD.rank)
        hvd.init(everyone)
        assert hvd.size() == WORLD.size
        hvd.shutdown()
        everyone.Free()
        alone = WORLD.Split(WORLD.rank, 0)
        hvd.init(alone)
        assert hvd.size() == 1
        assert hvd.allreduce(3.0, op=hvd.Sum) == 3
        hvd.shutdown()
        alone.Free()


def test_a_communicator_may_be_freed_while_it_is_in_use():
    everyone = WORLD.Dup()
    hvd.init(everyone)
    everyone.Free()
    assert hvd.allreduce(1.0, op=hvd.Sum) == WORLD.size
