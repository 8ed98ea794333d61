"""What is left of a checkpoint when a program ends while it is being written."""

import h5py
import pytest

pytestmark = [pytest.mark.fault, pytest.mark.mpich]

PROGRAM = """
import os, signal, sys, time
import numpy as np
import mpistrat
from mpistrat.training import save, save_async
from mpistrat.training.checkpoint import disk_writer

what, path, asynchronous = sys.argv[1], sys.argv[2], sys.argv[3] == "asynchronous"
strategy = mpistrat.MultiWorkerMirroredStrategy()
with strategy.scope():
    v = mpistrat.Variable(np.ones(1_000_000), name="v")
save([v], path)
v.assign(np.full(1_000_000, 2.0))
put, begun = disk_writer.DiskWriter._put, os.path.join(os.path.dirname(path), "begun")


def slow(self, data, offset):
    put(self, data[:4096], offset)
    open(begun, "w").close()
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5 if what == "ends" else 200)
    put(self, data[4096:], offset + 4096)


disk_writer.DiskWriter._put = slow
if what == "cannot":
    path = os.path.join(path, "below a file")
if asynchronous:
    save_async([v], path)
else:
    save([v], path)
if what == "fails":
    while not os.path.exists(begun):
        time.sleep(0.01)
    if strategy.comm.rank == strategy.num_replicas_in_sync - 1:
        raise ValueError("on purpose")
    strategy.barrier()
if what == "killed":
    strategy.barrier()
print("at its end", flush=True)
"""


@pytest.fixture
def run(run_ranks, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(what, how="asynchronous"):
        path = tmp_path / "v.h5"
        ended = run_ranks(2, tmp_path / "program.py", what, path, how, limit=100)
        assert ended.status is not None, str(ended)
        with h5py.File(path) as file:
            values = set(file["v"][()])
        assert len(values) == 1
        return ended, values.pop()

    return run


@pytest.mark.parametrize("how", ["asynchronous", "synchronous"])
def test_killed_in_the_middle_of_a_write(run, how):
    ended, value = run("killed", how)
    assert ended.status != 0
    assert value == 1


def test_another_rank_fails_meanwhile(run):
    ended, value = run("fails")
    assert ended.status != 0
    ended.shows("ValueError: on purpose")
    assert value == 1


def test_the_end_of_a_program_waits_for_the_file(run):
    ended, value = run("ends")
    ended.check().shows("at its end")
    assert value == 2


def test_an_error_that_nobody_waits_for_is_logged(run):
    ended, value = run("cannot")
    ended.check().shows("at its end", "was not written, and the program did not wait for it")
    assert value == 1


MANAGED = """
import itertools, os, pathlib, signal, sys
import mpistrat
from mpistrat.training import Checkpoint, CheckpointManager

folder, last = sys.argv[1], int(sys.argv[2])
strategy = mpistrat.MultiWorkerMirroredStrategy()
with strategy.scope():
    v = mpistrat.Variable(0, name="v")
manager = CheckpointManager(Checkpoint(v=v), folder, max_to_keep=1)
path = manager.restore_or_initialize()
print("found", path and os.path.basename(path), int(v), manager.checkpoint.save_counter, flush=True)
changes = itertools.count(1)


def killing(change):
    def call(*arguments, **options):
        if next(changes) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return change(*arguments, **options)

    return call


for name in ("replace", "rename", "link", "unlink"):
    setattr(os, name, killing(getattr(os, name)))
pathlib.Path.unlink = killing(pathlib.Path.unlink)
for _ in range(2):
    v.assign_add(1)
    manager.save()
print("at its end", flush=True)
"""


def test_a_manager_that_is_killed_before_each_change_of_the_directory(run_alone, tmp_path):
    (tmp_path / "program.py").write_text(MANAGED)
    count = 0
    for last in range(1, 30):
        ended = run_alone(tmp_path / "program.py", tmp_path / "kept", last)
        found, value, counter = ended.output.partition("found ")[2].split()[:3]
        # Whole, and the newest of those that were listed: never older than at the start before.
        assert value == counter, str(ended)
        assert found == ("None" if value == "0" else f"ckpt-{value}"), str(ended)
        assert int(value) in (count, count + 1, count + 2), str(ended)
        count = int(value)
        if "at its end" in ended.output:
            break
    assert last > 4, "no change was met"
    assert max(int(each.name[5:]) for each in (tmp_path / "kept").glob("ckpt-*")) == count + 2
