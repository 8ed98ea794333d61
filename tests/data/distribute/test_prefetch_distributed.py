"""Tests that distributed datasets give the same batches with and without read-ahead."""

import contextlib
import gc
import os
import threading

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpistrat
from mpistrat.data import (
    AUTOTUNE,
    AutoShardPolicy,
    DataFileError,
    Dataset,
    DistributedDataset,
    DistributedDatasetsFromFunction,
    Options,
)
from mpistrat.data.pipeline import prefetch
from mpistrat.runtime.agreement import collective_lock


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "mpistrat-read"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    for i, (rows, how) in enumerate([(13, {}), (9, {"chunks": (2, 3), "compression": "gzip"}), (8, {})]):
        with h5py.File(folder / f"{i}.h5", "w") as f:
            f.create_dataset("x", data=np.arange(3.0 * rows).reshape(rows, 3) + 100 * i, **how)
            f["y"] = np.arange(rows) + 100 * i
    return str(folder / "*.h5")


@pytest.mark.full
@settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    replicas_=st.integers(1, 3),
    policy=st.sampled_from(["DATA", "FILE", "OFF"]),
    batch=st.integers(3, 12),
    shuffle=st.booleans(),
    mapped=st.booleans(),
    ahead=st.sampled_from([AUTOTUNE, 1, 2, 4, 9]),
    leave=st.integers(0, 3),
)
def test_the_same_with_and_without(files, replicas, replicas_, policy, batch, shuffle, mapped, ahead, leave):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]

    def epochs(peer, prefetch):
        dataset = Dataset.from_hdf5(files, ("x", "y")).with_options(options)
        dataset = dataset.shuffle(seed=1) if shuffle else dataset
        dataset = dataset.map(lambda x, y: (x * 2, y)) if mapped else dataset
        distributed = DistributedDataset(dataset.batch(batch).prefetch(prefetch), peer)
        iterator = iter(distributed)
        told = [[x.tolist() for x in next(iterator)] for _ in range(min(leave, distributed.cardinality))]
        state = iterator.state()
        again = DistributedDataset(dataset.batch(batch).prefetch(prefetch), peer)
        again.restore(state)
        told += [[x.tolist() for x in pair] for pair in again]
        return told + [[x.tolist() for x in pair] for pair in distributed], state, distributed.cardinality

    with_thread = replicas(replicas_, lambda peer: epochs(peer, ahead))
    assert with_thread == replicas(replicas_, lambda peer: epochs(peer, 0))


def test_from_function_and_alone(files, replicas):
    def own(peer, prefetch):
        made = DistributedDatasetsFromFunction(
            lambda context: (
                Dataset.from_hdf5(files, "y").shard(2, context.input_pipeline_id).batch(4).prefetch(prefetch)
            ),
            peer,
        )
        return [batch.tolist() for batch in made]

    assert replicas(2, lambda peer: own(peer, 2)) == replicas(2, lambda peer: own(peer, 0))
    alone = Dataset.from_hdf5(files, "y")
    assert [x.tolist() for x in alone.batch(7).prefetch(3)] == [x.tolist() for x in alone.batch(7)]
    assert [int(x) for x in alone.prefetch(-1)] == [int(x) for x in alone]


def test_kept_batches_stay_as_they_are(tmp_path, replicas):
    """Memory is reused only when no batch refers to it."""
    x = np.random.default_rng(0).random((60, 20_000), np.float32)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["x"] = x
    (kept,) = replicas(
        1, lambda peer: list(DistributedDataset(Dataset.from_hdf5(tmp_path / "a.h5", "x").batch(7), peer))
    )
    np.testing.assert_array_equal(np.concatenate(kept), x)


def test_an_error_comes_at_its_step_and_reading_goes_on(replicas):
    calls = []

    def doubled(x):
        calls.append(int(x[0]))
        if x[0] == 4 and calls.count(4) == 1:
            raise ZeroDivisionError("once")
        return 2 * x

    def replica(peer):
        iterator = iter(DistributedDataset(Dataset.range(8).batch(2).map(doubled), peer))
        assert [next(iterator).tolist() for _ in range(2)] == [[0, 2], [4, 6]]
        with pytest.raises(ZeroDivisionError, match="once") as caught:
            next(iterator)
        assert caught.traceback[-1].name == "doubled"
        return [batch.tolist() for batch in iterator]

    assert replicas(1, replica) == [[[8, 10], [12, 14]]]
    assert calls == [0, 0, 2, 4, 4, 6]  # the second call gives the dtypes, which all replicas find alike


def test_a_file_that_goes_bad_is_told_at_its_step(tmp_path, replicas):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        data = np.arange(40.0).reshape(20, 2)
        f.create_dataset("x", data=data, chunks=(5, 2), compression="gzip")
        offset = f["x"].id.get_chunk_info(2).byte_offset
    with open(tmp_path / "a.h5", "r+b") as f:
        f.seek(offset)
        f.write(b"\xff" * 8)

    def replica(peer):
        iterator = iter(DistributedDataset(Dataset.from_hdf5(tmp_path / "a.h5", "x").batch(5), peer))
        assert [len(next(iterator)) for _ in range(2)] == [5, 5]
        with pytest.raises(DataFileError, match="rows 10 to 14 cannot be read"):
            next(iterator)

    replicas(1, replica)


def test_epochs_of_a_program_that_computes_nothing(files, replicas, monkeypatch):
    """No thread is started after the first epoch, until the program computes between batches."""
    names, yielded = [], []

    def named(x):
        names.append(threading.current_thread().name != "mpistrat-read")
        return x

    def replica(peer):
        distributed = DistributedDataset(Dataset.from_hdf5(files, "y").batch(1).map(named).prefetch(1), peer)
        epochs = []
        for at_once in (10.0, 10.0, -1.0, -1.0):
            monkeypatch.setattr(prefetch, "_AT_ONCE", at_once)
            epochs.append([int(batch[0]) for batch in distributed])
            yielded.append((any(names), all(names)))
            names.clear()
        return epochs

    ((first, *others),) = replicas(1, replica)
    assert len(first) == 30
    assert others == [first] * 3
    # A program that is expected at once makes the first batch itself, even if it computes afterwards.
    assert yielded == [(True, False), (True, True), (True, False), (False, False)]


@pytest.mark.parametrize("kind", ["distributed", "restored", "alone"])
def test_functions_never_overlap(replicas, kind):
    """The thread of an abandoned iterator is still in the function when the next iterator begins."""
    inside, most, began, go_on = [], [], threading.Event(), threading.Event()

    def slow(x):
        inside.append(x)
        most.append(len(inside))
        if x[0] == 2 and not began.is_set():
            began.set()
            go_on.wait(20)
        inside.pop()
        return x

    def replica(peer):
        dataset = Dataset.range(8).batch(2).map(slow).prefetch(1)
        made = dataset if kind == "alone" else DistributedDataset(dataset, peer)
        first = iter(made)
        assert next(first).tolist() == [0, 1]
        assert began.wait(20)
        if kind == "restored":
            made.restore(first.state())
        del first
        second, got = iter(made), []
        main = threading.Thread(target=lambda: got.append(next(second).tolist()))
        main.start()
        main.join(0.3)
        assert main.is_alive()  # it waits
        assert most == [1] * (2 if kind == "alone" else 3)  # one more call gives the dtypes
        go_on.set()
        main.join(20)
        assert got == [[2, 3] if kind == "restored" else [0, 1]]
        assert len(list(second)) == (2 if kind == "restored" else 3)

    replicas(1, replica)
    assert set(most) == {1}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_has_its_own_turn(replicas):
    """A child is forked while the parent's thread makes an element."""
    began, go_on = threading.Event(), threading.Event()

    def slow(x):
        if x[0] == 2 and not go_on.is_set():
            began.set()
            go_on.wait(20)
        return x

    def replica(peer):
        made = DistributedDataset(Dataset.range(8).batch(2).map(slow).prefetch(1), peer)
        iterator = iter(made)
        next(iterator)
        assert began.wait(20)
        child = os.fork()
        if child == 0:
            go_on.set()
            with contextlib.suppress(Exception):
                os._exit(0 if [x.tolist()[0] for x in made] == [0, 2, 4, 6] else 1)
            os._exit(2)
        go_on.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(list(iterator)) == 3

    replicas(1, replica)


def test_no_thread_is_left(files, replicas):
    def replica(peer):
        distributed = DistributedDataset(Dataset.from_hdf5(files, "y").repeat().batch(2).prefetch(1), peer)
        for _ in distributed:
            assert len(readers()) == 1
            break
        gc.collect()
        for thread in readers():
            thread.join(10)
        assert not readers()
        iterator = iter(distributed)
        next(iterator)
        assert len(readers()) == 1

    replicas(1, replica)
    gc.collect()
    for thread in readers():
        thread.join(10)
    assert not readers()


def test_the_number_is_checked():
    for wrong in (1.5, "2", None, True):
        with pytest.raises(TypeError, match="buffer size of prefetch"):
            Dataset.range(3).prefetch(wrong)
    with pytest.raises(ValueError, match="at least -1"):
        Dataset.range(3).prefetch(-2)
    assert Dataset.range(3).prefetch(5).options().prefetch == 5
    assert Dataset.range(3).prefetch(5).with_options(Options()).options().prefetch == 5
    assert Options().prefetch is None
    with pytest.raises(ValueError, match="number of batches"):
        Options().prefetch = -2
    assert Dataset.range(3).prefetch(5).prefetch(-1).options().prefetch == AUTOTUNE


@pytest.mark.parametrize(("ahead", "thread"), [(AUTOTUNE, "MainThread"), (2, "mpistrat-read")])
def test_map_sees_the_strategy_and_may_not_communicate(ahead, thread):
    strategy = mpistrat.OneDeviceStrategy("cpu:0")
    seen = []

    def fn(x):
        seen.append((mpistrat.get_strategy() is strategy, threading.current_thread().name))
        with pytest.raises(RuntimeError, match="reduce was called while a batch was made"):
            collective_lock.refuse_thread("reduce")
        return x

    with strategy.scope():
        dataset = strategy.experimental_distribute_dataset(Dataset.range(4).batch(2).map(fn).prefetch(ahead))
        assert [x.tolist() for x in dataset] == [[0, 1], [2, 3]]
    assert seen == [(True, thread)] * 3  # one more call gives the dtypes
    collective_lock.refuse_thread("reduce")
