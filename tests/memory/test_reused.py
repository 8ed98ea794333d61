"""Memory that waits to be used again is no more than was needed of late."""

import math
import pickle

import pytest

from mpistrat.memory import buffer_pool as reused
from mpistrat.memory.buffer_pool import Buffers

MIB = 1 << 20


@pytest.fixture
def made(monkeypatch):
    """The sizes of all memory that was made anew."""
    sizes = []
    new_memory = reused.new_memory

    def counted(size):
        sizes.append(size)
        return new_memory(size)

    monkeypatch.setattr(reused, "new_memory", counted)
    return sizes


def waiting(buffers):
    return sum(size * len(free) for size, free in buffers._free.items())


def test_what_is_used_in_every_step_stays(made, monkeypatch):
    monkeypatch.setattr(reused, "_REQUESTS", 50)
    buffers = Buffers()
    for _ in range(100):
        held = [buffers.empty((size,), "u1") for size in (MIB, 2 * MIB, 2 * MIB, 3 * MIB)]
        del held
    assert sorted(made) == [MIB, 2 * MIB, 2 * MIB, 3 * MIB]
    assert waiting(buffers) == 8 * MIB


def test_what_is_not_used_any_more_goes(made, monkeypatch):
    monkeypatch.setattr(reused, "_REQUESTS", 50)
    buffers = Buffers()
    held = [buffers.empty((2 * MIB,), "u1") for _ in range(30)]
    held.append(buffers.empty((5 * MIB,), "u1"))
    del held
    assert waiting(buffers) == 65 * MIB
    for _ in range(100):
        held = [buffers.empty((2 * MIB,), "u1") for _ in range(3)]
        del held
    assert waiting(buffers) == 6 * MIB
    assert len(made) == 31


def test_many_sizes_do_not_pile_up(made, monkeypatch):
    monkeypatch.setattr(reused, "_NEW_BYTES", 64 * MIB)
    buffers = Buffers()
    most = 0
    for i in range(400):  # none twice in a row
        buffers.empty((math.floor(MIB * 1.09 ** (i % 40)),), "u1")
        most = max(most, waiting(buffers))
    assert sum(made) > 1000 * MIB
    assert most <= 2 * (64 * MIB + max(made))  # what was made between three times of giving back


def test_pickled_ones_are_empty():
    buffers = Buffers()
    buffers.empty((MIB,), "u1")
    assert waiting(buffers) == MIB
    assert waiting(pickle.loads(pickle.dumps(buffers))) == 0
