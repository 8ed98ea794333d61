"""Tests of prefetching: same elements and errors with and without the thread, which ends when not needed."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import traceback
import weakref

import numpy as np
import pytest

import mpistrat
from mpistrat.data.pipeline import prefetch
from mpistrat.data.pipeline.prefetch import Prefetched
from mpistrat.memory.buffer_pool import Buffers
from mpistrat.runtime.agreement import collective_lock


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "mpistrat-read"]


@pytest.fixture(autouse=True)
def none_left():
    assert not readers()
    yield
    gc.collect()
    for thread in readers():
        thread.join(60)
    assert not readers()


@pytest.mark.parametrize("most", [1, 2, 5])
def test_all_elements_in_order(most):
    assert list(Prefetched(iter(range(20)), most)) == list(range(20))
    assert list(Prefetched(iter(()), most)) == []


def test_no_further_ahead_than_said(monkeypatch):
    made, room = [], threading.Semaphore(0)
    monkeypatch.setattr(prefetch, "_AT_ONCE", -1.0)

    def numbers():
        for i in range(100):
            made.append(i)
            room.release()
            yield i

    ahead = Prefetched(numbers(), 3)
    for taken in range(5):
        for _ in range(3 if taken == 0 else 1):
            assert room.acquire(timeout=250)
        assert len(made) <= 3 + taken
        assert next(ahead) == taken
    ahead.close()


# --- which thread makes an element: the reading thread, or a caller that asks again at once ---


def named(count, names):
    for i in range(count):
        names.append(threading.current_thread().name)
        yield i


@pytest.mark.parametrize("most", [1, 2, 5])
def test_who_comes_back_at_once_makes_them_himself(monkeypatch, most):
    names = []
    monkeypatch.setattr(prefetch, "_AT_ONCE", 10.0)
    ahead = Prefetched(named(60, names), most)
    assert [next(ahead) for _ in range(20)] == list(range(20))
    # The first call does not count as asked at once. After `_OFTEN` calls the caller begins to keep permits.
    by_thread = prefetch._OFTEN + most
    assert names == ["mpistrat-read"] * by_thread + ["MainThread"] * (20 - by_thread)
    monkeypatch.setattr(prefetch, "_AT_ONCE", -1.0)
    assert list(ahead) == list(range(20, 60))
    assert names[20:] == ["mpistrat-read"] * 40


def test_a_thread_that_nobody_needs_is_not_started(monkeypatch):
    names = []
    monkeypatch.setattr(prefetch, "_AT_ONCE", 10.0)
    ahead = Prefetched(named(40, names), 2, in_line=True)
    assert [next(ahead) for _ in range(10)] == list(range(10))
    assert ahead.in_line
    assert names == ["MainThread"] * 10
    assert not readers()
    monkeypatch.setattr(prefetch, "_AT_ONCE", -1.0)
    assert [next(ahead) for _ in range(10)] == list(range(10, 20))
    assert not ahead.in_line
    assert set(names[10:]) == {"mpistrat-read"}
    assert len(readers()) == 1
    ahead.close()
    unused = Prefetched(named(40, names), 2, in_line=True)
    unused.close()
    assert unused._hand_over.thread is None


def test_changing_makers_change_nothing(monkeypatch):
    names = []
    ahead = Prefetched(named(300, names), 2)
    for i in range(300):
        monkeypatch.setattr(prefetch, "_AT_ONCE", 10.0 if i // 10 % 2 else -1.0)
        assert next(ahead) == i
    with pytest.raises(StopIteration):
        next(ahead)
    assert len(names) == 300
    assert set(names) == {"mpistrat-read", "MainThread"}


def test_its_user_makes_them_as_the_thread_would(monkeypatch):
    monkeypatch.setattr(prefetch, "_AT_ONCE", 10.0)
    strategy = mpistrat.OneDeviceStrategy("cpu:0")
    seen = []

    def elements():
        for i in range(20):
            seen.append(
                (mpistrat.get_strategy() is strategy, threading.get_ident() in collective_lock.forbidden_threads)
            )
            yield i
        raise Broken("here")

    with strategy.scope():
        ahead = Prefetched(elements(), 2)
    assert [next(ahead) for _ in range(20)] == list(range(20))
    assert seen == [(True, True)] * 20
    assert mpistrat.get_strategy() is not strategy
    collective_lock.refuse_thread("reduce")
    with pytest.raises(Broken, match="here"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    ahead._hand_over.thread.join(60)
    assert not ahead._hand_over.thread.is_alive()


class Broken(Exception):
    pass


def breaks(at):
    yield from range(at)
    raise Broken("here")


def test_an_error_comes_where_it_belongs():
    ahead = Prefetched(breaks(2), 4)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(Broken, match="here") as caught:
        next(ahead)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-1] == "breaks"
    with pytest.raises(StopIteration):
        next(ahead)


def test_one_that_ends_the_program_too():
    def leaves():
        yield 1
        sys.exit(3)

    ahead = Prefetched(leaves(), 2)
    assert next(ahead) == 1
    with pytest.raises(SystemExit):
        next(ahead)


def test_the_thread_ends_when_nobody_asks():
    for leave in ("break", "drop", "close", "raise"):
        ahead = Prefetched(iter(int, 1), 2)
        thread = ahead._hand_over.thread
        if leave == "break":
            for _ in ahead:
                break
        elif leave == "close":
            ahead.close()
        elif leave == "raise":
            with contextlib.suppress(Broken):
                for _ in ahead:
                    raise Broken
        del ahead
        gc.collect()
        thread.join(60)
        assert not thread.is_alive(), leave


def test_elements_are_held_by_nobody_else():
    class Element:
        pass

    ahead = Prefetched((Element() for _ in range(3)), 1)
    first = next(ahead)
    gone = weakref.ref(first)
    del first
    assert gone() is None
    ahead.close()


def ends(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=100, check=False
    )


ENDLESS = """
import itertools, os, sys, time
from mpistrat.data.pipeline.prefetch import Prefetched
ahead = Prefetched(itertools.count(), 2)
assert next(ahead) == 0
"""


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("", 0),
        ("kept = [ahead]; kept.append(kept)", 0),
        ("sys.exit(4)", 4),
        ("raise ValueError", 1),
        ("os._exit(5)", 5),
    ],
)
def test_the_program_ends(last, status):
    ended = ends(ENDLESS + last)
    assert ended.returncode == status, ended.stderr
    assert "Fatal" not in ended.stderr


@pytest.mark.full
def test_the_program_ends_while_the_thread_reads():
    program = """
import h5py, sys, tempfile, time
from mpistrat.data import Dataset
from mpistrat.data.pipeline.prefetch import Prefetched
path = tempfile.mkdtemp() + "/a.h5"
with h5py.File(path, "w") as f:
    f.create_dataset("x", data=[[i] * 1000 for i in range(3000)], chunks=(10, 1000), compression=sys.argv[1])
ahead = Prefetched(iter(Dataset.from_hdf5(path, "x").repeat().shuffle(buffer_size=500).batch(100)), 2)
next(ahead)
"""
    for compression in ("lzf", "gzip"):  # decoded by HDF5, and by threads of this library
        ended = ends(program, compression)
        assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_thread():
    ahead = Prefetched(iter(int, 1), 2)
    next(ahead)
    assert ahead.usable
    child = os.fork()
    if child == 0:
        usable = ahead.usable
        del ahead  # must not wait for a lock that is never released
        os._exit(1 if usable else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ahead.close()


# --- memory -------------------------------------------------------------------------------


def test_buffers_are_used_again_only_when_free():
    buffers = Buffers()
    shape = (400, 300)
    kept = [buffers.empty(shape, "f4") for _ in range(6)]
    for i, array in enumerate(kept):
        array[...] = i
    assert [float(array.mean()) for array in kept] == list(range(6))
    view = kept[0][::2, 1:]
    address = kept[0].ctypes.data
    kept.clear()
    others = [buffers.empty(shape, "f4") for _ in range(8)]
    for array in others:
        array[...] = -1
    assert address not in [array.ctypes.data for array in others]
    assert (view == 0).all()
    del view, array
    assert buffers.empty(shape, "f4").ctypes.data == address


def test_buffers_of_any_type():
    buffers = Buffers()
    for dtype in ("u1", "f8", [("a", "i2"), ("b", "f4", (2,))], "S7", "O"):
        array = buffers.empty((3, 40_000), np.dtype(dtype))
        assert array.dtype == np.dtype(dtype)
        assert array.shape == (3, 40_000)
        assert array.flags.c_contiguous
        assert array.flags.writeable
