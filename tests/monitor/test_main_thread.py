"""Whether the main thread runs Python code, or is in a function in C."""

import concurrent.futures
import hashlib
import os
import threading
import time

import pytest

from mpistrat.monitor import main_thread

tells_who_had_a_core = pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the system does not tell how long a thread had a core"
)


def known():
    """What is known of the main thread, as soon as it had a core."""
    while (moves := main_thread.moves()) is None:
        pass
    return moves


@pytest.fixture
def asked():
    """Ask another thread, once the main thread is busy."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield lambda: pool.submit(known)


def test_a_loop(asked):
    answer = asked()
    while not answer.done():
        pass
    assert answer.result()


def test_a_loop_that_had_no_core_for_a_while(monkeypatch):
    """The wait stands for a core that other processes have: longer than many samples take."""
    go_on, samples, sleep = threading.Event(), [], time.sleep

    def count(seconds):
        sleep(seconds)
        samples.append(seconds)
        if len(samples) == 20:
            go_on.set()

    def ask():
        try:
            while (moves := known()) and len(samples) < 20:  # it was not there yet
                samples.clear()
            return moves
        finally:
            go_on.set()

    monkeypatch.setattr("time.sleep", count)
    monkeypatch.setattr(main_thread, "_IDLE", 60.0)  # 20 samples take long where this test gets no core
    monkeypatch.setattr(main_thread, "_BUSY", 60.0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        go_on.wait()
        while not answer.done():
            pass
        assert answer.result()


@tells_who_had_a_core
@pytest.mark.parametrize("stay", [lambda: hashlib.pbkdf2_hmac("sha256", b"x", b"y", 200_000), None])
def test_a_function_in_c_and_a_wait(stay):
    """The thread that asks may be asked to run before the main thread has come there, so it asks again."""

    def ever_stays():
        return any(not known() for _ in range(20))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ever_stays)
        while stay is not None and not answer.done():
            stay()
        assert answer.result()


@pytest.fixture
def napping():
    """Let another thread sleep, and ask it then."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the thread is there
        yield lambda: pool.submit(main_thread.kept_lock, 0.1)


@pytest.mark.full
@tells_who_had_a_core
def test_c_code_keeps_the_lock(napping, monkeypatch):
    asleep, sleep = threading.Event(), time.sleep

    def fall_asleep(seconds):
        asleep.set()
        sleep(seconds)

    monkeypatch.setattr("time.sleep", fall_asleep)
    answer = napping()
    asleep.wait()
    sum(range(100_000_000))
    assert answer.result()


def test_python_code_and_a_thread_that_sleeps_release_the_lock(napping):
    answer = napping()
    while not answer.done():
        pass
    assert not answer.result()
    assert not napping().result()
