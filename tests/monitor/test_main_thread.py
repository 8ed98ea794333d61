"""Whether the main thread runs Python code, or is in a function in C."""

import concurrent.futures
import hashlib
import threading
import time

import pytest

from mpistrat.monitor import main_thread


@pytest.fixture
def asked():
    """Ask another thread, once the main thread is busy."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield lambda: pool.submit(main_thread.moves)


def test_a_loop(asked):
    answer = asked()
    while not answer.done():
        pass
    assert answer.result()


def test_a_loop_that_had_no_core_for_a_while(asked):
    """The wait stands for a core that other processes have: longer than five samples take."""
    go_on = threading.Event()
    answer = asked()
    threading.Timer(0.04, go_on.set).start()
    go_on.wait()
    while not answer.done():
        pass
    assert answer.result()


@pytest.mark.parametrize("stay", [lambda: hashlib.pbkdf2_hmac("sha256", b"x", b"y", 200_000), None])
def test_a_function_in_c_and_a_wait(stay):
    """The thread that asks may be asked to run before the main thread has come there, so it asks again."""

    def ever_stays():
        return any(not main_thread.moves() for _ in range(20))

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


def test_c_code_keeps_the_lock(napping):
    answer = napping()
    time.sleep(0.02)  # it sleeps by now
    sum(range(50_000_000))
    assert answer.result()


def test_python_code_and_a_thread_that_sleeps_release_the_lock(napping):
    answer = napping()
    while not answer.done():
        pass
    assert not answer.result()
    assert not napping().result()
