"""Masked arrays are refused where a value enters the library, before any communication."""

from collections import deque

import numpy as np
import pytest

import mpistrat
from mpistrat.data import Dataset, write_hdf5
from mpistrat.runtime.agreement.operation import MismatchError

SUM = mpistrat.VariableAggregation.SUM


class Convertible:
    """An array-like that NumPy converts to a masked array, as a variable of netCDF4."""

    shape, dtype = (3,), np.dtype(float)

    def __len__(self):
        return 3

    def __getitem__(self, key):
        return MASKED[key]

    def __array__(self, dtype=None, copy=None):
        return MASKED


MASKED = np.ma.masked_array([1.0, 1e6, 2.0], [False, True, False])
FORMS = {
    "array": MASKED,
    "nothing masked": np.ma.masked_array([1.0, 2.0, 3.0]),
    "list": [MASKED, MASKED],
    "element": [1.0, np.ma.masked, 2.0],
    "nested list": [[1.0, 2.0], (3.0, np.ma.masked)],
    "deque": deque([MASKED, MASKED]),
    "convertible": Convertible(),
}


def replica():
    return mpistrat.get_replica_context()


class Sequence:
    """Elements by number; an array-like if it has a shape."""

    def __init__(self, element):
        self.element = element

    def __len__(self):
        return 2

    def __getitem__(self, key):
        return self.element


class ArrayLike(Sequence):
    shape, dtype = (3,), MASKED.dtype

    def __len__(self):
        return 3

    def __getitem__(self, key):
        return self.element[key]


def rows():
    return Dataset.from_arrays(np.arange(3.0))


# Each takes (strategy, variable of shape (3,) with aggregation SUM, value).
REDUCTIONS = {
    "reduce": lambda s, v, x: s.reduce("SUM", {"a": x}, axis=None),
    "reduce over an axis": lambda s, v, x: s.reduce("MEAN", x, axis=0),
    "gather": lambda s, v, x: s.gather(x, axis=0),
    "reduce_to": lambda s, v, x: s.extended.reduce_to("SUM", x, v),
    "batch_reduce_to": lambda s, v, x: s.extended.batch_reduce_to("SUM", [(x, v), (1.0, v)]),
    "broadcast_to": lambda s, v, x: s.extended.broadcast_to(x, v),
    "all_reduce": lambda s, v, x: s.run(lambda: replica().all_reduce("SUM", x)),
    "all_reduce of a list": lambda s, v, x: s.run(lambda: replica().all_reduce("SUM", [np.ones(2), x])),
    "async": lambda s, v, x: s.run(lambda: replica().experimental_all_reduce_async("SUM", x)),
    "reduce_scatter": lambda s, v, x: s.run(lambda: replica().experimental_reduce_scatter("SUM", x)),
    "all_gather": lambda s, v, x: s.run(lambda: replica().all_gather(x, axis=0)),
    "per-replica": lambda s, v, x: s.reduce("SUM", mpistrat.PerReplica((x,)), axis=None),
    "buffers": lambda s, v, x: s.experimental_buffers_like(x),
    "apply_gradients": lambda s, v, x: s.run(lambda: mpistrat.optimizers.SGD(0.1).apply_gradients([(x, v)])),
    "apply_gradients without a reduction": lambda s, v, x: s.run(
        lambda: mpistrat.optimizers.SGD(0.1).apply_gradients([(x, v)], experimental_aggregate_gradients=False)
    ),
}
WRITES = {
    "Variable": lambda s, v, x: mpistrat.Variable(x),
    "Variable of a callable": lambda s, v, x: mpistrat.Variable(lambda: x),
    "Variable with a dtype": lambda s, v, x: mpistrat.Variable(x, dtype="float32"),
    "assign": lambda s, v, x: v.assign(x),
    "assign_add": lambda s, v, x: v.assign_add(x),
    "assign_sub": lambda s, v, x: v.assign_sub(x),
    "assign in a replica": lambda s, v, x: s.run(lambda: v.assign(x)),
    "update": lambda s, v, x: s.extended.update(v, lambda copy, y: copy.assign_add(y), (x,)),
    "item": lambda s, v, x: v.__setitem__(slice(None), x),
    "item in an update": lambda s, v, x: s.extended.update(v, lambda copy: copy.__setitem__(slice(None), x)),
    "in place": lambda s, v, x: v.__iadd__(x),
    "out": lambda s, v, x: np.multiply(v, x, out=v),
    "ufunc.at": lambda s, v, x: np.add.at(v, [0, 1, 2], x),
    "a mirrored value": lambda s, v, x: np.asarray(mpistrat.Mirrored((x,))),
    "assign of a mirrored value": lambda s, v, x: v.assign(mpistrat.Mirrored((x,))),
    "a per-replica value": lambda s, v, x: s.run(lambda: np.asarray(mpistrat.PerReplica((x,)))),
    "rows": lambda s, v, x: mpistrat.IndexedSlices(x, np.arange(len(x))),
    "indices": lambda s, v, x: mpistrat.IndexedSlices(np.zeros(len(x)), x),
}
METRICS = {
    "Mean": lambda s, v, x: mpistrat.metrics.Mean().update_state(x),
    "Sum": lambda s, v, x: mpistrat.metrics.Sum().update_state(x),
    "weights": lambda s, v, x: mpistrat.metrics.Mean().update_state(np.zeros(3), sample_weight=x),
    "MeanSquaredError": lambda s, v, x: mpistrat.metrics.MeanSquaredError().update_state(x, np.zeros(3)),
    "y_pred": lambda s, v, x: mpistrat.metrics.MeanSquaredError().update_state(np.zeros(3), x),
    "Accuracy": lambda s, v, x: mpistrat.metrics.Accuracy().update_state(x, np.zeros(3)),
}
DATA = {
    "from_arrays": lambda s, v, x: Dataset.from_arrays({"x": x, "y": np.zeros(3)}),
    "from_tensor_slices": lambda s, v, x: Dataset.from_tensor_slices(x),
    "make_numpy_dataset": lambda s, v, x: s.extended.experimental_make_numpy_dataset(x),
    "from_sequence": lambda s, v, x: list(Dataset.from_sequence(Sequence(x)).batch(2)),
    "from_iterable": lambda s, v, x: list(Dataset.from_iterable([(x, 1.0)])),
    "distributed": lambda s, v, x: list(s.experimental_distribute_dataset(Dataset.from_iterable(lambda: [x]).batch(4))),
}
ARRAYS_ONLY = {
    "map": lambda s, v, x: list(rows().map(lambda row: {"x": x, "row": row})),
    "map before batch": lambda s, v, x: list(rows().map(lambda row: x).batch(2)),
    "from_sequence of an array": lambda s, v, x: Dataset.from_sequence(x),
    "from_sequence of an array-like": lambda s, v, x: list(Dataset.from_sequence(ArrayLike(x)).batch(2)),
    "map after batch": lambda s, v, x: list(rows().batch(2).map(lambda batch: x)),
    "map of a stream's batches": lambda s, v, x: list(Dataset.from_iterable([1, 2]).batch(2).map(lambda batch: x)),
}


def check(strategy, door, value):
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(3), aggregation=SUM)
        before = v.numpy()
    with pytest.raises(TypeError, match="masked"):
        door(strategy, v, value)
    np.testing.assert_array_equal(v.numpy(), before)
    # The ranks are still in step.
    assert strategy.reduce("SUM", 1.0, axis=None) == strategy.num_replicas_in_sync


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(strategy, name):
    check(strategy, REDUCTIONS[name], MASKED)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WRITES)
def test_variables_and_values(strategy, name, form):
    check(strategy, WRITES[name], FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", METRICS)
def test_metrics(strategy, name, form):
    def door(s, v, x):
        with mpistrat.OneDeviceStrategy("cpu:0").scope():
            METRICS[name](s, v, x)

    check(strategy, door, FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DATA)
def test_datasets(strategy, name, form):
    check(strategy, DATA[name], FORMS[form])


@pytest.mark.parametrize("name", ARRAYS_ONLY)
def test_datasets_of_arrays(strategy, name):
    check(strategy, ARRAYS_ONLY[name], MASKED)


@pytest.mark.parametrize("form", FORMS)
def test_files(strategy, tmp_path, form):
    folder = tmp_path / f"rank {strategy.comm.rank}"
    folder.mkdir()
    for rows_to_write in (FORMS[form], {"x": FORMS[form]}, iter([{"x": FORMS[form]}])):
        with pytest.raises(TypeError, match="masked"):
            write_hdf5(folder / "x.h5", rows_to_write)
    assert not list(folder.iterdir())


def test_a_variable_and_a_masked_array_make_a_masked_array(strategy):
    """What is not stored keeps its mask, as in NumPy."""
    with strategy.scope():
        v = mpistrat.Variable(np.ones(3))
    total = v + MASKED
    np.testing.assert_array_equal(np.ma.getmaskarray(total), MASKED.mask)
    assert total.sum() == 5.0


@pytest.mark.parametrize("aggregation", [SUM, mpistrat.VariableAggregation.ONLY_FIRST_REPLICA])
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_one_replica_alone(strategy, method, aggregation):
    """The others learn of it in the same call, and the ranks are still in step."""
    with strategy.scope():
        v = mpistrat.Variable(np.zeros(3), aggregation=aggregation)
    last = strategy.num_replicas_in_sync - 1
    value = MASKED if strategy.comm.rank == last else np.ones(3)
    with pytest.raises((TypeError, MismatchError), match="masked"):
        strategy.run(lambda: getattr(v, method)(value))
    np.testing.assert_array_equal(v.numpy(), np.zeros(3))
    assert strategy.reduce("SUM", 1.0, axis=None) == strategy.num_replicas_in_sync


@pytest.mark.parametrize("key", [np.ma.masked_array([0, 1], [False, True]), ([0], np.ma.masked_array([0, 1]))])
def test_keys(strategy, key):
    with strategy.scope():
        v = mpistrat.Variable(np.zeros((3, 3)))
    with pytest.raises(TypeError, match="masked"):
        v[key] = 1.0
    assert not v.numpy().any()


def test_structures_of_the_default_strategy():
    extended = mpistrat.get_strategy().extended
    with pytest.raises(TypeError, match="masked"):
        extended.reduce_to("SUM", [np.ones(2), MASKED], "cpu:0")
    with pytest.raises(TypeError, match="masked"):
        extended.batch_reduce_to("SUM", [({"a": deque([MASKED])}, "cpu:0")])
