"""Variables on many replicas: what each kind of write and read does in each context."""

import copy
import gc
import itertools
import operator
import pickle
import re
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpistrat
from mpistrat import IndexedSlices, PerReplica, Variable
from mpistrat import VariableAggregation as Aggregation
from mpistrat import VariableSynchronization as Synchronization
from mpistrat.variables import LocalVariable, MirroredVariable, SyncOnReadVariable, distributed

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANKS = range(SIZE)


def make(strategy, value=1.0, aggregation=Aggregation.NONE, on_read=False, **options):
    synchronization = Synchronization.ON_READ if on_read else Synchronization.AUTO
    with strategy.scope():
        return Variable(value, synchronization=synchronization, aggregation=aggregation, **options)


def own(v):
    """This replica's copy, without communication."""
    return v.distribute_strategy.experimental_local_results(v)[0].array


def equal(v, wanted):
    np.testing.assert_array_equal(own(v), wanted)


# --- creating ------------------------------------------------------------------------------------------


def test_kinds(strategy):
    assert type(make(strategy)) is MirroredVariable
    assert type(make(strategy, on_read=True)) is SyncOnReadVariable
    assert type(Variable(1.0)) is LocalVariable
    assert type(make(mpistrat.OneDeviceStrategy("cpu:0"))) is LocalVariable
    for synchronization in (Synchronization.AUTO, Synchronization.ON_WRITE):
        with strategy.scope():
            v = Variable(1.0, synchronization=synchronization)
        assert v.synchronization is Synchronization.ON_WRITE
    assert all(isinstance(each, Variable) for each in (make(strategy), make(strategy, on_read=True)))
    assert isinstance(make(strategy), mpistrat.DistributedValues)


def test_initial_value_comes_from_replica_0(strategy):
    for on_read in (False, True):
        equal(make(strategy, np.full(3, RANK + 5.0), on_read=on_read), [5, 5, 5])
        calls = []
        v = make(strategy, lambda calls=calls: calls.append(1) or np.float32(RANK + 7), on_read=on_read)
        equal(v, 7)
        assert v.dtype == np.float32
        assert calls == [1]
    v = make(strategy, np.random.default_rng(RANK).normal(size=100))
    equal(v, np.random.default_rng(0).normal(size=100))


def test_initial_value_is_copied(strategy):
    for creator in (lambda x: make(strategy, x), lambda x: make(strategy, x, on_read=True), Variable):
        array = np.ones(3)
        v = creator(array)
        array[:] = 9
        np.testing.assert_array_equal(v.distribute_strategy.experimental_local_results(v)[0].array, 1)
        again = creator(v) if not isinstance(v, SyncOnReadVariable) else None
        if again is not None:
            again.assign_add(np.ones(3))
            np.testing.assert_array_equal(v, 1)


def test_dtypes_of_initial_values(strategy):
    for value, dtype, wanted in [
        (1, None, np.int64),
        (1.0, None, np.float64),
        (True, None, np.bool_),
        ([1, 2.5], None, np.float64),
        (1, "float32", np.float32),
        (np.float16(1), None, np.float16),
        (1, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (np.ones(2, ">f8"), None, np.float64),
        (np.asfortranarray(np.ones((2, 3))), None, np.float64),
        (np.zeros((0, 3)), None, np.float64),
    ]:
        v = make(strategy, value, dtype=dtype)
        assert v.dtype == np.dtype(wanted)
        assert own(v).flags.c_contiguous
        assert v.shape == np.shape(value)
        assert v.ndim == np.ndim(value)
        assert v.size == np.size(value)


@pytest.mark.parametrize("value", [None, object(), [None], lambda: None, [[1.0], [2.0, 3.0]], {"a": 1}])
def test_initial_values_that_are_none(strategy, value):
    for creator in (lambda: make(strategy, value), lambda: Variable(value)):
        with pytest.raises(ValueError):
            creator()
    assert strategy.agree(True)


def test_arguments_that_are_wrong(strategy):
    for options, error in [
        ({"synchronization": Synchronization.NONE}, ValueError),
        ({"synchronization": "ON_WRITE"}, TypeError),
        ({"synchronization": 3}, TypeError),
        ({"aggregation": "SUM"}, TypeError),
        ({"aggregation": mpistrat.ReduceOp.SUM}, TypeError),
        ({"aggregation": Aggregation.MEAN, "dtype": "int32"}, ValueError),
        ({"aggregation": Aggregation.MEAN, "dtype": "bool"}, ValueError),
        ({"aggregation": Aggregation.MEAN, "dtype": "U3"}, ValueError),
        ({"aggregation": Aggregation.MEAN, "dtype": "i4,f4"}, ValueError),
        ({"aggregation": Aggregation.SUM, "dtype": "no such dtype"}, TypeError),
    ]:
        with pytest.raises(error), strategy.scope():
            Variable(1, **options)
        assert not mpistrat.has_strategy()
    for dtype in ("float16", "float32", ml_dtypes.bfloat16, "complex64"):
        assert float(make(strategy, 1, Aggregation.MEAN, dtype=dtype).read_value().real) == 1
    assert strategy.agree(True)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"initial_value": np.ones(2 + RANK)},
        lambda: {"initial_value": np.ones((2,) * (1 + RANK % 2))},
        lambda: {"initial_value": np.ones(2, ["f4", "f8"][RANK % 2])},
        lambda: {"initial_value": 1.0, "name": f"v{RANK}"},
        lambda: {"initial_value": 1.0, "trainable": bool(RANK % 2)},
        lambda: {"initial_value": 1.0, "aggregation": [Aggregation.SUM, Aggregation.MEAN][RANK % 2]},
        lambda: {
            "initial_value": 1.0,
            "synchronization": [Synchronization.ON_READ, Synchronization.ON_WRITE][RANK % 2],
        },
    ],
)
def test_replicas_that_differ(strategy, options):
    with pytest.raises(ValueError, match=r"ranks? [\d, -]*1") as caught, strategy.scope():
        Variable(**options())
    assert re.search("ranks? 0", str(caught.value))
    assert strategy.agree(True)
    assert not mpistrat.has_strategy()
    equal(make(strategy, 3.0), 3)


def test_names(strategy):
    assert [make(strategy).name for _ in range(3)] == ["Variable", "Variable_1", "Variable_2"]
    v = make(strategy, name="kernel")
    assert v.name == "kernel"
    (component,) = strategy.experimental_local_results(v)
    assert component.name == (f"kernel/replica_{RANK}" if RANK else "kernel")
    assert make(strategy, name="kernel").name == "kernel"


def test_properties(strategy):
    v = make(strategy, np.ones((2, 3), np.float32), Aggregation.SUM)
    assert v.trainable is True
    assert make(strategy, on_read=True).trainable is False
    assert make(strategy, on_read=True, trainable=True).trainable is True
    assert make(strategy, trainable=False).trainable is False
    assert v.aggregation is Aggregation.SUM
    assert v.distribute_strategy is strategy
    assert v.device == "cpu:0"
    assert len(v) == 2
    with pytest.raises(TypeError):
        len(make(strategy))


def test_components(strategy):
    v = make(strategy, [1.0, 0.0])
    (component,) = strategy.experimental_local_results(v)
    assert strategy.extended.value_container(component) is v
    assert strategy.extended.value_container(v) is v
    assert strategy.extended.value_container(7) == 7
    zero = make(strategy, 0.0)
    assert strategy.extended.value_container(strategy.experimental_local_results(zero)[0]) is zero
    other = mpistrat.OneDeviceStrategy("cpu:0")
    assert strategy.extended.variable_created_in_scope(v)
    assert not other.extended.variable_created_in_scope(v)
    assert mpistrat.get_strategy().extended.variable_created_in_scope(Variable(1.0))


def test_variables_are_collected(strategy):
    v = make(strategy, np.ones(10))
    reference = weakref.ref(v)
    (component,) = strategy.experimental_local_results(v)
    del v
    gc.collect()
    assert reference() is None
    assert strategy.extended.value_container(component) is component


# --- writing to mirrored variables ---------------------------------------------------------------------


def combined(aggregation, values):
    values = [np.asarray(each) for each in values]
    if aggregation is Aggregation.ONLY_FIRST_REPLICA:
        return values[0]
    total = sum(values)
    return total / SIZE if aggregation is Aggregation.MEAN else total


AGGREGATIONS = [Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA]


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
        np.testing.assert_array_equal(
            variable.distribute_strategy.experimental_local_results(variable)[0].array, value
        )
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


# --- sparse writes -------------------------------------------------------------------------------------


ROWS = IndexedSlices([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [0, 2, 0])
SCATTERS = {
    "scatter_add": [[7, 9], [1, 1], [4, 5]],
    "scatter_sub": [[-5, -7], [1, 1], [-2, -3]],
    "scatter_mul": [[5, 12], [1, 1], [3, 4]],
    "scatter_div": [[1 / 5, 1 / 12], [1, 1], [1 / 3, 1 / 4]],
    "scatter_min": [[1, 1], [1, 1], [1, 1]],
    "scatter_max": [[5, 6], [1, 1], [3, 4]],
    "scatter_update": [[5, 6], [1, 1], [3, 4]],
}


@pytest.mark.parametrize("method", SCATTERS)
@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_scatter(strategy, method, name):
    dtype = getattr(ml_dtypes, name) if name == "bfloat16" else name
    wanted = np.array(SCATTERS[method])
    rtol = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[name]
    for v in (
        Variable(np.ones((3, 2), dtype)),
        make(strategy, np.ones((3, 2), dtype)),
        make(strategy, np.ones((3, 2), dtype), Aggregation.SUM),
    ):
        assert getattr(v, method)(ROWS) is v
        np.testing.assert_allclose(v.read_value().astype(float), wanted, rtol=rtol)
    v = make(strategy, np.ones((3, 2), dtype), on_read=True, aggregation=Aggregation.SUM)
    strategy.run(lambda: getattr(v, method)(ROWS))
    np.testing.assert_allclose(own(v).astype(float), wanted, rtol=rtol)
    v = make(strategy, np.ones((3, 2), dtype), Aggregation.ONLY_FIRST_REPLICA)
    mine = ROWS if RANK == 0 else IndexedSlices(np.zeros((RANK, 2)), [1] * RANK)
    strategy.run(lambda: getattr(v, method)(mine))
    np.testing.assert_allclose(own(v).astype(float), wanted, rtol=rtol)


@pytest.mark.parametrize("aggregation", [Aggregation.SUM, Aggregation.MEAN])
def test_scatter_add_of_all_replicas(strategy, aggregation):
    v = make(strategy, np.zeros((SIZE + 1, 2)), aggregation)
    mine = IndexedSlices(np.full((2, 2), RANK + 1.0), [RANK, SIZE])
    wanted = np.zeros((SIZE + 1, 2))
    for rank in RANKS:
        wanted[rank] += rank + 1.0
        wanted[SIZE] += rank + 1.0
    if aggregation is Aggregation.MEAN:
        wanted /= SIZE
    strategy.run(lambda: v.scatter_add(mine))
    np.testing.assert_allclose(own(v), wanted)
    strategy.run(lambda: v.scatter_sub(mine))
    np.testing.assert_allclose(own(v), 0, atol=1e-12)


@pytest.mark.parametrize("aggregation", [Aggregation.SUM, Aggregation.MEAN])
@pytest.mark.parametrize("method", ["scatter_min", "scatter_max", "scatter_update"])
def test_scatters_that_cannot_be_added_up(strategy, aggregation, method):
    """The replicas' rows have no sum or mean here: the last replica's must not win silently."""
    v = make(strategy, np.ones((3, 2)), aggregation)
    with pytest.raises(NotImplementedError):
        strategy.run(lambda: getattr(v, method)(ROWS))
    equal(v, np.ones((3, 2)))


def test_scatter_what_does_not_fit(strategy):
    for v in (make(strategy, np.ones((3, 2))), Variable(np.ones((3, 2)))):
        for wrong, error in [
            (np.ones((3, 2)), TypeError),
            (IndexedSlices(np.ones((1, 3)), [0]), ValueError),
            (IndexedSlices(np.ones(1), [0]), ValueError),
            (IndexedSlices(np.ones((1, 2)), [3]), ValueError),
            (IndexedSlices(np.ones((1, 2)), [-1]), ValueError),
            (IndexedSlices(np.ones((1, 2), complex), [0]), TypeError),
        ]:
            for method in SCATTERS:
                with pytest.raises(error):
                    getattr(v, method)(wrong)
        np.testing.assert_array_equal(v, np.ones((3, 2)))
        v.scatter_add(IndexedSlices(np.ones((0, 2)), []))
    with pytest.raises(ValueError):
        Variable(1.0).scatter_add(IndexedSlices([1.0], [0]))
    integers = Variable([6, 7])
    integers.scatter_div(IndexedSlices([2, 2], [0, 1]))
    np.testing.assert_array_equal(integers, [3, 3])
    with pytest.raises(TypeError):
        integers.scatter_add(IndexedSlices([0.5], [0]))


def test_scatter_of_a_variable_that_is_combined_when_read(strategy):
    v = make(strategy, np.ones((3, 2)), Aggregation.SUM, on_read=True, name="kernel")
    for method in SCATTERS:
        for enter in (strategy.scope, np.errstate):
            with enter(), pytest.raises(ValueError, match="kernel"):
                getattr(v, method)(ROWS)
    equal(v, np.ones((3, 2)))


# --- variables that are combined when they are read ----------------------------------------------------


@pytest.mark.parametrize("aggregation", Aggregation)
def test_replicas_write_their_own_copies(strategy, aggregation):
    v = make(strategy, 1.0, aggregation, on_read=True)
    strategy.run(lambda: v.assign(RANK + 10.0))
    equal(v, RANK + 10)
    strategy.run(lambda: v.assign_add(1.0).assign_sub(0.5))
    equal(v, RANK + 10.5)
    assert strategy.run(lambda: float(v)) == RANK + 10.5
    assert strategy.run(lambda: v + 1) == RANK + 11.5
    if RANK == 0:  # no communication
        strategy.run(lambda: v.assign(v.read_value() * 2))


def test_read_of_all_copies(strategy):
    copies = [rank + 10.0 for rank in RANKS]
    for aggregation in AGGREGATIONS:
        v = make(strategy, 0.0, aggregation, on_read=True)
        strategy.run(lambda v=v: v.assign(RANK + 10.0))
        wanted = combined(aggregation, copies)
        for enter in (strategy.scope, np.errstate):
            with enter():
                for read in (
                    lambda v: v.read_value(),
                    lambda v: v.value(),
                    lambda v: v.numpy(),
                    float,
                    np.asarray,
                    lambda v: v + 0,
                    lambda v: 0 + v,
                    lambda v: np.add(v, 0),
                    lambda v: v[()],
                ):
                    assert read(v) == wanted
                assert bool(v == wanted)
        assert (
            strategy.run(lambda v=v: mpistrat.get_replica_context().merge_call(lambda s: float(v))) == wanted
        )
        equal(v, RANK + 10)
        assert strategy.reduce("SUM", v, axis=None) == sum(copies)
    v = make(strategy, 0.0, Aggregation.NONE, on_read=True, name="kernel")
    with pytest.raises(ValueError, match="kernel"):
        v.read_value()
    with pytest.raises(ValueError, match="kernel"):
        float(v)


def test_assign_in_cross_replica_context_to_what_is_combined_when_read(strategy):
    for aggregation in Aggregation:
        v = make(strategy, [0.0, 0.0], aggregation, on_read=True)
        v.assign([3.0, 6.0])
        equal(v, np.array([3.0, 6.0]) / (SIZE if aggregation is Aggregation.SUM else 1))
        if aggregation is not Aggregation.NONE:
            np.testing.assert_allclose(v, [3, 6], rtol=1e-14)
        if aggregation is Aggregation.SUM:
            for method in ("assign_add", "assign_sub"):
                with pytest.raises(ValueError, match=method):
                    getattr(v, method)([1.0, 1.0])
        else:
            v.assign_add([1.0, 1.0])
            equal(v, [4, 7])
            v.assign_sub([1.0, 1.0])
            equal(v, [3, 6])


def test_integer_sums(strategy):
    v = make(strategy, 0, Aggregation.SUM, on_read=True)
    v.assign(7)
    equal(v, 7 // SIZE)
    assert int(v) == 7 // SIZE * SIZE
    v.assign(-7)
    assert int(v) == -(7 // SIZE) * SIZE
    large = ((1 << 60) + 1) * SIZE
    v.assign(large)
    assert int(v) == large


def test_no_communication_where_there_must_be_none(strategy):
    """``if rank == 0: print(v)`` must not hang."""
    variables = [make(strategy, np.ones((2, 3)), Aggregation.SUM, on_read=bool(i)) for i in range(2)]
    if RANK == SIZE - 1:
        for v in variables:
            for enter in (strategy.scope, np.errstate):
                with enter():
                    text = f"{v} {v!r} {v!s}"
                    assert "this replica" in text
                    assert "(2, 3)" in text
                    assert "float64" in text
                    assert v.name in text
                    assert (v.shape, v.dtype, v.ndim, v.size, len(v)) == ((2, 3), np.float64, 2, 6, 2)
                    assert hash(v) == hash(v)
                    assert v in {v}
                    assert {v: 1}[v] == 1
                    assert isinstance(v.name, str)
                    assert strategy.experimental_local_results(v)[0].array.sum() == 6
                    assert v is not None
                    assert callable(v.assign)
    assert strategy.agree(True)
    assert "..." in repr(make(strategy, np.zeros(10_000)))
    assert "\n" not in repr(make(strategy, np.zeros((100, 100))))


# --- with NumPy ----------------------------------------------------------------------------------------


BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod]
BINARY += [operator.pow, operator.lt, operator.le, operator.eq, operator.ne, operator.ge, operator.gt]


def kinds(strategy, value):
    """The value as each kind of variable, and as a mirrored value."""
    yield Variable(value)
    yield make(strategy, value)
    yield make(strategy, value, Aggregation.MEAN, on_read=True)
    yield mpistrat.Mirrored((np.array(value),))


def test_operators(strategy):
    array = np.array([1.0, 2.0, 4.0])
    for v in kinds(strategy, array):
        for op in BINARY:
            for other in (2.0, np.float32(2), [1.0, 2.0, 3.0], np.array([3.0, 2.0, 1.0])):
                np.testing.assert_array_equal(op(v, other), op(array, np.asarray(other)))
                np.testing.assert_array_equal(op(other, v), op(np.asarray(other), array))
            np.testing.assert_array_equal(op(v, v), op(array, array))
            assert type(op(v, 1)) is np.ndarray
        np.testing.assert_array_equal(-v, -array)
        np.testing.assert_array_equal(abs(v), array)
        assert v @ v == 21
        np.testing.assert_array_equal(array @ v, 21)
        np.testing.assert_array_equal(divmod(v, 2.0), divmod(array, 2.0))
    for v in kinds(strategy, 3.0):
        assert float(v) == 3
        assert int(v) == 3
        assert complex(v) == 3
        assert bool(v)
        assert f"{float(v):.1f}" == "3.0"
    for v in (Variable(True), make(strategy, True), mpistrat.Mirrored((np.True_,))):
        np.testing.assert_array_equal(~v, False)
    assert [1, 2, 3][Variable(1)] == 2


def test_functions_of_numpy(strategy):
    array = np.arange(6.0).reshape(2, 3)
    for v in kinds(strategy, array):
        for fn in (
            np.exp,
            np.sum,
            np.mean,
            np.transpose,
            np.ravel,
            np.linalg.norm,
            np.shape,
            np.ndim,
            np.size,
            np.max,
            np.argmax,
            np.copy,
            np.array,
            lambda x: np.concatenate([x, x]),
            lambda x: np.stack([x, array]),
            lambda x: np.dot(x, np.ones(3)),
            lambda x: np.einsum("ij->j", x),
            lambda x: np.where(x > 2, x, 0),
            lambda x: np.add.reduce(x, axis=1),
            lambda x: np.add.accumulate(x),
            lambda x: np.multiply.outer(x, x),
            lambda x: np.allclose(x, array),
            lambda x: np.array_equal(x, array),
            lambda x: np.clip(x, 1, 2),
            lambda x: x[1],
            lambda x: x[:, 1:],
            lambda x: x[x > 2],
            lambda x: x[..., None],
            list,
        ):
            np.testing.assert_array_equal(fn(v), fn(array))
        assert np.isclose(v, array).all()


def test_conversion_to_arrays(strategy):
    for v in kinds(strategy, [1.0, 2.0]):
        view = np.asarray(v)
        assert not view.flags.writeable
        with pytest.raises(ValueError):
            view[0] = 5
        for copied in (np.array(v), v.read_value() if isinstance(v, Variable) else np.array(v)):
            copied[0] = 5
        assert np.asarray(v, np.float32).dtype == np.float32
        assert np.array(v, copy=True).flags.writeable
        np.testing.assert_array_equal(v, [1, 2])
        with pytest.raises(ValueError):
            v.__array__(np.float32, copy=False)
        with pytest.raises(ValueError):
            v[:][0] = 5
        for row in v:
            assert row in (1, 2)
    v = make(strategy, [1.0, 2.0])
    view = np.asarray(v)
    v.assign([3.0, 4.0])
    np.testing.assert_array_equal(view, [3, 4])


def test_in_place_operators(strategy):
    for v in (Variable([1.0, 2.0]), make(strategy, [1.0, 2.0]), make(strategy, [1.0, 2.0], Aggregation.SUM)):
        same, strategy_of_v = v, v.distribute_strategy
        v += 1
        v *= [2.0, 3.0]
        v -= np.array([1.0, 0.0])
        v /= 2
        v **= 2
        assert v is same
        np.testing.assert_array_equal(strategy_of_v.experimental_local_results(v)[0].array, [2.25, 20.25])
        np.add(v, 1, out=v)
        np.testing.assert_array_equal(v, [3.25, 21.25])
        v[0] = 7
        v[1:] = [8]
        np.testing.assert_array_equal(v, [7, 8])
        with pytest.raises((ValueError, TypeError)):
            v += np.ones((2, 2))
        with pytest.raises(TypeError):
            v += 1j
        np.testing.assert_array_equal(v, [7, 8])
    integers = make(strategy, [1, 2])
    with pytest.raises(TypeError):
        integers += 0.5
    equal(integers, [1, 2])
    out = np.empty(2)
    v = make(strategy, [1.0, 2.0])
    assert np.multiply(v, 2, out=out) is out
    np.testing.assert_array_equal(out, [2, 4])


def test_in_place_operators_follow_the_rules_of_writing(strategy):
    v = make(strategy, [1.0], name="kernel")

    def add():
        nonlocal v
        v += 1

    with pytest.raises(ValueError, match="kernel"):
        strategy.run(add)
    with pytest.raises(ValueError, match="kernel"):
        strategy.run(lambda: np.add(v, 1, out=v))
    with pytest.raises(ValueError, match="kernel"):
        strategy.run(lambda: v.__setitem__(0, 1.0))
    equal(v, [1])
    v = make(strategy, 0.0, Aggregation.MEAN, on_read=True)
    strategy.run(add)
    equal(v, 1)
    with pytest.raises((ValueError, RuntimeError)), mpistrat.MirroredStrategy().scope():
        add()


def test_numbers_in_a_list_have_the_precision_of_the_variable(strategy):
    """As one Python number has: integers are a mean's floats, ranks may mix them, and none wraps around."""
    v = make(strategy, np.zeros(2, np.float32), Aggregation.MEAN)
    strategy.run(lambda: v.assign([1, 2] if RANK % 2 else (1.0, 2.0)))
    equal(v, [1, 2])
    small = make(strategy, np.zeros(2, np.int8), Aggregation.SUM, name="small")
    strategy.run(lambda: small.assign_add([1, 2]))
    equal(small, [SIZE, 2 * SIZE])
    for write in (lambda: strategy.run(lambda: small.assign([300, 0])), lambda: small.assign((0, -129))):
        with pytest.raises(ValueError, match=r"small.* int8, which cannot hold (300|-129)"):
            write()
    with pytest.raises(TypeError, match="float64"):
        strategy.run(lambda: small.assign([0.5, 1]))
    equal(small, [SIZE, 2 * SIZE])


def test_variables_and_strategies_are_not_pickled(strategy):
    """Nor what holds them; values are."""
    with strategy.scope():
        variables = [
            Variable(1.0, name="v"),
            Variable(1.0, name="v", synchronization=Synchronization.ON_READ),
        ]
    for v in (*variables, Variable(1.0, name="v"), variables[0].values[0]):
        for action in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match=r"variable 'v.*read_value"):
                action([v] if action is pickle.dumps else v)
    for made in (
        strategy,
        mpistrat.MirroredStrategy(),
        mpistrat.get_strategy(),
        strategy.run(mpistrat.get_replica_context),
    ):
        with pytest.raises(TypeError, match=r"(?i)strategy.*cannot be pickled"):
            pickle.dumps(made)
    assert pickle.loads(pickle.dumps(variables[0].read_value())) == 1


def test_in_place_in_a_replica_by_aggregation(strategy):
    """What is not written stays as it is: also where the replicas' values are added up."""
    v = make(strategy, [5.0, 6.0], Aggregation.SUM, name="kernel")

    def add():
        nonlocal v
        v += 1

    for write in (add, lambda: v.__setitem__(0, 1.0), lambda: np.add.at(v, [0], 1.0)):
        with pytest.raises(ValueError, match=r"kernel.*assign_add"):
            strategy.run(write)
        equal(v, [5, 6])
    strategy.extended.update(v, lambda copy: copy.__setitem__(0, 4.0))
    add()
    equal(v, [5, 7])
    for aggregation in (Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA):
        v = make(strategy, [5.0, 6.0], aggregation)
        strategy.run(add)
        strategy.run(lambda v=v: v.__setitem__(0, 4.0))
        equal(v, [4, 7])


def test_nothing_writes_around_the_rules(strategy):
    """``ufunc.at`` and multiple outputs neither change a copy silently nor lose a result."""
    v = make(strategy, [1.0, 2.0])

    def at():
        np.add.at(v, [0], 5.0)

    before = own(v).copy()
    with pytest.raises((TypeError, ValueError)):
        strategy.run(at)
    equal(v, before)
    w = make(strategy, [0.0, 0.0])
    quotient, remainder = np.divmod(np.array([5.0, 7.0]), 2.0, out=(w, None))
    assert quotient is w
    equal(w, [2, 3])
    np.testing.assert_array_equal(remainder, [1, 1])


def test_copies(strategy):
    for v in kinds(strategy, [1.0, 2.0]):
        if isinstance(v, mpistrat.Mirrored) and not isinstance(v, Variable):
            other = copy.deepcopy(v)
            other.values[0][0] = 9
            np.testing.assert_array_equal(v, [1, 2])
            np.testing.assert_array_equal(pickle.loads(pickle.dumps(v)), [1, 2])
        else:
            other = copy.deepcopy(v)
            own(other)[0] = 9
            np.testing.assert_array_equal(own(v), [1, 2])


# --- updating ------------------------------------------------------------------------------------------


def test_update_touches_this_copy_only(strategy):
    for v in (make(strategy, 1.0), make(strategy, 1.0, Aggregation.SUM), make(strategy, 1.0, on_read=True)):

        def fn(component, value, factor=1, v=v):
            assert isinstance(component, LocalVariable)
            assert mpistrat.get_replica_context() is None
            assert mpistrat.in_cross_replica_context()
            component.assign_add(value * factor)
            v.assign_add(0.5)  # the variable itself: its component here
            return float(component)

        with strategy.scope():
            result = strategy.extended.update(v, fn, args=(PerReplica((RANK + 1.0,)),), kwargs={"factor": 2})
        assert isinstance(result, mpistrat.Mirrored)
        assert result.values == (2 * RANK + 3.5,)
        equal(v, 2 * RANK + 3.5)
        assert strategy.extended.update(v, lambda x: 3, group=False) == (3,)
        assert strategy.run(lambda v=v: strategy.extended.update(v, lambda x: 4, group=False)) == (4,)
        assert strategy.extended.update(v, lambda x: None).values == (None,)


def test_update_passes_distributed_arguments(strategy):
    v, w = make(strategy, 1.0), make(strategy, [5.0, 6.0])
    seen = []
    value = PerReplica((RANK,))
    args = (value, [value, {"a": value}], w, None, "x")
    strategy.extended.update(v, lambda *got, **kwargs: seen.append((got, kwargs)), args, {"k": (value,)})
    (((_, first, second, third, fourth, fifth), kwargs),) = seen
    assert first == RANK
    assert second == [RANK, {"a": RANK}]
    assert third is strategy.experimental_local_results(w)[0]
    assert fourth is None
    assert fifth == "x"
    assert kwargs == {"k": (RANK,)}


def test_update_of_what_is_no_variable(strategy):
    other = mpistrat.MirroredStrategy()
    v = make(strategy, [1.0, 2.0])
    for wrong, error in [
        (1.0, TypeError),
        (None, TypeError),
        (np.ones(1), TypeError),
        (make(other), ValueError),
    ]:
        with pytest.raises(error):
            strategy.extended.update(wrong, lambda x: x)
    with pytest.raises(ValueError):
        strategy.extended.update(Variable(1.0), lambda x: x)
    with other.scope(), pytest.raises(RuntimeError):
        strategy.extended.update(v, lambda x: x)
    (component,) = strategy.experimental_local_results(v)
    assert strategy.extended.update(component, lambda x: 1, group=False) == (1,)


def test_update_leaves_its_context_after_an_error(strategy):
    v = make(strategy)
    for call in (
        lambda: strategy.extended.update(v, lambda x: 1 / 0),
        lambda: strategy.extended.update_non_slot(None, lambda: 1 / 0),
    ):
        with pytest.raises(ZeroDivisionError):
            call()
        assert not mpistrat.has_strategy()
        with strategy.scope():
            with pytest.raises(ZeroDivisionError):
                call()
            assert mpistrat.in_cross_replica_context()
            assert mpistrat.get_strategy() is strategy


def test_update_non_slot(strategy):
    extended = strategy.extended
    assert extended.update_non_slot(None, lambda x: x + 1, (PerReplica((RANK,)),)).values == (RANK + 1,)
    assert extended.update_non_slot(None, lambda x: x, (1,), group=False) == (1,)
    with pytest.raises(RuntimeError, match="merge_call"):
        strategy.run(lambda: extended.update_non_slot(None, lambda: 1))


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
        values = [
            np.full(3, number + (rank if where in ("replica", "update") else 0), name) for rank in RANKS
        ]
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


# --- compared when asked for ---------------------------------------------------------------------------


def different(strategy, **options):
    """Of two variables that agree in all but identity another one on replica 0 than elsewhere."""
    return [make(strategy, name="v", **options) for _ in range(2)][min(RANK, 1)]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("aggregation", [Aggregation.SUM, Aggregation.ONLY_FIRST_REPLICA])
def test_different_variables_are_told(strategy, monkeypatch, aggregation):
    monkeypatch.setattr(distributed, "COMPARES", True)
    v = different(strategy, aggregation=aggregation)
    for write in (v.assign, v.assign_add):
        with pytest.raises(RuntimeError, match=r"rank 0: assign\S* of a variable v created in collective"):
            strategy.run(write, args=(2.0,))
        with pytest.raises(RuntimeError, match=r"rank 0: assign\S* of a variable v created in collective"):
            write(2.0)
    counted = different(strategy, aggregation=aggregation, on_read=True)
    with pytest.raises(RuntimeError, match="rank 0: read of a variable v created in collective"):
        counted.read_value()


@pytest.mark.ranks(min=2)
def test_different_copies_are_told(strategy, monkeypatch):
    v = make(strategy, name="v")
    monkeypatch.setattr(distributed, "COMPARES", True)
    v.assign(3.0)
    assert strategy.run(v.read_value) == 3.0
    with pytest.raises(RuntimeError, match="variable 'v' differs between replicas after assign_add: ranks"):
        v.assign_add(float(RANK))
