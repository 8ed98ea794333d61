"""Variables to a file and back."""

import os

import h5py
import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.training import load, save

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
        first = mpistrat.Variable(
            0.0, name="first", synchronization=SYNC.ON_READ, aggregation=AGG.ONLY_FIRST_REPLICA
        )

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
    with pytest.raises(TypeError, match="ndarray"):
        save({"a": np.ones(3)}, tmp_path / "v.h5")
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
    with pytest.raises(FileNotFoundError):
        save([v], tmp_path / "no folder" / "v.h5")


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
