"""Version 1, and names that were."""

import warnings

import numpy as np
import pytest

import mpistrat
from mpistrat import data
from mpistrat.compat import v1


@pytest.fixture
def one():
    return v1.OneDeviceStrategy("cpu:0")


@pytest.fixture
def multi():
    with pytest.warns(DeprecationWarning, match=r"mpistrat\.MultiWorkerMirroredStrategy"):
        return v1.experimental.MultiWorkerMirroredStrategy("RING")


def test_reduce_needs_no_axis(multi):
    replicas = multi.num_replicas_in_sync
    assert float(multi.reduce("SUM", 2.0)) == 2.0 * replicas
    assert multi.extended.engine.options.implementation is mpistrat.experimental.CollectiveCommunication.RING


def test_dataset_iterator(multi):
    iterator = multi.make_dataset_iterator(data.Dataset.range(8).batch(4))
    first = iterator.get_next()
    assert [len(x) for x in iterator] == [len(first)]
    with pytest.raises(StopIteration):
        iterator.get_next()
    assert iterator.initialize() == []
    np.testing.assert_array_equal(next(iterator), first)
    assert iterator.initializer == []
    np.testing.assert_array_equal(next(iterator), first)


def test_input_fn_iterator(multi):
    def input_fn(context):
        return data.Dataset.range(2 * (context.input_pipeline_id + 1)).batch(2)

    iterator = multi.make_input_fn_iterator(input_fn)
    assert [len(x) for x in iterator] == [2 if step <= multi.comm.rank else 0 for step in range(multi.comm.size)]
    for mode in (mpistrat.InputReplicationMode.PER_REPLICA, "PER_NODE"):
        with pytest.raises(ValueError, match="not supported"):
            multi.make_input_fn_iterator(input_fn, mode)


def test_experimental_run(multi):
    iterator = multi.make_dataset_iterator(data.Dataset.range(multi.comm.size).batch(multi.comm.size))
    with pytest.warns(DeprecationWarning, match="use run"):
        assert multi.experimental_run(lambda x: int(x[0]), iterator) == multi.comm.rank
    with pytest.warns(DeprecationWarning, match="use run"):
        assert multi.experimental_run(lambda: 5) == 5


def test_numpy_dataset_and_configuration(multi, one):
    for strategy in (multi, one):
        dataset = strategy.experimental_make_numpy_dataset((np.arange(3), np.ones((3, 2))))
        assert [len(x) for x in next(iter(dataset.batch(2)))] == [2, 2]
        for make in (strategy.experimental_make_numpy_dataset, strategy.extended.experimental_make_numpy_dataset):
            with pytest.raises(RuntimeError, match="cross-replica context"):
                strategy.run(make, args=(np.arange(3),))
        config = {"a": [1]}
        copy = strategy.update_config_proto(config)
        assert copy == config
        assert copy is not config
        assert copy["a"] is not config["a"]


def test_loss_reduction_and_read_var(multi):
    assert v1.get_loss_reduction() is mpistrat.ReduceOp.SUM
    with multi.scope():
        v = mpistrat.Variable([1.0, 2.0])
    np.testing.assert_array_equal(multi.extended.read_var(v), [1.0, 2.0])
    with pytest.raises(ValueError, match="created by"):
        multi.extended.read_var(mpistrat.Variable(1.0))


def test_mirrored(strategy):
    mirrored = v1.MirroredStrategy(cross_device_ops=v1.ReductionToOneDevice())
    assert float(mirrored.reduce("SUM", 1.0)) == strategy.num_replicas_in_sync


def test_former_names_say_the_new_ones(strategy):
    dataset_fn = lambda context: data.Dataset.range(2).batch(1)  # noqa: E731
    with strategy.scope():
        v = mpistrat.Variable(1.0)
        with pytest.warns(DeprecationWarning, match="extended.colocate_vars_with"), strategy.colocate_vars_with(v):
            pass
    with pytest.warns(DeprecationWarning, match="experimental_local_results"):
        assert strategy.unwrap(3) == (3,)
    with pytest.warns(DeprecationWarning, match="use run"):
        assert strategy.experimental_run_v2(lambda x: x + 1, (1,)) == 2
    with pytest.warns(DeprecationWarning, match="distribute_datasets_from_function"):
        distributed = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    assert isinstance(distributed, mpistrat.DistributedDataset)
    assert distributed.cardinality == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run(lambda: None)


def test_hints_are_options():
    with pytest.warns(DeprecationWarning, match="CommunicationOptions") as warned:
        hints = mpistrat.experimental.CollectiveHints(bytes_per_pack=3, timeout_seconds=2.0)
    assert warned[0].filename == __file__
    assert hints == mpistrat.experimental.CommunicationOptions(bytes_per_pack=3, timeout_seconds=2.0)
    merged = hints.merge(mpistrat.experimental.CommunicationOptions(implementation="nccl"))
    assert (merged.bytes_per_pack, merged.implementation.name) == (3, "NCCL")
    for wrong in ({"bytes_per_pack": -1}, {"timeout_seconds": 0}, {"implementation": "smoke"}):
        with pytest.raises(ValueError, match=next(iter(wrong)) + "|smoke"):
            mpistrat.experimental.CommunicationOptions(**wrong)
