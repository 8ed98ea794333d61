"""What a reduction returns is a value: it does not change with the variable or the array that was given."""

import copy

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat import IndexedSlices, Mirrored, VariableAggregation, VariableSynchronization

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
STRATEGIES = {
    "multi-worker": mpistrat.MultiWorkerMirroredStrategy,
    "mirrored": mpistrat.MirroredStrategy,
    "to one device": lambda: mpistrat.MirroredStrategy(cross_device_ops=mpistrat.ReductionToOneDevice()),
    "one device": lambda: mpistrat.OneDeviceStrategy("cpu:0"),
    "default": mpistrat.get_strategy,
}


def replica():
    return mpistrat.get_replica_context()


CALLS = {
    "reduce": lambda s, x: s.reduce("MEAN", x, axis=None),
    "reduce in a structure": lambda s, x: s.reduce("MEAN", {"x": [x], "y": 1.0}, axis=None)["x"][0],
    "reduce over an axis": lambda s, x: s.reduce("MEAN", x, axis=0),
    "reduce_to": lambda s, x: s.extended.reduce_to("MEAN", x, x),
    "batch_reduce_to": lambda s, x: s.extended.batch_reduce_to("MEAN", [(x, x), (1.0, x)])[0],
    "gather": lambda s, x: s.gather(x, axis=0),
    "all_reduce": lambda s, x: s.run(lambda: replica().all_reduce("MEAN", x)),
    "all_reduce of a list": lambda s, x: s.run(lambda: replica().all_reduce("MEAN", [x, x])[1]),
    "async": lambda s, x: s.run(lambda: replica().experimental_all_reduce_async("MEAN", x).wait()),
    "reduce_scatter": lambda s, x: s.run(lambda: replica().experimental_reduce_scatter("MEAN", x)),
    "all_gather": lambda s, x: s.run(lambda: replica().all_gather(x, axis=0)),
}


def make(strategy, **options):
    with strategy.scope():
        return mpistrat.Variable(np.arange(1.0, 8.0), **options)


def variable(strategy):
    v = make(strategy)
    return v, lambda: v.assign(np.full(7, -1.0))


def on_read(strategy):
    v = make(strategy, synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.MEAN)
    return v, lambda: v.assign(np.full(7, -1.0))


def array(strategy):
    x = np.arange(1.0, 8.0)
    return x, lambda: x.__setitem__(slice(None), -1.0)


def mirrored_array(strategy):
    x, change = array(strategy)
    return Mirrored((x,)), change


def copied_variable(strategy):
    v = copy.deepcopy(make(strategy))
    return v, lambda: v.assign_sub(np.ones(7))


@pytest.mark.parametrize("given", [variable, on_read, array, mirrored_array, copied_variable])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("which", STRATEGIES)
def test_results_do_not_change(which, call, given):
    s = STRATEGIES[which]()
    value, change = given(s)
    result = CALLS[call](s, value)
    before = np.array(result)
    rows = np.arange(1.0, 8.0)
    size = s.num_replicas_in_sync
    wanted = {
        "reduce over an axis": rows.mean(),
        "gather": np.tile(rows, size),
        "all_gather": np.tile(rows, size),
        "reduce_scatter": np.array_split(rows, size)[RANK if size > 1 else 0],
    }.get(call, rows)
    np.testing.assert_allclose(before, wanted)
    change()
    np.testing.assert_array_equal(np.asarray(result), before)
    assert not isinstance(result, mpistrat.Variable)


@pytest.mark.parametrize("which", [name for name in STRATEGIES if name != "default"])
def test_broadcasts(which):
    s = STRATEGIES[which]()
    for given in (variable, array, mirrored_array):
        value, change = given(s)
        result = s.extended.broadcast_to(value, "cpu:0")
        change()
        np.testing.assert_array_equal(result, np.arange(1.0, 8.0))


@pytest.mark.parametrize("which", STRATEGIES)
def test_rows(which):
    s = STRATEGIES[which]()
    values = np.ones((2, 3))
    rows = IndexedSlices(values, [0, 2])
    for result in (s.reduce("SUM", rows, axis=None), s.run(lambda: replica().all_reduce("SUM", rows))):
        values[...] = 5
        assert (result.values == 1).all()
        values[...] = 1


@pytest.mark.parametrize("which", [name for name in STRATEGIES if name != "to one device"])
def test_buffers_are_reduced_where_they_are(which):
    s = STRATEGIES[which]()
    buffer = s.experimental_buffers_like(np.zeros(4))
    buffer[...] = 1
    assert s.reduce("SUM", buffer, axis=None) is buffer
    assert (buffer == s.num_replicas_in_sync).all()


def test_rows_cannot_be_gathered():
    rows = IndexedSlices(np.ones((2, 3)), [0, 2])
    for make_strategy in STRATEGIES.values():
        s = make_strategy()
        for value in (rows, {"a": rows}):
            with pytest.raises(NotImplementedError, match="values and indices"):
                s.gather(value, axis=0)


def test_structures_of_the_default_strategy():
    extended = mpistrat.get_strategy().extended
    x = np.ones(3)
    results = [
        extended.reduce_to("SUM", [x, {"a": x}], "cpu:0"),
        *extended.batch_reduce_to("SUM", [([x, {"a": x}], "cpu:0")]),
    ]
    x[...] = 5
    for first, second in results:
        np.testing.assert_array_equal(first, np.ones(3))
        np.testing.assert_array_equal(second["a"], np.ones(3))
