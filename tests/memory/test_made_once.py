"""Tests of what the processes of a node make once: right bytes, and no process that waits for another one for ever."""

import errno
import os
import random
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from selection import core

from mpistrat.memory import made_once
from mpistrat.memory.made_once import Chunk, MadeOnce, in_turn

SIZE = 1000


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    monkeypatch.setattr(made_once, "_STALLED_S", 0.2)


def ring(nbytes=16 << 10, processes=2):
    """A ring that forked processes share."""
    node = SimpleNamespace(rank=0, size=processes, bcast=lambda value: value, allgather=lambda value: [value])
    return MadeOnce(nbytes, 1 << 40, node)


class Parts:
    """Parts whose bytes follow from their number, counted where they are made and where they are used."""

    def __init__(self, before=None):
        self.made, self.used, self._before = [], [], before

    def __call__(self, number):
        wanted = np.full(SIZE, number % 251, np.uint8)

        def make(memory):
            self.made.append(number)
            if self._before:
                self._before(number)
            if memory is None:
                return wanted
            memory[:] = wanted
            return memory

        def use(memory):
            found = memory.copy()
            self.used.append((number, bool((found == wanted).all())))

        return Chunk(("part", number), SIZE, 1, 1, make, use)

    def right(self):
        """Whether the last use of each part found its bytes: one before may have been overwritten meanwhile."""
        return all(dict(self.used).values())


def child(do):
    process = os.fork()
    if not process:
        try:
            do()
            os._exit(0)
        finally:
            os._exit(1)
    return process


def ended(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def alone(shared, parts, numbers):
    for part in shared.use_all([parts(number) for number in numbers], in_turn):
        part.use(part.make(None))


def test_another_process_finds_what_was_made():
    shared, mine = ring(), Parts()
    alone(shared, mine, range(8))

    def again():
        theirs = Parts()
        alone(shared, theirs, range(8))
        assert (theirs.made, theirs.used) == ([], [(number, True) for number in range(8)])

    assert ended(child(again)) == 0
    assert mine.made == [*range(8)]
    alone(shared, mine, range(100, 200))  # the oldest make room
    alone(shared, mine, [0])
    assert mine.made == [*range(8), *range(100, 200), 0]
    assert mine.right()


def test_a_part_that_is_overwritten_while_it_is_copied():
    shared, mine, others = ring(), Parts(), Parts()
    alone(shared, mine, [1])
    part = mine(1)

    def use(memory):
        if not others.made:
            alone(shared, others, range(100, 140))
        part.use(memory)

    shared.use_all([part._replace(use=use)], in_turn)
    assert [right for _, right in mine.used[1:]] == [False, True]
    assert mine.made == [1, 1]


def test_a_part_that_is_being_made_is_not_overwritten():
    shared, others = ring(), Parts()
    mine = Parts(lambda number: alone(shared, others, range(100, 140)))
    part = mine(1)
    alone(shared, others, range(300, 310))  # the part lies in the middle

    def make(memory):
        made = part.make(memory)
        alone(shared, others, range(200, 240))
        return made

    shared.use_all([part._replace(make=make)], in_turn)
    alone(shared, mine, [1])
    assert mine.made == [1]
    assert mine.right()
    assert others.right()


def test_a_part_behind_a_busy_one_outlives_older_ones():
    """The ring has four places, and begins again while the third is busy: the fourth is the newest."""

    def while_busy(number):
        if number == 2:
            alone(shared, parts, [3, 4, 3])

    shared, parts = ring(2 << 10), Parts(while_busy)
    alone(shared, parts, range(3))
    assert parts.made == [0, 1, 2, 3, 4]
    assert parts.right()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("where", ["while it makes a part", "while it has the lock"])
def test_a_process_ends_or_stops(end, where):
    shared, mine = ring(), Parts()

    def stopping(_=None):
        os.kill(os.getpid(), end)

    def do():
        if where == "while it makes a part":
            alone(shared, Parts(stopping), [1])
        else:
            with shared._locked():
                stopping()

    process = child(do)
    os.waitpid(process, os.WUNTRACED)
    began = time.monotonic()
    alone(shared, mine, [0, 1, 2])
    assert time.monotonic() - began < 5
    assert sorted(mine.made) == [0, 1, 2]
    assert mine.right()
    if end == signal.SIGSTOP:
        os.kill(process, signal.SIGCONT)
        assert ended(process) == 0
        alone(shared, mine, [1])
        assert mine.right()


def test_a_part_of_a_slow_process_is_waited_for():
    shared, mine = ring(), Parts()
    begun = threading.Event()

    def slow(number):
        begun.set()
        time.sleep(0.1)

    theirs = Parts(slow)
    thread = threading.Thread(target=alone, args=(shared, theirs, [1]))
    thread.start()
    begun.wait()
    alone(shared, mine, [1, 2])
    thread.join()
    assert (mine.made, theirs.made) == ([2], [1])
    assert mine.right()


def test_an_error_leaves_the_part_to_others():
    shared, mine = ring(), Parts()

    def fails(number):
        raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        alone(shared, Parts(fails), [1])
    alone(shared, mine, [1])
    assert mine.made == [1]
    assert mine.right()


@pytest.mark.parametrize("short_of", ["memory", "room"])
def test_without_memory_each_makes_its_own(monkeypatch, short_of):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    shared, mine = ring(16 << 10 if short_of == "memory" else SIZE // 4), Parts()
    monkeypatch.setattr(os, "posix_fallocate", full)
    alone(shared, mine, [1, 2, 1])
    assert mine.made == [1, 2, 1]
    assert mine.right()


@pytest.mark.parametrize("seed", core(range(6), 1))
def test_processes_that_share_too_little_memory(seed):
    """Each finds right bytes, though parts are overwritten while they are copied, and some processes are killed."""
    shared = ring(3 * SIZE, processes=4)

    def do(rank):
        chosen, mine = random.Random(seed * 10 + rank), Parts()
        for _ in range(300):
            alone(shared, mine, [chosen.randrange(20) for _ in range(chosen.randrange(1, 6))])
        assert mine.right()

    processes = [child(lambda rank=rank: do(rank)) for rank in range(4)]
    killed = processes[: seed % 3]
    for process in killed:
        time.sleep(0.02)
        os.kill(process, signal.SIGKILL)
    assert [ended(process) for process in processes if process not in killed] == [0] * (4 - len(killed))
    for process in killed:
        os.waitpid(process, 0)
