"""Variables to a file and back."""

import os
import resource
import signal

import h5py
import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.data import ChecksumError, DataFileError
from mpistrat.experimental import PreemptionCheckpointHandler
from mpistrat.training import load, save, save_async
from mpistrat.training.checkpoint import by_all

SYNC, AGG = mpistrat.VariableSynchronization, mpistrat.VariableAggregation


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "int64", "bool", "complex64", ml_dtypes.bfloat16]
)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_round_trip(strategy, tmp_path, dtype, shape):
    value = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    with strategy.scope():
        v = mpistrat.Variable(value, name="a/b")
    save([v], tmp_path / "v.h5")
    v.assign(np.zeros(shape, dtype))
    load([v], tmp_path / "v.h5")
    np.testing.assert_array_equal(v.read_value(), value)
    assert v.dtype == np.dtype(dtype)


def test_sums_are_shared_anew(strategy, tmp_path):
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        total = mpistrat.Variable(0.0, name="total", synchronization=SYNC.ON_READ, aggregation=AGG.SUM)
        mean = mpistrat.Variable(0.0, name="mean", synchronization=SYNC.ON_READ, aggregation=AGG.MEAN)
        first = mpistrat.Variable(0.0, name="first", synchronization=SYNC.ON_READ, aggregation=AGG.ONLY_FIRST_REPLICA)

    def write():
        rank = mpistrat.get_replica_context().replica_id_in_sync_group
        for variable in (total, mean, first):
            variable.assign(10.0 * (rank + 1))

    strategy.run(write)
    everything = [total, mean, first]
    save(everything, tmp_path / "v.h5")
    for variable in everything:
        variable.assign(0.0)
    load(everything, tmp_path / "v.h5")
    expected_sum, expected_mean = 10.0 * replicas * (replicas + 1) / 2, 5.0 * (replicas + 1)
    np.testing.assert_allclose([total, mean, first], [expected_sum, expected_mean, 10.0])
    own = strategy.run(lambda: [float(variable) for variable in everything])
    np.testing.assert_allclose(own, [expected_sum / replicas, expected_mean, 10.0])


def test_what_cannot_be_saved_raises(strategy, tmp_path):
    with strategy.scope():
        v = mpistrat.Variable(1.0, name="v")
        w = mpistrat.Variable(1.0, name="v")
        n = mpistrat.Variable(1.0, name="n", synchronization=SYNC.ON_READ)
    with pytest.raises(ValueError, match="'v'"):
        save([v, w], tmp_path / "v.h5")
    with pytest.raises(ValueError, match="no variables"):
        save([], tmp_path / "v.h5")
    with pytest.raises(TypeError, match="list or a dict"):
        save(v, tmp_path / "v.h5")
    with pytest.raises(ValueError, match="NONE"):
        save([n], tmp_path / "v.h5")
    save({"one": v, "two": w}, tmp_path / "v.h5")
    assert sorted(os.listdir(tmp_path)) == ["v.h5"]


def test_what_does_not_fit_raises_on_every_rank_and_changes_nothing(strategy, tmp_path):
    with strategy.scope():
        v = mpistrat.Variable([1.0, 2.0], name="v")
        other = mpistrat.Variable([1.0, 2.0, 3.0], name="w")
    save([v], tmp_path / "v.h5")
    v.assign([5.0, 6.0])
    with pytest.raises(FileNotFoundError, match=r"none\.h5"):
        load([v], tmp_path / "none.h5")
    with pytest.raises(ValueError, match="has no variable 'w': it has 'v'"):
        load([v, other], tmp_path / "v.h5")
    with pytest.raises(ValueError, match="shape"):
        load({"v": other}, tmp_path / "v.h5")
    np.testing.assert_array_equal(v.read_value(), [5.0, 6.0])


def test_a_file_that_cannot_be_written_raises_on_every_rank(strategy, tmp_path):
    with strategy.scope():
        v = mpistrat.Variable(1.0)
    strategy.extended.engine.topology.on_first((tmp_path / "file").touch)
    with pytest.raises(NotADirectoryError):
        save([v], tmp_path / "file" / "v.h5")


def test_the_folder_is_made(strategy, tmp_path):
    v = variable(strategy, 1.0)
    save([v], tmp_path / "a" / "b" / "v.h5")
    save_async([v], tmp_path / "a" / "c" / "v.h5").wait()
    v.assign(0.0)
    load([v], tmp_path / "a" / "b" / "v.h5")
    assert float(v) == 1.0
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "c"]


def test_what_cannot_be_saved_is_named_without_its_content(strategy, tmp_path):
    array = np.full(1000, "7")
    for given, message in (
        ({"layer": [{"w": array}]}, "'layer/0/w' is a numpy.ndarray of <U1 and shape (1000,), not a variable"),
        ([variable(strategy, 1.0), array.astype(object)], "'1' is a numpy.ndarray of object and shape"),
        ({"name": "7" * 1000}, "'name' is a str, not a variable"),
        ({"count": 2**70}, "'count' is an int, not a variable"),
        (array, "a list or a dict, not a numpy.ndarray of <U1"),
    ):
        with pytest.raises(TypeError) as caught:
            save(given, tmp_path / "v.h5")
        assert message in str(caught.value)
        assert "77" not in str(caught.value).replace(" ", "")


def test_in_a_replica_context_there_is_no_one_value(strategy, tmp_path):
    with strategy.scope():
        v = mpistrat.Variable(1.0, name="v", synchronization=SYNC.ON_READ, aggregation=AGG.SUM)
    save([v], tmp_path / "v.h5")
    for call in (save, load):
        with pytest.raises(RuntimeError, match=r"outside of strategy\.run"):
            strategy.run(lambda call=call: call([v], tmp_path / "v.h5"))


def test_names_that_lie_in_each_other(strategy, tmp_path):
    with strategy.scope():
        v = mpistrat.Variable(1.0)
    with pytest.raises(ValueError, match="'a' and 'a/b'"):
        save({"a/b": v, "a": v}, tmp_path / "v.h5")


def test_names_that_hdf5_reads_otherwise(strategy, tmp_path):
    with strategy.scope():
        v, w = mpistrat.Variable(1.0), mpistrat.Variable(2.0)
    for name in ("", "/", ".", "./", "a\0b"):
        with pytest.raises(ValueError, match="cannot be the name of a variable in a file") as caught:
            save({name: v}, tmp_path / "v.h5")
        assert repr(name) in str(caught.value)
    for one, other in (("/a", "a"), ("a//b", "a/b"), ("./a", "a/"), ("/a/b", "a/./b")):
        with pytest.raises(ValueError, match=f"two variables have the name '{one}' or '{other}'"):
            save({one: v, other: w}, tmp_path / "v.h5")
    with pytest.raises(ValueError, match="'/a' and 'a//b' cannot both be in a file"):
        save({"/a": v, "a//b": w}, tmp_path / "v.h5")
    save({"/é x//y/": v}, tmp_path / "v.h5")
    v.assign(0.0)
    load({"é x/y": v}, tmp_path / "v.h5")
    assert float(v) == 1.0


def test_an_interrupted_save_leaves_the_old_file(strategy, tmp_path, monkeypatch):
    with strategy.scope():
        v = mpistrat.Variable(1.0, name="v")
    save([v], tmp_path / "v.h5")
    v.assign(2.0)

    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        save([v], tmp_path / "v.h5")
    monkeypatch.undo()
    strategy.barrier()
    assert sorted(os.listdir(tmp_path)) == ["v.h5"]
    with h5py.File(tmp_path / "v.h5") as file:
        assert file["v"][()] == 1.0


def variable(strategy, value, name="v"):
    with strategy.scope():
        return mpistrat.Variable(value, name=name)


@pytest.mark.parametrize("damage", ["truncated", "empty", "spoilt", "other"])
def test_a_damaged_file_is_refused_on_every_rank(strategy, comm, tmp_path, damage):
    v = variable(strategy, np.arange(3000.0))
    path = tmp_path / "v.h5"
    save([v], path)
    if comm.rank == 0:
        data = bytearray(path.read_bytes())
        with h5py.File(path) as file:
            data[file["v"].id.get_offset() + 8 * 1234] ^= 1
        cases = {"truncated": data[:-1], "empty": b"", "spoilt": data, "other": b"no HDF5 file" * 100}
        path.write_bytes(cases[damage])
    comm.Barrier()
    v.assign(np.zeros(3000))
    kind, text = (ChecksumError, "dataset 'v': bytes") if damage == "spoilt" else (DataFileError, "fix:")
    with pytest.raises(kind, match=("^rank 0: " if comm.rank else "^") + "file .*v.h5.*" + text):
        load([v], path)
    assert not v.read_value().any()


# --- in the background -----------------------------------------------------------------------------------


def test_what_is_saved_is_what_was_there(strategy, tmp_path):
    v = variable(strategy, np.arange(5000.0))
    with strategy.scope():
        total = mpistrat.Variable(0.0, name="total", synchronization=SYNC.ON_READ, aggregation=AGG.SUM)
    strategy.run(lambda: total.assign(2.0))
    pending = save_async([v, total], tmp_path / "v.h5")
    v.assign(np.zeros(5000))
    strategy.run(lambda: total.assign(0.0))
    assert pending.done() in (True, False)
    pending.wait()
    pending.wait()
    assert pending.done()
    load([v, total], tmp_path / "v.h5")
    np.testing.assert_array_equal(v.read_value(), np.arange(5000.0))
    assert float(total) == 2.0 * strategy.num_replicas_in_sync
    assert os.listdir(tmp_path) == ["v.h5"]


def test_one_after_the_other_in_the_same_memory(strategy, tmp_path):
    v = variable(strategy, np.zeros(100_000))
    places = set()
    for i in range(6):
        v.assign(np.full(100_000, i))
        pending = save_async({"v": v}, tmp_path / f"{i}.h5")
        room = strategy.extended.engine.topology.slot(by_all.SaveBuffer)
        places.add((room._bytes.ctypes.data, len(room._bytes)))
    save({"v": v}, tmp_path / "last.h5")  # waits for it
    assert pending.done()
    assert len(places) == 1
    assert sorted(os.listdir(tmp_path)) == [*(f"{i}.h5" for i in range(6)), "last.h5"]
    for i in range(6):
        load({"v": v}, tmp_path / f"{i}.h5")
        assert (v.read_value() == i).all()


def test_load_waits(strategy, tmp_path):
    v = variable(strategy, np.ones(1_000_000))
    save_async([v], tmp_path / "v.h5")
    v.assign(np.zeros(1_000_000))
    load([v], tmp_path / "v.h5")
    assert v.read_value().all()


def test_errors_come_with_wait_or_the_next_call_on_every_rank(strategy, tmp_path):
    v = variable(strategy, 1.0)
    strategy.extended.engine.topology.on_first((tmp_path / "file").touch)
    pending = save_async([v], tmp_path / "file" / "v.h5")
    for _ in range(2):
        with pytest.raises(NotADirectoryError, match="file"):
            pending.wait()
    save([v], tmp_path / "v.h5")  # it was told
    for call in (save, save_async, load):
        save_async([v], tmp_path / "file" / "v.h5")
        with pytest.raises(NotADirectoryError, match="file"):
            call([v], tmp_path / "v.h5")
        call([v], tmp_path / "v.h5")
    save([v], tmp_path / "v.h5")
    assert sorted(os.listdir(tmp_path)) == ["file", "v.h5"]


def test_no_memory_for_the_copy(strategy, comm, tmp_path, monkeypatch):
    """Known to replica 0 alone at first: the others must not wait for it."""

    def fails(*_):
        raise MemoryError("no memory")

    v = variable(strategy, 1.0)
    if comm.rank == 0:
        monkeypatch.setattr(by_all.SaveBuffer, "copies", fails)
    pending = save_async([v], tmp_path / "v.h5")
    assert strategy.reduce("SUM", 1, axis=None) == strategy.num_replicas_in_sync
    with pytest.raises(MemoryError, match="no memory"):
        pending.wait()


@pytest.mark.parametrize("size", [2, 9_000_000])  # which rank 0 writes, and all
@pytest.mark.parametrize("who", ["first", "last", "all"])
def test_no_more_threads(strategy, comm, tmp_path, monkeypatch, size, who):
    """The file is then written in the call."""

    def fails(_):
        raise RuntimeError("can't start new thread")

    v = variable(strategy, np.zeros(size, "f4"))
    save_async([v], tmp_path / "v.h5").wait()  # the trial of the directory
    v.assign(np.ones(size, "f4"))
    if who == "all" or comm.rank == (0 if who == "first" else comm.size - 1):
        monkeypatch.setattr(by_all.threading.Thread, "start", fails)
        monkeypatch.setattr(by_all, "_THREADS", 1)
    pending = save_async([v], tmp_path / "v.h5")
    monkeypatch.undo()
    pending.wait()
    v.assign(np.zeros(size, "f4"))
    load([v], tmp_path / "v.h5")
    assert v.read_value().all()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_is_full(strategy, comm, tmp_path, asynchronous):
    """Here, the size of a file is limited: the system says so in the middle of a write."""
    v = variable(strategy, np.ones(1_000_000))
    save([v], tmp_path / "v.h5")
    v.assign(np.zeros(1_000_000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"checkpoint of 8000000 bytes was not written.*v\.h5"):
            save_async([v], tmp_path / "v.h5").wait() if asynchronous else save([v], tmp_path / "v.h5")
        comm.Barrier()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["v.h5"]
    load([v], tmp_path / "v.h5")
    assert v.read_value().all()


def test_h5py_is_free_meanwhile(strategy, comm, tmp_path):
    """Its one lock is never held for long: files are read, and made, while checkpoints are."""
    v = variable(strategy, np.ones(2_000_000))
    for i in range(5):
        pending = save_async([v], tmp_path / "v.h5")
        path = tmp_path / f"{comm.rank}-{i}.h5"
        for j in range(20):
            with h5py.File(path, "a") as file:
                file[str(j)] = np.full(1000, j)
            with h5py.File(path) as file:
                assert (file[str(j)][()] == j).all()
    pending.wait()


@pytest.mark.ranks(min=2)
def test_ranks_that_save_different_variables_raise_before_the_file_is_touched(strategy, comm, tmp_path):
    with strategy.scope():
        a, b = (mpistrat.Variable(1.0, name=name, synchronization=SYNC.ON_READ, aggregation=AGG.SUM) for name in "ab")
    path = tmp_path / "weights.h5"
    save([a, b], path)
    before = path.read_bytes()
    comm.Barrier()
    for variables in ([a, b] if comm.rank else [b, a], [a, b] if comm.rank else [a]):
        for call in (save, save_async, load):
            with pytest.raises(ValueError, match=rf"{call.__name__} of a, b at .*test_checkpoint"):
                call(variables, path)
    with pytest.raises(RuntimeError, match="save of a, b at"):
        save([a, b], path) if comm.rank == 0 else strategy.barrier()
    assert path.read_bytes() == before


@pytest.mark.ranks(min=2)
def test_ranks_that_do_not_save_raise(strategy, comm, tmp_path):
    v = variable(strategy, 1.0)
    with pytest.raises(RuntimeError, match="save_async"):
        save_async([v], tmp_path / "v.h5") if comm.rank else strategy.barrier()


def test_wrong_arguments_of_save_async(strategy, tmp_path):
    v = variable(strategy, 1.0)
    with pytest.raises(ValueError, match="no variables"):
        save_async([], tmp_path / "v.h5")
    with pytest.raises(TypeError, match="list or a dict"):
        save_async(v, tmp_path / "v.h5")
    with pytest.raises(RuntimeError, match=r"save_async.*outside of strategy\.run"):
        strategy.run(lambda: save_async([v], tmp_path / "v.h5"))
    assert os.listdir(tmp_path) == []


def test_a_job_that_is_stopped_waits_for_the_file(strategy, comm, tmp_path):
    v = variable(strategy, np.ones(1_000_000))
    with strategy.scope():
        handler = PreemptionCheckpointHandler(None, lambda: save_async([v], tmp_path / "v.h5"))
    handler.run(lambda: None)
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
    with pytest.raises(SystemExit):
        handler.run(lambda: None)
    assert os.listdir(tmp_path) == ["v.h5"]
