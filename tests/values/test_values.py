"""Values of replicas, and the words for how they are combined, by themselves."""

import copy
import pickle

import numpy as np
import pytest

import mpistrat
from mpistrat.values import (
    ArrayLike,
    IndexedSlices,
    Mirrored,
    PerReplica,
    ReduceOp,
    ValueContext,
    VariableAggregation,
    component,
)

# --- words ---------------------------------------------------------------------------------------------


def test_reduce_op():
    assert [each.name for each in ReduceOp] == ["SUM", "MEAN"]
    for word in ("sum", "SUM", "Sum", ReduceOp.SUM, VariableAggregation.SUM):
        assert ReduceOp.parse(word) is ReduceOp.SUM
    assert ReduceOp.parse("mean") is ReduceOp.MEAN
    assert ReduceOp("MEAN") is ReduceOp.MEAN
    for word in ("", "max", "SUM ", VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA):
        with pytest.raises(ValueError):
            ReduceOp.parse(word)
    for word in (None, 0, b"SUM", [ReduceOp.SUM]):
        with pytest.raises(TypeError):
            ReduceOp.parse(word)


def test_from_variable_aggregation():
    convert = ReduceOp.from_variable_aggregation
    assert convert(VariableAggregation.SUM) is ReduceOp.SUM
    assert convert(VariableAggregation.MEAN) is ReduceOp.MEAN
    for aggregation in (VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA):
        with pytest.raises(ValueError):
            convert(aggregation)


def test_value_context():
    context = ValueContext(2, 5)
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (2, 5)
    assert repr(context) == "ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=5)"
    default = ValueContext()
    assert (default.replica_id_in_sync_group, default.num_replicas_in_sync) == (0, 1)


# --- distributed values --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PerReplica, Mirrored, mpistrat.DistributedValues])
def test_components(kind):
    array = np.ones(2)
    value = kind((array,))
    assert value.values[0] is array
    assert component(value) is array
    assert component(array) is array
    assert kind([3]).values == (3,)
    assert repr(kind((3,))) == f"{kind.__name__}:{{\n  0: 3\n}}"
    several = kind((1, 2.5))
    assert several.values == (1, 2.5)
    assert repr(several) == f"{kind.__name__}:{{\n  0: 1,\n  1: 2.5\n}}"
    with pytest.raises(ValueError, match="give one"):
        kind(())
    assert hash(value) == hash(value)
    assert len({value, value}) == 1


def test_several_components_that_differ_are_not_one():
    with pytest.raises(ValueError, match="2 components in this process, and one is needed here"):
        component(PerReplica((1, 2)))
    assert component(Mirrored((3, 3))) == 3


def test_mirrored_behaves_as_its_value():
    value = Mirrored((np.array([3.0, 1.0]),))
    np.testing.assert_array_equal(value + 1, [4, 2])
    np.testing.assert_array_equal([1, 1] - value, [-2, 0])
    np.testing.assert_array_equal(np.sort(value), [1, 3])
    assert value.sum() == 4
    assert value.shape == (2,)
    assert value.dtype == np.float64
    assert len(value) == 2
    assert list(value) == [3, 1]
    assert value[0] == 3
    assert isinstance(value, ArrayLike)
    with pytest.raises(AttributeError):
        value.no_such_thing  # noqa: B018
    for change in (lambda: value.__iadd__(1), lambda: np.add(value, 1, out=value)):
        with pytest.raises(TypeError):
            change()
    np.testing.assert_array_equal(value, [3, 1])
    assert Mirrored((3,)) == 3
    assert float(Mirrored((3,))) == 3
    assert [10, 20][Mirrored((1,))] == 20
    assert Mirrored(("text",)).upper() == "TEXT"
    assert repr(Mirrored((None,))) == "Mirrored:{\n  0: None\n}"
    with pytest.raises(TypeError):
        len(Mirrored((3,)))


def test_mirrored_that_was_never_made_has_no_attributes():
    """Copying and inspecting look at objects before they are filled."""
    with pytest.raises(AttributeError):
        object.__new__(Mirrored).anything  # noqa: B018


@pytest.mark.parametrize("kind", [PerReplica, Mirrored])
def test_copies(kind):
    value = kind((np.ones(2),))
    for again in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(again) is kind
        np.testing.assert_array_equal(again.values[0], [1, 1])
        assert again.values[0] is not value.values[0]
    assert copy.copy(value).values[0] is value.values[0]


def test_per_replica_is_no_array():
    value = PerReplica((np.ones(2),))
    with pytest.raises(ValueError, match="not inside a replica context"):
        np.asarray(value)
    with pytest.raises(ValueError):
        np.ones(2) + value
    for wrong in (lambda: value + 1, lambda: 1 - value, lambda: bool(value + 0), lambda: value < 1):
        with pytest.raises(TypeError):
            wrong()


# --- sparse rows ---------------------------------------------------------------------------------------


def test_rows():
    rows = IndexedSlices([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [2, 0, 2], (4, 2))
    np.testing.assert_array_equal(rows.to_dense(), [[3, 4], [0, 0], [6, 8], [0, 0]])
    assert rows.dtype == np.float64
    assert rows.shape == rows.dense_shape == (4, 2)
    assert rows.indices.dtype == np.int64
    assert "3 rows of float64" in repr(rows)
    empty = IndexedSlices(np.ones((0, 2), np.float32), [], (4, 2))
    np.testing.assert_array_equal(empty.to_dense(), np.zeros((4, 2)))
    assert empty.to_dense().dtype == np.float32
    flat = IndexedSlices([1, 2], np.array([1, 1], np.uint8), [3])
    assert flat.to_dense().tolist() == [0, 3, 0]
    assert IndexedSlices([1], [5]).shape is None
    with pytest.raises(ValueError, match="dense_shape"):
        IndexedSlices([1], [5]).to_dense()


@pytest.mark.parametrize(
    ("values", "indices", "shape", "error"),
    [
        ([1.0, 2.0], [0], None, ValueError),
        (1.0, [0], None, ValueError),
        ([1.0], [0.0], None, TypeError),
        ([1.0], [True], None, TypeError),
        ([1.0], ["0"], None, TypeError),
        ([1.0], [[0]], None, TypeError),
        ([1.0], 0, None, TypeError),
        ([1.0], [3], (3,), ValueError),
        ([1.0], [-1], (3,), ValueError),
        ([[1.0]], [0], (3, 2), ValueError),
        ([[1.0]], [0], (3,), ValueError),
        ([1.0], [0], (), ValueError),
    ],
)
def test_rows_that_do_not_fit(values, indices, shape, error):
    with pytest.raises(error):
        IndexedSlices(values, indices, shape)
