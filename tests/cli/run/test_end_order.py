"""The order in which the processes of a job end."""

import ctypes
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mpistrat.cli.run.running_job import EndOrder
from mpistrat.record import lifetime

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps this order")

RANK = """
import os, subprocess, sys, time
from mpistrat.record import lifetime

lifetime.keep_open()
lifetime.keep_open()  # a process keeps one
if sys.argv[1:] == ["fork"] and os.fork():
    sys.stdin.read()
print("ready", flush=True)
if sys.argv[1:] == ["fork"]:
    time.sleep(3)
sys.stdin.read()
"""

PAIRS = """
import os, pathlib, signal, sys
from mpistrat.cli.run.running_job import EndOrder
from mpistrat.record import lifetime

os.environ[lifetime.VARIABLE] = sys.argv[1]
order, expected = EndOrder(pathlib.Path(sys.argv[1])), []

def start():
    end, started = os.pipe()
    process = os.fork()
    if process == 0:
        lifetime.keep_open()
        os.write(started, b".")
        signal.pause()
    os.close(started)
    os.read(end, 1)
    return process, end

for _ in range(200):
    (first, end_of_first), (second, end_of_second) = start(), start()
    os.kill(first, signal.SIGKILL)
    os.read(end_of_first, 1)
    os.kill(second, signal.SIGKILL)
    for process, end in ((first, end_of_first), (second, end_of_second)):
        os.waitpid(process, 0)
        os.close(end)
    expected += [first, second]
found = order.close()
print(sum(found[i : i + 2] == expected[i : i + 2] for i in range(0, 400, 2)), "of 200 in order")
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts a process as `mpistrat run` starts a rank. It ends with its input."""
    started = []

    def begin(*options, folder=tmp_path):
        environ = {**os.environ, lifetime.VARIABLE: str(folder)}
        command = [sys.executable, "-c", RANK, *options]
        process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield begin
    for each in started:
        each.kill()
        each.wait()
        each.stdin.close()
        each.stdout.close()


@pytest.mark.full
def test_the_order_is_known_to_a_process_that_looks_later(start, tmp_path):
    order = EndOrder(tmp_path)
    ranks = [start() for _ in range(6)]
    expected = random.Random(7).sample(ranks[1:], 5)
    for number, each in enumerate(expected):
        if number % 2:
            each.stdin.close()  # it ends by itself
        else:
            each.kill()
        each.wait()
    assert order.close() == [each.pid for each in expected]
    ranks[0].kill()
    ranks[0].wait()
    assert order.close() == []


@pytest.mark.full
def test_the_file_is_closed_before_a_pipe_that_a_launcher_may_watch(tmp_path):
    ended = subprocess.run([sys.executable, "-c", PAIRS, tmp_path], capture_output=True, text=True, check=True)
    assert ended.stdout == "200 of 200 in order\n"


def test_a_forked_process_that_lives_longer_does_not_matter(start, tmp_path):
    order = EndOrder(tmp_path)
    ranks = [start("fork"), start()]
    for each in ranks:
        each.kill()
        each.wait()
    assert order.close() == [each.pid for each in ranks]


def test_a_folder_that_is_removed_leaves_the_order(start, tmp_path):
    folder = tmp_path / "ends"
    folder.mkdir()
    order = EndOrder(folder)
    rank = start(folder=folder)
    rank.kill()
    rank.wait()
    (folder / str(rank.pid)).unlink()
    folder.rmdir()
    assert order.close() == [rank.pid]


def test_a_process_of_another_node_has_no_place(start, tmp_path):
    order = EndOrder(tmp_path)
    rank = start(folder=tmp_path / "elsewhere")
    rank.kill()
    rank.wait()
    assert order.close() == []


def test_a_system_that_gives_no_notices(start, tmp_path, monkeypatch):
    class System:
        inotify_init1 = staticmethod(lambda flags: -1)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: System)
    order = EndOrder(tmp_path)
    rank = start()
    rank.kill()
    rank.wait()
    assert order.close() == []


def test_other_names_in_the_folder(start, tmp_path):
    order = EndOrder(tmp_path)
    (tmp_path / ".nfs0001").write_text("")
    rank = start()
    rank.kill()
    rank.wait()
    assert order.close() == [rank.pid]


@pytest.mark.parametrize(("release", "known"), [("3.10.0-1160.el7.x86_64", False), ("6.18.44", True)])
def test_an_old_system_closes_files_in_another_order(start, tmp_path, monkeypatch, release, known):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    order = EndOrder(tmp_path)
    rank = start()
    rank.kill()
    rank.wait()
    assert order.close() == [rank.pid] * known


def test_a_process_with_few_descriptors_keeps_no_file(tmp_path):
    program = """
import os, resource, sys
from mpistrat.record import lifetime
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
before = os.listdir("/proc/self/fd")
lifetime.keep_open()
assert os.listdir("/proc/self/fd") == before
"""
    order = EndOrder(tmp_path)
    environ = {**os.environ, lifetime.VARIABLE: str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True)
    assert order.close() == []
