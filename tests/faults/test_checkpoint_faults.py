"""What is left of a checkpoint when a program ends while it is being written."""

import os

import h5py
import numpy as np
import pytest

from mpistrat.training.checkpoint.read import contents, read

pytestmark = [pytest.mark.fault, pytest.mark.mpich]

PROGRAM = """
import os, signal, sys, time
import numpy as np
import mpistrat
from mpistrat.training import save, save_async
from mpistrat.training.checkpoint import write

what, path, asynchronous = sys.argv[1], sys.argv[2], sys.argv[3] == "asynchronous"
strategy = mpistrat.MultiWorkerMirroredStrategy()
with strategy.scope():
    v = mpistrat.Variable(np.ones(1_000_000), name="v")
save([v], path)
v.assign(np.full(1_000_000, 2.0))
put, begun = write.write_all, os.path.join(os.path.dirname(path), "begun")


def slow(descriptor, data, offset):
    if len(data) < 1 << 20:
        return put(descriptor, data, offset)
    put(descriptor, data[:4096], offset)
    open(begun, "w").close()
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5 if what == "ends" else 200)
    put(descriptor, data[4096:], offset + 4096)


write.write_all = slow
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


BY_ALL = """
import os, random, signal, sys, threading
import numpy as np
from mpi4py import MPI
import mpistrat
from mpistrat.data import Block
from mpistrat.runtime.topology import Limits
from mpistrat.runtime.topology import Topology
from mpistrat.training import save, save_async

what, path, asynchronous, seed = sys.argv[1], sys.argv[2], sys.argv[3] == "asynchronous", int(sys.argv[4])
comm = MPI.COMM_WORLD.Dup()
Topology.of(comm, limits=Limits(save_alone_bytes=0))
rank, size = comm.rank, comm.size
strategy = mpistrat.MultiWorkerMirroredStrategy(comm=comm)
chosen = random.Random(seed)
victim, delay = chosen.randrange(size), chosen.uniform(0, 1.0)
with strategy.scope():
    v = mpistrat.Variable(np.zeros(1_000_000), name="v")
    w = mpistrat.Variable(np.zeros(300_000, "f4"), name="w")
optimizer = mpistrat.optimizers.Adam(shard_state=True)
optimizer.build([w])
slots = optimizer.variables[2:]


def state(i):
    return {"b": Block(np.full((2, 50_000), float(i)), (2 * rank, 0), (2 * size, 50_000))}, {"u": np.full(1000, i)}


def write(i):
    v.assign(np.full(1_000_000, i)), w.assign(np.full(300_000, i))
    for slot in slots:
        slot.assign(np.full(300_000, i, "f4"))
    block, own = state(i)
    (save_async if asynchronous else save)({"v": v, "w": w, "slots": slots, **block}, path, own=own)


write(0)
if asynchronous:
    save([w], path + ".other")  # waits for the first one
comm.Barrier()
if what == "killed" and rank == victim:
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
if what == "raises":
    write(1)
    if rank == victim:
        raise ValueError("on purpose")
    comm.Barrier()
i = 0
while what == "killed":
    i += 1
    write(i)
if what == "ends":
    write(1)
"""


def is_whole(path, size):
    """The number that is everywhere in a file of the program, after `read` has compared all checksums."""
    likes = {name: np.empty(shape, dtype) for name, (dtype, shape) in contents(path).items()}
    read(likes, path)
    values = {float(each) for array in likes.values() for each in np.unique(array)}
    assert {f"u/{rank}" for rank in range(size)} < {*likes}
    (value,) = values
    return value


@pytest.fixture
def run_by_all(run_ranks, tmp_path):
    (tmp_path / "by_all.py").write_text(BY_ALL)

    def run(what, how, seed=0, size=4):
        folder = tmp_path / f"{what} {how} {seed}"
        folder.mkdir()
        ended = run_ranks(size, tmp_path / "by_all.py", what, folder / "a.h5", how, seed, limit=100)
        assert ended.status is not None, str(ended)
        return ended, is_whole(folder / "a.h5", size), sorted(os.listdir(folder))

    return run


KILLS = int(os.environ.get("MPISTRAT_TEST_KILLS", "2"))  # 300 take ten minutes on two cores


@pytest.mark.parametrize("seed", range(KILLS))
def test_killed_at_any_moment_of_a_save_by_all_ranks(run_by_all, seed):
    ended, value, _ = run_by_all("killed", ["asynchronous", "synchronous"][seed % 2], seed)
    assert ended.status != 0
    assert value >= 0


def test_a_rank_that_raises_while_all_write(run_by_all):
    ended, value, _ = run_by_all("raises", "asynchronous")
    assert ended.status != 0
    ended.shows("ValueError: on purpose")
    assert value in (0, 1)


def test_the_end_of_a_program_waits_for_the_parts_of_all_ranks(run_by_all):
    ended, value, files = run_by_all("ends", "asynchronous")
    ended.check()
    assert value == 1
    assert files == ["a.h5", "a.h5.other"]
