"""Writing to variables in each context, against a model in which one process knows all copies."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from variable_copies import AGGREGATIONS, combined, equal, make, own

import mpistrat
from mpistrat import IndexedSlices, PerReplica, Variable
from mpistrat import VariableAggregation as Aggregation

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANKS = range(SIZE)


# --- writing to mirrored variables ---------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_assign_in_replica_context(strategy, aggregation):
    v = make(strategy, [1.0, 1.0], aggregation)
    wanted = combined(aggregation, [np.array([10.0, 20.0]) * (rank + 1) for rank in RANKS])
    mine = np.array([10.0, 20.0]) * (RANK + 1)
    for method, start in (("assign", 0), ("assign_add", 1), ("assign_sub", 1)):
        v.assign([1.0, 1.0])
        assert strategy.run(lambda method=method: getattr(v, method)(mine)) is v
        sign = -1 if method == "assign_sub" else 1
        equal(v, start + sign * wanted)
    assert strategy.run(lambda: v.assign(mine, read_value=False)) is None
    np.testing.assert_array_equal(mine, np.array([10.0, 20.0]) * (RANK + 1))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_python_numbers_are_this_replicas_value(strategy, aggregation):
    v = make(strategy, 1.0, aggregation)
    strategy.run(lambda: v.assign(5.0))
    equal(v, 5 * SIZE if aggregation is Aggregation.SUM else 5)
    strategy.run(lambda: v.assign(RANK))
    equal(v, combined(aggregation, RANKS))
    strategy.run(lambda value: v.assign(value), args=(PerReplica((RANK + 1.0,)),))
    equal(v, combined(aggregation, [rank + 1.0 for rank in RANKS]))


def test_no_aggregation_in_replica_context(strategy):
    v = make(strategy, [1.0], name="kernel")
    rows = IndexedSlices([1.0], [0])
    for write in (
        lambda: v.assign([2.0]),
        lambda: v.assign_add([2.0]),
        lambda: v.assign_sub([2.0]),
        lambda: v.scatter_add(rows),
        lambda: v.scatter_update(rows),
    ):
        with pytest.raises(ValueError, match="kernel") as caught:
            strategy.run(write)
        assert "aggregation=" in str(caught.value)
        equal(v, [1])


@pytest.mark.ranks(min=2)
def test_replicas_that_assign_what_does_not_fit(strategy):
    v = make(strategy, [1.0, 2.0], Aggregation.SUM)
    with pytest.raises(ValueError):
        strategy.run(lambda: v.assign(np.ones(3)))
    with pytest.raises(ValueError, match=r"ranks? [\d, -]*1"):
        strategy.run(lambda: v.assign(np.ones(2, ["f4", "f8"][RANK % 2])))
    equal(v, [1, 2])
    assert strategy.agree(True)


def test_assign_in_cross_replica_context(strategy):
    """This rank's value, without communication, inside of the scope and outside of it."""
    for aggregation in Aggregation:
        v = make(strategy, [1.0, 2.0], aggregation)
        for enter in (strategy.scope, lambda: np.errstate()):
            with enter():
                assert v.assign([3.0, 4.0]) is v
                v.assign_add([1.0, 1.0]).assign_sub([2.0, 0.0])
                equal(v, [2, 5])
                v.assign(mpistrat.Mirrored((np.array([7.0, 8.0]),)))
                equal(v, [7, 8])
                with pytest.raises(ValueError, match="PerReplica"):
                    v.assign(PerReplica((np.zeros(2),)))
                equal(v, [7, 8])
        if RANK == SIZE - 1:
            v.assign([0.0, 0.0])
        equal(v, [0, 0] if RANK == SIZE - 1 else [7, 8])


def test_assign_in_merge_call(strategy):
    v = make(strategy, 1.0)

    def replica_fn():
        def merge_fn(strategy, value):
            v.assign(strategy.reduce("SUM", value, axis=None))

        mpistrat.get_replica_context().merge_call(merge_fn, args=(RANK + 1.0,))

    strategy.run(replica_fn)
    equal(v, sum(RANKS) + SIZE)


def test_write_under_another_strategy(strategy):
    v = make(strategy, 1.0, Aggregation.SUM, name="kernel")
    w = make(strategy, 1.0, Aggregation.SUM, on_read=True)
    other = mpistrat.MirroredStrategy()
    with other.scope():
        for write in (v.assign, v.assign_add, w.assign):
            with pytest.raises(RuntimeError, match=r"kernel|Variable"):
                write(2.0)
        assert float(v.read_value()) == 1
        assert v + 1 == 2
    with pytest.raises(RuntimeError):
        other.run(lambda: v.assign(2.0))
    with pytest.raises(RuntimeError):
        other.extended.update(make(other), lambda x: v.assign(2.0))
    equal(v, 1)


UNFITTING = [
    (1.0, [1.0], ValueError),
    ([1.0, 2.0], 1.0, ValueError),
    ([1.0, 2.0], [[1.0, 2.0]], ValueError),
    ([1.0, 2.0], [1.0], ValueError),
    ([[1.0], [2.0]], [1.0, 2.0], ValueError),
    (1, 1.5, TypeError),
    (1, 1j, TypeError),
    (1.0, 1j, TypeError),
    (1.0, "1", TypeError),
    (1.0, None, (TypeError, ValueError)),
    (True, 2, TypeError),
    (np.uint8(1), np.int64(1), TypeError),
    (np.int32(1), np.float32(1), TypeError),
    (1.0, object(), (TypeError, ValueError)),
]


@pytest.mark.parametrize(("value", "wrong", "error"), UNFITTING)
def test_values_that_do_not_fit(strategy, value, wrong, error):
    v = make(strategy, value, Aggregation.SUM, name="kernel")
    w = make(strategy, value, Aggregation.ONLY_FIRST_REPLICA, on_read=True, name="kernel")
    plain = Variable(value, name="kernel")
    for variable, method, run in itertools.product(
        (v, w, plain), ("assign", "assign_add", "assign_sub"), (strategy.run, lambda fn: fn())
    ):
        if variable is plain and run == strategy.run:
            continue
        with pytest.raises(error) as caught:
            run(lambda variable=variable, method=method: getattr(variable, method)(wrong))
        assert "kernel" in str(caught.value)
        np.testing.assert_array_equal(variable.distribute_strategy.experimental_local_results(variable)[0].array, value)
    assert strategy.agree(True)


def test_assign_to_a_sum_that_is_read_checks_as_all_do(strategy):
    for value, wrong, error in UNFITTING:
        v = make(strategy, value, Aggregation.SUM, on_read=True)
        with pytest.raises(error):
            v.assign(wrong)
        equal(v, value)


def test_values_that_fit(strategy):
    for value, right in [
        (np.float32(1), 2),
        (np.float32(1), np.float64(2)),
        (np.float16(1), 2.0),
        (1.0, np.float32(2)),
        (np.int8(1), 2),
        (np.uint8(1), 2),
        (1j, 2.0),
        (np.ones((), ml_dtypes.bfloat16), 2.0),
        (np.ones((), ml_dtypes.bfloat16), 2),
        (np.ones((), ml_dtypes.bfloat16), np.float32(2)),
        (np.ones((), np.float32), np.ones((), ml_dtypes.bfloat16) * 2),
        (True, False),
    ]:
        for v in (make(strategy, value), make(strategy, value, Aggregation.SUM)):
            dtype = v.dtype
            v.assign(right)
            equal(v, right)
            if v.dtype.kind != "b":
                v.assign_add(right)
                equal(v, np.asarray(right + right))
            assert v.dtype == dtype


def test_integers_that_a_dtype_cannot_hold_are_refused(strategy):
    """They must not turn into others."""
    for dtype, wrong in [("uint8", 300), ("uint8", -1), ("int8", 128), ("int64", 1 << 63), ("uint64", -1)]:
        for v in (make(strategy, 1, dtype=dtype), Variable(1, dtype=dtype)):
            with pytest.raises((ValueError, OverflowError, TypeError)):
                v.assign(wrong)
            assert v.read_value() == 1


# --- any sequence --------------------------------------------------------------------------------------


steps = st.tuples(
    st.sampled_from(["assign", "assign_add", "assign_sub"]),
    st.sampled_from(["replica", "cross-replica", "scope", "update"]),
    st.integers(-8, 8),
)


@settings(max_examples=60)
@given(
    aggregation=st.sampled_from(AGGREGATIONS),
    on_read=st.booleans(),
    name=st.sampled_from(["float32", "float64", "float16"]),
    todo=st.lists(steps, max_size=8),
)
def test_any_sequence_of_writes(strategy, aggregation, on_read, name, todo):
    """Against a model in which one process knows all copies."""
    v = make(strategy, np.zeros(3, name), aggregation, on_read)
    copies = [np.zeros(3, name) for _ in RANKS]
    change = {"assign": lambda x, y: y, "assign_add": np.add, "assign_sub": np.subtract}
    for method, where, number in todo:
        apply = change[method]
        values = [np.full(3, number + (rank if where in ("replica", "update") else 0), name) for rank in RANKS]
        write = getattr(v, method)
        if where == "replica":
            strategy.run(write, args=(values[RANK],))
            if not on_read:
                one = combined(aggregation, values).astype(name)
                values = [one] * SIZE
        elif where == "update":
            if not on_read:
                values = [values[0]] * SIZE  # what differs would stay different
            strategy.extended.update(v, lambda x, y, method=method: getattr(x, method)(y), (values[RANK],))
        elif on_read and aggregation is Aggregation.SUM and method != "assign":
            with pytest.raises(ValueError):
                write(values[RANK])
            continue
        else:
            if where == "scope":
                with strategy.scope():
                    write(values[RANK])
            else:
                write(values[RANK])
            if on_read and aggregation is Aggregation.SUM:
                values = [(value / SIZE).astype(name) for value in values]
        copies = [np.asarray(apply(x, y)).astype(name) for x, y in zip(copies, values, strict=True)]
        np.testing.assert_allclose(own(v), copies[RANK], rtol=1e-3, atol=1e-2)
    wanted = combined(aggregation, [x.astype(np.float64) for x in copies])
    np.testing.assert_allclose(v.read_value(), wanted if on_read else copies[0], rtol=1e-2, atol=5e-2)
    assert v.dtype == np.dtype(name)
