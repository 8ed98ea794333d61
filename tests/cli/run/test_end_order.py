"""The order in which the processes of a job end."""

import os
import random
import resource
import subprocess
import sys

import pytest

from mpistrat.cli.run import processes
from mpistrat.cli.run.end_order import EndOrder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps this order")


def test_the_order_is_known_to_a_process_that_looks_later():
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(6)]
    order = EndOrder()
    for each in (*started, *started):  # the second time they are known
        order.add(each.pid)
    expected = random.Random(7).sample(started[1:], 5)
    for each in expected:
        each.kill()
        each.wait()
    assert order.close() == [each.pid for each in expected]
    started[0].kill()
    started[0].wait()


def test_a_process_that_has_ended_before_has_no_place():
    ended = subprocess.Popen(["true"])
    ended.wait()
    order = EndOrder()
    order.add(ended.pid)
    assert order.close() == []


@pytest.fixture
def three():
    """Three processes that run."""
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield started
    for each in started:
        each.kill()
        each.wait()


def test_a_python_without_these_descriptors_knows_no_order(three, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    order = EndOrder()
    for each in three:
        order.add(each.pid)
    assert order.close() == []


@pytest.mark.parametrize("free", [0, 4])
def test_the_order_leaves_descriptors_to_others(three, free):
    before = os.listdir("/proc/self/fd")
    order = EndOrder()
    for each in three[:2]:
        order.add(each.pid)
    three[0].kill()
    three[0].wait()
    lowest = os.dup(0)
    os.close(lowest)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, usual[1]))
    try:
        order.add(three[2].pid)
        assert processes.ranks_below(os.getpid()) == {}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert os.listdir("/proc/self/fd") == before
    order.add(three[1].pid)
    assert order.close() == []
