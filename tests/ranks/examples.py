"""The number of examples that a property test draws."""

from hypothesis import settings
from mpi4py import MPI

SIZE = MPI.COMM_WORLD.size


def examples(count: int) -> settings:
    """Return the decorator for that many examples on 2 ranks, and half as many on other numbers of ranks.

    All ranks of a job draw the same ones.
    """
    return settings(max_examples=count if SIZE == 2 else count // 2)
