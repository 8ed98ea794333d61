"""Files in memory, one of each rank, whose contents are reduced in place."""

import mmap
import os

import numpy as np
import pytest
from layouts import layouts, on_nodes
from mpi4py import MPI

from mpistrat.collectives import CollectiveAllReduce, CommunicationOptions
from mpistrat.collectives.arena import buffer_on_file, map_side_by_side
from mpistrat.memory.node import NoSharedMemoryError
from mpistrat.runtime.topology import Topology
from mpistrat.values import ReduceOp

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
COUNTS = [1, 1000, 1024, 70001]


@pytest.fixture
def make():
    """Makes a file in memory with these values."""
    made = []

    def file(values):
        made.append(os.memfd_create("mpistrat-test"))
        os.write(made[-1], values.tobytes())
        return made[-1]

    yield file
    for descriptor in made:
        os.close(descriptor)


@pytest.mark.four_ranks
@pytest.mark.parametrize("layout", layouts("0000", "0011", "0101", "0123"))
@pytest.mark.parametrize("count", COUNTS)
def test_contents_are_reduced_where_they_are(layout, count, make):
    comm = on_nodes(layout)
    topology = Topology.of(comm)
    descriptor = make(np.arange(float(count)) + RANK)
    buffer = buffer_on_file(topology, descriptor, np.dtype(float), count)
    if buffer is None:
        assert topology.memory is None
    else:
        ops = CollectiveAllReduce().bound_to(topology)
        (total,) = ops.all_reduce(ReduceOp.SUM, [buffer], CommunicationOptions())
        assert total is buffer
        with mmap.mmap(descriptor, 8 * count, access=mmap.ACCESS_READ) as memory:
            content = np.frombuffer(memory, float).tolist()
        assert content == (np.arange(float(count)) * SIZE + SIZE * (SIZE - 1) / 2).tolist()
    del buffer
    comm.Free()


@pytest.mark.parametrize("count", COUNTS)
def test_ranks_see_the_files_of_all(count, make):
    memory = map_side_by_side(MPI.COMM_WORLD, make(np.full(count, RANK + 1.0)), 8 * count)
    for rank, part in enumerate(np.split(memory, SIZE)):
        assert set(part[: 8 * count].view(float)) == {rank + 1.0}
        assert not part[8 * count :].any()
        assert len(part) % mmap.PAGESIZE == 0


def test_a_rank_without_a_file(make):
    descriptor = None if RANK == SIZE - 1 else make(np.ones(3))
    with pytest.raises(NoSharedMemoryError, match=f"rank {SIZE - 1} of the node does not have a file"):
        map_side_by_side(MPI.COMM_WORLD, descriptor, 24)


def test_ranks_that_disagree_in_length(make):
    if SIZE > 1:
        with pytest.raises(RuntimeError, match="buffer on a file"):
            buffer_on_file(Topology.of(MPI.COMM_WORLD), make(np.ones(9)), np.dtype(float), 3 + RANK)
