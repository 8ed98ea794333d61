"""Arrays that another process reads while they are written: a reader sees whole writes, and never waits."""

import os
import signal
import time

import ml_dtypes
import numpy as np
import pytest

from mpistrat.memory.published import Location, PublishedMemory, Reader

SECONDS = 0.3
LIMIT = 60
SIZE = 50_000

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs files in memory")


@pytest.fixture
def memory():
    return PublishedMemory()


@pytest.fixture
def in_child():
    """Start a function in a forked process, which is killed at the end. Return its process number."""
    started = []

    def start(function):
        number = os.fork()
        if number == 0:
            try:
                function()
            finally:
                os._exit(0)
        started.append(number)
        return number

    yield start
    for number in started:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)


def whole_copies(reader, *views, seconds=SECONDS):
    """The numbers that each accepted copy of the arrays holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        copies = reader.attempt(view.copy() for view in views)
        if copies is not None:
            yield {float(x) for copy in copies for x in (copy.min(), copy.max(), copy[len(copy) // 2])}


def test_a_copy_has_no_half_of_a_write(memory, in_child):
    arrays, places = zip(*(memory.copy(np.zeros(SIZE)) for _ in range(2)), strict=True)

    def write():
        for i in range(1 << 60):
            memory.begin()
            for array in arrays:
                array[:] = i
            memory.end()
            time.sleep(1e-4)

    in_child(write)
    reader = Reader(places[0])
    begun, seen = time.monotonic(), set()
    for numbers in whole_copies(reader, *(reader.view(place).array for place in places), seconds=LIMIT):
        assert len(numbers) == 1
        seen |= numbers
        if len(seen) > 1 and time.monotonic() > begun + SECONDS:
            break
    assert len(seen) > 1


def test_a_writer_that_dies_leaves_no_copy(memory, in_child):
    array, place = memory.copy(np.zeros(SIZE))

    def write_half():
        memory.begin()
        array[: SIZE // 2] = 1.0
        signal.pause()

    reader = Reader(place)
    view = reader.view(place).array
    assert next(whole_copies(reader, view)) == {0.0}
    in_child(write_half)
    while view[0] == 0.0:
        time.sleep(0.001)
    assert [*whole_copies(reader, view)] == []


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5), (1_000, 70)])
@pytest.mark.parametrize("dtype", ["float64", ">i4", "bool", "complex64", "bfloat16"])
def test_all_shapes_and_dtypes(memory, shape, dtype):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    value = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    other = memory.copy(np.ones(3))
    array, place = memory.copy(value)
    assert (array.dtype, array.shape) == (value.dtype, value.shape)
    reader = Reader(other[1])
    view = reader.view(place).array
    memory.begin()
    array[...] = 1
    assert reader.attempt([view]) is None
    memory.end()
    memory.end()  # no write has begun
    np.testing.assert_array_equal(reader.attempt([view]), [np.ones(shape, dtype)])
    assert not view.flags.writeable


def test_the_memory_of_deleted_arrays_is_freed(memory):
    array, place = memory.copy(np.ones(1 << 20))
    part, used = array[5:], os.stat(place.path).st_blocks
    del array
    assert (part == 1.0).all()
    assert os.stat(place.path).st_blocks == used
    del part
    assert os.stat(place.path).st_blocks < used / 100


def test_a_reader_knows_that_an_array_was_deleted(memory):
    array, place = memory.copy(np.ones(3))
    view = Reader(place).view(place)
    assert view.lives
    del array
    assert not view.lives


def test_many_arrays_take_few_descriptors(memory):
    before = len(os.listdir("/proc/self/fd"))
    kept = [memory.copy(np.full(3, float(i))) for i in range(100)]
    reader = Reader(kept[0][1])
    assert [reader.view(place).array[2] for _, place in kept] == [*range(100)]
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_forked_child_frees_nothing(memory):
    arrays = [memory.copy(np.ones(1 << 16))[0]]
    number = os.fork()
    if number == 0:
        arrays.clear()
        os._exit(0)
    os.waitpid(number, 0)
    assert (arrays[0] == 1.0).all()


def test_more_than_the_machine_has(memory):
    with pytest.raises(MemoryError):
        memory.copy(np.broadcast_to(np.zeros(1), (1 << 46,)))


def test_another_file_is_not_read(memory, tmp_path):
    _, place = memory.copy(np.zeros(3))
    other = tmp_path / "other"
    other.write_bytes(bytes(8192))
    for path in (other, tmp_path, tmp_path / "missing", "/dev/null"):
        with pytest.raises(OSError):
            Reader(Location(str(path), *place[1:]))
