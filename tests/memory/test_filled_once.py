"""Memory that is filled once, under threads and forks of one process."""

import os
import signal
import threading

import pytest

from mpistrat.memory.made_once import FilledOnce

SOON = 0.1  # seconds, in which a thread without a lock would begin to fill


def test_a_piece_is_filled_by_one_thread():
    """A second thread would write to rows that the first one already takes."""
    made = FilledOnce(8, 1)
    second_begins, loads = threading.Event(), []

    def load():
        loads.append(threading.current_thread().name)
        second_begins.wait()
        second.join(SOON)

    def fill_too():
        second_begins.set()
        made.fill(0, [(0, 8)], load)

    second = threading.Thread(target=fill_too)
    made.fill(0, [(0, 8)], lambda: (second.start(), load()))
    second.join()
    assert loads == ["MainThread"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_fills_while_a_thread_of_its_parent_does():
    begun, end = threading.Event(), threading.Event()
    made = FilledOnce(8, 1)
    thread = threading.Thread(target=made.fill, args=(0, [(0, 8)], lambda: (begun.set(), end.wait())))
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        made.fill(0, [(0, 8)], lambda: made.memory.fill(7))
        os._exit(set(made.memory.tolist()) != {7})
    end.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert set(made.memory.tolist()) == {0}
