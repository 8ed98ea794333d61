"""The order in which the processes of a job end."""

import random
import subprocess
import sys

import pytest

from mpistrat.cli.run.end_order import EndOrder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps this order")


def test_the_order_is_known_to_a_process_that_looks_later():
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(6)]
    order = EndOrder()
    for each in (*processes, *processes):  # the second time they are known
        order.add(each.pid)
    expected = random.Random(7).sample(processes[1:], 5)
    for each in expected:
        each.kill()
        each.wait()
    assert order.close() == [each.pid for each in expected]
    processes[0].kill()
    processes[0].wait()


def test_a_process_that_has_ended_before_has_no_place():
    ended = subprocess.Popen(["true"])
    ended.wait()
    order = EndOrder()
    order.add(ended.pid)
    assert order.close() == []
