"""Files that cannot be written to their end: OSError, nothing is left behind, and the program goes on."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import gc, os, resource, sys
import h5py
import numpy as np
import mpistrat
from mpistrat.data import Dataset, write_hdf5
from mpistrat.data.write.write import shard
from mpistrat.training import load, save, save_async

folder, limit = sys.argv[1], int(sys.argv[2])
numbers = np.random.default_rng(0).normal(size=(250_000, 2))
words = np.array([str(value) * 3 for value in numbers[:20_000, 0]], object)
source, target = os.path.join(folder, "source.h5"), os.path.join(folder, "full", "target.h5")
write_hdf5(source, {"x": numbers})
with mpistrat.get_strategy().scope():
    v = mpistrat.Variable(numbers, name="v")
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
WAYS = {
    "contiguous": lambda: write_hdf5(target, {"x": numbers}),
    "chunks": lambda: write_hdf5(target, {"x": numbers}, chunk=100),
    "gzip": lambda: write_hdf5(target, {"x": numbers}, compress="gzip"),
    "words": lambda: write_hdf5(target, {"x": words}, chunk=100),
    "stream": lambda: write_hdf5(target, (numbers[i : i + 777] for i in range(0, len(numbers), 777))),
    "shard": lambda: shard([source], os.path.join(folder, "full"), 1, compress="gzip"),
    "save": lambda: save([v], target),
    "save_async": lambda: save_async([v], target).wait(),
}

def attempts(way):
    for attempt in range(2):
        try:
            way()
        except OSError as error:
            yield f"{type(error).__name__} {error.errno}"
        gc.collect()
    assert os.listdir(os.path.join(folder, "full")) == []
    if os.path.isdir("/proc/self/fd"):
        links = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
        assert not [each for each in links if os.path.lexists(each) and "deleted" in os.readlink(each)]
    write_hdf5(target, {"x": np.arange(5)}, compress="gzip")
    (rows,) = Dataset.from_hdf5(target, "x").batch(5)
    assert rows.tolist() == [0, 1, 2, 3, 4]
    os.unlink(target)
    yield "goes on"

for what, way in WAYS.items():
    print(what, *attempts(way), sep=", ", flush=True)
"""
WAYS = ["contiguous", "chunks", "gzip", "words", "stream", "shard", "save", "save_async"]


def check(folder, limit, errno):
    """Write in all ways, in one process: to start one for each takes three times as long as all that they write."""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(limit)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    wanted = [f"{what}, OSError {errno}, OSError {errno}, goes on" for what in WAYS]
    assert ended.stdout.splitlines() == wanted


@pytest.mark.full
def test_a_limit_on_the_size_of_files(tmp_path):
    (tmp_path / "full").mkdir()
    check(tmp_path, 300_000, 27)


@pytest.fixture
def small_disk(tmp_path):
    (tmp_path / "full").mkdir()
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("mounts a file system: needs root on Linux")
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path / "full")]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path / "full")], check=True)


def test_a_full_disk(small_disk):
    check(small_disk, 0, 28)


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
from mpistrat.data import write_hdf5

def interrupt(delay, seen):
    while not seen.wait(delay):
        os.kill(os.getpid(), signal.SIGINT)
        delay = 20  # and again, where Python ignored it in a callback of its own

for delay in np.linspace(0.001, 0.15, 20):
    seen = threading.Event()
    try:
        threading.Thread(target=interrupt, args=(delay, seen)).start()
        while True:
            write_hdf5(sys.argv[1] + "/x.h5", {"x": np.ones((3000, 5))}, chunk=10, compress="gzip", overwrite=True)
    except KeyboardInterrupt:
        seen.set()
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("goes on")
"""

# An interrupt while HDF5 closes a file, and one while the thread of a file begins.
INTERRUPTED_ONCE = """
import os, signal, sys, threading, time
import h5py
import numpy as np
from h5py._objects import phil
from mpistrat.data import write_hdf5

def slowly(file):
    closing.set()
    with phil:
        time.sleep(1)
        close(file)

def begun(thread):
    start(thread)
    if thread.name.startswith("mpistrat-hdf5"):
        threading.Thread.start = start
        raise KeyboardInterrupt

def interrupt():
    closing.wait()
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)

close, start, closing = h5py.File.close, threading.Thread.start, threading.Event()
if sys.argv[2] == "closes":
    h5py.File.close = slowly
    threading.Thread(target=interrupt).start()
else:
    threading.Thread.start = begun
try:
    write_hdf5(sys.argv[1] + "/x.h5", {"x": np.ones((3000, 5))}, chunk=10)
except KeyboardInterrupt as error:
    kept = error  # as the interpreter keeps an error that ends the program
    print("goes on")
"""


def goes_on(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "goes on\n"


@pytest.mark.full
def test_interrupted_at_any_moment(tmp_path):
    goes_on(INTERRUPTED, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("when", ["closes", "begins"])
def test_interrupted_where_a_thread_might_be_lost(tmp_path, when):
    """The program ends, too: Python waits for the thread."""
    goes_on(INTERRUPTED_ONCE, tmp_path, when)
